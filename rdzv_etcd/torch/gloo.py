"""The TCP connections of one process group, so that they can be ended from another thread.

gloo has no way to abort a collective (in torch 2.13 its process group's ``abort`` and ``shutdown``
do nothing): one that waits for a silent host waits for the group's timeout. What ends it is the end
of its connections: to gloo, ``shutdown(2)`` of its socket looks like a peer that has closed it.

Knows sockets and ``/proc/self/fd``; knows nothing of torch or of worlds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rdzv_etcd.process import Latch

_TCP = (socket.AF_INET, socket.AF_INET6)
_LINK = "socket:["

Place = tuple[str, int]
"""The address and port of one end of a connection, or of a socket that listens. A port alone says
little: any program on any host may have the same."""


class Connections:
    """Those sockets of this process that belong to the process group.

    One of gloo's leads to where another member's process group listens, or was accepted where ours
    does. Only while gloo connects, which takes milliseconds as a rule, these places are not known:
    then all TCP connections that were opened since it began are taken for its own.
    """

    def __init__(self, store_port: int) -> None:
        """Made before the process group and the connection to its store, which rank 0 serves at
        ``store_port``; only that one belongs to it until gloo connects."""
        self._before = _inodes()
        self._before_gloo: set[int] | None = None
        self._store_port = store_port
        self._stores: frozenset[Place] | None = None
        self._own: frozenset[Place] = frozenset()
        self._peers: frozenset[Place] | None = frozenset()
        self._ending = threading.Lock()
        self._made = Latch()
        self._closed = Latch()
        self.are_ended = False
        """Whether :meth:`end` or :meth:`close` was called: what is opened now will be ended."""

    def gloo_begins(self) -> None:
        """The store is connected. From now on, until :meth:`gloo_is_done`, every new connection is
        gloo's."""
        ends = (_peer(one) for _, one in _sockets(self._before))
        self._stores = frozenset(end for end in ends if end and end[1] == self._store_port)
        self._before_gloo = _inodes()
        self._peers = None

    def listening(self) -> list[Place]:
        """Where gloo listens."""
        before = self._before if self._before_gloo is None else self._before_gloo
        return [
            _place(one.getsockname())
            for _, one in _sockets(before)
            if one.family in _TCP and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ]

    def gloo_is_done(self, own: Iterable[Place], peers: Iterable[Place]) -> None:
        """From now on only connections at these places are gloo's."""
        self._own, self._peers = frozenset(own), frozenset(peers)

    def made(self) -> None:
        """No more connections are opened."""
        self._made.open()

    def wait_made(self, timeout_s: float) -> bool:
        """Block until :meth:`made` was called, for at most ``timeout_s`` seconds."""
        return self._made.wait(timeout_s)

    def end(self) -> None:
        """Shut down those that are open; whoever waits for one fails at once. Does not block."""
        with self._ending:
            self._end()

    def close(self) -> None:
        """The process group is ended; what is opened from now on is somebody else's, also to a
        thread that is in :meth:`end`."""
        with self._ending:
            self._end()
            self._closed.open()

    def wait_closed(self, timeout_s: float) -> bool:
        """Block until :meth:`close` was called, for at most ``timeout_s`` seconds."""
        return self._closed.wait(timeout_s)

    def _end(self) -> None:
        self.are_ended = True  # first: who sees its connection end looks why
        if self._closed.is_open:
            return
        for inode, one in _sockets(self._before):
            if self._is_ours(inode, one):
                with contextlib.suppress(OSError):  # its other end was quicker
                    one.shutdown(socket.SHUT_RDWR)

    def _is_ours(self, inode: int, one: socket.socket) -> bool:
        peer = _peer(one)
        if peer is None:
            return False
        if peer[1] == self._store_port if self._stores is None else peer in self._stores:
            return True
        if self._peers is None:
            return self._before_gloo is not None and inode not in self._before_gloo
        return peer in self._peers or _place(one.getsockname()) in self._own


def _peer(one: socket.socket) -> Place | None:
    """Where a TCP connection leads to; ``None`` if it is none, or not connected."""
    if one.family not in _TCP:
        return None
    try:
        return _place(one.getpeername())
    except OSError:
        return None


def _place(name: tuple[str, int] | tuple[str, int, int, int]) -> Place:
    """A socket's name, the same on all hosts: without what only one of them knows of it."""
    address, _, _interface = name[0].partition("%")
    return address.removeprefix("::ffff:"), name[1]


def _inodes() -> set[int]:
    """This process's sockets, by inode."""
    return {inode for _, inode in _descriptors()}


def _descriptors() -> Iterator[tuple[int, int]]:
    """The descriptors of this process that are sockets, and their inodes."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - these are numbers, not paths
        try:
            link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - of no file
        except OSError:  # closed meanwhile
            continue
        if link.startswith(_LINK):
            yield int(name), int(link[len(_LINK) : -1])


def _sockets(without: Collection[int]) -> Iterator[tuple[int, socket.socket]]:
    """This process's sockets but those, with their inodes; each only until the next is asked for.

    What is looked at is a duplicate, so that it is the same socket from the first look to the last:
    their owners close theirs meanwhile. Nothing else is duplicated: closing any descriptor of a
    file gives up the process's locks (``fcntl``) on it.
    """
    for number, inode in _descriptors():
        if inode in without:
            continue
        try:
            descriptor = os.dup(number)
        except OSError:  # closed meanwhile
            continue
        status = os.fstat(descriptor)
        try:
            one = socket.socket(fileno=descriptor)
        except OSError:  # of a kind that has no name, or no socket any more
            os.close(descriptor)
            continue
        with one:
            if status.st_ino == inode:
                yield inode, one


T = TypeVar("T")


class _Work(Generic[T]):
    """What is done in the other thread, and what has come of it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.made: list[T] = []
        self._error: BaseException | None = None

    def do(self) -> None:
        try:
            self.made.append(self._make())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error

    def result(self) -> T:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self.made.pop()
        finally:
            del error  # its traceback would keep this frame, and with it all callers' values


class Connecting:
    """One such wait."""

    def __init__(self, if_late: Callable[[], object] = lambda: None) -> None:
        """``if_late`` is called in the thread that was left behind if this was given up and all
        went well after all."""
        self._if_late = if_late
        self._given_up: list[bool] = []
        """Whether it was that, or else has ended by itself: the first one counts. What came of it
        is not here: whoever may give it up keeps this for long."""
        self._decided = Latch()

    def run(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns. Blocks until it does, or is given up; signal handlers run
        meanwhile. If it is given up already, nothing is begun.

        Raises what ``make`` raises, and ``torch.distributed.DistNetworkError`` if it is given up.
        """
        work = _Work(make)
        if not self._decided.is_open:
            threading.Thread(target=self._run, args=(work,), name=LEFT_BEHIND, daemon=True).start()
        self._decided.wait(None)
        if self._given_up[0]:
            raise dist.DistNetworkError("a member was lost while it was connected to")
        return work.result()

    def give_up(self) -> None:
        """Let :meth:`run` raise. Does nothing if it has returned."""
        self._decide(given_up=True)

    def _run(self, work: _Work[object]) -> None:
        work.do()
        self._decide(given_up=False)
        if self._given_up[0] and work.made:
            self._if_late()

    def _decide(self, *, given_up: bool) -> None:
        self._given_up.append(given_up)
        self._decided.open()


def end_made_late() -> None:
    """For a process group: it is torch's default one now, in place of one that may be in use."""
    end_process(
        "a process group that was given up while gloo connected was made after all, by a member "
        "that was silent"
    )


_log = logging.getLogger("rdzv_etcd")

LEFT_BEHIND = "rdzv-etcd-connecting"
"""The name of threads that do not count: nobody waits for them any more."""

_GLOO = "pt_gloo_runloop"
"""The name of the threads in which gloo's collectives run."""

_COLLECTIVES = distributed_c10d.__file__
"""Where in Python torch's are, and wait."""

_TASKS = Path("/proc/self/task")

_LIMIT = 4
"""Where the pointer to its limit stands in a line of a thread that waits in futex(2)."""

Wait = tuple[int, str]
"""A thread, and how often it has slept before. The same one twice: it has not woken meanwhile."""


def collectives() -> frozenset[Wait]:
    """Return the threads that are in a collective, each with the wait that it is in.

    Looks at what gloo's threads do, and where in Python each of the others is: a ``send`` waits in
    the caller's own thread, and a backward pass with DistributedDataParallel only for gloo's.
    """
    frames = sys._current_frames()
    waiting = {
        str(thread.native_id)
        for thread in threading.enumerate()
        if thread.name != LEFT_BEHIND
        and (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code.co_filename == _COLLECTIVES
    }
    found = set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or this system does not tell
            if task.name in waiting or _waits_for_a_peer(task):
                found.add((int(task.name), _sleeps(task)))
    return frozenset(found)


def _waits_for_a_peer(task: Path) -> bool:
    """Whether it is a thread of gloo's that does. For work, these wait without a limit."""
    if (task / "comm").read_text().strip() != _GLOO:
        return False
    # The number of the call and its arguments. These threads sleep in no other call; of one that
    # does not sleep it is only "running".
    call = (task / "syscall").read_text().split()
    return len(call) > _LIMIT and int(call[_LIMIT], 16) != 0


def _sleeps(task: Path) -> str:
    return next(
        line
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def end_process(why: str) -> NoReturn:
    """End this process at once, for its supervisor to start it again; say why at ERROR."""
    try:
        _log.error("%s: this process ends, with exit code %d. Start it again", why, os.EX_TEMPFAIL)
        faulthandler.dump_traceback()
        sys.stdout.flush()
    finally:  # whatever has become of the streams
        os._exit(os.EX_TEMPFAIL)

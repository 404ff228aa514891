"""What gloo lacks: to abort a collective, to give up a connection, to see a send that hangs.

**Collectives.** In torch 2.13 ``abort`` and ``shutdown`` of gloo's process group do nothing: a
collective that waits for a silent host waits for the group's timeout. What ends it is the end of
its connections: to gloo, ``shutdown(2)`` of its socket looks like a peer that has closed it.

**Connecting.** Where torch's C++ code waits, no signal handler runs. And gloo waits for the
connections of all members for five times the group's timeout, and nothing ends that wait if one
dies that was about to connect; nor does anything end that of a store's client for the first answer
of a silent server. So these calls run on a thread of their own, which can be left behind.

**Hangs.** A send that waits for room on its connection is forgotten when the connection ends
(gloo's ``Pair::signalException`` notifies those that have not begun, not those under way). Its
caller then waits for the group's timeout, half an hour as a rule: this happens to a neighbour of a
host that has fallen silent. All that can be done is to see it, and to end the process.

Knows sockets, threads, ``/proc`` and where torch's files are; knows nothing of worlds.
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
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rdzv_etcd.process import Latch, begun_in_thread

T = TypeVar("T")

_log = logging.getLogger("rdzv_etcd")

# --- its connections ------------------------------------------------------------------------------

_TCP = (socket.AF_INET, socket.AF_INET6)
_LINK = "socket:["

_SILENT_S = 10.0
"""After this a wait is logged at WARNING."""

Address = tuple[str, int]
"""The host and port of one end of a connection, or of a socket that listens. A port alone would not
do: any program on any host may have the same."""


class Connections:
    """The TCP connections of one process group, which another thread can end.

    A connection of gloo's leads to where another member's process group listens, or was accepted
    where ours does. Only while gloo connects, as a rule for milliseconds, these addresses are not
    known: then all TCP connections that were opened since it began are taken for its own.
    """

    def __init__(self, store_port: int) -> None:
        """To be made before the process group and before the connection to its store, which rank 0
        serves on ``store_port``; only that one belongs to the group until gloo connects."""
        self._before = _inodes()
        self._before_gloo: set[int] | None = None
        self._store_port = store_port
        self._stores: frozenset[Address] | None = None
        self._own: frozenset[Address] = frozenset()
        self._peers: frozenset[Address] | None = frozenset()
        self._ending = threading.Lock()
        self.made = Latch()
        """Opened by the maker of the process group: no more connections are opened."""
        self.closed = Latch()
        """Opened by :meth:`close`."""

    def gloo_begins(self) -> None:
        """The store is connected. From now on, until :meth:`gloo_is_done`, every new connection is
        gloo's."""
        ends = (_peer(one) for _, one in _sockets(self._before))
        self._stores = frozenset(end for end in ends if end and end[1] == self._store_port)
        self._before_gloo = _inodes()
        self._peers = None

    def listening(self) -> list[Address]:
        """Return where gloo listens."""
        before = self._before if self._before_gloo is None else self._before_gloo
        return [
            _address(one.getsockname())
            for _, one in _sockets(before)
            if one.family in _TCP and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ]

    def gloo_is_done(self, own: Iterable[Address], peers: Iterable[Address]) -> None:
        """From now on only connections at these addresses are gloo's."""
        self._own, self._peers = frozenset(own), frozenset(peers)

    def end(self) -> None:
        """Shut down the open ones; a call that waits for one fails at once. Does not block."""
        with self._ending:
            self._end()

    def close(self) -> None:
        """The process group is ended: what is opened from now on is not the group's, also to a
        thread that is in :meth:`end`."""
        with self._ending:
            self._end()
            self.closed.open()

    def _end(self) -> None:
        if self.closed.is_open:
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
        return peer in self._peers or _address(one.getsockname()) in self._own


def _peer(one: socket.socket) -> Address | None:
    """Return where a TCP connection leads to; ``None`` for another socket, or if not connected."""
    if one.family not in _TCP:
        return None
    try:
        return _address(one.getpeername())
    except OSError:
        return None


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """Return a socket's name as it is on all hosts: without the interface of one of them."""
    address, _, _interface = name[0].partition("%")
    return address.removeprefix("::ffff:"), name[1]


def _inodes() -> set[int]:
    return {inode for _, inode in _descriptors()}


def _descriptors() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of this process's sockets, and their inodes."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - these are numbers, not paths
        try:
            link = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - of no file
        except OSError:  # closed meanwhile
            continue
        if link.startswith(_LINK):
            yield int(name), int(link[len(_LINK) : -1])


def _sockets(without: Collection[int]) -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's other sockets, with their inodes; each only until the next is taken.

    Each is a duplicate, so that it stays the same socket while it is looked at: its owner may close
    it meanwhile. Only sockets are duplicated: closing any descriptor of a file gives up the
    process's locks (``fcntl``) on it.
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


# --- connecting -----------------------------------------------------------------------------------

LEFT_BEHIND = "rdzv-etcd-connecting"
"""The name of the threads of :class:`AbandonableCalls`."""


class AbandonableCalls:
    """Calls that block in torch's C++ code, one after another. Signals interrupt them, and another
    thread can give them up."""

    def __init__(self) -> None:
        self._are_given_up = False
        self._give_up: Callable[..., None] = lambda **_: None
        """Gives up the call under way."""

    def run(
        self,
        make: Callable[[], T],
        *,
        limit_s: float = threading.TIMEOUT_MAX,
        when_silent: Callable[[float], object] = lambda _: None,
        if_late: Callable[[], object] | None = None,
    ) -> T:
        """Return what ``make`` returns. Blocks until it does, or is given up; signal handlers run
        meanwhile. After a while, ``when_silent`` is called with the seconds that are left.

        ``if_late`` is called, on the thread that was left behind, if the call succeeds although it
        was given up. Raises what ``make`` raises, ``torch.distributed.DistNetworkError`` if it is
        given up, or was before, and ``torch.distributed.DistStoreError`` after ``limit_s``.
        """
        decided = Latch()
        given_up: list[bool] = []
        """Whether it was given up, or else has ended by itself: the first one counts."""

        def decide(*, giving_up: bool) -> None:
            given_up.append(giving_up)
            decided.open()

        def give_up(*, with_gloo: bool) -> None:
            if with_gloo or if_late is None:
                decide(giving_up=True)

        def end(outcome: Future[T]) -> None:
            decide(giving_up=False)
            if given_up[0] and if_late is not None and outcome.exception() is None:
                if_late()

        self._give_up = give_up
        if self._are_given_up:
            raise _lost_while_connecting()
        outcome = begun_in_thread(make, LEFT_BEHIND)
        outcome.add_done_callback(end)
        if not decided.wait(min(limit_s, _SILENT_S)) and limit_s > _SILENT_S:
            when_silent(limit_s - _SILENT_S)
            decided.wait(limit_s - _SILENT_S)
        try:
            if not given_up:
                raise dist.DistStoreError(f"rank 0 has not served its store within {limit_s:g} s")
            if given_up[0]:
                raise _lost_while_connecting()
            return outcome.result()
        finally:
            del outcome  # its error's traceback keeps this frame, and all callers' values

    def give_up(self, *, with_gloo: bool) -> None:
        """Let :meth:`run` raise, now and from now on; ``with_gloo``: also a call that does harm if
        it succeeds later."""
        self._are_given_up = True
        self._give_up(with_gloo=with_gloo)


def _lost_while_connecting() -> dist.DistNetworkError:
    return dist.DistNetworkError("a member was lost while this one was connecting to it")


def end_made_late() -> None:
    """End the process: a late process group is torch's default one now, in place of another."""
    end_process(
        "a process group that was given up while gloo connected was made after all, by a member "
        "that was silent"
    )


# --- hangs ----------------------------------------------------------------------------------------

_GLOO = "pt_gloo_runloop"
"""The name of the threads in which gloo's collectives run."""

_COLLECTIVES = distributed_c10d.__file__
"""The file in which torch's collectives wait, where they do so in Python."""

_TASKS = Path("/proc/self/task")

_LIMIT = 4
"""Where ``/proc/…/syscall`` shows the pointer to the time limit of a thread in futex(2)."""

Wait = tuple[int, str]
"""A thread, and how often it has slept before: if both are the same, it has not woken meanwhile."""


def collectives() -> frozenset[Wait]:
    """Return the threads that are in a collective, each with the wait that it is in.

    Checks what gloo's threads do, and where in Python each other thread is: a ``send`` waits on the
    caller's own thread, a backward pass with DistributedDataParallel only on gloo's.
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
        with contextlib.suppress(OSError):  # it has ended, or this system does not show it
            if task.name in waiting or _waits_for_a_peer(task):
                found.add((int(task.name), _sleeps(task)))
    return frozenset(found)


def _waits_for_a_peer(task: Path) -> bool:
    """Whether this is a thread of gloo's in such a wait. For work, they wait without a limit."""
    if (task / "comm").read_text().strip() != _GLOO:
        return False
    # The number of the call and its arguments; "running" if it does not sleep. These threads sleep
    # in no other call.
    call = (task / "syscall").read_text().split()
    return len(call) > _LIMIT and int(call[_LIMIT], 16) != 0


def _sleeps(task: Path) -> str:
    return next(
        line
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def end_process(why: str) -> NoReturn:
    """End this process at once, for its supervisor to start it again; log why at ERROR."""
    try:
        _log.error("%s: this process ends, with exit code %d. Start it again", why, os.EX_TEMPFAIL)
        faulthandler.dump_traceback()
        sys.stdout.flush()
    finally:  # whatever state the streams are in
        os._exit(os.EX_TEMPFAIL)

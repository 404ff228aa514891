"""The TCP connections of one process group, so that they can be ended from another thread.

gloo has no way to abort a collective (in torch 2.13 its process group's ``abort`` and ``shutdown``
do nothing): one that waits for a silent host waits for the group's timeout. What ends it is the end
of its connections: to gloo, ``shutdown(2)`` of its socket looks like a peer that has closed it.

Knows sockets and ``/proc/self/fd``; knows nothing of torch or of worlds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Collection, Iterable, Iterator

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

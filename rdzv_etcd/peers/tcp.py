"""Links over TCP: a handshake of one line each way, then silence until the link ends.

When a process dies, its host's kernel closes its connections and refuses new ones; when the host
itself is gone, keep-alive probes go unanswered. Executed programs do not inherit Python's sockets;
in a forked child they are replaced, because a child that held them would make its dead parent
appear alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias, cast

from rdzv_etcd.clock import wait_for
from rdzv_etcd.peers import Answer, Contact, LinkEnd, Peer
from rdzv_etcd.process import begun_in_thread
from rdzv_etcd.text import shown

_WORDS = b"rdzv-etcd peer 1 "
"""Begins the lines of both sides; contains the version of this protocol."""
_GOODBYE = b"good-bye\n"
_MAX_LINE = 8192
"""A job's id has at most 1,000 characters, each up to six bytes in JSON, a node's 300."""
_GREETING_S = 5.0
"""How long a new connection may take to name the node that it wants."""
_MAX_OF_A_KIND = 64
"""Connections that have not named their node yet, and likewise those that were answered."""
_TURNS_TO_CLOSE = 4
"""Turns of the loop that closing takes: connections it has just accepted need one to begin, one to
notify their protocol, and one to close."""
_IDLE_S = 60
"""How often the kernel checks whether a node that watches this one is still there."""
_LONGEST_PROBE_S = 32767
_LONGEST_TIMEOUT_MS = 2**31 - 1
"""The largest values that Linux takes for TCP_KEEPIDLE and TCP_KEEPINTVL, and for
TCP_USER_TIMEOUT."""

_Address: TypeAlias = "tuple[int, tuple[object, ...]]"
"""An address family, and an address as sockets take them."""


class TcpPeers:
    """One node's end of its links over TCP."""

    def __init__(self, silence_s: float = 3.0) -> None:
        """A link ends after ``silence_s`` seconds without a sign of life; 0: never."""
        self._silence_s = silence_s
        self._listener: socket.socket | None = None
        self._port = 0
        self._server: asyncio.Server | None = None
        self.watchers: dict[_Watcher, None] = {}
        """In the order of their arrival."""
        self._links: weakref.WeakSet[_Watched] = weakref.WeakSet()
        self._known: dict[tuple[str, int], _Address] = {}
        """Where nodes were reached: names are not looked up again, and what answers at another
        address of theirs does not count."""
        self.is_closed = False

    def listen_on(self, listener: socket.socket) -> None:
        """Take over a listening socket; may be called on any thread, before :meth:`admit`."""
        listener.setblocking(False)
        _sockets.add(listener)
        self._listener, self._port = listener, listener.getsockname()[1]

    @property
    def port(self) -> int:
        return self._port

    async def admit(self, me: Peer) -> None:
        if self._server is not None or self._listener is None or self.is_closed:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Watcher(me, self), sock=self._listener)

    async def connect(self, address: str, port: int, peer: Peer, timeout_s: float) -> Contact:
        watched = _Watched(peer)
        contact = None
        try:
            contact = await wait_for(self._connect(watched, address, port), timeout_s)
        except TimeoutError:
            held = watched.is_connected
            contact = Contact(Answer.HELD) if held else Contact(Answer.UNREACHABLE, "timed out")
        except ConnectionRefusedError:
            contact = Contact(Answer.REFUSED)
        except OSError as error:
            contact = Contact(Answer.UNREACHABLE, shown(error.strerror or str(error), 100))
        finally:
            if contact is None or contact.link is None:
                watched.close()
        return contact

    async def _connect(self, watched: _Watched, address: str, port: int) -> Contact:
        addresses = [self._known[address, port]] if (address, port) in self._known else []
        reached = await self._open(watched, addresses or await _resolve(address, port))
        self._links.add(watched)
        answer = await watched.answer()
        if answer is not Answer.SAME:
            return Contact(answer)
        self._known[address, port] = reached
        return Contact(answer, link=watched)

    async def _open(self, watched: _Watched, addresses: Sequence[_Address]) -> _Address:
        """Connect to the first of these that can be reached, and return it.

        Raises OSError: ConnectionRefusedError only if all have refused.
        """
        problem: OSError | None = None
        for one in addresses:
            try:
                await self._open_one(watched, *one)
            except OSError as error:
                if problem is None or isinstance(problem, ConnectionRefusedError):
                    problem = error
            else:
                return one
        raise problem or OSError("its name has no address")

    async def _open_one(self, watched: _Watched, family: int, target: tuple[object, ...]) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        _sockets.add(sock)
        try:
            sock.setblocking(False)
            self._keep_alive(sock)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, target)
            await loop.create_connection(lambda: watched, sock=sock)
        except BaseException:
            sock.close()
            raise

    def _keep_alive(self, sock: socket.socket) -> None:
        if not self._silence_s:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every_s = min(max(1, int(self._silence_s / 3)), _LONGEST_PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        # Ends the probes when it is over, whatever their number.
        silence_ms = min(max(1, int(1000 * self._silence_s)), _LONGEST_TIMEOUT_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)

    async def close(self) -> None:
        self.is_closed, self._port = True, 0
        for watcher in tuple(self.watchers):
            watcher.say_goodbye()
        for link in tuple(self._links):
            link.close()
        server, listener = self._server, self._listener
        self._server = self._listener = None
        if listener is not None:
            # A server that is closed while it sets up an accepted connection leaves that open.
            asyncio.get_running_loop().remove_reader(listener)
        try:
            for _ in range(_TURNS_TO_CLOSE):
                await asyncio.sleep(0)
        finally:
            if server is not None:
                server.close()
            if listener is not None:
                listener.close()


class _Watcher(asyncio.Protocol):
    """A connection that was opened to this node, to watch it or for anything else."""

    def __init__(self, me: Peer, peers: TcpPeers) -> None:
        self._me = me
        self._peers = peers
        self._line = b""
        self._is_answered = False
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        if self._peers.is_closed:  # it was accepted just before that
            transport.abort()
            return
        self._make_room()
        self._peers.watchers[self] = None
        _accepted.add(self)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        self._limit = asyncio.get_running_loop().call_later(_GREETING_S, transport.abort)

    def _make_room(self) -> None:
        """Close the oldest connection of each kind of which there are too many: an honest greeting
        arrives at once, and a node that watches this one connects again."""
        for is_answered in (False, True):
            same = [
                watcher for watcher in self._peers.watchers if watcher._is_answered is is_answered
            ]
            if len(same) >= _MAX_OF_A_KIND and (transport := same[0]._transport) is not None:
                del self._peers.watchers[same[0]]
                transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read the greeting; anything after it is ignored, but read: unread data would turn the end
        of the connection into a reset."""
        if self._is_answered or self._transport is None:
            return
        self._line += data
        line, end, _ = self._line.partition(b"\n")
        if not end and len(line) < _MAX_LINE:
            return
        asked = _read_peer(line) if end else None
        if asked is None or self._peers.is_closed:
            self._transport.abort()
            return
        self._is_answered, self._line = asked == self._me, b""
        self._transport.write(_WORDS + (b"yes\n" if self._is_answered else b"no\n"))
        if not self._is_answered:
            self._transport.close()
        elif self._limit is not None:
            self._limit.cancel()

    @property
    def descriptor(self) -> int:
        """The connection's descriptor, -1 once it is closed."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def abort(self) -> None:
        """Close the connection without a goodbye."""
        if self._transport is not None:
            self._transport.abort()

    def say_goodbye(self) -> None:
        if self._transport is not None:
            if self._is_answered:
                self._transport.write(_GOODBYE)
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._peers.watchers.pop(self, None)
        if self._limit is not None:
            self._limit.cancel()


class _Watched(asyncio.Protocol):
    """A link to the node that this one watches."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[LinkEnd] = asyncio.get_running_loop().create_future()

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    async def answer(self) -> Answer:
        return await asyncio.shield(self._answered)

    async def ended(self) -> LinkEnd:
        return await asyncio.shield(self._end)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.write(_WORDS + _greeting(self._peer) + b"\n")

    def data_received(self, data: bytes) -> None:
        if len(self._received) < _MAX_LINE:
            self._received += data
        if self._answered.done():
            return
        line, end, _ = self._received.partition(b"\n")
        if not end and len(self._received) < len(_WORDS) + 4:
            return
        answers = {_WORDS + b"yes": Answer.SAME, _WORDS + b"no": Answer.OTHER}
        self._answered.set_result(answers.get(line, Answer.MUTE) if end else Answer.MUTE)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_result(Answer.MUTE)
        if self._received.endswith(_GOODBYE):
            self._end.set_result(LinkEnd.GOODBYE)
        elif error is None or isinstance(error, ConnectionError):
            self._end.set_result(LinkEnd.CLOSED)
        else:  # timed out, no route to the host
            self._end.set_result(LinkEnd.SILENT)


def _greeting(peer: Peer) -> bytes:
    return json.dumps([peer.job, peer.node_id], separators=(",", ":")).encode()


def _read_peer(line: bytes) -> Peer | None:
    """Return the node that a greeting asks for; ``None`` if the line is not a greeting."""
    if not line.startswith(_WORDS):
        return None
    try:
        match json.loads(line[len(_WORDS) :]):
            case [str(job), str(node_id)]:
                return Peer(job, node_id)
    except (ValueError, RecursionError):
        pass
    return None


# --- names ----------------------------------------------------------------------------------------


async def _resolve(address: str, port: int) -> list[_Address]:
    """Return all addresses of a host. Raises OSError.

    A name is looked up on a thread of its own: the interpreter would wait at its exit for an
    executor's threads, and cannot start any more of them then.
    """
    look_up = partial(socket.getaddrinfo, address, port, type=socket.SOCK_STREAM)
    try:
        infos = look_up(flags=socket.AI_NUMERICHOST)  # which asks nobody
    except (OSError, ValueError):
        try:
            infos = await asyncio.wrap_future(begun_in_thread(look_up, "rdzv-etcd name look-up"))
        except (OSError, ValueError) as error:
            raise OSError(f"its name cannot be resolved: {error}") from None
        except RuntimeError as error:
            raise OSError(f"its name cannot be looked up: {error}") from error
    return [(int(family), target) for family, _, _, _, target in infos]


# --- forks ----------------------------------------------------------------------------------------

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_accepted: weakref.WeakSet[_Watcher] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Release a parent's connections in its forked child. Objects there still refer to their
    descriptors, and must not meet another file under these numbers, so the numbers stay in use."""
    descriptors = [sock.fileno() for sock in _sockets]
    descriptors += [watcher.descriptor for watcher in _accepted]
    open_ones = [descriptor for descriptor in descriptors if descriptor >= 0]
    if not open_ones:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in open_ones:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _sockets.clear()
    _accepted.clear()


os.register_at_fork(after_in_child=_let_go_in_child)

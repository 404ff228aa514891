"""Links between nodes in memory, with what happens to real ones: processes that end, hosts that
fall silent, networks that cut, reset or refuse, strangers and proxies that take over a port.

Knows asyncio's loop only, so that it works in virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from rdzv_etcd.peers import Answer, Contact, LinkEnd, Peer

Place = tuple[str, int]
"""An address and a port."""


class State(Enum):
    """What is at a place."""

    ALIVE = "a process that answers"
    STOPPED = "a process that does nothing, on a host that does"
    DEAD = "a host that says that nobody listens there"
    SILENT = "a host that says nothing"


class PeerSwitch:
    """All links of one simulation."""

    def __init__(self, *, silence_s: float = 3.0, delay_s: float = 0.0005) -> None:
        """``silence_s``: after so long without a sign of life a link ends; 0: never."""
        self.silence_s = silence_s
        self.delay_s = delay_s
        self._peers: dict[Place, MemoryPeer] = {}
        self._links: dict[_Link, None] = {}
        """In the order in which they were made, so that a seed replays exactly."""
        self._cuts: set[tuple[str, str]] = set()
        self._refused: set[str] = set()
        self._refused_for: set[str] = set()
        self._extra_s: dict[str, float] = {}
        self._accepted_for_all: set[str] = set()
        self._to_lose = 0
        self._breaks_new = False
        self.broken = 0
        """How many links ended as soon as they were made."""

    def plug(self, address: str, port: int) -> MemoryPeer:
        """Make one node's end."""
        peer = self._peers[address, port] = MemoryPeer(self, (address, port))
        return peer

    # -- what happens -----------------------------------------------------------------------------

    def kill(self, peer: MemoryPeer) -> None:
        """End a process: its host closes its links and refuses new ones."""
        peer.state = State.DEAD
        self._end_links_of(peer, LinkEnd.CLOSED)

    def silence(self, peer: MemoryPeer) -> None:
        """Let a host vanish without a word."""
        peer.state = State.SILENT
        self._check_links()

    def stop(self, peer: MemoryPeer) -> None:
        """Stop a process (SIGSTOP): its host holds its links, and accepts for it."""
        peer.state = State.STOPPED

    def resume(self, peer: MemoryPeer) -> None:
        if peer.state is State.STOPPED:
            peer.state = State.ALIVE
            peer.wake()

    def cut(self, one: str, other: str) -> None:
        """Let nothing through from one address to the other."""
        self._cuts.add((one, other))
        self._check_links()

    def heal(self) -> None:
        """End all cuts and refusals."""
        self._cuts.clear()
        self._refused.clear()
        self._refused_for.clear()
        self._extra_s.clear()
        self._to_lose = 0
        self._accepted_for_all.clear()

    def reset_all(self) -> None:
        """Let something on the way break every link, between nodes that live."""
        for link in tuple(self._links):
            link.end(LinkEnd.CLOSED)

    def break_new_links(self, yes: bool) -> None:
        """Let something on the way break every link, and each new one as soon as it is made."""
        self._breaks_new = yes
        self.reset_all()

    def lose_attempts(self, count: int) -> None:
        """Let the next attempts to connect get lost on the way."""
        self._to_lose = count

    def refuse(self, address: str) -> None:
        """Let something on the way refuse whoever connects to a host, and break its links."""
        self._refused.add(address)
        for link in tuple(self._links):
            if link.to[0] == address:
                link.end(LinkEnd.CLOSED)

    def refuse_for(self, address: str) -> None:
        """Let a host's own firewall refuse whatever it wants to connect to, and break its links."""
        self._refused_for.add(address)
        for link in tuple(self._links):
            if link.by[0] == address:
                link.end(LinkEnd.CLOSED)

    def delay(self, address: str, one_way_s: float) -> None:
        """Let every packet from and to a host take so much longer."""
        self._extra_s[address] = one_way_s

    def accept_for(self, address: str) -> None:
        """Let something on the way accept whoever connects to a host, whether that lives or not,
        and close the connection."""
        self._accepted_for_all.add(address)

    def _end_links_of(self, peer: MemoryPeer, end: LinkEnd) -> None:
        for link in tuple(self._links):
            if peer.place in (link.to, link.by):
                gone = link.by if peer.place == link.to else link.to
                if not self._is_cut(link.to, link.by) and not self._is_silent(gone):
                    link.end(end)
        self._check_links()

    def _check_links(self) -> None:
        """Let links fall silent over which nothing can be heard, if that is so for long enough."""
        if not self.silence_s:
            return
        loop = asyncio.get_running_loop()
        for link in tuple(self._links):
            if self._is_mute(link) and not link.is_watched:
                link.is_watched = True
                loop.call_later(self.silence_s, self._fall_silent, link)

    def _fall_silent(self, link: _Link) -> None:
        link.is_watched = False
        if self._is_mute(link):
            link.end(LinkEnd.SILENT)

    def _is_mute(self, link: _Link) -> bool:
        return self._is_cut(link.to, link.by) or self._is_silent(link.to)

    def _is_cut(self, one: Place, other: Place) -> bool:
        return (one[0], other[0]) in self._cuts or (other[0], one[0]) in self._cuts

    def _is_silent(self, place: Place) -> bool:
        peer = self._peers.get(place)
        return peer is not None and peer.state is State.SILENT

    # -- what nodes do ----------------------------------------------------------------------------

    async def connect(self, by: MemoryPeer, to: Place, peer: Peer, timeout_s: float) -> Contact:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        delay_s = self.delay_s + self._extra_s.get(by.place[0], 0.0) + self._extra_s.get(to[0], 0.0)
        await asyncio.sleep(min(timeout_s, 2 * delay_s))  # there and back: it is connected
        there = self._peers.get(to)
        is_lost, self._to_lose = self._to_lose > 0, max(0, self._to_lose - 1)
        is_lost = is_lost or 2 * delay_s >= timeout_s
        if is_lost or self._is_cut(by.place, to) or self._is_silent(to):
            await asyncio.sleep(max(0.0, until_s - loop.time()))
            return Contact(Answer.UNREACHABLE, "timed out")
        is_refused = to[0] in self._refused or by.place[0] in self._refused_for
        if to[0] in self._accepted_for_all:
            return Contact(Answer.MUTE)
        if is_refused or there is None or there.state is State.DEAD:
            return Contact(Answer.REFUSED)
        answers = await there.answers(until_s - loop.time() - 2 * delay_s)
        is_late = loop.time() + 2 * delay_s > until_s
        await asyncio.sleep(max(0.0, min(until_s - loop.time(), 2 * delay_s)))
        if not answers or is_late:
            return Contact(Answer.HELD if there.is_up else Answer.MUTE)
        if there.me != peer:
            return Contact(Answer.OTHER)
        link = _Link(by.place, to, self._links)
        self._check_links()
        if self._breaks_new:
            self.broken += 1
            link.end(LinkEnd.CLOSED)
        return Contact(Answer.SAME, link=link)

    def close(self, peer: MemoryPeer) -> None:
        """A node says good-bye, and its links end."""
        self._end_links_of(peer, LinkEnd.GOODBYE)
        peer.state = State.DEAD


@dataclass(eq=False)
class MemoryPeer:
    """One node's end of its links."""

    switch: PeerSwitch
    place: Place
    me: Peer | None = None
    state: State = State.ALIVE
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.place[1]

    @property
    def is_up(self) -> bool:
        """Whether its process is there."""
        return self.state is not State.DEAD

    async def admit(self, me: Peer) -> None:
        self.me = me
        self.wake()

    async def connect(self, address: str, port: int, peer: Peer, timeout_s: float) -> Contact:
        return await self.switch.connect(self, (address, port), peer, timeout_s)

    async def close(self) -> None:
        if self.state is not State.DEAD:
            self.switch.close(self)

    def wake(self) -> None:
        """Let those go on who wait for an answer."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def answers(self, timeout_s: float) -> bool:
        """Whether this node answers within that time; a host accepts for it until then."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self.me is None or self.state is not State.ALIVE:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.append(waiter)
            await asyncio.wait({waiter}, timeout=max(0.0, until_s - loop.time()))
            if not waiter.done():
                return False
            if self.state is State.DEAD:
                return False
        return True


class _Link:
    """An open link, at the end of the node that watches."""

    def __init__(self, by: Place, to: Place, all_of_them: dict[_Link, None]) -> None:
        self.by, self.to = by, to
        self.is_watched = False
        """Whether it is about to fall silent."""
        self._all = all_of_them
        self._end: asyncio.Future[LinkEnd] = asyncio.get_running_loop().create_future()
        all_of_them[self] = None

    async def ended(self) -> LinkEnd:
        return await asyncio.shield(self._end)

    def end(self, end: LinkEnd) -> None:
        self._all.pop(self, None)
        if not self._end.done():
            self._end.set_result(end)

    def close(self) -> None:
        self.end(LinkEnd.CLOSED)

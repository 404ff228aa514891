"""Keeps a link to one node at a time, and says what came of it when the node answers no more.

Knows what links say of a node: nothing of what is in etcd, and nothing of who is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.peers.api import Answer, Contact, End, Peer, PeerNetwork
from rdzv_etcd.protocol.model import NodeInfo

_CONTACT_S = 5.0
"""How long a first contact may take: the other node may be about to begin to answer."""
_RECONTACT_S = 0.5
"""How long a node is looked for whose link has ended, and longer if it is far away: a process that
dies takes some milliseconds, and its host answers for it all the while; and of a living one's
packets some may be lost."""
_HANDSHAKES = 4
"""So many times the time that the handshake took once is added to that."""
_LATE_S = 0.05
"""Whoever does that much later what it meant to do was stopped meanwhile, or has too little of a
processor."""
_NEXT_TRY_S = 0.1
"""After this long without an answer, it is asked once more beside."""
_TRIES = 4
_BETWEEN_TRIES_S = 0.001
_BRIEF_S = 0.5
_BRIEF_LINKS = 3
"""After so many links, one after the other, that did not live for that long it waits longer and
longer before the next one, up to …"""
_LONGEST_PAUSE_S = 5.0


class Evidence(Enum):
    """What was seen of a node that does not answer."""

    GONE = "its process is gone: it was there, and its host refuses"
    REFUSED = "its host refuses; it was never reached, or fell silent before"
    SILENT = "nobody answers for it"


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of watching a node over links."""

    contact: Contact
    """The last attempt to reach it."""
    end: End | None = None
    """How its last link ended, if it had one …"""
    after_s: float | None = None
    """… and how long after that the attempt had its answer."""


def evidence_of(
    seen: Seen, *, was_linked: bool, fell_silent: bool, others_are_gone: bool
) -> Evidence | None:
    """What says that a node is gone; ``None``: nothing does. Pure.

    A node that this one has never reached may be unreachable, and live; but after others were found
    to be gone it is asked all the same: all processes of a host, or all hosts of a rack may have
    ended. A connection that is held without an answer is held by a kernel: the process is there,
    and stopped or very slow.
    """
    answer = seen.contact.answer
    if answer is Answer.HELD or not (was_linked or others_are_gone):
        return None
    if not seen.contact.says_gone:
        return Evidence.SILENT if was_linked or answer is not Answer.MUTE else None
    return Evidence.GONE if was_linked and not fell_silent else Evidence.REFUSED


class PeerWatch:
    """Watches nodes of one job, one at a time, and remembers what it has seen of each."""

    def __init__(self, clock: Clock, network: PeerNetwork, job: str) -> None:
        self._clock = clock
        self._network = network
        self._job = job
        self._handshakes_s: dict[str, float] = {}
        """Whom there was a link to, and how long the handshake took."""
        self._fell_silent: set[str] = set()
        """Those whose last link ended so; then what their host says is not all that certain."""
        self._late_s = 0.0
        """How much later than it meant to this node has looked for another one last."""

    def has_reached(self, node_id: str) -> bool:
        """Whether there was a link to that node since it was distrusted last."""
        return node_id in self._handshakes_s

    def distrust(self, node_id: str) -> None:
        """What its host says of that node is no evidence any more, until there is a link again."""
        self._handshakes_s.pop(node_id, None)

    def keep_only(self, node_ids: Collection[str]) -> None:
        """Forget what was seen of all others."""
        kept = set(node_ids)
        self._handshakes_s = {
            one: took_s for one, took_s in self._handshakes_s.items() if one in kept
        }
        self._fell_silent &= kept

    def judge(self, node_id: str, seen: Seen, *, others_are_gone: bool) -> Evidence | None:
        """What says that the node is gone; ``None``: nothing does."""
        return evidence_of(
            seen,
            was_linked=node_id in self._handshakes_s,
            fell_silent=node_id in self._fell_silent,
            others_are_gone=others_are_gone,
        )

    async def watch(self, info: NodeInfo, *, suspect: bool) -> Seen:
        """Watch a node, over as many links as it takes, until it says good-bye or does not answer
        any more. ``suspect``: it may be gone already."""
        clock = self._clock
        look = suspect or info.node_id in self._handshakes_s
        seen = Seen(await (self._recontact(info) if look else self._contact(info, _CONTACT_S)))
        brief = 0
        while seen.contact.link is not None:
            link, began_s = seen.contact.link, clock.now_s()
            try:
                end = await link.ended()
            finally:
                link.close()
            if end is End.GOOD_BYE:
                return Seen(seen.contact, end)
            if end is End.SILENT:
                self._fell_silent.add(info.node_id)
            ended_s = clock.now_s()
            brief = brief + 1 if ended_s < began_s + _BRIEF_S else 0
            if brief >= _BRIEF_LINKS:  # somebody breaks them as soon as they are made
                await clock.sleep(min(_LONGEST_PAUSE_S, _BRIEF_S * (brief - _BRIEF_LINKS + 1)))
            contact = await self._recontact(info)
            seen = Seen(contact, end, clock.now_s() - ended_s)
        return seen

    async def _contact(self, info: NodeInfo, timeout_s: float) -> Contact:
        began_s = self._clock.now_s()
        contact = await self._network.connect(
            info.address, info.peer_port, Peer(self._job, info.node_id), timeout_s
        )
        if contact.link is not None:
            took_s = min(self._clock.now_s() - began_s, _RECONTACT_S)
            known_s = self._handshakes_s.get(info.node_id, took_s)
            self._handshakes_s[info.node_id] = min(took_s, known_s)
            self._fell_silent.discard(info.node_id)
        return contact

    async def _recontact(self, info: NodeInfo) -> Contact:
        """Look for a node whose link has ended, until there is a clear answer, or it was looked for
        long enough: while this node is stopped itself, it does not look."""
        clock = self._clock
        while True:
            far_s = _HANDSHAKES * self._handshakes_s.get(info.node_id, 0.0)
            until_s = clock.now_s() + _RECONTACT_S + far_s
            self._late_s = 0.0
            told = await self._look_for(info, until_s)
            if told.is_clear or max(self._late_s, clock.now_s() - until_s) < _LATE_S:
                return told

    async def _look_for(self, info: NodeInfo, until_s: float) -> Contact:
        """Try to reach a node; TCP sends again only after a second what is lost of an attempt, so
        there are several."""
        now_s = self._clock.now_s()
        tries = [
            asyncio.ensure_future(self._try(info, begins_s, until_s))
            for begins_s in (now_s + number * _NEXT_TRY_S for number in range(_TRIES))
        ]
        told = Contact(Answer.UNREACHABLE)
        try:
            for one in asyncio.as_completed(tries):
                last = await one
                # Of those that tell nothing, one that was held says most: somebody is there.
                told = told if told.answer is Answer.HELD and not last.is_clear else last
                if told.is_clear:
                    break
            return told
        finally:
            for each in tries:
                await end_task(each)
                link = None if each.cancelled() else each.result().link
                if link is not None and link is not told.link:
                    link.close()

    async def _try(self, info: NodeInfo, begins_s: float, until_s: float) -> Contact:
        """Ask it at that time, and, as soon as there is an answer that tells nothing, again."""
        clock = self._clock
        await clock.sleep(begins_s - clock.now_s())
        self._late_s = max(self._late_s, clock.now_s() - begins_s)
        while True:
            contact = await self._contact(info, max(_BETWEEN_TRIES_S, until_s - clock.now_s()))
            if contact.is_clear or clock.now_s() >= until_s:
                return contact
            await clock.sleep(_BETWEEN_TRIES_S)


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel it and wait until it has ended; whatever it ended with is looked at elsewhere."""
    task.cancel()
    await asyncio.wait({task})

"""Watches the next member over a link, and accuses it in etcd when it is gone.

:mod:`~rdzv_etcd.protocol.liveness` decides who watches whom, and when an accused node counts as
lost. No round waits for a link: without one, the lease reveals a death. :class:`PeerWatch` knows
what links show of a node, and nothing of what is in etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from rdzv_etcd.clock import Clock, race
from rdzv_etcd.errors import EtcdError
from rdzv_etcd.node.accuse import Accuser, Place
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.peers import Answer, Contact, LinkEnd, Peer, PeerNetwork
from rdzv_etcd.protocol.liveness import follows_loss, names_dead, ring_after, room_for_a_world_s
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.world_change import how_gone, how_silent

_CONTACT_S = 5.0
"""How long a first contact may take: the other node may be about to begin to answer."""
_RECONTACT_S = 0.5
"""How long a node is looked for whose link has ended, and longer if it is far away: a process that
dies takes some milliseconds, and its host answers for it all the while; and some packets of a
living one may be lost."""
_HANDSHAKES = 4
"""So many times the duration of a handshake with the node are added to that."""
_ATTEMPT_S = 0.1
"""An attempt that has not connected after this long and twice a handshake is made again: TCP sends
again only after a second what was lost of it. A node to which there was no link may be farther
away: the second attempt has all the time that is left."""
_BETWEEN_ATTEMPTS_S = 0.001
_LATE_S = 0.05
"""An attempt that ends later than planned by that much shows that this node itself was stopped
meanwhile, or has too little of a processor."""
_BRIEF_S = 0.5
_BRIEF_LINKS = 3
"""After so many links in a row that did not live for ``_BRIEF_S`` it waits longer and longer before
the next one."""
_LONGEST_PAUSE_S = 5.0
"""The longest of these waits."""


class Evidence(Enum):
    """What was seen of a node that does not answer."""

    GONE = "its process is gone: it was there, and its host refuses"
    REFUSED = "its host refuses; it was never reached, or fell silent before"
    SILENT = "nobody answers for it"


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """What came of watching a node over links."""

    contact: Contact
    """The last attempt to reach it."""
    end: LinkEnd | None = None
    """How its last link ended, if it had one just now."""
    after_s: float | None = None
    """How long after the end of that link the attempt had its answer."""
    was_linked: bool = False
    """Whether there was a link to it since it was distrusted last."""
    fell_silent: bool = False
    """Whether the last of these ended in silence: then its host is a less certain witness."""

    def evidence(self, *, others_are_gone: bool) -> Evidence | None:
        """Return what shows that the node is gone; ``None``: nothing does.

        A node that this one has never reached may be unreachable, and live; but after others were
        found to be gone it is accused all the same: all processes of a host, or all hosts of a rack
        may have ended. A connection that is held without an answer is held by a kernel: the process
        is there, and stopped or very slow.
        """
        answer = self.contact.answer
        if answer is Answer.HELD or not (self.was_linked or others_are_gone):
            return None
        if not self.contact.says_gone:
            return Evidence.SILENT if self.was_linked or answer is not Answer.MUTE else None
        return Evidence.GONE if self.was_linked and not self.fell_silent else Evidence.REFUSED


class PeerWatch:
    """Watches nodes of one job, one at a time, and remembers what it has seen of each."""

    def __init__(self, clock: Clock, network: PeerNetwork, job: str) -> None:
        self._clock = clock
        self._network = network
        self._job = job
        self._handshakes_s: dict[str, float] = {}
        """The nodes to which there was a link, and how long the handshake took."""
        self._fell_silent: set[str] = set()
        """The nodes whose last link ended in silence."""

    def distrust(self, node_id: str) -> None:
        """Take the answer of that node's host as no evidence, until there is a link again."""
        self._handshakes_s.pop(node_id, None)

    def keep_only(self, node_ids: Collection[str]) -> None:
        """Forget what was seen of all others."""
        for node_id in self._handshakes_s.keys() - node_ids:
            del self._handshakes_s[node_id]
        self._fell_silent.intersection_update(node_ids)

    async def watch(self, info: NodeInfo, *, suspect: bool) -> LinkSeen:
        """Watch a node, over as many links as it takes, until it says goodbye or does not answer
        any more. ``suspect``: it may be gone already."""
        clock, node_id = self._clock, info.node_id
        end, after_s, brief = None, None, 0
        if suspect or node_id in self._handshakes_s:
            contact = await self._recontact(info)
        else:
            contact = await self._contact(info, _CONTACT_S)
        while (link := contact.link) is not None:
            began_s = clock.now_s()
            try:
                end = await link.ended()
            finally:
                link.close()
            if end is LinkEnd.GOODBYE:
                break
            if end is LinkEnd.SILENT:
                self._fell_silent.add(node_id)
            ended_s = clock.now_s()
            brief = brief + 1 if ended_s < began_s + _BRIEF_S else 0
            if brief >= _BRIEF_LINKS:  # something breaks them as soon as they are made
                await clock.sleep(min(_LONGEST_PAUSE_S, _BRIEF_S * (brief - _BRIEF_LINKS + 1)))
            contact = await self._recontact(info)
            after_s = clock.now_s() - ended_s
        was_linked, fell_silent = node_id in self._handshakes_s, node_id in self._fell_silent
        return LinkSeen(contact, end, after_s, was_linked, fell_silent)

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
        long enough; again from the start if this node was stopped itself meanwhile."""
        clock = self._clock
        handshake_s = self._handshakes_s.get(info.node_id, 0.0)
        while True:
            until_s = clock.now_s() + _RECONTACT_S + _HANDSHAKES * handshake_s
            best, late_s = Contact(Answer.UNREACHABLE), 0.0
            attempt_s = _ATTEMPT_S + 2 * handshake_s
            while (left_s := until_s - clock.now_s()) > 0:
                # Its kernel, which holds a connection, sends again by itself what is lost of it.
                is_held = best.answer is Answer.HELD
                limit_s = left_s if is_held else min(left_s, attempt_s)
                ends_s = clock.now_s() + limit_s
                contact = await self._contact(info, limit_s)
                if contact.is_clear:
                    return contact
                # Of those that show nothing, one that was held shows most: a kernel is there.
                best = best if is_held else contact
                late_s = max(late_s, clock.now_s() - ends_s)
                attempt_s = attempt_s if handshake_s else _RECONTACT_S
                await clock.sleep(_BETWEEN_ATTEMPTS_S)
            if late_s < _LATE_S:
                return best


_PAUSE_S = 1.0
_RETRY_S = 5.0
_STALE_S = 0.5
"""A silence that was seen longer ago, because etcd took so long, is no evidence."""


class PeerLinks:
    """One node's links: the one over which it watches, and those over which it is watched."""

    def __init__(self, context: NodeContext, member: Member, network: PeerNetwork) -> None:
        self._context = context
        self._member = member
        self._network = network
        settings = context.settings
        self._me = Peer(f"{settings.prefix}/{settings.job_id}", member.node_id)
        self._peer_watch = PeerWatch(context.clock, network, self._me.job)
        self.accuser = Accuser(context)
        self._warned: set[str] = set()
        self._gone: set[str] = set()
        """Members of the present ring that were found to be gone, by this node or another."""
        self._follows_loss = False
        """Whether the world before ended because members were lost."""
        self._passed_over: set[str] = set()
        """Members without a presence, which may put it back."""
        self._watched = ""
        """The member that is watched over a link."""
        self._backoff = context.backoff()
        member.watches_early = True

    @property
    def port(self) -> int:
        """Where others reach this node; 0: nowhere."""
        return self._network.port

    async def close(self) -> None:
        """Say goodbye, so that no node takes this one for dead. Idempotent."""
        await self._network.close()

    async def run(self) -> None:
        """Answer for this node and watch its neighbor, until cancelled."""
        member, context = self._member, self._context
        await context.wakeup.wait(when=lambda: context.presence.has_begun)
        await self._network.admit(self._me)
        while True:
            await self._tend(member.epoch)

    def _ring(self) -> tuple[str, ...]:
        member, record = self._member, self._member.record
        if record is None:
            return ()
        members: Sequence[str] = record.members
        if record.slices is not None:  # of a large world this node knows one slice
            mine = member.slice_of(record)
            ranks = {} if mine is None else mine.ranks
            members = sorted(ranks, key=ranks.__getitem__)
        return ring_after(members, member.node_id)

    async def _tend(self, epoch: int) -> None:
        """Watch the members of the world that this node is in, until it is in another one: also
        while it waits for the next round, which would be formed with a dead node."""
        member, context = self._member, self._context
        ring = self._ring()
        self._peer_watch.keep_only(ring)
        self._warned.intersection_update(ring)
        self._gone.clear()
        self._passed_over.clear()
        self._follows_loss = follows_loss(member.record, context.control.view.change)
        while member.epoch == epoch:
            watching, _ = await race(self._watch(ring), self._until_other(epoch))
            if watching is not None:
                watching.result()  # it ends only with an error

    async def _until_other(self, epoch: int) -> None:
        """Wait until another node has to be watched: the one that is watched was declared lost, as
        another node was faster, or one is back that had no presence, or there is another world."""
        member, wakeup, clock = self._member, self._context.wakeup, self._context.clock

        def is_over() -> bool:
            return member.epoch != epoch or self._is_declared_lost()

        while not is_over():
            await wakeup.wait(when=lambda: is_over() or bool(self._passed_over))
            await wakeup.wait(clock.now_s() + _PAUSE_S, when=is_over)
            if not is_over() and await self._are_back():
                return
        if member.epoch == epoch:
            return
        # Meanwhile the neighbor in the world before is watched.
        record = member.record
        await clock.sleep(room_for_a_world_s(0 if record is None else record.size))

    async def _are_back(self) -> bool:
        """Look whether nodes that had no presence are there again."""
        back = False
        for node_id in tuple(self._passed_over):
            with contextlib.suppress(EtcdError):  # looked at again soon
                place = await self._read(node_id, is_late=True)
                if place.presence is not None:
                    back = True
                    self._passed_over.discard(node_id)
                    self._gone.discard(node_id)
        return back

    async def _read(self, node_id: str, *, is_late: bool = False) -> Place:
        """Read what stands in the place of a node's presence, and note whether it is an answer to
        this node's accusation. Raises EtcdError."""
        await self.accuser.until_decided(node_id)
        place = await self.accuser.read(node_id)
        if self.accuser.is_refuted(node_id, place, is_late=is_late):
            self._peer_watch.distrust(node_id)
        return place

    async def _watch(self, ring: Sequence[str]) -> None:
        """Watch the next one that is there; when it is gone, the one after it."""
        for node_id in ring:
            await self._watch_one(node_id)
        await asyncio.Event().wait()  # no node is left

    async def _watch_one(self, node_id: str) -> None:
        """Watch that node until it is gone. A link that cannot be had is tried again, rarely."""
        clock = self._context.clock
        silence_counts = self._context.settings.peer_silence_limit_s > 0
        fails_since_s: float | None = None
        while True:
            try:
                place = await self._read(node_id)
                if place.presence is None:
                    self._pass_over(node_id, place)
                    return
                _, info = place.presence
                if not info.peer_port:
                    return
                seen = await self._see(info)
                if seen.end is LinkEnd.GOODBYE:
                    return
                evidence = seen.evidence(others_are_gone=self._others_are_gone)
                if evidence is Evidence.SILENT and not silence_counts:
                    evidence = None
                if evidence is not None:
                    await self._accuse(info, evidence, seen)
                    continue
                fails_since_s = clock.now_s() if fails_since_s is None else fails_since_s
                self._warn_unreachable(info, seen, clock.now_s() - fails_since_s)
            except EtcdError as error:
                name = self._context.log.names(node_id)
                complaint = f"this node cannot watch {name}, which may be gone"
                await self._context.back_off(self._backoff, error, complaint, at_least_s=_RETRY_S)
            else:
                await clock.sleep(_RETRY_S)

    @property
    def _others_are_gone(self) -> bool:
        return bool(self._gone) or self._follows_loss

    def _pass_over(self, node_id: str, place: Place) -> None:
        """Watch the next one: this one is leaving or gone, or may be putting its presence back."""
        if place.is_vacant:
            self._gone.add(node_id)
        self._passed_over.add(node_id)
        self._context.wakeup.notify()

    async def _see(self, info: NodeInfo) -> LinkSeen:
        """Watch a node until it does not answer any more."""
        was_lost = names_dead(self._context.control.view.open_change, info.node_id)  # and is back
        self._watched = "" if was_lost else info.node_id
        try:
            return await self._peer_watch.watch(info, suspect=self._others_are_gone)
        finally:
            self._watched = ""

    def _is_declared_lost(self) -> bool:
        """Whether the node was declared lost that is watched."""
        return names_dead(self._context.control.view.open_change, self._watched)

    def _warn_unreachable(self, info: NodeInfo, seen: LinkSeen, for_s: float) -> None:
        """Warn once of a node that this one has never reached. If its host answers for it, it may
        be dead; then its lease ends soon."""
        lease_s = info.lease_ttl_s or self._context.session.ttl_s
        limit_s = 0.0 if seen.contact.answer is Answer.UNREACHABLE else lease_s
        if seen.was_linked or info.node_id in self._warned or for_s < limit_s:
            return
        self._warned.add(info.node_id)
        other, why = self._context.log.names(info.node_id), seen.contact.why
        self._context.log.warn(
            f"this node cannot reach {other} at {info.address}:{info.peer_port} ({why}): "
            "only its lease will show its death, and MASTER_ADDR there may be unreachable as well"
        )

    # -- losing one -------------------------------------------------------------------------------

    async def _accuse(self, info: NodeInfo, evidence: Evidence, seen: LinkSeen) -> None:
        """Report in etcd how the node was lost, unless this node may not accuse it now: then wait.
        Raises EtcdError."""
        context, clock = self._context, self._context.clock
        is_gone = evidence is Evidence.GONE
        from_s = self.accuser.quiet_until_s(info.node_id)
        if not is_gone:
            from_s = max(from_s, self.accuser.earliest_s())
        if clock.now_s() < from_s or not context.session.lease_id:
            await clock.sleep(max(_PAUSE_S, from_s - clock.now_s()))
            return
        read_s = clock.now_s()
        place = await self.accuser.read(info.node_id)
        is_stale = clock.now_s() - read_s > _STALE_S + context.session.round_trip_s
        if place.presence is None or (is_stale and not is_gone):
            return
        presence, now = place.presence
        if now.peer_port != info.peer_port:
            return
        how = self._how(info, evidence, seen)
        after_ms = None if seen.after_s is None or not is_gone else round(1000 * seen.after_s)
        accusation = Accusation(self._me.node_id, how, is_gone, now.round_trip_ms, after_ms)
        await self.accuser.accuse(info.node_id, presence, accusation)
        self._backoff.reset()

    def _how(self, info: NodeInfo, evidence: Evidence, seen: LinkSeen) -> str:
        names = self._context.log.names
        names.learn([info.node_id])
        me = names(self._me.node_id)
        why, end = seen.contact.why, seen.end
        if evidence is not Evidence.SILENT:
            return how_gone(me, why, seen.after_s)
        return how_silent(me, why if end is None else f"{end.value}, then {why}")

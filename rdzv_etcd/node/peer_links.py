"""Watches the next member over a link, and reports in etcd when it is gone.

:mod:`~rdzv_etcd.protocol.ring` decides who watches whom; :mod:`~rdzv_etcd.protocol.accusations`
decides when an accused node counts as lost. No round waits for a link: without one, the lease
reveals a death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.node.accuse import SETTLED_S, Place, Witness
from rdzv_etcd.node.backoff import Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.peer_watch import Evidence, PeerWatch, Seen, end_task
from rdzv_etcd.peers.api import Answer, Contact, End, Peer, PeerNetwork
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.names import names_apart
from rdzv_etcd.protocol.ring import (
    LONGEST_ROOM_S,
    follows_loss,
    how_gone,
    how_silent,
    names_dead,
    ring_after,
    ring_in_slice,
    room_for_a_world_s,
)

_PAUSE_S = 1.0
_RETRY_S = 5.0
_STALE_S = 0.5
"""What was seen longer ago, because etcd took so long, says of no node that it is silent."""


class PeerLinks:
    """One node's links: the one over which it watches, and those over which it is watched."""

    def __init__(self, context: NodeContext, member: Member, network: PeerNetwork) -> None:
        self._context = context
        self._member = member
        self._network = network
        settings = context.settings
        self._job = f"{settings.prefix}/{settings.job_id}"
        self._peer_watch = PeerWatch(context.clock, network, self._job)
        self._witness = Witness(context, member)
        self._warned: set[str] = set()
        self._gone: set[str] = set()
        """Members of the present ring that were found to be gone, by whomever."""
        self._follows_loss = False
        """Whether the world before ended because members were lost."""
        self._ring_since_s = 0.0
        """When the present ring was made."""
        self._doubts: dict[str, float] = {}
        """Members without presence, and when to look whether they have put it back."""
        self._backoff = Backoff(context.session.renewal_period_s)
        self._me = member.node_id
        member.watch_early()

    @property
    def port(self) -> int:
        """Where others reach this node; 0: nowhere."""
        return self._network.port

    async def close(self) -> None:
        """Say good-bye, so that nobody takes this node for dead. Idempotent."""
        await self._network.close()

    async def answer_again(self) -> None:
        """Answer for this node, if it was disowned: its thread is back."""
        if self._member.hears_accusations:
            await self._network.admit(Peer(self._job, self._me))

    async def run(self) -> None:
        """Answer for this node and watch its neighbour, until cancelled."""
        member, wakeup = self._member, self._context.wakeup
        while not member.hears_accusations:
            await wakeup.wait(when=lambda: member.hears_accusations)
        await self._network.admit(Peer(self._job, self._me))
        while True:
            withdrawing = asyncio.ensure_future(self._witness.withdraw())
            try:
                await self._tend(member.epoch)
                if withdrawing.done():
                    withdrawing.result()
            finally:
                await end_task(withdrawing)

    def _ring(self) -> tuple[str, ...]:
        member = self._member
        record = member.record
        if record is None:
            return ()
        if record.slices is None:
            return ring_after(record.members, member.node_id)
        mine = member.slice_of(record)
        return () if mine is None else ring_in_slice(mine.ranks, member.node_id)

    async def _tend(self, epoch: int) -> None:
        """Watch the members of the world that this node is in, until it is in another one: also
        while it waits for the next round, which would be formed with a dead node."""
        member, context = self._member, self._context
        ring = self._ring()
        self._peer_watch.keep_only(ring)
        self._warned.intersection_update(ring)
        self._gone.clear()
        self._ring_since_s = context.clock.now_s()
        self._follows_loss = follows_loss(member.record, context.control.view.change)
        self._doubts.clear()
        watching = self._begin(ring)
        try:
            while member.epoch == epoch:
                until_s = min(self._doubts.values(), default=None)
                news = partial(self._has_news, epoch, watching, len(self._doubts))
                await context.wakeup.wait(until_s, when=news)
                if watching.done():
                    watching.result()
                if await self._are_back():
                    await end_task(watching)
                    watching = self._begin(ring)
            record = member.record  # meanwhile the neighbour in the world before is watched
            await context.clock.sleep(room_for_a_world_s(0 if record is None else record.size))
        finally:
            await end_task(watching)

    def _has_news(self, epoch: int, watching: asyncio.Task[None], doubts: int) -> bool:
        return self._member.epoch != epoch or watching.done() or len(self._doubts) != doubts

    def _begin(self, ring: Sequence[str]) -> asyncio.Task[None]:
        watching = asyncio.ensure_future(self._watch(ring))
        watching.add_done_callback(lambda _: self._context.wakeup.notify())
        return watching

    async def _watch(self, ring: Sequence[str]) -> None:
        """Watch the next one that is there; when it is gone, the one after it."""
        for node_id in ring:
            await self._watch_one(node_id)
        await asyncio.Event().wait()  # nobody is left

    async def _watch_one(self, node_id: str) -> None:
        """Watch that node until it is gone. A link that cannot be had is tried again, rarely."""
        clock = self._context.clock
        fails_since_s: float | None = None
        while True:
            try:
                place = await self._witness.read(node_id)
                if place.presence is None:
                    self._pass_over(node_id, place)
                    return
                _, info = place.presence
                if not info.peer_port:
                    return
                seen = await self._see(info)
                if seen is None:
                    continue
                if seen.end is End.GOOD_BYE:
                    return
                evidence = self._judge(node_id, seen)
                if evidence is not None:
                    if await self._accuse(info, evidence, seen):
                        return
                    continue
                fails_since_s = clock.now_s() if fails_since_s is None else fails_since_s
                self._tell_unreachable(info, seen.contact, clock.now_s() - fails_since_s)
            except EtcdError as error:
                await self._rest(node_id, error)
            else:
                await clock.sleep(_RETRY_S)

    async def _see(self, info: NodeInfo) -> Seen | None:
        """Watch a node until it does not answer any more; ``None`` if it is declared lost before:
        somebody else was faster."""
        control, wakeup, node_id = self._context.control, self._context.wakeup, info.node_id
        was_lost = names_dead(control.view.open_change, node_id)  # and is back
        seeing = asyncio.ensure_future(self._peer_watch.watch(info, suspect=self._others_are_gone))
        seeing.add_done_callback(lambda _: wakeup.notify())

        def is_over() -> bool:
            is_lost = names_dead(control.view.open_change, node_id)
            return seeing.done() or (is_lost and not was_lost)

        try:
            await wakeup.wait(when=is_over)
            return seeing.result() if seeing.done() else None
        finally:
            await end_task(seeing)

    @property
    def _others_are_gone(self) -> bool:
        return bool(self._gone) or self._follows_loss

    def _judge(self, node_id: str, seen: Seen) -> Evidence | None:
        evidence = self._peer_watch.judge(node_id, seen, others_are_gone=self._others_are_gone)
        if evidence is Evidence.SILENT and not self._context.settings.peer_silence_limit_s:
            return None
        return evidence

    async def _rest(self, node_id: str, error: EtcdError) -> None:
        """etcd did not do what it was asked; if it does not answer, the keep-alives say so."""
        if self._backoff.is_news(error):
            name, _ = names_apart(node_id, self._me)
            self._context.log.warn(f"cannot look after {name}, which may be gone: {error}")
        self._backoff.after(error)
        await self._context.clock.sleep(_RETRY_S)

    def _tell_unreachable(self, info: NodeInfo, contact: Contact, for_s: float) -> None:
        """Warn once of a node that this one has never reached. If its host answers for it, it may
        be dead; then its lease ends soon."""
        if info.node_id in self._warned or self._peer_watch.has_reached(info.node_id):
            return
        lease_s = info.lease_ttl_s or self._context.session.ttl_s
        limit_s = 0.0 if contact.answer is Answer.UNREACHABLE else lease_s
        if for_s < limit_s:
            return
        self._warned.add(info.node_id)
        me, other = names_apart(self._me, info.node_id)
        self._context.log.warn(
            f"{me} cannot reach {other} at {info.address}:{info.peer_port} ({contact.why}): its "
            "death will be noticed by its lease only, and MASTER_ADDR there may be unreachable, too"
        )

    # -- losing one -------------------------------------------------------------------------------

    async def _accuse(self, info: NodeInfo, evidence: Evidence, seen: Seen) -> bool:
        """Say in etcd how the node was lost; ``False`` if its presence is not what it was, or if
        this node has to keep silent. Raises EtcdError."""
        context, clock = self._context, self._context.clock
        if not await self._may_accuse(info, evidence):
            return False
        read_s = clock.now_s()
        place = await self._witness.read(info.node_id)
        if place.presence is None:
            self._pass_over(info.node_id, place)
            return True
        presence, now = place.presence
        is_stale = clock.now_s() - read_s > _STALE_S + context.session.round_trip_s
        if now.peer_port != info.peer_port or (evidence is Evidence.SILENT and is_stale):
            return False
        how = self._how(info, evidence, seen)
        is_gone = evidence is Evidence.GONE
        after_ms = None if seen.after_s is None or not is_gone else round(1000 * seen.after_s)
        accusation = Accusation(self._me, how, is_gone, now.round_trip_ms, after_ms)
        grace_s = await self._witness.accuse(info.node_id, presence, accusation)
        self._backoff.reset()
        if not grace_s:
            return False
        self._gone.add(info.node_id)
        self._doubts.pop(info.node_id, None)  # before that it need not have answered
        self._doubt(info.node_id, grace_s)
        return True

    async def _may_accuse(self, info: NodeInfo, evidence: Evidence) -> bool:
        """Whether this node may say anything; else wait until it may, or for a while. Raises
        EtcdError."""
        context, clock = self._context, self._context.clock
        answers_s = self._ring_since_s + LONGEST_ROOM_S
        if evidence is not Evidence.GONE and clock.now_s() < answers_s:
            await clock.sleep(answers_s - clock.now_s())
            return False
        mistaken = await self._witness.next_mistake()
        if mistaken is not None:
            self._distrust(mistaken)
            return False
        quiet_until_s = self._witness.mistakes.quiet_until_s(info.node_id, clock.now_s())
        if evidence is Evidence.SILENT:
            quiet_until_s = max(quiet_until_s, context.session.in_contact_since_s() + SETTLED_S)
        if clock.now_s() < quiet_until_s or not context.session.lease_id:
            await clock.sleep(max(_PAUSE_S, quiet_until_s - clock.now_s()))
            return False
        return True

    def _how(self, info: NodeInfo, evidence: Evidence, seen: Seen) -> str:
        me, _ = names_apart(self._me, info.node_id)
        why, end = seen.contact.why, seen.end
        if evidence is not Evidence.SILENT:
            return how_gone(me, why, seen.after_s)
        return how_silent(me, why if end is None else f"{end.value}, then {why}")

    def _distrust(self, node_id: str) -> None:
        self._gone.discard(node_id)
        self._peer_watch.distrust(node_id)

    def _pass_over(self, node_id: str, place: Place) -> None:
        """Watch the next one: this one is leaving or gone, or may be putting its presence back."""
        if place.is_vacant:
            self._gone.add(node_id)
        self._doubt(node_id, _PAUSE_S)

    def _doubt(self, node_id: str, in_s: float) -> None:
        """Have a look then, and again and again, whether a node has put its presence back."""
        self._doubts.setdefault(node_id, self._context.clock.now_s() + in_s)
        self._context.wakeup.notify()

    async def _are_back(self) -> bool:
        """Look whether nodes that had no presence are there again, when it is time to."""
        now_s = self._context.clock.now_s()
        back = False
        for node_id in [node for node, at_s in self._doubts.items() if at_s <= now_s]:
            self._doubts[node_id] = now_s + _PAUSE_S
            try:
                place = await self._witness.read(node_id)
            except EtcdError:
                continue
            if self._witness.look_back(node_id, place, self._context.clock.now_s()):
                self._distrust(node_id)
            if place.presence is not None:
                back = True
                del self._doubts[node_id]
                self._gone.discard(node_id)
        return back

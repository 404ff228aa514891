"""Accusations: reports in etcd that a member is dead, and whether they were right.

A node has up to two witnesses, its links (:mod:`rdzv_etcd.node.peers`) and its program, and the
mistakes of each are its own. Which nodes they may accuse, and when, each decides by itself.
:class:`Reports` is that of a program that knows: a supervisor, a health checker. A living node
answers both in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial

from rdzv_etcd.errors import EtcdError, LeaseNotFoundError, MisuseError, StateCorruptError
from rdzv_etcd.etcd.port import Etcd, KeyValue
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.slices import members_in
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.liveness import Mistakes, answer_grace_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.views import place_in
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import how_reported, may_be_gone

SETTLED_S = 2.0
"""A node that has been in contact with etcd for less than this accuses no node of being silent."""
_EVIDENCE = 200
"""Characters of the evidence that the others are shown."""
_ROOM_S = 1.0
"""A member may be accused so long after it began to watch its own presence: then it can answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """The key of a node's presence, and its value."""

    kv: KeyValue | None = None
    """``None``: there is no such key."""
    holds: NodeInfo | Accusation | None = None
    """``None``: no node wrote what is there."""

    @property
    def presence(self) -> tuple[KeyValue, NodeInfo] | None:
        """The node's presence; ``None`` if there is none, or it is leaving."""
        kv, info = self.kv, self.holds
        if kv is None or not isinstance(info, NodeInfo) or info.leaving is not None:
            return None
        return kv, info

    @property
    def is_vacant(self) -> bool:
        """Whether the node has no presence: nothing is there, or an accusation."""
        return self.kv is None or isinstance(self.holds, Accusation)


@dataclass(frozen=True, slots=True)
class _Made:
    """An accusation, as its accuser remembers it."""

    revision: int
    epoch: int
    """Of the world whose members it was made for."""


async def read_place(etcd: Etcd, keys: JobKeys, node_id: str) -> Place:
    """Read what stands in the place of a node's presence. Raises EtcdError."""
    result = await etcd.get(requests.read_presence(keys, node_id))
    if not result.kvs:
        return Place()
    (kv,) = result.kvs
    try:
        return Place(kv, place_in(keys, kv))
    except StateCorruptError:  # the leader warns of it
        return Place(kv)


async def put_accusation(
    etcd: Etcd, keys: JobKeys, presence: KeyValue, accusation: Accusation, lease_id: int
) -> int:
    """Replace a presence that was read with an accusation, on a lease of the accuser's.

    Returns the accusation's revision; 0 if the presence has changed since. Raises EtcdError.
    """
    node_id = keys.node_id(presence.key)
    txn = requests.accuse(keys, node_id, presence, accusation, lease_id)
    result = await etcd.txn(txn, repeatable=True)
    return result.revision if result.succeeded else await _made_at(etcd, keys, node_id, accusation)


async def _made_at(etcd: Etcd, keys: JobKeys, node_id: str, accusation: Accusation) -> int:
    """At which revision this accusation was put, 0 if it was not: one whose answer was lost is
    refused when it is repeated."""
    place = await read_place(etcd, keys, node_id)
    return place.kv.mod_revision if place.kv is not None and place.holds == accusation else 0


class Witness:
    """The accusations of one of a node's witnesses. All methods but :meth:`withdraw` raise
    EtcdError."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self.mistakes = Mistakes()
        self._undecided: dict[str, float] = {}
        """The accused that were not looked at since, and until when they may answer."""
        self._made: dict[str, _Made] = {}
        """The accusations that were neither withdrawn nor found to be wrong."""

    @property
    def has_made_any(self) -> bool:
        """Whether there is something to withdraw."""
        return bool(self._made)

    async def read(self, node_id: str) -> Place:
        """Read what stands in the place of a node's presence."""
        return await read_place(self._context.etcd, self._context.keys, node_id)

    async def accuse(self, node_id: str, presence: KeyValue, accusation: Accusation) -> float:
        """Put the accusation in the place of the presence that was read, on this node's session.

        Returns how long the accused may take to answer, in seconds; 0 if the presence is another
        one by now, or there is no session.
        """
        context = self._context
        session = context.session.lease_id
        if not session:  # on no lease it would stay forever
            return 0.0
        try:
            made_at = await put_accusation(
                context.etcd, context.keys, presence, accusation, session
            )
        except LeaseNotFoundError:
            context.session.lost(session)
            return 0.0
        if not made_at:
            return 0.0
        context.log.info(may_be_gone(context.log.names(node_id), accusation.how))
        self._made[node_id] = _Made(made_at, context.control.view.epoch)
        grace_s = answer_grace_s(context.session.round_trip_s, accusation)
        self._undecided[node_id] = context.clock.now_s() + grace_s
        return grace_s

    async def next_mistake(self) -> str | None:
        """Wait until all accused have been declared lost, or had the time to answer; return the
        first that has answered. A node that was wrong about one may be wrong about the next."""
        context = self._context
        while self._undecided:
            node_id, until_s = next(iter(self._undecided.items()))
            is_decided = partial(self._is_decided, node_id)
            await context.wakeup.wait(until_s, when=is_decided)
            place = Place() if is_decided() else await self.read(node_id)
            if self.look_back(node_id, place, until_s):
                return node_id
        return None

    def is_declared_lost(self, node_id: str) -> bool:
        change = self._context.control.view.open_change
        return change is not None and change.may_name(node_id)

    def _is_decided(self, node_id: str) -> bool:
        """Whether the node's presence no longer shows that this witness was wrong about it: it was
        declared lost, or there is another world, into which the lost may come back."""
        made = self._made.get(node_id)
        is_over = made is None or made.epoch != self._context.control.view.epoch
        return is_over or self.is_declared_lost(node_id)

    def look_back(self, node_id: str, place: Place, at_s: float) -> bool:
        """Return whether this witness was wrong about a node that had the time to answer, by
        ``at_s`` on the clock. If so, its accusation no longer stands.

        Once a world is over no node is declared lost in it any more: one that has not answered by
        then was as good as dead, and comes back for the next world.
        """
        is_first_look = self._undecided.pop(node_id, None) is not None
        is_open = self._context.control.view.open_change is not None
        is_too_late = is_open and not is_first_look
        if place.presence is None or self._is_decided(node_id) or is_too_late:
            return False
        self.mistakes.note(node_id, at_s)
        del self._made[node_id]
        return True

    async def withdraw(self) -> None:
        """Delete the accusations of members of an earlier world: they are of no more use. If this
        is cancelled, call it again."""
        made, self._made = self._made, {}
        try:
            while made and self._member.phase is Phase.MEMBER:
                node_id, one = next(iter(made.items()))
                txn = requests.withdraw_accusation(self._context.keys, node_id, one.revision)
                await self._context.etcd.txn(txn, repeatable=True)
                del made[node_id]
        except EtcdError:
            pass  # they go with this node's session
        finally:
            self._made = made | self._made


class Reports:
    """The witness that is one node's program."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self._me = member.node_id
        self.witness = Witness(context, member)
        self._entered_s = 0.0
        """When this node became a member of its world."""
        self._one_at_a_time = asyncio.Lock()

    def note_world(self) -> None:
        """Note that this node has become a member of a world just now."""
        self._entered_s = self._context.clock.now_s()

    async def make(self, node_id: object, evidence: object, *, certain: bool) -> bool:
        """Report that member dead; return whether that stands in etcd.

        Raises MisuseError if it is no member of the present world, or this node itself, or the
        evidence is none; and EtcdError.
        """
        if not isinstance(node_id, str):
            raise MisuseError(
                f"the member is {shown(repr(node_id), 80)}; it must be one of world.members, or "
                "its node id"
            )
        if not isinstance(evidence, str) or not evidence.strip():
            raise MisuseError(
                f"the evidence is {shown(repr(evidence), 80)}; it must say in words what was seen "
                "of the member: all members are shown it"
            )
        async with self._one_at_a_time:
            epoch = await self._world_with(node_id)
            await self._note_mistakes()
            return await self._make(epoch, node_id, evidence.strip(), is_certain=bool(certain))

    async def look_back(self) -> None:
        """Look in time whether the last report was right: the next world does not show that."""
        with contextlib.suppress(EtcdError):  # the next report looks as well
            await self._note_mistakes()

    async def _note_mistakes(self) -> None:
        while await self.witness.next_mistake() is not None:
            pass  # each counts

    async def _world_with(self, node_id: str) -> int:
        """The epoch of the world that this node and that one are in. Raises MisuseError."""
        member = self._member
        member.check_not_gone()
        record = member.record
        if record is None or member.phase is not Phase.MEMBER:
            raise MisuseError("this node is in no world, so it has no members to report")
        if node_id == self._me:
            raise MisuseError("this node reports itself dead: leave() ends its part")
        if node_id not in await members_in(self._context, record):
            raise MisuseError(
                f"{shown(node_id, 80)!r} is no member of the present world (round {record.number})"
            )
        return member.epoch

    async def _make(self, epoch: int, node_id: str, evidence: str, *, is_certain: bool) -> bool:
        context, member = self._context, self._member
        while True:
            member.check_not_gone()
            if self.witness.is_declared_lost(node_id) or not self._takes_part(epoch):
                return False
            presence = (await self.witness.read(node_id)).presence
            if presence is None:
                return False
            kv, info = presence
            until_s = self._earliest_s(info, is_certain=is_certain)
            if context.clock.now_s() < until_s:
                await context.wakeup.wait(until_s, when=lambda: not self._takes_part(epoch))
                continue
            if self._is_quiet(node_id):
                return False
            how = how_reported(context.log.names(self._me), shown(evidence, _EVIDENCE))
            accusation = Accusation(self._me, how, is_certain, info.round_trip_ms)
            if not context.session.lease_id:
                await context.wakeup.wait(
                    when=lambda: context.session.lease_id != 0 or not self._takes_part(epoch)
                )
                continue
            if await self.witness.accuse(node_id, kv, accusation):
                return True

    def _takes_part(self, epoch: int) -> bool:
        """Whether this node is in that world, and neither expelled nor at the end of its job, nor
        broken: then it opens no session any more."""
        member = self._member
        is_out = member.evicted or member.closure is not None or member.failure is not None
        return member.works_in(epoch) and not is_out

    def _earliest_s(self, info: NodeInfo, *, is_certain: bool) -> float:
        session = self._context.session
        watches_s = 0.0 if info.peer_port else (info.lease_ttl_s or session.ttl_s) / 3
        earliest_s = self._entered_s + watches_s + _ROOM_S
        if not is_certain:
            earliest_s = max(earliest_s, session.in_contact_since_s() + SETTLED_S)
        return earliest_s

    def _is_quiet(self, node_id: str) -> bool:
        now_s = self._context.clock.now_s()
        if self.witness.mistakes.quiet_until_s(node_id, now_s) <= now_s:
            return False
        name = self._context.log.names(node_id)
        self._context.log.warn(
            f"the report that {name} is dead is not passed on: this node was wrong "
            "about it or about others a moment ago"
        )
        return True

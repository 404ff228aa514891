"""Tells the others that a member is dead, for a program that knows: a supervisor, a health checker.

What it says is what a broken link says (see :mod:`rdzv_etcd.node.peer_links`), and whoever lives
answers it the same way. It is a witness of its own: its mistakes count for itself.
"""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import EtcdError, MisuseError
from rdzv_etcd.node.accuse import SETTLED_S, Witness
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.slices import members_in
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.names import display_name
from rdzv_etcd.protocol.ring import how_reported
from rdzv_etcd.text import shown

_EVIDENCE = 200
"""Characters of the evidence that the others are told."""
_ROOM_S = 1.0
"""A member may be accused so long after it began to watch its own presence: then it can answer."""


class Reports:
    """What one node's program has reported."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member
        self._me = member.node_id
        self._witness = Witness(context, member)
        self._entered_s = 0.0
        """When this node became a member of its world."""
        self._one_at_a_time = asyncio.Lock()

    def note_world(self) -> None:
        """Note that this node has become a member of a world just now."""
        self._entered_s = self._context.clock.now_s()

    async def make(self, node_id: object, evidence: object, *, certain: bool) -> bool:
        """Report that member dead; tell whether that stands in etcd.

        Raises MisuseError for what is no member of the present world, for this node itself, and for
        what is no evidence; and EtcdError.
        """
        if not isinstance(node_id, str):
            raise MisuseError(
                f"the member is {shown(repr(node_id), 80)}; it must be one of world.members, or "
                "its node id"
            )
        if not isinstance(evidence, str) or not evidence.strip():
            raise MisuseError(
                f"the evidence is {shown(repr(evidence), 80)}; it must say in words what was seen "
                "of the member: everybody is told"
            )
        async with self._one_at_a_time:
            epoch = await self._world_with(node_id)
            await self._note_mistakes()
            return await self._make(epoch, node_id, evidence.strip(), is_certain=bool(certain))

    async def look_back(self) -> None:
        """Look in time whether what was reported last was right: the next world does not tell."""
        with contextlib.suppress(EtcdError):  # the next report looks, too
            await self._note_mistakes()

    async def _note_mistakes(self) -> None:
        while await self._witness.next_mistake() is not None:
            pass  # each counts

    async def _world_with(self, node_id: str) -> int:
        """The epoch of the world that this node and that one are in. Raises MisuseError."""
        member = self._member
        member.check_not_gone()
        record = member.record
        if record is None or member.phase is not Phase.MEMBER:
            raise MisuseError("this node is in no world: who joins next is found out by joining")
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
            if self._witness.is_declared_lost(node_id) or not self._takes_part(epoch):
                return False
            presence = (await self._witness.read(node_id)).presence
            if presence is None:
                return False
            kv, info = presence
            until_s = self._earliest_s(info, is_certain=is_certain)
            if context.clock.now_s() < until_s:
                await context.wakeup.wait(until_s, when=lambda: not self._takes_part(epoch))
                continue
            if self._is_quiet(node_id):
                return False
            how = how_reported(self._me, shown(evidence, _EVIDENCE))
            accusation = Accusation(self._me, how, is_certain, info.round_trip_ms)
            if not context.session.lease_id:
                await context.wakeup.wait(
                    when=lambda: context.session.lease_id != 0 or not self._takes_part(epoch)
                )
                continue
            if await self._witness.accuse(node_id, kv, accusation):
                return True

    def _takes_part(self, epoch: int) -> bool:
        """Whether this node is in that world, and neither expelled nor at the end of its job, nor
        broken: then nobody opens a session for it any more."""
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
        if self._witness.mistakes.quiet_until_s(node_id, now_s) <= now_s:
            return False
        self._context.log.warn(
            f"does not pass on that {display_name(node_id)} is dead: this node was wrong about it "
            "or about others a moment ago"
        )
        return True

    async def withdraw(self) -> None:
        """Delete what was said of members of the world before this one."""
        await self._witness.withdraw()

    @property
    def has_made_any(self) -> bool:
        """Whether there is something to withdraw."""
        return self._witness.has_made_any

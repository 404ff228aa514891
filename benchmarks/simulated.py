"""Simulated nodes: the real requests, views and decisions, without tasks of their own.

A node here decides what :class:`rdzv_etcd.node.node.Node` decides, by the same functions, and does
it in an undisturbed job: it has a lease, watches the control keys, arrives, reads its slice of the
ranks, sees changes and arrives again, and claims a vacant lead. It is driven by events instead of
tasks, so that one process can hold thousands. It cannot lead: if it wins the lead, it gives it up
at once, which is counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from benchmarks.plan import Plan
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import EventKind, GetResult, TxnResult
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Member, Phase, Seat
from rdzv_etcd.protocol.model import Control, Leader, NodeInfo, Round
from rdzv_etcd.protocol.steps import (
    Arrive,
    Enter,
    JoiningStep,
    LeadStep,
    ReadSlice,
    Wait,
    claim_delay_s,
    joining_step,
    lead_step,
)
from rdzv_etcd.protocol.views import control_after, control_from, slice_from
from rdzv_etcd.protocol.world_end import waiting_count

JITTER_S = 0.02


class SimulatedNode:
    """One node; lives on its process's loop."""

    def __init__(
        self,
        index: int,
        plan: Plan,
        keys: JobKeys,
        etcd: EtcdClient,
        told: Callable[[SimulatedNode], None],
    ) -> None:
        """``told`` is called when the node hears of a leader, holds a rank, or fails."""
        self.index = index
        self.lease_id = plan.lease(index)
        self.is_gone = False
        self.problem: BaseException | None = None
        self.world: Seat | None = None
        """The world that it belongs to, while it is a member."""
        self.resigned = 0
        """How often it won the lead and gave it up."""
        self.told_s = self.arrived_s = self.ranked_s = 0.0
        """When it heard of the last change, had arrived again, and held its rank."""
        self._plan = plan
        self._settings = plan.settings.job
        self._keys = keys
        self._etcd = etcd
        self._told = told
        self._member = Member(plan.node_id(index))
        self._control = Control(0)
        self._task: asyncio.Task[None] | None = None
        self._claim: asyncio.TimerHandle | asyncio.Task[None] | None = None

    # -- life -------------------------------------------------------------------------------------

    async def open_session(self) -> None:
        grant = await self._etcd.grant(self._plan.steady_ttl_s(), lease_id=self.lease_id)
        self._member.note_start(grant.revision)

    async def read_control(self) -> None:
        """Read what is there; the watch is open already."""
        control = control_from(self._keys, await self._etcd.get(self._keys.control.read()))
        if control.revision >= self._control.revision:
            self._see(control)

    def join(self) -> None:
        self._member.begin_join(self._presence())
        self._look()

    def die(self) -> None:
        """Do nothing any more."""
        self.is_gone = True
        if self._task is not None:
            self._task.cancel()
        if self._claim is not None:
            self._claim.cancel()

    def note_events(self, response: Any) -> None:
        """Take a watch response."""
        if self.is_gone:
            return
        events = tuple(messages.event(message) for message in response.events)
        revision = events[-1].kv.mod_revision
        try:
            self._see(control_after(self._keys, self._control, revision, events))
        except RdzvEtcdError as error:
            self._fail(error)

    @property
    def presence_key(self) -> bytes:
        return self._keys.node(self._member.node_id)

    def note_presence(self, response: Any) -> None:
        """Take a watch response about this node's own presence."""
        gone = any(messages.event(message).kind is EventKind.DELETE for message in response.events)
        if gone and not self.is_gone:
            self._fail(RuntimeError(f"the presence of {self._member.node_id} is gone"))

    def _presence(self) -> NodeInfo:
        address, rack = self._plan.address(self.index), self._plan.rack(self.index)
        return NodeInfo(self._member.node_id, address, 29400, 0, self._settings, domain=rack)

    # -- what follows from what is seen -----------------------------------------------------------

    def _see(self, control: Control) -> None:
        no_leader = self._control.leader is None
        self._control = control
        self._member.notice(control, time.monotonic())
        self._look()
        if no_leader and control.leader is not None:
            self._told(self)

    @property
    def knows_a_leader(self) -> bool:
        return self._control.leader is not None

    def _look(self) -> None:
        """Do what is to be done now, as the drivers of a real node do after each change."""
        member, control = self._member, self._control
        if member.phase is Phase.MEMBER and waiting_count(member, control):
            self.world = None
            self.told_s = time.monotonic()
            member.begin_join(self._presence())
        if member.phase is Phase.WAITING and self._task is None:
            self._go_on(joining_step(member, control, self.lease_id, self._settings))
        if lead_step(member, control, self.lease_id) is LeadStep.CLAIM and self._claim is None:
            self._claim_in_turn()

    def _go_on(self, step: JoiningStep) -> None:
        match step:
            case Enter():
                self.world = self._member.enter(self._control)
                self.ranked_s = time.monotonic()
                self._told(self)
            case ReadSlice(record):
                self._task = self._spawn(self._read_slice(record))
            case Arrive():
                self._task = self._spawn(self._arrive())
            case Wait():
                pass
            case _:
                self._fail(RuntimeError(f"{self._member.node_id}: {step}"))

    # -- requests ---------------------------------------------------------------------------------

    async def _arrive(self) -> None:
        member, control = self._member, self._control
        info = member.plan_arrival(control, 0, time.time())
        assert info is not None
        result = await self._etcd.txn(
            requests.arrive(self._keys, info, self.lease_id, control),
            repeatable=True,
        )
        if result.succeeded:
            member.note_arrival(self.lease_id, control)
            self.arrived_s = time.monotonic()
            claimed = result.results[1]
            if isinstance(claimed, TxnResult):
                self._note_leader(claimed)
            return
        (got,) = result.results
        if isinstance(got, GetResult) and got.revision >= self._control.revision:
            self._control = control_from(self._keys, got)
            member.notice(self._control, time.monotonic())

    async def _read_slice(self, record: Round) -> None:
        slices, member = record.slices, self._member
        assert slices is not None
        result = await self._etcd.get(
            requests.read_slice(self._keys, record, slices, member.node_id)
        )
        found = slice_from(record, member.node_id, result)
        if found is None:
            raise RuntimeError(f"no slice for {member.node_id} in round {record.number}")
        member.slice, member.slice_revision = found, self._control.round_revision

    # -- the lead ---------------------------------------------------------------------------------

    def _claim_in_turn(self) -> None:
        formed = self._control.formed
        rank = None if formed is None else self._member.rank_in(formed)
        size = 0 if formed is None else formed.size
        delay_s = claim_delay_s(rank, size, random.random() * JITTER_S)
        self._claim = asyncio.get_running_loop().call_later(delay_s, self._claim_now)

    def _claim_now(self) -> None:
        self._claim = None
        if lead_step(self._member, self._control, self.lease_id) is LeadStep.CLAIM:
            self._claim = self._spawn(self._send_claim())

    async def _send_claim(self) -> None:
        leader = Leader(self._member.node_id, self._settings)
        result = await self._etcd.txn(
            requests.claim(self._keys, leader, self.lease_id), repeatable=True
        )
        self._note_leader(result)

    def _note_leader(self, claimed: TxnResult) -> None:
        leader = Leader(self._member.node_id, self._settings)
        known = requests.leader_after(leader, claimed)
        if known is not None and claimed.revision >= self._control.revision:
            self._control = replace(self._control, leader=known[0], leader_revision=known[1])
        if claimed.succeeded:
            mine = replace(self._control, leader=leader, leader_revision=claimed.revision)
            self._claim = self._spawn(self._resign(mine))

    async def _resign(self, control: Control) -> None:
        self.resigned += 1
        await self._etcd.txn(requests.resign(self._keys, control), repeatable=True)

    # -- tasks ------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if task is self._task:
            self._task = None
        elif task is self._claim:
            self._claim = None
        if self.is_gone:
            return
        error = task.exception()
        if error is None:
            self._look()
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.problem = error
        self._told(self)

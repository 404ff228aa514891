"""Repair: puts back what an outage took from a member – session, presence, round record.

Being lost is an act, not a state: a member is out when the leader has published it, not when its
lease ran out. Until then it comes back without anybody's noticing.
"""

from __future__ import annotations

import asyncio

from rdzv_etcd.errors import EtcdError, EtcdRefusedError, LeaseNotFoundError, RdzvEtcdError
from rdzv_etcd.etcd.port import Txn
from rdzv_etcd.node import job_lease
from rdzv_etcd.node.backoff import RETRY_S, Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.presence import is_own, read_own
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Control, NodeInfo, Round
from rdzv_etcd.protocol.steps import Recovery, WorkingStep, decide_recovery, working_step


class Repair:
    """Runs beside a node's work; acts only while it is a member of a job that goes on."""

    def __init__(self, context: NodeContext, member: Member) -> None:
        self._context = context
        self._member = member

    async def run(self) -> None:
        """Repair whenever it is needed, until cancelled."""
        context = self._context
        backoff = Backoff(context.session.renewal_period_s)
        while True:
            if not self._is_needed():
                backoff.reset()
                await context.wakeup.wait(when=self._is_needed)
                continue
            try:
                await self._put_back()
            except EtcdError as error:
                text = f"coming back after an outage: {error}"
                context.log.say(text, warn=backoff.is_news(error))
                if isinstance(error, EtcdRefusedError):
                    context.session.shake()  # whom else it refuses comes back when it looks again
                await context.clock.sleep(backoff.after(error))
            except RdzvEtcdError:
                # A corrupt record: the watch reports it, and the next join raises it.
                await context.clock.sleep(RETRY_S)
                until_s = context.clock.now_s() + context.session.renewal_period_s
                await context.wakeup.wait(until_s, when=lambda: context.control.problem is None)

    def _is_needed(self) -> bool:
        context = self._context
        step = working_step(self._member, context.control.view, context.session.lease_id)
        return step is WorkingStep.REPAIR

    async def _put_back(self) -> None:
        context, member = self._context, self._member
        control = await context.control.refresh()
        async with context.presence_lock:
            record = member.record
            if not self._is_needed() or record is None:
                return
            recovery = decide_recovery(control, record, member.node_id)
            if recovery is Recovery.REJOIN:
                member.evict()
                context.log.say(f"the others left round {record.number} without this node")
                context.wakeup.notify()
                return
            if recovery is Recovery.NOTHING:
                return  # the job is over; `notice` has seen it
            session, there = await asyncio.gather(
                context.session.open(context.urgent_limit_s),
                context.etcd.get(requests.read_presence(context.keys, member.node_id)),
            )
            info = member.plan_return()
            if info is None:
                return
            if recovery is Recovery.RECORD:
                txn = await self._record(control, record, info, session)
            else:
                txn = requests.restore_presence(
                    context.keys,
                    control,
                    info,
                    session,
                    member.slice_of(record),
                    presence_revision=max((kv.mod_revision for kv in there.kvs), default=0),
                )
            if await self._write(txn, session, info):
                member.note_slice_there(control)
                if not info.finished:
                    context.log.say(f"back in round {record.number} ({recovery.value})")
        await context.control.refresh()

    async def _record(self, control: Control, record: Round, info: NodeInfo, session: int) -> Txn:
        await job_lease.put_back(self._context, record)
        return requests.restore_record(
            self._context.keys,
            control,
            record,
            info,
            session,
            slice_=self._member.slice_of(record),
        )

    async def _write(self, txn: Txn, session: int, info: NodeInfo) -> bool:
        context = self._context
        try:
            result = await context.etcd.txn(txn, timeout_s=context.urgent_limit_s, repeatable=True)
        except LeaseNotFoundError:
            context.session.lost(session)
            return False
        if not result.succeeded:
            context.take_control(result)
            # Refused, because things have changed meanwhile, or because this very write had been
            # applied before and its answer was lost; or there was nothing to put back but the
            # record, and another member was first.
            place = await read_own(context)
            if not is_own(place, session):
                context.session.lost(session)  # it carries nothing: start afresh
                await context.etcd.revoke(session)
                return False
            if info.finished and not is_own(place, session, info):
                return False  # the others do not know it yet
        self._member.note_presence(session)
        return True

"""Healing: puts back what an outage took from a member – session, presence, round record.

Being lost is an act, not a state: a member is out when the leader has published it, not when its
lease ran out. Until then it comes back without anybody's noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from rdzv_etcd.core.changes import Recovery, decide_recovery
from rdzv_etcd.core.model import Control, NodeInfo, Round
from rdzv_etcd.errors import EtcdError, LeaseExistsError, LeaseNotFoundError, RdzvEtcdError
from rdzv_etcd.etcd.api import Txn
from rdzv_etcd.group.backoff import Backoff
from rdzv_etcd.group.context import NodeContext
from rdzv_etcd.group.presence import is_present
from rdzv_etcd.group.standing import Phase, Standing
from rdzv_etcd.schema import requests

_RETRY_S = 0.5


class Healing:
    """Runs beside a node's work; acts only while it is a member of a job that goes on."""

    def __init__(self, context: NodeContext, standing: Standing) -> None:
        self._context = context
        self._standing = standing

    async def run(self) -> None:
        """Heal whenever it is needed, until cancelled."""
        context = self._context
        backoff = Backoff(context.session.renewal_period_s)
        while True:
            if not self._is_needed():
                backoff.reset()
                await context.pulse.wait(when=self._is_needed)
                continue
            try:
                await self._heal()
            except EtcdError as error:
                text = f"coming back after an outage: {error}"
                context.narrator.say(text, warn=backoff.is_news(error))
                await context.clock.sleep(backoff.after(error))
            except RdzvEtcdError:  # a corrupt record: reported by the feed, raised by the next join
                await context.clock.sleep(_RETRY_S)
                until_s = context.clock.now_s() + context.session.renewal_period_s
                await context.pulse.wait(until_s, when=lambda: context.control.problem is None)

    async def keep_job_lease(self) -> None:
        """Renew the job's shared leases at a slow rate while this node is a member, or waits.

        A round that lost a member may wait for a replacement longer than the lease lives. The
        leader renews at once, because the lease may have aged while the round was being closed; the
        others have time, and better things to do in the moment a round is formed.
        """
        context, standing = self._context, self._standing
        period_s = context.settings.timing.job_ttl_s / 3
        renewed = False
        while True:
            record = self._kept_record()
            if record is None:
                await context.pulse.wait(when=lambda: self._kept_record() is not None)
                continue
            control = context.control.view
            leads = control.leader is not None and control.leader.node_id == standing.node_id
            with contextlib.suppress(EtcdError):  # the others do it too; a loss is healed
                if renewed or leads:
                    await context.etcd.keep_alive(record.job_lease)
                if leads and control.epoch_lease:
                    await context.etcd.keep_alive(control.epoch_lease)
            renewed = True
            await context.clock.sleep(period_s + context.clock.jitter(period_s / 10))

    def _kept_record(self) -> Round | None:
        """The round whose job lease this node has a part in."""
        standing = self._standing
        if standing.phase is Phase.WAITING:
            # A newcomer that has not arrived may be waiting for the end of what a dead job left.
            belongs = standing.arrived_with != 0 or standing.epoch > 0
            return standing.record or (self._context.control.view.formed if belongs else None)
        return standing.record if standing.phase is Phase.MEMBER else None

    def _is_needed(self) -> bool:
        standing = self._standing
        if standing.phase is not Phase.MEMBER or standing.evicted or standing.closure is not None:
            return False
        control = self._context.control.view
        if self._context.session.lease_id == 0 or control.round is None:
            return True
        record = standing.record
        return standing.may_lack_slice(control) or (
            record is not None and control.is_behind(record)
        )

    async def _heal(self) -> None:
        context, standing = self._context, self._standing
        control = await context.control.refresh()
        async with standing.presence_lock:
            record, info = standing.record, standing.info
            if not self._is_needed() or record is None or info is None:
                return
            recovery = decide_recovery(control, record)
            if recovery is Recovery.REJOIN:
                standing.evict()
                context.narrator.say(f"round {record.number} went on without this node: re-joining")
                context.pulse.beat()
                return
            if control.is_behind(record):
                context.session.shake()  # others' leases may be lost with what etcd has forgotten
            if recovery is Recovery.NOTHING:
                return  # the job is over; `notice` has seen it
            session, there = await asyncio.gather(
                context.session.open(context.urgent_limit_s),
                context.etcd.get(requests.read_presence(context.keys, info.node_id)),
            )
            info = replace(
                info,
                arrived_for=record.number,
                epoch_seen=standing.epoch_seen,
                epoch_trained=standing.epoch,
            )
            if recovery is Recovery.RECORD:
                txn = await self._record(control, record, info, session)
            else:
                txn = requests.restore_presence(
                    context.keys,
                    control,
                    info,
                    session,
                    standing.slice_of(record),
                    presence_revision=max((kv.mod_revision for kv in there.kvs), default=0),
                )
            if await self._write(txn, session):
                standing.note_slice_there(control)
                context.narrator.say(f"back in round {record.number} ({recovery.value})")
        await context.control.refresh()

    async def _record(self, control: Control, record: Round, info: NodeInfo, session: int) -> Txn:
        with contextlib.suppress(LeaseExistsError):  # another member was first
            await self._context.etcd.grant(
                self._context.settings.timing.job_ttl_s,
                lease_id=record.job_lease,
                timeout_s=self._context.urgent_limit_s,
            )
        return requests.restore_record(
            self._context.keys,
            control,
            record,
            info,
            session,
            slice_=self._standing.slice_of(record),
        )

    async def _write(self, txn: Txn, session: int) -> bool:
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
            if not await is_present(context, session):
                context.session.lost(session)  # it carries nothing: start afresh
                await context.etcd.revoke(session)
                return False
        self._standing.note_presence(session)
        return True

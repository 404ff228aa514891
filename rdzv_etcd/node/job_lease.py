"""The job's shared leases: granted before the first round, kept alive, put back, given up.

All that belongs to the job as a whole lives on the job lease, and what its epochs count from on the
epoch lease, which outlives it. No node owns them: whoever is there keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import EtcdError, LeaseExistsError
from rdzv_etcd.etcd.port import LeaseGrant
from rdzv_etcd.node.backoff import Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Round
from rdzv_etcd.protocol.steps import kept_record


async def keep(context: NodeContext, member: Member) -> None:
    """Renew the job's leases at a slow rate while this node is a member, or waits.

    A round that lost a member may wait for a replacement longer than the lease lives. The leader
    renews at once, because the lease may have aged while the round was being closed; the others
    have time, and better things to do in the moment a round is formed.

    The epoch lease is the leader's to renew, and may be the shorter one.

    What is not answered is tried again as soon as a node's own lease is: the record can be put
    back, but what is in the round's store goes with the lease for good. The leases may have been
    granted by a node that was started with a shorter ``job_lease_ttl`` than this one.
    """
    timing = context.settings.timing
    period_s = timing.job_ttl_s / 3
    leader_period_s = min(period_s, timing.ended_ttl_s / 3)
    backoff = Backoff(leader_period_s)
    renewed = False
    while True:
        record = kept_record(member, context.control.view)
        if record is None:
            await context.wakeup.wait(
                when=lambda: kept_record(member, context.control.view) is not None
            )
            continue
        control, leads = context.control.view, _leads(context, member)
        limit_s = context.session.reply_limit_s()
        pause_s = leader_period_s if leads else period_s
        leases = [record.job_lease] if renewed or leads else []
        if leads and control.epoch_lease:
            leases.append(control.epoch_lease)
        try:
            for lease_id in leases:
                ttl_s = await context.etcd.keep_alive(lease_id, timeout_s=limit_s)
                pause_s = min(pause_s, ttl_s / 3) if ttl_s else pause_s
        except EtcdError as error:
            await context.clock.sleep(backoff.after(error))
            continue
        backoff.reset()
        renewed = True
        pause_s += context.clock.jitter(pause_s / 10)
        if leads:
            await context.clock.sleep(pause_s)
        else:  # whoever comes to lead renews at once
            until_s = context.clock.now_s() + pause_s
            await context.wakeup.wait(until_s, when=lambda: _leads(context, member))


def _leads(context: NodeContext, member: Member) -> bool:
    leader = context.control.view.leader
    return leader is not None and leader.node_id == member.node_id


async def put_back(context: NodeContext, record: Round) -> None:
    """Grant the record's lease again, under its id. Raises EtcdError."""
    with contextlib.suppress(LeaseExistsError):  # another member was first
        await context.etcd.grant(
            context.settings.timing.job_ttl_s,
            lease_id=record.job_lease,
            timeout_s=context.urgent_limit_s,
        )


async def give_up(context: NodeContext, record: Round | None) -> None:
    """Revoke the record's lease, and all that lives on it: nobody is left. Raises EtcdError."""
    if record is not None and record.job_lease:
        await context.etcd.revoke(record.job_lease, timeout_s=context.farewell_limit_s)


class PreparedLease:
    """A lease of ``ttl_s`` that the leader grants ahead and gives to the first round it forms."""

    def __init__(self, context: NodeContext, ttl_s: int) -> None:
        self._context = context
        self._ttl_s = ttl_s
        self._granting: asyncio.Task[LeaseGrant] | None = None
        self._renewed_s = 0.0
        self._is_in_doubt = False

    def begin(self) -> asyncio.Task[LeaseGrant]:
        """Begin to grant the lease, unless that is under way or done."""
        granting = self._granting
        if granting is None or (granting.done() and granting.exception() is not None):
            context = self._context
            self._forget()
            self._renewed_s = context.clock.now_s()
            granting = asyncio.ensure_future(
                context.etcd.grant(self._ttl_s, timeout_s=context.urgent_limit_s)
            )
            granting.add_done_callback(_look_at)
            self._granting = granting
        return granting

    async def get(self) -> int:
        """Return its id; renew it first if the wait for the first round was long.

        Raises EtcdError.
        """
        lease_id = (await asyncio.shield(self.begin())).lease_id
        context = self._context
        now_s = context.clock.now_s()
        if now_s - self._renewed_s > self._ttl_s / 3:
            if not await context.etcd.keep_alive(lease_id, timeout_s=context.urgent_limit_s):
                self._forget()  # it ran out during the wait
                lease_id = (await asyncio.shield(self.begin())).lease_id
            self._renewed_s = now_s
        return lease_id

    def in_doubt(self) -> None:
        """Note that a round may use it or not: nobody knows what became of the write.

        The next attempt offers it again, so that no second lease is left behind.
        """
        self._is_in_doubt = True

    def given_away(self) -> None:
        """Note that it is a round's now, or is gone."""
        self._forget()

    async def drop(self) -> None:
        """Revoke it if no round uses it. If this is cancelled, call it again."""
        granting = self._granting
        if granting is None:
            return
        limit_s = self._context.farewell_limit_s
        if not self._is_in_doubt:  # if it is: a round may live on it, and it expires if none does
            with contextlib.suppress(EtcdError, TimeoutError):  # it expires by itself
                # Shielded: of a grant that was cut off nobody would know the id.
                grant = await self._context.clock.wait_for(asyncio.shield(granting), limit_s)
                await self._context.etcd.revoke(grant.lease_id, timeout_s=limit_s)
        if self._granting is granting:
            self._forget()

    def _forget(self) -> None:
        self._granting = None
        self._is_in_doubt = False


def _look_at(granting: asyncio.Task[LeaseGrant]) -> None:
    """Retrieve the error of a grant that nobody may wait for any more."""
    if not granting.cancelled():
        granting.exception()

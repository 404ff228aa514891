"""The leases of a job: granted ahead for its first round, renewed, and put back if etcd lost them.

All that belongs to the job as a whole lives on the job lease, and what its epochs count from on the
epoch lease, which outlives it. No node owns them: every node that is there keeps them alive.
"""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import EtcdError, LeaseExistsError
from rdzv_etcd.etcd.port import LeaseGrant
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.waiting import Backoff
from rdzv_etcd.protocol.liveness import room_for_a_world_s
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Round
from rdzv_etcd.protocol.steps import kept_record


async def keep_job_leases(context: NodeContext, member: Member) -> None:
    """Renew the job's leases at a slow rate while this node is a member, or waits; until cancelled.

    A round that lost a member may wait for a replacement longer than the lease lives. The leader
    renews soon, because the lease may have aged while the round was being closed; the others have
    time, and better things to do in the moment a round is formed.

    The epoch lease is the leader's to renew, and may be the shorter one.

    A renewal without an answer is tried again as soon as that of a node's own lease is: the record
    can be put back, but the round's store goes with the lease for good. The leases may have been
    granted by a node that was started with a shorter ``job_lease_ttl`` than this one.
    """
    timing = context.settings.timing
    period_s = timing.job_ttl_s / 3
    leader_period_s = min(period_s, timing.ended_ttl_s / 3)
    backoff = Backoff(leader_period_s)
    renewed = False

    def leads() -> bool:
        leader = context.control.view.leader
        return leader is not None and leader.node_id == member.node_id

    def kept() -> Round | None:
        return kept_record(member, context.control.view)

    while True:
        await context.wakeup.wait(when=lambda: kept() is not None)
        record, leading = kept(), leads()
        if record is None:
            continue
        if leading and not renewed:  # first, the members of a new world take their ranks
            await context.clock.sleep(room_for_a_world_s(record.size))
        pause_s = leader_period_s if leading else period_s
        leases = [record.job_lease] if renewed or leading else []
        if leading and context.control.view.epoch_lease:
            leases.append(context.control.view.epoch_lease)
        try:
            for lease_id in leases:
                limit_s = context.session.reply_limit_s()
                ttl_s = await context.etcd.keep_alive(lease_id, timeout_s=limit_s)
                pause_s = min(pause_s, ttl_s / 3) if ttl_s else pause_s
        except EtcdError as error:
            await context.back_off(backoff, error, "this node cannot renew the job's lease")
            continue
        backoff.reset()
        renewed = True
        pause_s += context.clock.jitter(pause_s / 10)
        if leading:
            await context.clock.sleep(pause_s)
        else:  # a node that comes to lead renews at once
            await context.wakeup.wait(context.clock.now_s() + pause_s, when=leads)


async def put_back_job_lease(context: NodeContext, record: Round) -> None:
    """Grant the record's lease again, under its id. Raises EtcdError."""
    with contextlib.suppress(LeaseExistsError):  # another member was first
        await context.etcd.grant(
            context.settings.timing.job_ttl_s,
            lease_id=record.job_lease,
            timeout_s=context.urgent_limit_s,
        )


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
            self.forget()
            self._renewed_s = context.clock.now_s()
            granting = asyncio.ensure_future(
                context.etcd.grant(self._ttl_s, timeout_s=context.urgent_limit_s)
            )
            # Its error is retrieved: perhaps no call waits for it any more.
            granting.add_done_callback(lambda done: done.cancelled() or done.exception())
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
                self.forget()  # it ran out during the wait
                lease_id = (await asyncio.shield(self.begin())).lease_id
            self._renewed_s = now_s
        return lease_id

    def in_doubt(self) -> None:
        """Note that a round may use it or not: the outcome of the write is unknown.

        The next attempt offers it again, so that no second lease is left behind.
        """
        self._is_in_doubt = True

    def forget(self) -> None:
        """Note that it belongs to a round now, or is gone."""
        self._granting, self._is_in_doubt = None, False

    async def drop(self) -> None:
        """Revoke it if no round uses it. If this is cancelled, call it again."""
        granting = self._granting
        if granting is None:
            return
        limit_s = self._context.leaving_limit_s
        if not self._is_in_doubt:  # if it is: a round may live on it, and it expires if none does
            with contextlib.suppress(EtcdError, TimeoutError):  # it expires by itself
                # Shielded: the id of a grant that was cut off would be unknown.
                grant = await self._context.clock.wait_for(asyncio.shield(granting), limit_s)
                await self._context.etcd.revoke(grant.lease_id, timeout_s=limit_s)
        if self._granting is granting:
            self.forget()

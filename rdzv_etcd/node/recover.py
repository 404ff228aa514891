"""What a member puts back that etcd has lost: session, presence, round record, the job's leases.

Being lost is an act, not a state: a member is out when the leader has published it, not when its
lease ran out. Until then it comes back unnoticed.

It watches its own presence, because etcd may revoke the lease of a node that has renewed it in
time: a leader of etcd that was paused believes for a moment after it wakes up that all leases have
run out (etcd#15247; newer versions, 3.5.30 too, check first, but not whether they were asleep). The
next keep-alive would show that, up to a third of a TTL later, when this member has long been
declared lost. And if only the key is gone (an operator deleted it), no keep-alive shows it, and a
waiting node would wait forever.

All that belongs to the job as a whole lives on the job lease, and what its epochs count from on the
epoch lease, which outlives it. No node owns them: every node that is there keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib

from rdzv_etcd.errors import (
    EtcdError,
    EtcdRefusedError,
    LeaseExistsError,
    StateCorruptError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import EventKind, KeyValue, Txn, Watch
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.waiting import Backoff
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import encode_node
from rdzv_etcd.protocol.liveness import room_for_a_world_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo, Round
from rdzv_etcd.protocol.steps import (
    Recovery,
    WorkingStep,
    decide_recovery,
    kept_record,
    working_step,
)
from rdzv_etcd.protocol.views import place_in
from rdzv_etcd.text import shown

_RETRY_S = 1.0


async def repair(context: NodeContext, member: Member) -> None:
    """Put back what an outage took from this member whenever something is missing, until
    cancelled."""
    await context.whenever(
        lambda: _is_needed(context, member),
        lambda: _put_back(context, member),
        "this node cannot come back after an outage",
    )


def _is_needed(context: NodeContext, member: Member) -> bool:
    step = working_step(member, context.control.view, context.session.lease_id)
    return step is WorkingStep.REPAIR


async def _put_back(context: NodeContext, member: Member) -> None:
    try:
        await _put_back_once(context, member)
    except EtcdRefusedError:
        context.session.shake()  # others that it refuses come back when they look again
        raise


async def _put_back_once(context: NodeContext, member: Member) -> None:
    control = await context.control.refresh()
    async with context.presence_lock:
        record = member.record
        if not _is_needed(context, member) or record is None:
            return
        recovery = decide_recovery(control, record, member.node_id)
        if recovery is Recovery.REJOIN:
            member.evicted = True
            context.log.info(f"the other nodes left round {record.number} without this one")
            context.wakeup.notify()
            return
        if recovery is Recovery.NOTHING:
            return  # the job is over; `notice` has seen it
        session, there = await asyncio.gather(
            context.session.open(context.urgent_limit_s), read_own(context)
        )
        info = member.plan_return()
        if info is None:
            return
        slice_ = member.slice_of(record)
        if recovery is Recovery.RECORD:
            await _put_back_job_lease(context, record)
            txn = requests.restore_record(
                context.keys, control, record, info, session, slice_=slice_
            )
        else:
            revision = 0 if there is None else there.mod_revision
            txn = requests.restore_presence(
                context.keys, control, info, session, slice_, presence_revision=revision
            )
        if await _is_written(context, txn, session, info):
            member.note_presence(session)
            member.slice_revision = control.round_revision  # its slice is there as well
            if not info.finished:
                context.log.info(f"back in round {record.number} ({recovery.value})")
    await context.control.refresh()


async def _is_written(context: NodeContext, txn: Txn, session: int, info: NodeInfo) -> bool:
    """Apply ``txn``; return whether the presence is there now. Raises EtcdError."""
    result = await context.write(txn, session, timeout_s=context.urgent_limit_s)
    if result is None:
        return False
    if result.succeeded:
        return True
    context.take_control(result)
    # Refused, because things have changed meanwhile, or because this very write had been applied
    # before and its answer was lost; or there was nothing to put back but the record, and another
    # member was first.
    place = await read_own(context)
    if not is_own(place, session):
        context.session.lost(session)  # it carries nothing: start afresh
        await context.etcd.revoke(session)
        return False
    # What says that it has finished may not be known to the others yet.
    return not info.finished or is_own(place, session, info)


# -- the presence, watched ---------------------------------------------------------------------


async def watch_own(context: NodeContext, member: Member) -> None:
    """Keep the presence of a node that has arrived in place, until cancelled.

    Begins when the node has been there for the time between two keep-alives, or soon after its
    first world was formed if others will look after it: when it arrives and when a round is formed
    there are better things to do.
    """
    await context.wakeup.wait(when=lambda: _should_be_there(member))
    until_s = context.clock.now_s() + context.session.renewal_period_s
    if member.watches_early:
        await context.wakeup.wait(until_s, when=lambda: member.phase is Phase.MEMBER)
        size = 0 if member.record is None else member.record.size
        until_s = min(until_s, context.clock.now_s() + room_for_a_world_s(size))
    await context.clock.sleep(max(0.0, until_s - context.clock.now_s()))
    backoff = context.backoff()
    while True:
        try:
            await _follow(context, member, backoff)
        except WatchLostError:
            pass  # etcd may have lost the presence as well: it is looked for at once
        except EtcdError as error:
            complaint = "this node cannot check that its presence is in etcd"
            await context.back_off(backoff, error, complaint, at_least_s=_RETRY_S)


async def _follow(context: NodeContext, member: Member, backoff: Backoff) -> None:
    key = context.keys.node(member.node_id)
    watch = context.etcd.watch(key, start_revision=0, mark_resumes=True)
    try:
        await watch.ready()
        await _check(context, member, watch)  # it may have gone before
        backoff.reset()
        member.hears_accusations = True
        context.wakeup.notify()
        async for batch in watch:
            session = context.session.lease_id
            if not batch.events or any(  # the watch resumed after a break
                event.kind is EventKind.DELETE or event.kv.lease_id != session  # or overwritten
                for event in batch.events
            ):
                await _check(context, member, watch)
    finally:
        await watch.close()


async def _check(context: NodeContext, member: Member, watch: Watch) -> None:
    async with context.presence_lock:  # what this node does to its presence itself is no news
        session = context.session.lease_id
        if not session or not _should_be_there(member):
            return
        # If etcd went back, what a waiting node wrote at an earlier arrival may be there again, or
        # what a member wrote before it had finished.
        written = member.info if member.phase is Phase.WAITING else None
        if member.has_finished:
            written = member.plan_return()
        place = await read_own(context, watch)
        if is_own(place, session, written):
            return
        if member.phase is Phase.WAITING or is_own(place, session):
            member.forget_arrival()  # it is put again, on the same session if that lives
            context.wakeup.notify()
        elif place is None or not await _answer(context, member, session, place):
            context.session.lost(session)


async def _answer(context: NodeContext, member: Member, session: int, place: KeyValue) -> bool:
    """Put the presence back at once if ``place`` is another node's accusation, and this node was
    not declared lost since; return whether that was so. Raises EtcdError."""
    record, back = member.record, member.plan_return()
    if record is None or back is None or member.evicted:
        return False
    try:
        found = place_in(context.keys, place)
        if not isinstance(found, Accusation):
            return False
        for _ in range(2):  # a change that names others may have come first
            control = context.control.view
            if decide_recovery(control, record, member.node_id) is not Recovery.PRESENCE:
                return False
            txn = requests.restore_presence(
                context.keys, control, back, session, presence_revision=place.mod_revision
            )
            result = await context.write(txn, session, timeout_s=context.urgent_limit_s)
            if result is None:
                return False
            if result.succeeded:
                by, how = context.log.names(found.by), shown(found.how)
                context.log.warn(f"{by} reported this node dead ({how}); it is alive")
                return True
            context.take_control(result)
    except StateCorruptError:  # another program has written there
        pass
    return False


def _should_be_there(member: Member) -> bool:
    waits = member.phase is Phase.WAITING and member.arrived_with != 0
    return waits or member.phase is Phase.MEMBER


async def read_own(context: NodeContext, watch: Watch | None = None) -> KeyValue | None:
    """Read what stands in the place of this node's presence, which ``watch`` watches."""
    read = requests.read_presence(context.keys, context.identity.node_id)
    found = await context.etcd.get(read)
    if watch is not None:
        watch.count_from(found)
    return next(iter(found.kvs), None)


def is_own(place: KeyValue | None, session: int, info: NodeInfo | None = None) -> bool:
    """Whether it is this node's presence on that session, and as ``info`` says if that is given."""
    if place is None or place.lease_id != session:
        return False
    return info is None or place.value == encode_node(info)


# -- the leases of the job ---------------------------------------------------------------------


async def keep_job_leases(context: NodeContext, member: Member) -> None:
    """Renew the job's leases at a slow rate while this node is a member, or waits; until cancelled.

    A round that lost a member may wait for a replacement longer than the lease lives. The leader
    renews at once, because the lease may have aged while the round was being closed; the others
    have time, and better things to do in the moment a round is formed.

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


async def _put_back_job_lease(context: NodeContext, record: Round) -> None:
    """Grant the record's lease again, under its id. Raises EtcdError."""
    with contextlib.suppress(LeaseExistsError):  # another member was first
        await context.etcd.grant(
            context.settings.timing.job_ttl_s,
            lease_id=record.job_lease,
            timeout_s=context.urgent_limit_s,
        )

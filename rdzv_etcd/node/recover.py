"""What a node keeps in etcd beside its work: its session, its presence and the round record.

A node knows what it should have in etcd, compares that with what it sees, and puts back the first
thing that is missing. Being lost is an act, not a state: a member is out when the leader has
published it, not when its lease ran out. Until then it comes back unnoticed.

It watches its own presence, because etcd may revoke the lease of a node that has renewed it in
time: a leader of etcd that was paused believes for a moment after it wakes up that all leases have
run out (etcd#15247; newer versions, 3.5.30 too, check first, but not whether they were asleep). The
next keep-alive would show that, up to a third of a TTL later, when this member has long been
declared lost. And if only the key is gone (an operator deleted it), no keep-alive shows it, and a
waiting node would wait forever.
"""

from __future__ import annotations

import asyncio

from rdzv_etcd.errors import EtcdError, EtcdRefusedError, RdzvEtcdError
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.node.accuse import place_of
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.job_leases import put_back_job_lease
from rdzv_etcd.node.leave import announce_drain, step_aside
from rdzv_etcd.node.waiting import RETRY_S
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import encode_node
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.liveness import room_for_a_world_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo, Round
from rdzv_etcd.protocol.steps import WorkingStep, working_step
from rdzv_etcd.text import shown


def next_step(context: NodeContext, member: Member) -> WorkingStep:
    """Compare what this node should have in etcd with what it sees, from memory."""
    return working_step(
        member,
        context.control.view,
        context.session.lease_id,
        is_missed=_is_missed(context, member),
    )


def _is_missed(context: NodeContext, member: Member) -> bool:
    """Whether etcd shows something else in the place of the presence that this node has put."""
    session, seen = context.session.lease_id, context.presence.seen
    if seen is None or not session or member.arrived_with != session:
        return False
    # If etcd went back, what a waiting node wrote at an earlier arrival may be there again, or
    # what a member wrote before it had finished.
    written = member.info if member.phase is Phase.WAITING else None
    if member.has_finished:
        written = member.plan_return()
    return not is_own(seen.kv, session, written)


def is_own(place: KeyValue | None, session: int, info: NodeInfo | None = None) -> bool:
    """Whether it is this node's presence on that session, and as ``info`` says if that is given."""
    if place is None or place.lease_id != session:
        return False
    return info is None or place.value == encode_node(info)


async def work_beside(context: NodeContext, member: Member) -> None:
    """Do what a node has to do in etcd beside its work, one guarded write after the other, until
    cancelled: put back what etcd lost, announce a drain, step aside at the end.

    If etcd does not know the lease, the write has ended the session. If etcd refuses, this backs
    off. If the guards did not hold, it looks again.
    """
    backoff = context.backoff()
    is_drain_logged = False

    def is_due() -> bool:
        return next_step(context, member) is not WorkingStep.WORK

    while True:
        step, drain = next_step(context, member), member.drain
        complaint = "this node cannot come back after an outage"
        try:
            if step is WorkingStep.WORK:
                await context.wakeup.wait(when=is_due)
            elif step is WorkingStep.ANNOUNCE and drain is not None:
                complaint = "this node cannot announce that it is being drained"
                if not is_drain_logged:
                    why = why_drained(drain, member.node_id)
                    context.log.warn(f"{why}; will leave at the next safe point")
                is_drain_logged = True
                await announce_drain(context, member)
            elif step is WorkingStep.FINISH:
                await step_aside(context, member)
                return
            else:
                await put_back(context, member)
        except EtcdError as error:
            await context.back_off(backoff, error, complaint)
        except RdzvEtcdError:  # a corrupt record: the watch reports it, the next join raises it
            await context.clock.sleep(RETRY_S)
            until_s = context.clock.now_s() + context.session.renewal_period_s
            await context.wakeup.wait(until_s, when=lambda: context.control.problem is None)
        else:
            backoff.reset()


async def put_back(context: NodeContext, member: Member) -> None:
    """Put back the first thing that etcd has lost of this node. Raises EtcdError,
    StateCorruptError."""
    try:
        await asyncio.gather(context.control.refresh(), context.presence.refresh())
        async with context.presence_lock:  # what this node does to its presence itself is no news
            step, record = next_step(context, member), member.record
            if step is WorkingStep.ARRIVE:
                member.forget_arrival()  # on the same session if that lives
                context.wakeup.notify()
            elif step is WorkingStep.REJOIN and record is not None:
                member.evicted = True
                context.log.info(f"the other nodes left round {record.number} without this one")
                context.wakeup.notify()
            elif step in (WorkingStep.PRESENCE, WorkingStep.RECORD) and record is not None:
                await _return_to(record, context, member, step)
    except EtcdRefusedError:
        context.session.note_instability()  # others that it refuses come back when they look again
        raise


async def _return_to(
    record: Round, context: NodeContext, member: Member, step: WorkingStep
) -> None:
    """Put this node's presence back, and the record of its world as well if that is gone."""
    keys, control = context.keys, context.control.view
    session, info = await context.session.open(context.urgent_limit_s), member.plan_return()
    if info is None:
        return
    slice_, place = member.slice_of(record), context.presence.view.kv
    if step is WorkingStep.RECORD:
        await put_back_job_lease(context, record)
        txn = requests.restore_record(keys, control, record, info, session, slice_=slice_)
    else:
        revision = 0 if place is None else place.mod_revision
        txn = requests.restore_presence(
            keys, control, info, session, slice_, presence_revision=revision
        )
    result = await context.put_presence(txn, info, session, context.urgent_limit_s)
    if result is None or not result.succeeded:
        return  # things have changed meanwhile, or this very write was applied before
    member.note_presence(session)
    member.slice_revision = control.round_revision  # its slice is there as well
    accusation = place_of(keys, place).holds
    if isinstance(accusation, Accusation):
        by, how = context.log.names(accusation.by), shown(accusation.how)
        context.log.warn(f"{by} reported this node dead ({how}); it is alive")
    elif not info.finished:
        context.log.info(f"back in round {record.number} ({step.value})")


async def watch_own_presence(context: NodeContext, member: Member) -> None:
    """Watch the presence of a node that has arrived, until cancelled.

    Begins when the node has been there for the time between two keep-alives, or soon after its
    first world was formed if others will look after it: when it arrives and when a round is formed
    there are better things to do.
    """

    def should_be_there() -> bool:
        waits = member.phase is Phase.WAITING and member.arrived_with != 0
        return waits or member.phase is Phase.MEMBER

    await context.wakeup.wait(when=should_be_there)
    until_s = context.clock.now_s() + context.session.renewal_period_s
    if member.watches_early:
        await context.wakeup.wait(until_s, when=lambda: member.phase is Phase.MEMBER)
        size = 0 if member.record is None else member.record.size
        until_s = min(until_s, context.clock.now_s() + room_for_a_world_s(size))
    await context.clock.sleep(max(0.0, until_s - context.clock.now_s()))
    await context.presence.run()

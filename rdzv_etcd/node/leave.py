"""The end: closes the job, says goodbye, and removes the job if this was the last node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from rdzv_etcd.errors import EtcdError, OutcomeUnknownError
from rdzv_etcd.etcd.port import Op
from rdzv_etcd.node import job_lease
from rdzv_etcd.node.backoff import RETRY_S
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.lead import Leadership
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Closure, Control, Ended, NodeInfo, Round
from rdzv_etcd.protocol.steps import WorkingStep, working_step
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown

_ROOM_FOR_RANK_0_S = 1.0
RUNS_REMEMBERED = 8
"""A node that was cut off for longer than this many runs of one id counts as new."""


def why_interrupted(error: BaseException, what: str) -> str:
    """Why a node has left whose caller waits no longer for ``what``, as the others are told."""
    by = what_interrupted(error)
    return shown(f"was interrupted in {what}{': ' if by else ''}{by}", MAX_REASON)


async def close_job(
    context: NodeContext, member: Member, *, succeeded: bool, reason: str, anyones: bool
) -> None:
    """Put the closed marker; see :meth:`rdzv_etcd.node.node.Node.close_job`."""
    clock, watched = context.clock, context.control
    if anyones:
        record = (await watched.refresh(context.settings.timing.close_timeout_s)).formed
    else:
        record = member.record if member.phase is Phase.MEMBER else None
    if record is None:
        return
    if succeeded and member.rank_in(record) != 0:
        # All members finish together: let one of them do it, and do it if it does not.
        until_s = clock.now_s() + _ROOM_FOR_RANK_0_S
        while member.closure is None and await context.wakeup.wait(until_s):
            pass
    until_s = clock.now_s() + context.settings.timing.close_timeout_s
    while member.closure is None and clock.now_s() < until_s:
        control = watched.view if watched.view.round is not None else await watched.refresh()
        if control.formed is None or not (anyones or control.formed.same_world(record)):
            return  # all is gone, or the others went on without this node
        await _put_marker(
            context,
            control,
            control.formed,
            member.epoch_seen,
            succeeded=succeeded,
            reason=reason,
        )


async def _put_marker(
    context: NodeContext,
    control: Control,
    record: Round,
    epoch_seen: int,
    *,
    succeeded: bool,
    reason: str,
) -> None:
    timing = context.settings.timing
    timeout_s = timing.close_timeout_s
    grant = await context.etcd.grant(timing.closed_ttl_s, timeout_s=timeout_s)
    ended_lease = await _ended_lease(context, control, grant.lease_id)
    closure = Closure(
        context.identity.node_id, reason[:MAX_REASON], succeeded, context.clock.wall_s()
    )
    closed = replace(record, closure=closure)
    this = Ended(record.origin, closure, max(control.epoch, epoch_seen))
    ended = (*control.ended, this)[-RUNS_REMEMBERED:]
    txn = requests.close_job(
        context.keys,
        control,
        closed,
        ended,
        marker_lease=grant.lease_id,
        ended_lease=ended_lease,
    )
    try:
        result = await context.etcd.txn(txn, timeout_s=timeout_s)
    except OutcomeUnknownError:
        await context.control.refresh(timeout_s)  # whatever happened, it shows in the record
        return
    if result.succeeded:
        context.show_written(
            result.revision,
            round=closed,
            round_revision=result.revision,
            ended=ended,
            ended_revision=result.revision,
            ended_lease=ended_lease,
        )
        context.log.say(f"closed the job: {reason}")
    else:
        context.take_control(result)
        for lease in {grant.lease_id, ended_lease} - {control.ended_lease, control.epoch_lease}:
            await context.etcd.revoke(lease, timeout_s=timeout_s)


async def _ended_lease(context: NodeContext, control: Control, marker_lease: int) -> int:
    """Return the lease that keeps the memory of runs that are over: one for all of them, and for
    what their epochs count from."""
    timing = context.settings.timing
    timeout_s = timing.close_timeout_s
    if context.settings.embed or timing.ended_ttl_s <= timing.closed_ttl_s:
        return marker_lease  # an embedded etcd ends when nothing holds it, and its memory with it
    kept = control.epoch_lease or control.ended_lease
    if kept and await context.etcd.keep_alive(kept, timeout_s=timeout_s):
        return kept
    return (await context.etcd.grant(timing.ended_ttl_s, timeout_s=timeout_s)).lease_id


async def say_goodbye(
    context: NodeContext,
    member: Member,
    leadership: Leadership,
    info: NodeInfo | None,
    reason: str,
) -> None:
    """End the session, whatever becomes of the goodbye; the others see it at once, and why.

    ``info``: what this node is known by, if it has begun to take part. Nobody asks why when the job
    is over. Raises EtcdError.
    """
    limit_s = context.farewell_limit_s / 2  # for the courtesy, and for what counts
    async with context.presence_lock:
        session = context.session.lease_id
        try:
            if session and info is not None and member.closure is None:
                also = leadership.departure(reason)
                await _mark_leaving(context, info, reason, session, limit_s, also=also)
        except EtcdError as error:
            context.log.say(f"etcd did not take the goodbye: {error}")
        finally:
            await context.session.end(limit_s)


async def _mark_leaving(
    context: NodeContext,
    info: NodeInfo,
    reason: str,
    session: int,
    limit_s: float,
    *,
    also: Sequence[Op] = (),
) -> None:
    await context.etcd.txn(
        requests.say_goodbye(context.keys, replace(info, leaving=reason), session, also),
        timeout_s=limit_s,
        repeatable=True,
    )


async def step_aside(context: NodeContext, member: Member) -> None:
    """Mark a member that works on after its job was closed, so that no new run counts on it.

    Done late, because most are gone by then; but before the marker, which tells it until then.
    """

    def finishes() -> bool:
        step = working_step(member, context.control.view, context.session.lease_id)
        return step is WorkingStep.FINISH

    while not finishes():
        await context.wakeup.wait(when=finishes)
    await context.clock.sleep(context.settings.timing.closed_ttl_s / 2)
    while True:
        async with context.presence_lock:
            session, info = context.session.lease_id, member.info
            if not finishes() or not session or info is None:
                return
            with contextlib.suppress(EtcdError):  # tried again until it is done
                await _mark_leaving(
                    context, info, "the job is closed", session, context.farewell_limit_s
                )
                return
        await context.clock.sleep(RETRY_S)


async def remove_job(context: NodeContext, member: Member) -> None:
    """If this was the last node, leave nothing behind but a closed marker. Raises EtcdError."""
    limit_s = context.farewell_limit_s
    for _ in range(2):  # once more if the record changed under our hands
        control = context.control.view
        txn = requests.remove_job(context.keys, control, member.node_id)
        result = await context.etcd.txn(txn, timeout_s=limit_s, repeatable=True)
        if result.succeeded:
            await job_lease.give_up(context, control.round or member.record)
            return
        context.take_control(result)
        if context.control.view.round_revision == control.round_revision:
            return  # others are still there

"""The end of a node: a request to leave, closing the job, the goodbye, and removing the job if this
was its last node.

A drain is a wish, not a loss: the world continues until its members come to a point at which
stopping costs no work. All nodes learn of one from the control keys, which they watch anyway. A
request from outside has a lease of its own, so that it outlives whichever session the node has; the
node puts it on its own session when it learns of it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, cast

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    DrainedError,
    EtcdError,
    JobClosedError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    StateCorruptError,
)
from rdzv_etcd.etcd.port import Etcd, KeyValue, Txn, TxnResult
from rdzv_etcd.node.accuse import read_place
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.node.waiting import RETRY_S
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import decode_drain, decode_key
from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.lead import departure
from rdzv_etcd.protocol.liveness import answer_grace_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, Closure, Control, Drain, Ended, NodeInfo, Round
from rdzv_etcd.protocol.steps import drain_to_announce
from rdzv_etcd.runtime.loop_call import what_interrupted
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown

_BY = 200
_TRIES = 3
"""The node's presence, or the request, may change just then, but not again and again."""
_LONGEST_ANSWER_S = 5.0
"""Of a node as far from etcd as it may be at the default ``lease_ttl``. A request that took longer
had to connect first, and a drain may be due."""
REQUEST_TTL_S = 86_400
"""How long a request stands that never reaches its node."""


async def request_drain(
    etcd: Etcd,
    keys: JobKeys,
    clock: Clock,
    node_id: str,
    reason: str,
    *,
    by: str = "an operator",
) -> bool:
    """Ask a node to leave at its next safe point; from outside, on any connection to its etcd.

    The node learns of it in one watch event, or when it reads again after a break, and obeys: see
    :meth:`rdzv_etcd.Group.drain`. An earlier request stands. ``False`` if no node of that id is
    there: one that was found to be gone just then is looked for again when it had the time to
    answer. Raises EtcdError.
    """
    drain = Drain(shown(by, _BY) or "an operator", shown(reason, MAX_REASON))
    lease = accused_at = 0
    stands = False
    for _ in range(_TRIES):
        began_s = clock.now_s()
        place = await read_place(etcd, keys, node_id)
        round_trip_s = clock.now_s() - began_s
        if place.kv is None or place.holds is None:
            break  # nothing, or no node wrote it
        if isinstance(place.holds, Accusation):
            if place.kv.mod_revision == accused_at:
                break  # it has not answered
            accused_at = place.kv.mod_revision
            await clock.sleep(min(answer_grace_s(round_trip_s, place.holds), _LONGEST_ANSWER_S))
            continue
        there = next(iter((await etcd.get(requests.read_drain(keys, node_id))).kvs), None)
        if there is not None and _is_drain(there):
            if there.lease_id == lease:
                return True
            stands = True
            break
        lease = lease or (await etcd.grant(REQUEST_TTL_S)).lease_id
        revision = 0 if there is None else there.mod_revision
        txn = requests.ask_to_drain(keys, node_id, drain, lease, revision=revision)
        try:
            if (await etcd.txn(txn, repeatable=True)).succeeded:
                return True
        except LeaseNotFoundError:
            lease = 0
    if lease:
        with contextlib.suppress(EtcdError):  # it expires by itself
            await etcd.revoke(lease)
    return stands


def _is_drain(kv: KeyValue) -> bool:
    """Whether it asks a node to leave: what cannot be read is obeyed by none."""
    try:
        decode_key(decode_drain, kv)
    except StateCorruptError:
        return False
    return True


async def announce_drain(context: NodeContext, member: Member) -> None:
    """Announce to the others that this node leaves at the next safe point. Raises EtcdError."""
    drain, session = _to_announce(context, member), context.session.lease_id
    if drain is None:
        return
    result = await context.write(
        requests.announce_drain(context.keys, member.node_id, drain, session), session
    )
    if result is not None and result.succeeded:
        before = requests.lease_before(result)
        if before not in (0, session):  # nothing is on it any more
            with contextlib.suppress(EtcdError):
                await context.etcd.revoke(before)
        drains = {**context.control.view.drains, member.node_id: drain}
        context.show_written(result.revision, drains=drains)
    if _to_announce(context, member) is not None:
        await context.clock.sleep(RETRY_S)  # the watch will show it, or the presence is put back


def _to_announce(context: NodeContext, member: Member) -> Drain | None:
    return drain_to_announce(member, context.control.view, context.session.lease_id)


def drained_error(job_id: str, node_id: str, drain: Drain) -> DrainedError:
    """The error of a join of a node that is drained."""
    return DrainedError(
        f"this node has left job {job_id!r}: {why_drained(drain, node_id)}",
        by=drain.by,
        reason=drain.reason,
    )


def closed_error(context: NodeContext, member: Member, closure: Closure) -> JobClosedError:
    """The error of a join whose run is over."""
    return JobClosedError(
        closed_text(context, closure),
        closed_by=closure.by,
        reason=closure.reason,
        succeeded=closure.succeeded,
        was_member=member.was_member,
    )


def closed_text(context: NodeContext, closure: Closure) -> str:
    """Describe how the job was closed, for an error."""
    ago_s = max(0.0, context.clock.wall_s() - closure.wall_s)
    return (
        f"job {context.settings.job_id!r} was closed by {context.log.names(closure.by)}, "
        f"{ago_s:.0f} s ago: {shown(closure.reason)}"
    )


_ROOM_FOR_RANK_0_S = 1.0
RUNS_REMEMBERED = 8
"""A node that was cut off for longer than this many runs of one id counts as new."""


def why_interrupted(error: BaseException, what: str) -> str:
    """Why a node has left whose caller no longer waits for ``what``, as the others are shown."""
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
        await context.wakeup.wait(until_s, when=lambda: member.closure is not None)
    until_s = clock.now_s() + context.settings.timing.close_timeout_s
    while member.closure is None and clock.now_s() < until_s:
        control = watched.view if watched.view.round is not None else await watched.refresh()
        if control.formed is None or not (anyones or control.formed.same_world(record)):
            return  # all is gone, or the others formed a new world without this node
        await _put_marker(context, control, member.epoch_seen, succeeded=succeeded, reason=reason)


async def _put_marker(
    context: NodeContext, control: Control, epoch_seen: int, *, succeeded: bool, reason: str
) -> None:
    closure = Closure(
        context.identity.node_id, reason[:MAX_REASON], succeeded, context.clock.wall_s()
    )
    try:
        result, news = await put_closed_marker(
            context.etcd, context.settings, control, closure, epoch_seen
        )
    except OutcomeUnknownError:  # whatever happened, it shows in the record
        await context.control.refresh(context.settings.timing.close_timeout_s)
        return
    if result.succeeded:
        context.show_written(result.revision, **news)
        context.log.info(f"closed the job: {reason}")
    else:
        context.take_control(result)


async def put_closed_marker(
    etcd: Etcd, settings: Settings, control: Control, closure: Closure, epoch_seen: int = 0
) -> tuple[TxnResult, dict[str, Any]]:
    """Close a job if its control keys are as in ``control``, which has a formed round.

    Returns etcd's answer, and what of the control keys has changed if it succeeded. Raises
    EtcdError; after an OutcomeUnknownError the record shows whether it was done.
    """
    record = cast(Round, control.formed)
    timeout_s = settings.timing.close_timeout_s
    marker = (await etcd.grant(settings.timing.closed_ttl_s, timeout_s=timeout_s)).lease_id
    ended_lease = await _ended_lease(etcd, settings, control, marker)
    closed = replace(record, closure=closure)
    this = Ended(record.origin, closure, max(control.epoch, epoch_seen))
    ended = (*control.ended, this)[-RUNS_REMEMBERED:]
    txn = requests.close_job(
        JobKeys(settings.prefix, settings.job_id),
        control,
        closed,
        ended,
        marker_lease=marker,
        ended_lease=ended_lease,
    )
    result = await etcd.txn(txn, timeout_s=timeout_s)
    if not result.succeeded:
        for lease in {marker, ended_lease} - {control.ended_lease, control.epoch_lease}:
            await etcd.revoke(lease, timeout_s=timeout_s)
    at = result.revision
    return result, {
        "round": closed,
        "round_revision": at,
        "ended": ended,
        "ended_revision": at,
        "ended_lease": ended_lease,
    }


async def _ended_lease(etcd: Etcd, settings: Settings, control: Control, marker_lease: int) -> int:
    """Return the lease that keeps the memory of runs that are over: one for all of them, and for
    what their epochs count from."""
    timing = settings.timing
    timeout_s = timing.close_timeout_s
    if settings.embed or timing.ended_ttl_s <= timing.closed_ttl_s:
        return marker_lease  # an embedded etcd ends when nothing holds it, and its memory with it
    kept = control.epoch_lease or control.ended_lease
    if kept and await etcd.keep_alive(kept, timeout_s=timeout_s):
        return kept
    return (await etcd.grant(timing.ended_ttl_s, timeout_s=timeout_s)).lease_id


async def withdraw(
    context: NodeContext, member: Member, info: NodeInfo | None, reason: str
) -> None:
    """Say goodbye without leaving the job: the node may join again. If etcd does not answer, the
    lease runs out."""
    with contextlib.suppress(EtcdError):
        await say_goodbye(context, member, info, reason)


async def say_goodbye(
    context: NodeContext, member: Member, info: NodeInfo | None, reason: str
) -> None:
    """End the session, whatever becomes of the goodbye, which shows the others at once why.

    ``info``: what this node is known by, if it has begun to take part. There is no goodbye when the
    job is over. Raises EtcdError.
    """
    limit_s = context.leaving_limit_s / 2  # for the goodbye, and for the session
    async with context.presence_lock:
        session = context.session.lease_id
        try:
            if session and info is not None and member.closure is None:
                control = context.control.view
                change = departure(member, control, session, reason)
                also = None
                if change is not None:
                    also = requests.publish_change(context.keys, control, change)
                await _mark_leaving(context, info, reason, session, limit_s, also=also)
        except EtcdError as error:
            context.log.info(f"etcd did not take the goodbye: {error}")
        finally:
            await context.session.end(limit_s)


async def _mark_leaving(
    context: NodeContext,
    info: NodeInfo,
    reason: str,
    session: int,
    limit_s: float,
    *,
    also: Txn | None = None,
) -> None:
    txn = requests.say_goodbye(context.keys, replace(info, leaving=reason), session, also)
    await context.etcd.txn(txn, timeout_s=limit_s, repeatable=True)


async def step_aside(context: NodeContext, member: Member) -> None:
    """Mark a member that works on after its job was closed, so that no new run counts on it.

    Done late, because most are gone by then; but before the closed marker expires, which shows it
    until then.
    """
    await context.clock.sleep(context.settings.timing.closed_ttl_s / 2)
    while True:
        async with context.presence_lock:
            session, info = context.session.lease_id, member.info
            if not member.is_finishing or not session or info is None:
                return
            with contextlib.suppress(EtcdError):  # tried again until it is done
                await _mark_leaving(
                    context, info, "the job is closed", session, context.leaving_limit_s
                )
                return
        await context.clock.sleep(RETRY_S)


async def remove_job(context: NodeContext, member: Member) -> None:
    """If this was the last node, leave nothing behind but a closed marker. Raises EtcdError."""
    limit_s = context.leaving_limit_s
    for _ in range(2):  # once more if the record changed under our hands
        control = context.control.view
        txn = requests.remove_job(context.keys, control, member.node_id)
        result = await context.etcd.txn(txn, timeout_s=limit_s, repeatable=True)
        if result.succeeded:
            record = control.round or member.record
            if record is not None and record.job_lease:  # and all that lives on it
                await context.etcd.revoke(record.job_lease, timeout_s=limit_s)
            return
        context.take_control(result)
        if context.control.view.round_revision == control.round_revision:
            return  # others are still there

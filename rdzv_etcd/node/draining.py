"""Has a node leave at a point that costs its world nothing: tells the members, and asks nodes to.

What a drain means is decided in :mod:`rdzv_etcd.protocol.draining`. All nodes hear of one with the
control keys, which they watch anyway. A request from outside has a lease of its own, so that it
outlives whichever session the node has; as soon as the node has heard of it, it is on its session.
"""

from __future__ import annotations

import contextlib

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import DrainedError, EtcdError, LeaseNotFoundError, StateCorruptError
from rdzv_etcd.etcd.port import Etcd, KeyValue
from rdzv_etcd.node.backoff import RETRY_S, Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import health_requests, requests
from rdzv_etcd.protocol.accusations import answer_grace_s
from rdzv_etcd.protocol.codec import decode_drain, decode_key
from rdzv_etcd.protocol.draining import drain_to_tell, why_drained
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Accusation, Drain
from rdzv_etcd.protocol.views import place_in
from rdzv_etcd.settings.fields import MAX_REASON
from rdzv_etcd.text import shown

_BY = 200
_TRIES = 3
"""The node's presence, or the request, may change just then, but not again and again."""
_LONGEST_ANSWER_S = 5.0
"""Of a node as far from etcd as it may be at the default ``lease_ttl``. A request that took longer
had to connect first, and a drain may be due."""
REQUEST_TTL_S = 86_400
"""How long a request stands that the node never hears of."""


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

    The node hears of it in one watch event, or when it reads again after a break, and obeys: see
    :meth:`rdzv_etcd.Group.drain`. An earlier request stands. ``False`` if no node of that id is
    there: one that was found to be gone just then is looked for again when it had the time to
    answer. Raises EtcdError.
    """
    drain = Drain(shown(by, _BY) or "an operator", shown(reason, MAX_REASON))
    lease = accused_at = 0
    stands = False
    for _ in range(_TRIES):
        began_s = clock.now_s()
        found = await etcd.get(requests.read_presence(keys, node_id))
        round_trip_s = clock.now_s() - began_s
        if not found.kvs:
            break
        (presence,) = found.kvs
        try:
            place = place_in(keys, presence)
        except StateCorruptError:
            break  # no node wrote that
        if isinstance(place, Accusation):
            if presence.mod_revision == accused_at:
                break  # it has not answered
            accused_at = presence.mod_revision
            await clock.sleep(min(answer_grace_s(round_trip_s, place), _LONGEST_ANSWER_S))
            continue
        there = next(iter((await etcd.get(health_requests.read_drain(keys, node_id))).kvs), None)
        if there is not None and _is_drain(there):
            if there.lease_id == lease:
                return True
            stands = True
            break
        lease = lease or (await etcd.grant(REQUEST_TTL_S)).lease_id
        revision = 0 if there is None else there.mod_revision
        txn = health_requests.ask_to_drain(keys, node_id, drain, lease, revision=revision)
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


async def tell(context: NodeContext, member: Member) -> None:
    """Tell the others that this node is to leave as soon as it is, until cancelled."""
    backoff = Backoff(context.session.renewal_period_s)

    def untold() -> Drain | None:
        return drain_to_tell(member, context.control.view, context.session.lease_id)

    told = False
    while True:
        await context.wakeup.wait(when=lambda: untold() is not None)
        drain, session = untold(), context.session.lease_id
        if drain is None:
            continue
        if not told:
            told = True
            why = why_drained(drain, member.node_id)
            context.log.warn(f"leaves at its next safe point ({why})")
        txn = health_requests.tell_drain(context.keys, member.node_id, drain, session)
        try:
            result = await context.etcd.txn(txn, repeatable=True)
        except LeaseNotFoundError:
            context.session.lost(session)
        except EtcdError as error:  # if etcd is away, the keep-alives say so
            if backoff.is_news(error):
                context.log.warn(f"cannot tell the others that it is to leave: {error}")
            await context.clock.sleep(backoff.after(error))
        else:
            backoff.reset()
            if result.succeeded:
                if health_requests.lease_before(result) not in (0, session):  # nothing is on it now
                    with contextlib.suppress(EtcdError):
                        await context.etcd.revoke(health_requests.lease_before(result))
                drains = {**context.control.view.drains, member.node_id: drain}
                context.show_written(result.revision, drains=drains)
            if untold() is not None:  # the watch will show it, or the presence is put back first
                await context.clock.sleep(RETRY_S)


def drained_error(job_id: str, node_id: str, drain: Drain) -> DrainedError:
    """What the caller of a join is told."""
    return DrainedError(
        f"this node has left job {job_id!r}: {why_drained(drain, node_id)}",
        by=drain.by,
        reason=drain.reason,
    )


def own_drain(node_id: str, reason: str) -> Drain:
    """The wish of a node that itself wants to leave."""
    return Drain(node_id, shown(reason, MAX_REASON))

"""A node's watch on its own presence: it hears at once if etcd takes that away, and puts it back.

etcd may revoke the lease of a node that has renewed it in time: a leader of etcd that was paused
believes for a moment after it wakes up that all leases have run out (etcd#15247; newer versions,
3.5.30 too, check first, but not whether they were asleep). The next keep-alive would tell, up to a
third of a TTL later, when the other members have long been told that this one is lost. And if only
the key is gone (somebody deleted it), no keep-alive tells, and a waiting node would wait for ever.
"""

from __future__ import annotations

from rdzv_etcd.errors import EtcdError, EtcdPermissionError, StateCorruptError, WatchLostError
from rdzv_etcd.etcd.port import EventKind, KeyValue, Watch
from rdzv_etcd.node.backoff import Backoff
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.codec import encode_node
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Accusation, NodeInfo
from rdzv_etcd.protocol.names import names_apart
from rdzv_etcd.protocol.ring import room_for_a_world_s
from rdzv_etcd.protocol.steps import Recovery, decide_recovery
from rdzv_etcd.protocol.views import place_in
from rdzv_etcd.text import shown

_RETRY_S = 1.0


async def watch_own(context: NodeContext, member: Member) -> None:
    """See to it that the presence of a node that has arrived is there, until cancelled.

    Begins when the node has been there for the time between two keep-alives, or soon after its
    first world was formed if others will look after it: when it arrives and when a round is formed
    there are better things to do.
    """
    while not _should_be_there(member):
        await context.wakeup.wait(when=lambda: _should_be_there(member))
    until_s = context.clock.now_s() + context.session.renewal_period_s
    if member.watches_early:
        while member.phase is not Phase.MEMBER and await context.wakeup.wait(
            until_s, when=lambda: member.phase is Phase.MEMBER
        ):
            pass
        size = 0 if member.record is None else member.record.size
        until_s = min(until_s, context.clock.now_s() + room_for_a_world_s(size))
    await context.clock.sleep(max(0.0, until_s - context.clock.now_s()))
    backoff = Backoff(context.session.renewal_period_s)
    while True:
        try:
            await _follow(context, member, backoff)
        except WatchLostError:
            pass  # etcd may have lost the presence, too: it is looked for at once
        except EtcdError as error:  # if etcd is away, the keep-alives say so
            if backoff.is_news(error):
                hint = context.to_grant if isinstance(error, EtcdPermissionError) else ""
                context.log.warn(
                    f"cannot check that this node's presence is in etcd: {error}{hint}"
                )
            await context.clock.sleep(max(_RETRY_S, backoff.after(error)))


async def _follow(context: NodeContext, member: Member, backoff: Backoff) -> None:
    key = context.keys.node(member.node_id)
    watch = context.etcd.watch(key, start_revision=0, tell_resumes=True)
    try:
        await watch.ready()
        await _check(context, member, watch)  # it may have gone before
        backoff.reset()
        member.hear_accusations()
        context.wakeup.notify()
        async for batch in watch:
            session = context.session.lease_id
            if not batch.events or any(  # the watch goes on after a break
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
        # If etcd went back, what a waiting node said at an earlier arrival may be there again, or
        # what a member said before it had finished.
        said = member.info if member.phase is Phase.WAITING else None
        if member.has_finished:
            said = member.plan_return()
        place = await read_own(context, watch)
        if is_own(place, session, said):
            return
        if member.phase is Phase.WAITING or is_own(place, session):
            member.forget_arrival()  # it is put again, on the same session if that lives
            context.wakeup.notify()
        elif place is None or not await _answer(context, member, session, place):
            context.session.lost(session)


async def _answer(context: NodeContext, member: Member, session: int, place: KeyValue) -> bool:
    """Put the presence back at once if ``place`` is another node's accusation, and nobody has
    declared this one lost since; tell whether that was so."""
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
            result = await context.etcd.txn(txn, timeout_s=context.urgent_limit_s, repeatable=True)
            if result.succeeded:
                by, _ = names_apart(found.by, member.node_id)
                context.log.warn(f"was taken for dead by {by} ({shown(found.how)}), and is not")
                return True
            context.take_control(result)
    except StateCorruptError:  # somebody else has written there
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

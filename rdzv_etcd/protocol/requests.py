"""Every transaction of the protocol. One action, one guarded transaction; no I/O here.

Those of barriers and exchanges are in :mod:`rdzv_etcd.protocol.collective_requests`, those of the
round's store in :mod:`rdzv_etcd.protocol.store`. A range is read by :meth:`KeyRange.read`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rdzv_etcd.etcd.port import (
    OPS_PER_TXN,
    Compare,
    Delete,
    Get,
    GetResult,
    KeyValue,
    Op,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import (
    Accusation,
    Change,
    Control,
    Drain,
    Ended,
    Leader,
    NodeInfo,
    Nodes,
    Refused,
    Round,
    Slice,
    Slices,
)
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.world_change import reason_to_leave

BYTES_PER_TXN = 512 * 1024
"""etcd allows 1.5 MiB (``--max-request-bytes``) by default."""
AUDIT_BYTES = 8 * 1024
"""The limit for the audit of one round; a job of a few nodes needs less than a tenth of it."""
_LEFT_OUT_FIRST = ("waited_s", "expelled", "change", "came_back")
_FORGOTTEN_AT_ONCE = OPS_PER_TXN


# --- guards ---------------------------------------------------------------------------------------


def is_at(key: bytes, revision: int) -> Compare:
    """The key was written last at that revision; 0: it is absent."""
    return Compare(key, Target.MOD, Relation.EQUAL, revision)


def record_is(keys: JobKeys, round_revision: int) -> Compare:
    """The round's record is the one of that revision."""
    return is_at(keys.round, round_revision)


def _leads(keys: JobKeys, control: Control) -> tuple[Compare, ...]:
    """The lead is still the one of ``control``.

    Its create revision shows that, as long as etcd keeps its data. After a loss of data another
    node's lead may have got the very same one, so the leader is compared as well.
    """
    leader = b"" if control.leader is None else values.encode_leader(control.leader)
    return (
        Compare(keys.leader, Target.CREATE, Relation.EQUAL, control.leader_revision),
        Compare(keys.leader, Target.VALUE, Relation.EQUAL, leader),
    )


def _on_record(keys: JobKeys, control: Control, ops: Sequence[Op], *guards: Compare) -> Txn:
    """Do ``ops`` if the round's record is still that of ``control``, and ``guards`` hold. Otherwise
    the result holds the control keys as they are now."""
    return Txn(
        (record_is(keys, control.round_revision), *guards), tuple(ops), (keys.control.read(),)
    )


# --- presences and the lead -----------------------------------------------------------------------


def read_presence(keys: JobKeys, node_id: str) -> Get:
    return Get(keys.node(node_id))


def arrive(
    keys: JobKeys, info: NodeInfo, session: int, control: Control, slice_: Slice | None = None
) -> Txn:
    """Put the presence if the round record is still that of ``control``, and claim a vacant lead.

    ``slice_``: that of a member whose record was put back. The leader may not know the members in
    it.

    On success :func:`leader_after` returns the leader.
    """
    return _on_record(keys, control, _present(keys, info, session, control.formed, slice_))


def restore_presence(
    keys: JobKeys,
    control: Control,
    info: NodeInfo,
    session: int,
    slice_: Slice | None = None,
    *,
    presence_revision: int = 0,
) -> Txn:
    """Put a presence back if the round is as it was, and nobody was declared lost meanwhile.

    ``presence_revision``: that of the presence there is, 0 for none. If it is another one by then,
    this node has arrived again, and this is a copy that comes late. ``slice_``: this member's slice
    of a large world, which may be gone or overwritten as well.
    """
    return _on_record(
        keys,
        control,
        _present(keys, info, session, control.round, slice_),
        is_at(keys.change, control.change_revision),
        is_at(keys.node(info.node_id), presence_revision),
    )


def restore_record(
    keys: JobKeys,
    control: Control,
    record: Round,
    info: NodeInfo,
    session: int,
    *,
    slice_: Slice | None = None,
) -> Txn:
    """Put the round record and a presence back after a loss of data; the first one wins.

    Refused if a run was closed meanwhile: it may have been this one.
    """
    present = _present(keys, info, session, record, slice_)
    ops = (*present, _record(keys, record), Delete(keys.change))
    return _on_record(keys, control, ops, is_at(keys.ended, control.ended_revision))


def _present(
    keys: JobKeys, info: NodeInfo, session: int, record: Round | None, slice_: Slice | None
) -> tuple[Op, ...]:
    """Put the presence; claim the lead if it is vacant; and put a slice of a large world back if it
    is gone, or is not as this member has read it. The leader that formed the round wrote it once
    and for all, so another program has written there.
    """
    put = Put(keys.node(info.node_id), values.encode_node(info), session)
    ops = (put, claim(keys, Leader(info.node_id, info.settings), session))
    if record is None or record.slices is None or slice_ is None:
        return ops
    key = keys.slice(record.number, record.slices.edition, slice_.index)
    back = Put(key, values.encode_slice(slice_.ranks), record.job_lease)
    return (*ops, Txn((Compare(key, Target.VALUE, Relation.EQUAL, back.value),), (), (back,)))


def say_goodbye(keys: JobKeys, info: NodeInfo, session: int, also: Txn | None = None) -> Txn:
    """Mark a presence as leaving, if it is there, so that the others learn why it goes.

    ``also``: :func:`publish_change` of a leader that goes.
    """
    ops = () if also is None else (also,)
    key = keys.node(info.node_id)
    return Txn(
        (Compare(key, Target.LEASE, Relation.EQUAL, session),),
        (Put(key, values.encode_node(info), session), *ops),
    )


def accuse(
    keys: JobKeys, node_id: str, presence: KeyValue, accusation: Accusation, session: int
) -> Txn:
    """Put an accusation in the place of the very presence that was read, on the accuser's session,
    and free the lead if that node holds it.

    Its lease is left alone: a node that lives answers by putting its presence back, and everything
    else that is on the lease is still there then.
    """
    return Txn(
        (
            is_at(presence.key, presence.mod_revision),
            Compare(presence.key, Target.LEASE, Relation.EQUAL, presence.lease_id),
        ),
        (
            Put(keys.node(node_id), values.encode_accusation(accusation), session),
            Txn(
                (Compare(keys.leader, Target.LEASE, Relation.EQUAL, presence.lease_id),),
                (Delete(keys.leader),),
            ),
        ),
    )


def withdraw_accusation(keys: JobKeys, node_id: str, revision: int) -> Txn:
    """Delete the accusation that this node has made at ``revision``, if it is still there."""
    key = keys.node(node_id)
    return Txn((is_at(key, revision),), (Delete(key),))


def claim(keys: JobKeys, leader: Leader, session: int) -> Txn:
    """Take the lead if it is vacant; otherwise the result holds the present leader."""
    return Txn(
        (Compare(keys.leader, Target.CREATE, Relation.EQUAL, 0),),
        (Put(keys.leader, values.encode_leader(leader), session),),
        (Get(keys.leader),),
    )


def leader_after(leader: Leader, result: TxnResult, known: int = 0) -> tuple[Leader, int] | None:
    """Return the leader and its fence (create revision) from the result of :func:`claim`; ``None``
    if there is none, or it is the one whose fence is ``known``."""
    if result.succeeded:
        return leader, result.revision
    (got,) = result.results
    for kv in getattr(got, "kvs", ()):
        if kv.create_revision != known:
            return values.decode_key(values.decode_leader, kv), kv.create_revision
    return None


def resign(keys: JobKeys, control: Control) -> Txn:
    """Give up the lead that this node has in ``control``."""
    return Txn(_leads(keys, control), (Delete(keys.leader),))


# --- rounds ---------------------------------------------------------------------------------------


def publish_change(
    keys: JobKeys, control: Control, change: Change, nodes: Nodes | None = None
) -> Txn:
    """Notify the members that their round is over; fenced by the lead and the record.

    Refused as well if a member that is declared lost has put its presence back meanwhile; an
    accusation or a foreign value that is in its place according to ``nodes`` may stay there.
    """
    record = control.round
    lost = [node for node, how in change.lost.items() if reason_to_leave(how) is None]
    lease = 0 if record is None else record.job_lease
    return _on_record(
        keys,
        control,
        [Put(keys.change, values.encode_change(change), lease)],
        *_leads(keys, control),
        is_at(keys.change, control.change_revision),
        *(is_at(keys.node(node), 0 if nodes is None else nodes.in_place_of(node)) for node in lost),
    )


def close_round(
    keys: JobKeys,
    control: Control,
    nodes_revision: int,
    record: Round,
    audit: Mapping[str, object] | None,
    *,
    epoch_lease: int = 0,
) -> Txn:
    """Publish the new round if the lead, the record and the arrivals are as they were seen.

    The range compare catches every presence written after ``nodes_revision``. A node lost meanwhile
    is not caught; it shows as a change at once. Keys that older rounds left are deleted on the way.
    With ``epoch_lease`` the base of this run's epochs is kept on it for later runs. ``audit`` shows
    people how the round came about: on the lease that outlives the job, if there is one.
    """
    nodes = keys.nodes
    ops: list[Op] = [
        _record(keys, record),
        StoreKeys(keys.store(record.number, record.run)).begin(record.job_lease),
    ]
    if audit is not None:
        lease = epoch_lease or control.epoch_lease or record.job_lease
        ops.append(Put(keys.audit(record.number, record.run), _audit(audit), lease))
    if epoch_lease:
        ops.append(Put(keys.epoch, values.encode_epoch(record.epoch_base), epoch_lease))
    ops += [*_sweep(keys, record), keys.audits.read(count_only=True)]
    return _on_record(
        keys,
        control,
        ops,
        *_leads(keys, control),
        Compare(nodes.start, Target.MOD, Relation.LESS, nodes_revision + 1, nodes.end),
        *_has_slices(keys, record),
    )


def _record(keys: JobKeys, record: Round) -> Put:
    return Put(keys.round, values.encode_round(record), record.job_lease)


def _has_slices(keys: JobKeys, record: Round) -> tuple[Compare, ...]:
    """The slices of a large world are there: etcd may have gone back since they were put. The last
    one was put last."""
    if record.slices is None:
        return ()
    last = keys.slice(record.number, record.slices.edition, record.slices.count - 1)
    return (Compare(last, Target.CREATE, Relation.GREATER, 0),)


def _sweep(keys: JobKeys, record: Round) -> tuple[Op, ...]:
    """Delete the keys of rounds before the last one, whose stores no node reads any more, and those
    of failed attempts to form this one."""
    number = record.number
    ops: list[Op] = []
    if record.slices is not None:
        every = keys.editions(number)
        this = keys.edition(number, record.slices.edition)
        ops += [Delete(every.start, this.start), Delete(this.end, every.end)]
    if number > 2:
        ops += [old.delete() for old in keys.rounds(before=number - 1)]
    return tuple(ops)


def _audit(fields: Mapping[str, object]) -> bytes:
    """Encode an audit; the longest lists are left out if it is too long."""
    kept = {"v": values.VERSION, **fields}
    for name in ("", *_LEFT_OUT_FIRST):
        kept.pop(name, None)
        text = json.dumps(kept, separators=(",", ":"), ensure_ascii=False)
        value = text.encode(errors="backslashreplace")  # also for a lone surrogate this is JSON
        if len(value) <= AUDIT_BYTES:
            break
    return value


def remembered(closed: TxnResult) -> int:
    """Return how many rounds have an audit after :func:`close_round`."""
    count = closed.results[-1]
    return count.count if isinstance(count, GetResult) else 0


def read_history(keys: JobKeys, kept: int) -> Get:
    """Read which rounds are remembered, if so many are to be: see :func:`forget_history`."""
    return keys.audits.read(limit=kept + _FORGOTTEN_AT_ONCE, keys_only=True)


def forget_history(found: GetResult, kept: int) -> Txn | None:
    """Delete the audits of the oldest rounds among those that were read, some at a time; ``None``
    if there are not too many.

    An audit is never put again, so a copy of this that comes late does no harm.
    """
    by_age = sorted(found.kvs, key=lambda kv: kv.mod_revision)
    surplus = by_age[: max(0, len(by_age) - kept)][:_FORGOTTEN_AT_ONCE]
    return Txn((), tuple(Delete(kv.key) for kv in surplus)) if surplus else None


# --- the slices of a large world ------------------------------------------------------------------


def read_slice(keys: JobKeys, record: Round, slices: Slices, node_id: str) -> Get:
    """Read the slice that holds a node's rank in a large world."""
    return Get(keys.slice(record.number, slices.edition, slices.index_of(node_id)))


def publish_slices(
    keys: JobKeys,
    control: Control,
    record: Round,
    slices: Slices,
    ranks: Sequence[Mapping[str, int]],
) -> list[Txn]:
    """Put all slices of a large world, ahead of its record, the last transaction after the others;
    fenced by the lead."""
    batches: list[list[Op]] = [[]]
    size = 0
    for index, part in enumerate(ranks):
        value = values.encode_slice(part)
        if batches[-1] and (len(batches[-1]) == OPS_PER_TXN or size + len(value) > BYTES_PER_TXN):
            batches.append([])
            size = 0
        key = keys.slice(record.number, slices.edition, index)
        batches[-1].append(Put(key, value, record.job_lease))
        size += len(value)
    return [Txn(_leads(keys, control), tuple(batch)) for batch in batches]


def ask_for_slices(keys: JobKeys, control: Control, record: Round) -> Txn:
    """Put the record of a large world, ``record``, once more: its members put their slices back
    then. Fenced by the lead and the record."""
    return _on_record(keys, control, [_record(keys, record)], *_leads(keys, control))


# --- the end of a job -----------------------------------------------------------------------------


def close_job(
    keys: JobKeys,
    control: Control,
    record: Round,
    ended: Sequence[Ended],
    *,
    marker_lease: int,
    ended_lease: int,
) -> Txn:
    """Replace the round record by the closed marker, if it is still the one that was read, and add
    the run to those that are over (``ended``: all of them)."""
    ops = (
        Put(keys.round, values.encode_round(record), marker_lease),
        Put(keys.ended, values.encode_ended(ended), ended_lease),
    )
    return _on_record(keys, control, ops)


def remove_job(keys: JobKeys, control: Control, node_id: str) -> Txn:
    """If no node is left, delete the job's control keys except those that show its end; in any case
    the request that this node, which has left, should leave. Other nodes, which may be cut off,
    keep theirs.

    Succeeds only for the last node, which then revokes the job lease and with it the rest.
    """
    nodes = keys.nodes
    mine = Delete(keys.drain(node_id))
    ops: list[Op] = [Delete(keys.change), mine, *(each.delete() for each in keys.rounds())]
    if control.closure is None:
        ops.append(Delete(keys.round))
    return Txn(
        (
            Compare(nodes.start, Target.CREATE, Relation.EQUAL, 0, nodes.end),
            record_is(keys, control.round_revision),
        ),
        tuple(ops),
        (mine, keys.control.read()),
    )


# --- drains, and nodes that could not join -------------------------------------------------------


def read_drain(keys: JobKeys, node_id: str) -> Get:
    return Get(keys.drain(node_id))


def ask_to_drain(
    keys: JobKeys, node_id: str, drain: Drain, lease: int, *, revision: int = 0
) -> Txn:
    """Ask a node to leave, if one of that id is there.

    The request is on ``lease``, a lease of its own: it is for the node, whichever session that has
    by the time it learns of it. ``revision`` is that of a value there which is no drain (0: there
    is none); an earlier request is kept.
    """
    key = keys.drain(node_id)
    return Txn(
        (Compare(keys.node(node_id), Target.CREATE, Relation.GREATER, 0), is_at(key, revision)),
        (Put(key, values.encode_drain(drain), lease),),
    )


def announce_drain(keys: JobKeys, node_id: str, drain: Drain, session: int) -> Txn:
    """Announce to the others that this node will leave, if its presence is on that session.

    From then on the request is on the session: the node renews it, and it goes with the node. On
    success :func:`lease_before` returns the lease that the request was on.
    """
    key = keys.drain(node_id)
    return Txn(
        (Compare(keys.node(node_id), Target.LEASE, Relation.EQUAL, session),),
        (Get(key), Put(key, values.encode_drain(drain), session)),
    )


def lease_before(result: TxnResult) -> int:
    """Return the lease that a request was on before :func:`announce_drain`, 0 without a request."""
    before = result.results[0]
    return before.kvs[0].lease_id if isinstance(before, GetResult) and before.kvs else 0


def note_refused(keys: JobKeys, refused: Refused, lease: int) -> Txn:
    """Show the job's nodes a node that could not join. The first one is kept: thousands may fail in
    the same way, and every node of the job reads each write."""
    return Txn(
        (is_at(keys.refused, 0),), (Put(keys.refused, values.encode_refused(refused), lease),)
    )

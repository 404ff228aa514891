"""Folds etcd's keys and events into the views that decisions are made on. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import Event, EventKind, GetResult, KeyValue
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import (
    Accusation,
    Accused,
    Control,
    Drain,
    NodeInfo,
    Nodes,
    Presence,
    Refused,
    Round,
    Slice,
    Unreadable,
)

_REMEMBERED_S = 10.0
"""Nodes that went longer ago count as gone since the view began: no decision waits that long."""


def control_from(keys: JobKeys, result: GetResult) -> Control:
    """Build the control view from a read of ``keys.control``.

    Raises :class:`~rdzv_etcd.errors.StateCorruptError`.
    """
    news: dict[str, Any] = {}
    drains: dict[str, Drain] = {}
    for kv in result.kvs:
        if kv.key in keys.drains:
            _put_drain(keys, drains, kv)
        else:
            news |= _put(keys, kv)
    return Control(result.revision, drains=drains, **news)


def control_after(
    keys: JobKeys, control: Control, revision: int, events: Iterable[Event]
) -> Control:
    """Apply a watch batch. Events that ``control`` includes already are skipped, so a view that was
    brought forward by the node's own write can be fed the same events again."""
    news: dict[str, Any] = {}
    for event in events:
        if event.kv.mod_revision <= control.revision:
            continue
        is_put = event.kind is EventKind.PUT
        if event.kv.key in keys.drains:
            drains = news.setdefault("drains", dict(control.drains))
            if is_put:
                _put_drain(keys, drains, event.kv)
            else:
                drains.pop(keys.drained(event.kv.key), None)
        else:
            news |= _put(keys, event.kv) if is_put else _deleted(keys, event.kv.key)
    return replace(control, revision=max(control.revision, revision), **news)


def _put_drain(keys: JobKeys, drains: dict[str, Drain], kv: KeyValue) -> None:
    """Note that a node is to leave; what cannot be read asks nobody to, and stops nothing."""
    node_id = keys.drained(kv.key)
    try:
        drains[node_id] = values.decode_key(values.decode_drain, kv)
    except StateCorruptError:
        drains.pop(node_id, None)


def _refused(kv: KeyValue) -> Refused | None:
    """A value that cannot be read, or would stay forever, is shown nowhere, and stops nothing."""
    try:
        return values.decode_key(values.decode_refused, kv) if kv.lease_id else None
    except StateCorruptError:
        return None


def _put(keys: JobKeys, kv: KeyValue) -> dict[str, Any]:
    """What a key's value says of the control view."""
    if kv.key == keys.round:
        record = values.decode_key(values.decode_round, kv)
        return {"round": record, "round_revision": kv.mod_revision}
    if kv.key == keys.leader:
        leader = values.decode_key(values.decode_leader, kv)
        return {"leader": leader, "leader_revision": kv.create_revision}
    if kv.key == keys.change:
        change = values.decode_key(values.decode_change, kv)
        return {"change": change, "change_revision": kv.mod_revision}
    if kv.key == keys.ended:
        ended = values.decode_key(values.decode_ended, kv)
        return {"ended": ended, "ended_revision": kv.mod_revision, "ended_lease": kv.lease_id}
    if kv.key == keys.epoch:
        base = values.decode_key(values.decode_epoch, kv)
        return {"epoch_base": base, "epoch_lease": kv.lease_id}
    is_refused = kv.key == keys.refused
    return {"refused": _refused(kv), "refused_lease": kv.lease_id} if is_refused else {}


def _deleted(keys: JobKeys, key: bytes) -> dict[str, Any]:
    """What the loss of a key says of the control view."""
    if key == keys.round:
        return {"round": None, "round_revision": 0}
    if key == keys.leader:
        return {"leader": None, "leader_revision": 0}
    if key == keys.change:
        return {"change": None, "change_revision": 0}
    if key == keys.ended:
        return {"ended": (), "ended_revision": 0, "ended_lease": 0}
    if key == keys.epoch:
        return {"epoch_base": 0, "epoch_lease": 0}
    return {"refused": None, "refused_lease": 0} if key == keys.refused else {}


def slices_from(
    result: GetResult, size: int
) -> tuple[list[dict[str, int]], list[StateCorruptError]]:
    """Return the ranks in every slice that was read of a world of ``size``, and what is wrong with
    those that cannot be read: they are missing, like any that is not there."""
    decode = partial(values.decode_slice, size=size)
    found: list[dict[str, int]] = []
    problems: list[StateCorruptError] = []
    for kv in result.kvs:
        try:
            found.append(values.decode_key(decode, kv))
        except StateCorruptError as problem:
            problems.append(problem)
    return found, problems


def slice_from(record: Round, node_id: str, result: GetResult) -> Slice | None:
    """Build the slice of ``record`` from a read of the one that ``node_id`` falls into; ``None`` if
    it is not there. Raises StateCorruptError."""
    if record.slices is None:
        return None
    found, problems = slices_from(result, record.slices.size)
    if problems:
        raise problems[0]
    for ranks in found:
        return Slice(record.run, record.number, record.slices.index_of(node_id), ranks)
    return None


def nodes_from(
    keys: JobKeys, result: GetResult, now_s: float, before: Nodes | None = None
) -> Nodes:
    """Build the presence view from a read of ``keys.nodes``.

    What is as it was in ``before`` keeps the time at which it was seen, or was seen to be gone: a
    fresh read does not make anybody's wait begin again.
    """
    present: dict[str, Presence] = {}
    unreadable: dict[str, Unreadable] = {}
    accused: dict[str, Accused] = {}
    known = {} if before is None else before.present
    for kv in result.kvs:
        node_id = keys.node_id(kv.key)
        presence = _place(keys, kv, now_s)
        if isinstance(presence, Unreadable):
            unreadable[node_id] = presence
            continue
        if isinstance(presence, Accused):
            earlier_one = None if before is None else before.accused.get(node_id)
            same = earlier_one is not None and earlier_one.mod_revision == presence.mod_revision
            accused[node_id] = earlier_one if earlier_one is not None and same else presence
            continue
        earlier = known.get(node_id)
        same = earlier is not None and earlier.mod_revision == presence.mod_revision
        present[node_id] = earlier if earlier is not None and same else presence
    if before is None:
        return Nodes(
            result.revision, present, since_s=now_s, unreadable=unreadable, accused=accused
        )
    missed = dict.fromkeys(known.keys() - present.keys(), now_s)
    gone = {node_id: at_s for node_id, at_s in before.gone.items() if node_id not in present}
    left = {node: reason for node, reason in before.left.items() if node not in present}
    return Nodes(result.revision, present, left, before.since_s, missed | gone, unreadable, accused)


def nodes_after(
    keys: JobKeys, nodes: Nodes, revision: int, events: Iterable[Event], now_s: float
) -> Nodes:
    """Apply a watch batch; events that ``nodes`` includes already are skipped."""
    present = dict(nodes.present)
    left = dict(nodes.left)
    gone = {node_id: at_s for node_id, at_s in nodes.gone.items() if now_s - at_s < _REMEMBERED_S}
    unreadable = dict(nodes.unreadable)
    accused = dict(nodes.accused)
    for event in events:
        if event.kv.mod_revision <= nodes.revision:
            continue
        node_id = keys.node_id(event.kv.key)
        was_readable = unreadable.pop(node_id, None) is None
        accused.pop(node_id, None)
        presence = _place(keys, event.kv, now_s) if event.kind is EventKind.PUT else None
        if isinstance(presence, Presence):
            present[node_id] = presence
            left.pop(node_id, None)
            gone.pop(node_id, None)
            continue
        if isinstance(presence, Unreadable):
            unreadable[node_id] = presence
        elif presence is not None:
            accused[node_id] = presence
        last = present.pop(node_id, None)
        if was_readable:
            gone[node_id] = now_s
        if last is not None and last.info.leaving is not None:
            left[node_id] = last.info.leaving
    revision = max(nodes.revision, revision)
    return Nodes(revision, present, left, nodes.since_s, gone, unreadable, accused)


def place_in(keys: JobKeys, kv: KeyValue) -> NodeInfo | Accusation:
    """Read one key among the presences: a node, or why another one says that it is gone.

    Raises StateCorruptError.
    """
    node_id = keys.node_id(kv.key)

    def decode(key: bytes, value: bytes) -> NodeInfo | Accusation:
        if not kv.lease_id:
            raise StateCorruptError(key.decode(errors="replace"), "it is not on a node's lease")
        if keys.node(node_id) != key:
            raise StateCorruptError(key.decode(errors="replace"), "the key is not UTF-8")
        return values.decode_place(key, node_id, value)

    return values.decode_key(decode, kv)


def _place(keys: JobKeys, kv: KeyValue, now_s: float) -> Presence | Accused | Unreadable:
    """What cannot be a presence does not keep the others from being read: whoever may write there
    could stop the job with it."""
    try:
        info = place_in(keys, kv)
    except StateCorruptError as error:
        return Unreadable(str(error), kv.mod_revision)
    if isinstance(info, Accusation):
        return Accused(info, kv.mod_revision, now_s)
    return Presence(info, kv.create_revision, kv.mod_revision, now_s, kv.lease_id)


# --- a loss of data -----------------------------------------------------------------------------
#
# A restored etcd may count on from a higher revision (``--bump-revision``), or other applications
# may have written as much again by the time it is read. But its keys are as they were.


def control_went_back(before: Control, now: Control) -> bool:
    """Whether a key is there at an earlier revision than before, in a view that is not older."""
    revisions = (
        (before.round_revision, now.round_revision),
        (before.leader_revision, now.leader_revision),
        (before.change_revision, now.change_revision),
        (before.ended_revision, now.ended_revision),
    )
    return any(0 < is_at < was_at <= now.revision for was_at, is_at in revisions)


def nodes_went_back(before: Nodes, now: Nodes) -> bool:
    """Whether something stands in a node's place that was written before the earlier view, and was
    not in that."""
    return any(
        0 < _revision_in(now, node_id) <= before.revision
        and _revision_in(now, node_id) != _revision_in(before, node_id)
        for node_id in (*now.present, *now.accused)
    )


def _revision_in(nodes: Nodes, node_id: str) -> int:
    presence = nodes.present.get(node_id)
    return nodes.in_place_of(node_id) if presence is None else presence.mod_revision

"""Folds etcd's keys and events into the views that decisions are made on. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

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
    Round,
    Slice,
    Unreadable,
)

T = TypeVar("T")

_REMEMBERED_S = 10.0
"""Nodes that went longer ago count as gone since the view began: no decision waits that long."""


def control_from(keys: JobKeys, result: GetResult) -> Control:
    """Build the control view from a read of ``keys.control``.

    Raises :class:`~rdzv_etcd.errors.StateCorruptError`.
    """
    events = (Event(EventKind.PUT, kv) for kv in result.kvs)
    return control_after(keys, Control(0), result.revision, events)


def control_after(
    keys: JobKeys, control: Control, revision: int, events: Iterable[Event]
) -> Control:
    """Apply a watch batch. Events that ``control`` includes already are skipped, so a view that was
    brought forward by the node's own write can be fed the same events again."""
    news: dict[str, Any] = {}
    for event in events:
        kv = event.kv
        if kv.mod_revision <= control.revision:
            continue
        if event.kind is not EventKind.PUT:
            kv = KeyValue(kv.key, b"", 0, 0, 0)
        if kv.key in keys.drains:
            _note_drain(news.setdefault("drains", dict(control.drains)), keys, kv)
        else:
            news |= _news(keys, kv)
    return replace(control, revision=max(control.revision, revision), **news)


def _note_drain(drains: dict[str, Drain], keys: JobKeys, kv: KeyValue) -> None:
    """Note a request to leave, or its absence; an unreadable one asks no node to leave, and stops
    nothing."""
    node_id = keys.drained(kv.key)
    drains.pop(node_id, None)
    with contextlib.suppress(StateCorruptError):
        drains[node_id] = values.decode_key(values.decode_drain, kv)


def _news(keys: JobKeys, kv: KeyValue) -> dict[str, Any]:
    """Return what a key changes in the control view; the revisions of an absent key are 0."""

    def value(decode: Callable[[bytes, bytes], T], absent: T | None = None) -> T | None:
        return values.decode_key(decode, kv) if kv.mod_revision else absent

    news: dict[str, Any] = {}
    match kv.key:
        case keys.round:
            news = {"round": value(values.decode_round), "round_revision": kv.mod_revision}
        case keys.leader:
            news = {"leader": value(values.decode_leader), "leader_revision": kv.create_revision}
        case keys.change:
            news = {"change": value(values.decode_change), "change_revision": kv.mod_revision}
        case keys.ended:
            news = {
                "ended": value(values.decode_ended, ()),
                "ended_revision": kv.mod_revision,
                "ended_lease": kv.lease_id,
            }
        case keys.epoch:
            news = {"epoch_base": value(values.decode_epoch, 0), "epoch_lease": kv.lease_id}
        case keys.refused:
            refused = None
            with contextlib.suppress(StateCorruptError):  # it is shown nowhere, and stops nothing
                if kv.lease_id:  # otherwise it would stay forever
                    refused = values.decode_key(values.decode_refused, kv)
            news = {"refused": refused, "refused_lease": kv.lease_id}
    return news


def slices_from(
    result: GetResult, size: int
) -> tuple[list[dict[str, int]], list[StateCorruptError]]:
    """Return the ranks in every slice that was read of a world of ``size``, and the errors of those
    that cannot be read: these are missing, like a slice that is absent."""
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

    Everything that is as it was in ``before`` keeps the time at which it was seen, or was seen to
    be gone: a fresh read makes no wait begin again.
    """
    view = Nodes(0, since_s=now_s) if before is None else before
    read = [(keys.node_id(kv.key), kv) for kv in result.kvs]
    changes = [(node_id, kv) for node_id, kv in read if kv.mod_revision != view.place(node_id)]
    there = dict(read)
    gone = [
        (node_id, None)
        for node_id in (*view.present, *view.accused, *view.unreadable)
        if node_id not in there
    ]
    return _folded(keys, view, result.revision, [*changes, *gone], now_s)


def nodes_after(
    keys: JobKeys, nodes: Nodes, revision: int, events: Iterable[Event], now_s: float
) -> Nodes:
    """Apply a watch batch; events that ``nodes`` includes already are skipped."""
    changes = (
        (keys.node_id(event.kv.key), event.kv if event.kind is EventKind.PUT else None)
        for event in events
        if event.kv.mod_revision > nodes.revision
    )
    return _folded(keys, nodes, max(nodes.revision, revision), changes, now_s)


def _folded(
    keys: JobKeys,
    nodes: Nodes,
    revision: int,
    changes: Iterable[tuple[str, KeyValue | None]],
    now_s: float,
) -> Nodes:
    """Return the view with each change by node id: the value now in the node's place, if any."""
    present, left = dict(nodes.present), dict(nodes.left)
    unreadable, accused = dict(nodes.unreadable), dict(nodes.accused)
    gone = {node_id: at_s for node_id, at_s in nodes.gone.items() if now_s - at_s < _REMEMBERED_S}
    for node_id, kv in changes:
        was_readable = unreadable.pop(node_id, None) is None
        accused.pop(node_id, None)
        presence = None if kv is None else _place(keys, kv, now_s)
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
    """Read one key. A value that cannot be a presence does not keep the others from being read:
    otherwise a foreign program could stop the job with it."""
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
    """Whether a node's place holds a value that was written before the earlier view, and was not in
    that."""
    return any(
        0 < now.place(node_id) <= before.revision and now.place(node_id) != before.place(node_id)
        for node_id in (*now.present, *now.accused)
    )

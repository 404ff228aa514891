"""Tells from what is read that etcd has gone back, when its revision does not show that. Pure.

A restored etcd may count on from a higher revision (``--bump-revision``), or other applications may
have written as much again by the time it is read. But its keys are as they were.
"""

from __future__ import annotations

from rdzv_etcd.protocol.model import Control, Nodes


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

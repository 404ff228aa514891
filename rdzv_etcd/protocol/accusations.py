"""Decides when a node that another one has found to be gone counts as lost. Pure.

An accusation stands in the place of the presence, and whoever lives and reaches etcd puts its
presence back: a wrong one costs one write and no restart. How long that may take depends on how
certain the accuser is, and on how far away etcd is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

from rdzv_etcd.protocol.model import Accusation, Nodes

ANSWER_GRACE_S = 0.03
"""For a node whose process is gone, as its host says: only who answers for it can be wrong."""

ABSENCE_GRACE_S = 0.3
"""For a node that is silent, or whose presence is just gone: now and then etcd revokes the lease of
a node that has renewed it, which then puts its presence back (see ``node/recover.py``)."""

FEW_AT_ONCE = 2
"""If more than this many are accused at about the same time, it may be the network that is at
fault, and all of them get the longer time."""


ROUND_TRIPS = 4
"""An answer takes about three round trips to etcd: the node is told, looks, writes, and the leader
is told. One more in case that something has to be sent again."""


def answer_grace_s(round_trip_s: float, accusation: Accusation) -> float:
    """After how long the accuser looks whether it was answered; ``round_trip_s`` as below. Who is
    dead as its host says is taken to be that sooner, but not as soon as the leader does."""
    grace_s = 3 * ANSWER_GRACE_S if accusation.is_certain else ABSENCE_GRACE_S
    return grace_s + ROUND_TRIPS * max(round_trip_s, accusation.round_trip_ms / 1000)


def lost_from_s(
    nodes: Nodes, node_id: str, trust_absence_s: float = 0.0, round_trip_s: float = 0.0
) -> float:
    """From when on (on the leader's clock) a node without presence counts as lost.

    ``round_trip_s`` is how long etcd takes to answer the leader; the accused may be farther away.
    Before ``trust_absence_s`` nobody does because it is silent: the leader was cut off itself a
    moment ago, and others may be coming back. That a process is gone is true all the same, unless
    it was said before etcd went back: see :func:`doubted`.
    """
    accused, far_s = nodes.accused.get(node_id), ROUND_TRIPS * round_trip_s
    if accused is None:
        return max(trust_absence_s, nodes.absent_since_s(node_id) + ABSENCE_GRACE_S + far_s)
    far_s = max(far_s, ROUND_TRIPS * accused.accusation.round_trip_ms / 1000)
    if not accused.accusation.is_certain:
        return max(trust_absence_s, accused.seen_s + ABSENCE_GRACE_S + far_s)
    grace_s = ABSENCE_GRACE_S if _are_many(nodes, accused.seen_s) else ANSWER_GRACE_S
    return accused.seen_s + far_s + grace_s


def doubted(nodes: Nodes, up_to: int) -> Nodes:
    """Return ``nodes`` with nothing certain in what was said up to that revision: etcd has gone
    back, and who was accused before that may have answered since, or have come back."""
    if not any(one.mod_revision <= up_to for one in nodes.accused.values()):
        return nodes
    accused = {
        node_id: one
        if one.mod_revision > up_to
        else replace(one, accusation=replace(one.accusation, is_certain=False))
        for node_id, one in nodes.accused.items()
    }
    return replace(nodes, accused=accused)


def _are_many(nodes: Nodes, seen_s: float) -> bool:
    """Whether more than a few were accused at about that time."""
    beside = (
        other for other in nodes.accused.values() if abs(other.seen_s - seen_s) < ABSENCE_GRACE_S
    )
    return next(islice(beside, FEW_AT_ONCE, None), None) is not None


def may_answer_until_s(nodes: Nodes, now_s: float, round_trip_s: float = 0.0) -> float:
    """Until when some node that was accused may still answer; minus infinity if there is none."""
    times_s = (lost_from_s(nodes, node_id, round_trip_s=round_trip_s) for node_id in nodes.accused)
    return min((time_s for time_s in times_s if now_s < time_s), default=-math.inf)

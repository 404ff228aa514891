"""Decides who watches whom, and when a node that another one has found to be gone counts as lost.

As in SWIM, a death is suspected, and then refuted or confirmed. A node that *suspects* another one
puts an accusation in the place of its presence. A node that lives and reaches etcd *refutes* it by
putting its presence back: a wrong accusation costs one write and no restart. If that has not
happened in time, the leader *confirms* it by declaring the node lost. How long this may take
depends on how certain the accuser is, and on etcd's latency. An accuser that is refuted trusts its
own evidence less: see :class:`LocalHealth`.

The members of a world are a ring in the order of their ranks, and each watches the next one: one
link per node, however large the world is, and one node that acts when another dies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rdzv_etcd.protocol.model import Accusation, Change, Nodes, Round
from rdzv_etcd.world_change import reason_to_leave

ANSWER_GRACE_S = 0.03
"""For a node whose host says that the process is gone: hardly ever wrong."""

ABSENCE_GRACE_S = 0.3
"""For a node that is silent, or whose presence has just gone: now and then etcd revokes the lease
of a node that has renewed it, which then puts its presence back (see ``node/recover.py``)."""

FEW_AT_ONCE = 2
"""If more nodes than this are accused at about the same time, the network may be at fault, and all
of them get the longer time."""

ROUND_TRIPS = 4
"""An answer takes about three round trips to etcd: the node gets the event, reads, writes, and the
leader gets the event. One more for a request that has to be sent again."""


def answer_grace_s(round_trip_s: float, accusation: Accusation) -> float:
    """After how long the accuser checks for an answer; ``round_trip_s`` as below. Sooner if the
    accusation is certain, but not as soon as the leader."""
    grace_s = 3 * ANSWER_GRACE_S if accusation.is_certain else ABSENCE_GRACE_S
    return grace_s + ROUND_TRIPS * max(round_trip_s, accusation.round_trip_ms / 1000)


def lost_from_s(
    nodes: Nodes, node_id: str, trust_absence_s: float = 0.0, round_trip_s: float = 0.0
) -> float:
    """From when on (on the leader's clock) a node without a presence counts as lost.

    ``round_trip_s`` is etcd's latency for the leader; the accused may be farther away. Before
    ``trust_absence_s`` no silent node counts as lost: the leader was cut off itself a moment ago,
    and others may be returning. A certain accusation holds all the same, unless it is older than a
    loss of data: see :func:`doubted`.
    """
    accused, far_s = nodes.accused.get(node_id), ROUND_TRIPS * round_trip_s
    if accused is None:
        return max(trust_absence_s, nodes.absent_since_s(node_id) + ABSENCE_GRACE_S + far_s)
    far_s = max(far_s, ROUND_TRIPS * accused.accusation.round_trip_ms / 1000)
    if not accused.accusation.is_certain:
        return max(trust_absence_s, accused.seen_s + ABSENCE_GRACE_S + far_s)
    grace_s = ABSENCE_GRACE_S if _are_many(nodes, accused.seen_s) else ANSWER_GRACE_S
    return accused.seen_s + far_s + grace_s


def _are_many(nodes: Nodes, seen_s: float) -> bool:
    """Whether more than a few nodes were accused at about that time."""
    beside = (
        other for other in nodes.accused.values() if abs(other.seen_s - seen_s) < ABSENCE_GRACE_S
    )
    return next(islice(beside, FEW_AT_ONCE, None), None) is not None


def doubted(nodes: Nodes, up_to: int) -> Nodes:
    """Return ``nodes`` with no certain accusation up to that revision: etcd has lost data, and a
    node that was accused before may have answered since, or have returned."""
    if not any(one.mod_revision <= up_to for one in nodes.accused.values()):
        return nodes
    accused = {
        node_id: one
        if one.mod_revision > up_to
        else replace(one, accusation=replace(one.accusation, is_certain=False))
        for node_id, one in nodes.accused.items()
    }
    return replace(nodes, accused=accused)


def may_answer_until_s(
    nodes: Nodes, accused: Iterable[str], now_s: float, round_trip_s: float = 0.0
) -> float:
    """Until when one of these accused nodes may still answer; minus infinity if there is none."""
    times_s = (lost_from_s(nodes, node_id, round_trip_s=round_trip_s) for node_id in accused)
    return min((time_s for time_s in times_s if now_s < time_s), default=-math.inf)


# --- who watches whom, and who may accuse ---------------------------------------------------------

_LONGEST_ROOM_S = 0.3
_ROOM_PER_MEMBER_S = 0.005


def ring_after(members: Sequence[str], node_id: str) -> tuple[str, ...]:
    """The others in the order in which this node watches them: the next ranks first."""
    if node_id not in members:
        return ()
    at = members.index(node_id)
    return (*members[at + 1 :], *members[:at])


def room_for_a_world_s(size: int) -> float:
    """How long after a world of this size was formed its members begin to watch each other, and
    each its own presence: first the record has to reach all of them, and the agents exchange their
    ranks."""
    return min(_LONGEST_ROOM_S, size * _ROOM_PER_MEMBER_S)


QUIET_S = 60.0
"""A node that has refuted an accusation is not accused again by the same node for this long."""
MOST_MISTAKES = 3
"""A node that was refuted this often within that time accuses no other: its own connections are at
fault."""


@dataclass(slots=True)
class LocalHealth:
    """How far a node may trust what it sees of others, by how often that was refuted lately.

    As the local health of Lifeguard (https://arxiv.org/abs/1707.00788): whose accusations are
    refuted is itself the one that is slow, or cut off.
    """

    _refuted_s: dict[str, float] = field(default_factory=dict)
    """The nodes that were accused wrongly, and when they were found to live."""

    def note_refuted(self, node_id: str, now_s: float) -> None:
        """Note that a node was accused, and lives."""
        recent = {one: at_s for one, at_s in self._refuted_s.items() if now_s < at_s + QUIET_S}
        self._refuted_s = recent | {node_id: now_s}

    def quiet_until_s(self, node_id: str, now_s: float) -> float:
        """Until when this node does not accuse that one; in the past if it may."""
        recent = [at_s for at_s in self._refuted_s.values() if now_s < at_s + QUIET_S]
        if len(recent) >= MOST_MISTAKES:
            return min(recent) + QUIET_S
        return self._refuted_s.get(node_id, -QUIET_S) + QUIET_S


def follows_loss(record: Round | None, change: Change | None) -> bool:
    """Whether the world before ``record`` ended because members were lost."""
    if record is None or change is None:
        return False
    is_last = (change.run, change.round) == (record.run, record.number - 1)
    return is_last and any(names_dead(change, node_id) for node_id in change.lost)


def names_dead(change: Change | None, node_id: str) -> bool:
    """Whether ``change`` names this node as lost, and not as one that has left."""
    how = None if change is None else change.lost.get(node_id)
    return how is not None and reason_to_leave(how) is None

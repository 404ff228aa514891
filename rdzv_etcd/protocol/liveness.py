"""Decides who watches whom, and when a node that another one has found to be gone counts as lost.

An accusation stands in the place of the presence, and whoever lives and reaches etcd puts its
presence back: a wrong one costs one write and no restart. How long that may take depends on how
certain the accuser is, and on how far away etcd is.

The members of a world are a ring in the order of their ranks, and each watches the next one: one
link per node, however large the world is, and one node that acts when another dies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rdzv_etcd.protocol.model import Accusation, Change, Nodes, Round
from rdzv_etcd.world_change import reason_to_leave

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


# --- who watches whom, and what a broken link says of the other end ------------------------------


QUIET_S = 60.0
"""A node that has answered an accusation is not accused again for so long by the same one."""
MOST_MISTAKES = 3
"""A node that was wrong this often within that time accuses nobody: it is the one that hears
badly."""

LONGEST_ROOM_S = 0.3
"""By then each member can answer an accusation."""
_ROOM_PER_MEMBER_S = 0.005


def ring_after(members: Sequence[str], node_id: str) -> tuple[str, ...]:
    """The others in the order in which this node watches them: the next ranks first."""
    if node_id not in members:
        return ()
    at = members.index(node_id)
    return (*members[at + 1 :], *members[:at])


def ring_in_slice(ranks: Mapping[str, int], node_id: str) -> tuple[str, ...]:
    """The same in a large world, of which this node knows one slice."""
    return ring_after(sorted(ranks, key=lambda member: ranks[member]), node_id)


def room_for_a_world_s(size: int) -> float:
    """How long after a world of this size was formed its members begin to look after each other:
    while many are still being told of it, and while agents exchange their ranks, there are better
    things to do."""
    return min(LONGEST_ROOM_S, size * _ROOM_PER_MEMBER_S)


@dataclass(slots=True)
class Mistakes:
    """Whom this node has accused wrongly, and when."""

    _answered_s: dict[str, float] = field(default_factory=dict)

    def note(self, node_id: str, now_s: float) -> None:
        """Note that the node has answered."""
        recent = {one: at_s for one, at_s in self._answered_s.items() if now_s < at_s + QUIET_S}
        self._answered_s = recent | {node_id: now_s}

    def quiet_until_s(self, node_id: str, now_s: float) -> float:
        """Until when this node accuses that one of nothing; in the past if it may."""
        recent = [at_s for at_s in self._answered_s.values() if now_s < at_s + QUIET_S]
        if len(recent) >= MOST_MISTAKES:
            return min(recent) + QUIET_S
        return self._answered_s.get(node_id, -QUIET_S) + QUIET_S


def follows_loss(record: Round | None, change: Change | None) -> bool:
    """Whether the world before ``record`` ended because members were lost."""
    if record is None or change is None:
        return False
    is_last = (change.run, change.round) == (record.run, record.number - 1)
    return is_last and any(names_dead(change, node_id) for node_id in change.lost)


def names_dead(change: Change | None, node_id: str) -> bool:
    """Whether ``change`` says of this node that it was lost, and had not left."""
    how = None if change is None else change.lost.get(node_id)
    return how is not None and reason_to_leave(how) is None

"""Decides who watches whom, and what a broken link says of the other end. Pure.

The members of a world are a ring in the order of their ranks, and each watches the next one: one
link per node, however large the world is, and one node that acts when another dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rdzv_etcd.protocol.model import Change, Round, reason_to_leave
from rdzv_etcd.protocol.names import display_name

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


def how_gone(by: str, why: str, after_s: float | None = None) -> str:
    """How a node was lost whose process is gone; ``by``: who saw it, ``after_s``: seconds since its
    link ended."""
    after = "" if after_s is None else f" after {1000 * after_s:.0f} ms"
    return f"its process is gone ({why}, seen by {by}{after})"


def how_silent(by: str, why: str) -> str:
    """How a node was lost that did not answer, neither its neighbour nor etcd."""
    return f"its host is silent (seen by {by}: {why})"


def how_reported(by: str, evidence: str) -> str:
    """How a node was lost of which a program has said that it is dead."""
    return f"reported dead: {evidence} (by {display_name(by)})"

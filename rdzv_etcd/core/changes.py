"""Decides when a formed round must be re-formed, and what that means to a node. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from rdzv_etcd.core.model import Change, Closure, Control, Loss, Nodes, Round, is_unknown
from rdzv_etcd.core.waiting import sort_crowd

ABSENCE_GRACE_S = 0.3
"""How long a member may be without presence before that counts: now and then etcd revokes the lease
of a node that has renewed it, which then puts its presence back (see ``group/presence.py``)."""

NAMES_IN_CHANGE = 32
"""How many waiters, and how many lost members, a change names."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the members that their round is over."""

    change: Change


@dataclass(frozen=True, slots=True)
class Healthy:
    """Nothing to tell, or not before ``until_s`` on the leader's clock."""

    until_s: float | None = None
    reason: str = ""


def decide_change(
    control: Control,
    nodes: Nodes,
    now_s: float,
    *,
    trust_absence_s: float,
    unknown_until_s: float = math.inf,
) -> Publish | Healthy:
    """Say whether the formed round is over.

    Before ``trust_absence_s`` a member without presence is not declared lost: the leader was cut
    off itself a moment ago, and the others may be coming back (see docs: being lost is an act).
    Nor is one whose presence went less than :data:`ABSENCE_GRACE_S` ago. A newcomer is a reason
    only if the next world would be larger with it.

    A member whose name is not known is not declared lost before ``unknown_until_s`` while a node is
    there that may be it: that node lives, so it will put its slice back or arrive again.
    """
    formed = control.formed
    if formed is None or control.open_change is not None:
        return Healthy()
    crowd = sort_crowd(control, nodes, formed.settings)
    lost = dict.fromkeys(crowd.leaving, Loss.LEFT.value)
    may_return: list[float] = []
    for node_id in crowd.absent:
        until_s = max(trust_absence_s, nodes.absent_since_s(node_id) + ABSENCE_GRACE_S)
        if crowd.unplaced and is_unknown(node_id):
            until_s = max(until_s, unknown_until_s)
        if now_s < until_s:
            may_return.append(until_s)
        else:
            lost[node_id] = Loss.EXPIRED.value
    live = len(crowd.expected) + len(crowd.returning) + len(may_return)
    settings = formed.settings
    possible = min(settings.max_nodes, live + len(crowd.newcomers))
    grows = possible // settings.node_unit * settings.node_unit > formed.size
    if lost or crowd.returning or grows:
        waiters = crowd.pool if grows or lost else crowd.returning
        return Publish(
            _named_in_part(formed, [presence.info.node_id for presence in waiters], lost)
        )
    if may_return:
        until_s = min(may_return)
        reason = f"{len(may_return)} members are not back yet"
        return Healthy(None if until_s == math.inf else until_s, reason)
    return Healthy()


def _named_in_part(formed: Round, waiters: Sequence[str], lost: Mapping[str, str]) -> Change:
    return Change(
        formed.run,
        formed.number,
        tuple(waiters[:NAMES_IN_CHANGE]),
        dict(islice(lost.items(), NAMES_IN_CHANGE)),
        max(0, len(waiters) - NAMES_IN_CHANGE) + max(0, len(lost) - NAMES_IN_CHANGE),
    )


def waiting_count(
    control: Control, world: Round | None, evicted: bool, closure: Closure | None = None
) -> int:
    """How many nodes wait, as torch's agent asks: above zero means "stop and re-join".

    ``world`` is the round that the node works in, its epoch fixed (``None``: none). Above zero as
    well when a member was lost, when a newer round was formed without this node, and when the job
    failed.
    ``closure`` is how the node saw its job end: it outlives the marker, and a new run's rounds are
    no concern of a node that is still finishing the old one.
    """
    if world is None:
        return 0
    if evicted:
        return 1
    closure = closure if closure is not None else control.end_of(world.origin)
    if closure is not None:
        return 0 if closure.succeeded else 1
    if control.round is not None and not control.holds(world):
        # An older record: the feed lags behind what this node was told, or etcd went back, and then
        # this world's members put their record into its place.
        return 0 if control.is_behind(world) else 1
    change = control.change
    if change is not None and change.concerns(world):
        return max(1, change.count)
    return 0


class Recovery(Enum):
    """What a member does whose session or round record is gone."""

    NOTHING = "all is well"
    PRESENCE = "put the presence back"
    RECORD = "put the round record and the presence back"
    REJOIN = "it is a newcomer"


def decide_recovery(control: Control, world: Round) -> Recovery:
    """Say what a member of ``world`` without a session may put back, given a fresh ``control``.

    The later world wins: an older record in a fresh view means that etcd went back (it was restored
    from a snapshot, or lost its tail), and that those who formed it knew of no later one.
    """
    if control.end_of(world.origin) is not None:
        return Recovery.NOTHING
    if control.round is None or control.is_behind(world):
        return Recovery.RECORD
    if not control.holds(world) or control.open_change is not None:
        return Recovery.REJOIN
    return Recovery.PRESENCE


def claim_delay_s(rank: int | None, size: int, jitter_s: float) -> float:
    """How long to wait before claiming a vacant lead: members first, in rank order.

    ``size`` is that of the formed round, 0 without one, and ``rank`` the node's in it; ``jitter_s``
    a random number of seconds below 0.02, drawn by the caller. The first ranks are far apart, so
    that one claims and the others hear of it in time; from rank 50 on closer, because a whole rack
    may be gone.
    """
    if size == 0:
        return jitter_s
    if rank is None:
        return max(0.3, _turn_s(size) + 0.02) + jitter_s
    return 0.0 if rank == 0 else _turn_s(rank) + jitter_s


def _turn_s(rank: int) -> float:
    """5 ms for each of the first 50 ranks, 1 ms to rank 1,000, then 0.25 ms."""
    return 0.005 * min(rank, 50) + 0.001 * _between(rank, 50, 1000) + 0.00025 * max(0, rank - 1000)


def _between(rank: int, first: int, last: int) -> int:
    return max(0, min(rank, last) - first)

"""Decides when the next round is closed, and with which nodes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rdzv_etcd.protocol import describe
from rdzv_etcd.protocol.census import Census, take_census
from rdzv_etcd.protocol.liveness import may_answer_until_s, names_dead
from rdzv_etcd.protocol.model import Control, NodeInfo, Nodes, Presence
from rdzv_etcd.protocol.ranks import assign_ranks
from rdzv_etcd.protocol.segments import (
    Segment,
    cannot_stay,
    choose,
    incomplete,
    ranks_in,
    sizes_of_domains,
)
from rdzv_etcd.settings import JobSettings, Timing

_HEIRS = 32
"""One of them is enough, and every node reads their names."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the round with these nodes; the index is the rank."""

    world: tuple[NodeInfo, ...]
    expelled: tuple[str, ...]
    reason: str
    heirs: tuple[str, ...] = ()
    """See :attr:`~rdzv_etcd.protocol.model.Round.heirs`."""
    finished: tuple[str, ...] = ()
    """Live nodes that have finished."""
    domains: Mapping[str, int] = field(default_factory=dict)
    """See :attr:`~rdzv_etcd.protocol.model.Round.domains`."""


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Do nothing until something changes, or until ``until_s`` on the leader's clock."""

    until_s: float | None = None
    reason: str = ""


def decide_close(
    control: Control,
    nodes: Nodes,
    settings: JobSettings,
    timing: Timing,
    now_s: float,
    *,
    opened_s: float,
    give_up_s: float = math.inf,
    round_trip_s: float = 0.0,
) -> Close | KeepWaiting:
    """Decide whether to close the next round now; ``settings`` are the job's.

    All on the leader's clock: nodes could arrive for this round from ``opened_s`` on, as far as it
    knows, and it stops waiting itself at ``give_up_s``. ``round_trip_s`` is etcd's latency.

    * all seats taken and no other node expected: at once;
    * at least ``min_nodes`` and every live member of the previous round back: after ``settle``;
    * at least ``min_nodes``, but live members that would be in it are not back yet: after
      ``rejoin``, and not sooner, because a world without them might lose their work;
    * at least ``min_nodes``, and no previous round to expect nodes from: after ``last_call``;
    * fewer: wait; also if the number of the round has no successor.

    Nodes count only as far as they form whole segments (:mod:`rdzv_etcd.protocol.segments`).

    A round that can be closed is closed before the leader gives up.
    """
    stuck = describe.no_successor(control)
    if stuck:
        return KeepWaiting(None, stuck)
    if control.round is None and len(nodes.present) < settings.min_nodes:
        # The common case while a big job starts: do not sort thousands of nodes at each arrival.
        count = len(nodes.present)
        return KeepWaiting(None, describe.round_text(control, None, count, settings))
    census = take_census(control, nodes, settings)
    pool = census.pool
    segments = choose([presence.info for presence in pool], settings, control.formed)
    size = sum(len(segment.nodes) for segment in segments)
    if not pool and control.closure is not None:
        return KeepWaiting(None, "")  # the job is over, and the nodes still here are leaving
    if size < settings.min_nodes or size == 0:
        return KeepWaiting(None, _waits_for(control, nodes, settings, census))
    missed = bool(census.unplaced) or _are_missed(control, nodes, census, settings)
    enough_s = max(opened_s, _enough_since(pool, segments, settings))
    if missed:
        until_s, why = max(opened_s + timing.rejoin_timeout_s, enough_s), describe.NOT_BACK
    elif size == settings.largest:
        until_s, why = -math.inf, describe.ALL_SEATS
    elif control.formed is not None:
        last_s = max(opened_s, *(presence.seen_s for presence in pool))
        until_s = min(last_s + timing.settle_s, enough_s + timing.last_call_timeout_s)
        why = describe.ALL_BACK
    else:
        until_s, why = enough_s + timing.last_call_timeout_s, describe.LAST_CALL
    if nodes.accused:
        # One that lives answers within this time; otherwise it would be left out.
        accused = nodes.accused.keys() - _cannot_stay(control, census, settings)
        until_s = max(until_s, may_answer_until_s(nodes, accused, now_s, round_trip_s))
    if give_up_s < until_s:
        until_s, why = give_up_s, describe.GIVES_UP
    if now_s >= until_s:
        lacking = incomplete(census.candidates(nodes), settings, control.formed)
        why = "; ".join(filter(None, (why, describe.incomplete_text(lacking))))
        return _close(control, settings, census, segments, why)
    return KeepWaiting(until_s, _waits_for(control, nodes, settings, census))


def _waits_for(control: Control, nodes: Nodes, settings: JobSettings, census: Census) -> str:
    return describe.round_text(control, nodes, len(census.pool), settings, census=census)


def _are_missed(control: Control, nodes: Nodes, census: Census, settings: JobSettings) -> bool:
    """Whether live members that are not back would get a seat: not if others of their segment are
    gone, and nobody is there to replace these. Survivors are not given up for newcomers."""
    if not census.expected:
        return False
    seated = {
        node.node_id
        for segment in choose(census.candidates(nodes), settings, control.formed)
        for node in segment.nodes
    }
    back = {presence.info.node_id for presence in census.returning}
    return back.isdisjoint(seated) or not seated.isdisjoint(census.expected)


def _cannot_stay(control: Control, census: Census, settings: JobSettings) -> set[str]:
    """Return the members that get no seat, whoever else is back: others of their segments are
    gone for good, and nobody is there to replace these."""
    if control.formed is None or census.newcomers:
        return set()
    dead = {node_id for node_id in census.absent if names_dead(control.open_change, node_id)}
    return cannot_stay(dead.union(census.leaving, census.finished), settings, control.formed)


def _enough_since(
    pool: Sequence[Presence], segments: Sequence[Segment], settings: JobSettings
) -> float:
    """Return since when the smallest allowed world could have been formed."""
    arrivals = [(presence.seen_s, 1) for presence in pool]
    if settings.has_segments:
        seen_s = {presence.info.node_id: presence.seen_s for presence in pool}
        arrivals = [
            (max(seen_s[node.node_id] for node in segment.nodes), len(segment.nodes))
            for segment in segments
        ]
    arrivals.sort()
    counts = list(accumulate(count for _, count in arrivals))
    return arrivals[bisect_left(counts, settings.smallest)][0]


def _close(
    control: Control,
    settings: JobSettings,
    census: Census,
    segments: Sequence[Segment],
    reason: str,
) -> Close:
    formed = control.formed
    chosen = [node for segment in segments for node in segment.nodes]
    previous = ranks_in(formed)
    heirs = _heirs(control, census)
    here = {node.node_id for node in chosen}
    # If etcd lost data, a node that trained a later world than the record's keeps its work.
    went_on = any(node.epoch_trained > control.epoch for node in chosen)
    if not heirs and here.isdisjoint(previous) and not went_on:
        heirs = (census.expected + census.unplaced)[:_HEIRS]
    world = assign_ranks(segments, previous, heirs)
    return Close(
        world,
        census.expected + census.idle,
        reason,
        heirs if here.isdisjoint(heirs) else (),
        census.finished,
        sizes_of_domains(world, settings, formed),
    )


def _heirs(control: Control, census: Census) -> tuple[str, ...]:
    """Return the heirs that the last round left out and that are still alive.

    If etcd lost data, an heir that trained a later world has returned since: it was rank 0 then, or
    got the state from rank 0.
    """
    formed = control.formed
    if formed is None or not formed.heirs:
        return ()
    pool = (presence.info for presence in census.pool)
    alive = {*census.idle, *(info.node_id for info in pool if info.epoch_trained <= control.epoch)}
    return tuple(heir for heir in formed.heirs if heir in alive)

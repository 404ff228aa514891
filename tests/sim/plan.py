"""What one seed is about: the job's settings and how its life goes. Draws; lives nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rdzv_etcd.settings.fields import DEFAULT_SLICE_NODES
from rdzv_etcd.settings.options import AfterEnd
from tests.sim.kinds import KINDS, PEERS
from tests.sim.world import TIMING

KINDS_AT_ONCE = 4
"""Of so many kinds a wide life draws: of more, each would come too seldom to matter."""
TTLS_S = (2, 5, 10)

_FIELDS = {
    "closed_ttl": "closed_ttl_s",
    "ended_ttl": "ended_ttl_s",
    "after_end": "after_end",
    "job_lease_ttl": "job_lease_ttl_s",
    "last_call": "last_call_s",
    "settle": "settle_s",
    "rejoin_timeout": "rejoin_timeout_s",
    "join_timeout": "join_timeout_s",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed is about."""

    min_nodes: int
    max_nodes: int
    node_unit: int
    ttl_s: int
    nodes: int
    wipes: bool
    closes: bool | None
    """How the job is closed in the end: well, badly, or (``None``) not at all."""
    works: bool = True
    """Whether workers do something, and everything that came with it; see :data:`FOUND`."""
    closes_midway: bool = False
    """Whether the job may be closed, and its id used again, in the midst of it all."""
    comes_back: bool = False
    """Whether the id is used again after the end."""
    slice_nodes: int = DEFAULT_SLICE_NODES
    """Worlds of more nodes are published in slices: small ones, too, in some lives."""
    aims: bool = False
    """Whether faults wait for the moments that matter, see :mod:`tests.sim.aimed`."""
    kinds: tuple[str, ...] = ()
    """What else this life draws, see :mod:`tests.sim.kinds`."""
    closed_ttl_s: int = TIMING.closed_ttl_s
    ended_ttl_s: int = TIMING.ended_ttl_s
    after_end: AfterEnd = AfterEnd.NEW_RUN
    job_lease_ttl_s: int | None = None
    last_call_s: float = 20.0
    settle_s: float = TIMING.settle_s
    rejoin_timeout_s: float = TIMING.rejoin_timeout_s
    join_timeout_s: float = TIMING.join_timeout_s


def plan(
    rng_seed: int, *, works: bool = True, wide: bool = True, kinds: Sequence[str] = ()
) -> Plan:
    """Draw the settings of one seed. ``kinds``: draw exactly these besides.

    Without ``wide`` every life is what it was before there were kinds to draw.
    """
    drawn = _plan(rng_seed, works=works)
    rng = random.Random(f"kinds {rng_seed}")
    if kinds:
        return _widened(drawn, rng, tuple(kinds))
    if not (works and wide) or rng.random() < 0.5:
        return drawn
    return _widened(drawn, rng, _kinds(rng_seed))


def _kinds(rng_seed: int) -> tuple[str, ...]:
    """The kinds of a wide life. One more to draw changes only the lives that draw it."""
    lots = {kind: random.Random(f"{kind} {rng_seed}").random() for kind in KINDS}
    return tuple(sorted(lots, key=lots.__getitem__)[:KINDS_AT_ONCE])


def _widened(drawn: Plan, rng: random.Random, kinds: tuple[str, ...]) -> Plan:
    values: dict[str, Any] = {
        "closed_ttl": rng.choice([3, 20, 60, 300]),
        "job_lease_ttl": rng.choice([10, 60, 300]),
        "last_call": rng.choice([1.0, 5.0, 20.0, 60.0]),
        "settle": rng.choice([0.0, 0.2, 3.0]),
        # less than the last call takes would let nobody be there at its end
        "join_timeout": rng.choice([90.0, 200.0]),
        "rejoin_timeout": rng.choice([5.0, 30.0, 60.0]),
    }
    later = random.Random(f"kinds of the second draw {rng.random()}")
    values |= {
        "ended_ttl": later.choice([2, 30, 90]),
        "after_end": later.choice([AfterEnd.REFUSE, AfterEnd.FINISH]),
    }
    settings = {_FIELDS[kind]: value for kind, value in values.items() if kind in kinds}
    if "lease_ttls" in kinds:  # what the longest one allows is waited for
        settings["ttl_s"] = max(TTLS_S)
    return replace(drawn, kinds=kinds, **settings)


def _plan(rng_seed: int, *, works: bool) -> Plan:
    rng = random.Random(f"plan {rng_seed}")
    unit = rng.choice([1, 1, 1, 2])
    least = rng.randint(1, 3)
    most = max(least, unit, rng.randint(least, 5))
    most += most % unit
    return Plan(
        least,
        most,
        unit,
        rng.choice(TTLS_S),
        rng.randint(1, most + 2),
        rng.random() < 0.3,
        rng.choice([None, True, False]),
        works,
        works and rng.random() < 0.3,
        works and rng.random() < 0.5,
        random.Random(f"slices {rng_seed}").choice([DEFAULT_SLICE_NODES, 1, 2])
        if works
        else DEFAULT_SLICE_NODES,
        works,
    )


def options(what: Plan) -> dict[str, Any]:
    """The job that a plan asks for, as keywords of SimJob."""
    return {
        "min_nodes": what.min_nodes,
        "max_nodes": what.max_nodes,
        "node_unit": what.node_unit,
        "timing": replace(
            TIMING,
            lease_ttl_s=what.ttl_s,
            last_call_timeout_s=what.last_call_s,
            settle_s=what.settle_s,
            rejoin_timeout_s=what.rejoin_timeout_s,
            closed_ttl_s=what.closed_ttl_s,
            ended_ttl_s=what.ended_ttl_s,
            job_lease_ttl_s=what.job_lease_ttl_s,
            join_timeout_s=what.join_timeout_s,
        ),
        "after_end": what.after_end,
        "works": what.works,
        "slice_nodes": what.slice_nodes,
        "peer_links": any(kind in PEERS for kind in what.kinds),
    }

"""What one seed is about: the job's settings and how its life goes. Draws; lives nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from rdzv_etcd.settings.model import DEFAULT_SLICE_NODES
from tests.sim.world import TIMING


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


def plan(rng_seed: int, *, works: bool = True) -> Plan:
    """Draw the settings of one seed."""
    rng = random.Random(f"plan {rng_seed}")
    unit = rng.choice([1, 1, 1, 2])
    least = rng.randint(1, 3)
    most = max(least, unit, rng.randint(least, 5))
    most += most % unit
    return Plan(
        least,
        most,
        unit,
        rng.choice([2, 5, 10]),
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
        "timing": replace(TIMING, lease_ttl_s=what.ttl_s, last_call_timeout_s=20.0),
        "works": what.works,
        "slice_nodes": what.slice_nodes,
    }

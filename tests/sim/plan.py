"""What one seed is about: the job's settings and how its life goes. Draws; lives nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rdzv_etcd.settings import Timing
from rdzv_etcd.settings.fields import DEFAULT_SLICE_NODES, WHOLE_DOMAIN
from rdzv_etcd.settings.options import AfterEnd
from tests.sim.kinds import KINDS, OFTEN, PEERS, RACKS
from tests.sim.world import TIMING

OFTEN_SHARE = 0.25
KINDS_AT_ONCE = 4
"""Of so many kinds a wide life draws: of more, each would come too seldom to matter."""
TTLS_S = (2, 5, 10)

LAST_CALL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed is about."""

    min_nodes: int
    max_nodes: int
    node_unit: int
    nodes: int
    """How many start at once."""
    wipes: bool
    closes: bool | None
    """How the job is closed at the end: succeeded, failed, or (``None``) not at all."""
    closes_midway: bool
    """Whether the job may be closed, and its id used again, among the faults."""
    comes_back: bool
    """Whether the id is used again after the end."""
    slice_nodes: int
    """Worlds of more nodes are published in slices: small ones, too, in some lives."""
    timing: Timing
    after_end: AfterEnd = AfterEnd.NEW_RUN
    segment_size: int = 1
    domains: int = 1
    """Among how many the nodes are distributed, if there are segments."""
    kinds: tuple[str, ...] = ()
    """What else this life draws, see :mod:`tests.sim.kinds`."""

    @property
    def ttl_s(self) -> int:
        return self.timing.lease_ttl_s

    def job(self) -> dict[str, Any]:
        """Return the job that this plan asks for, as keywords of SimJob."""
        return {
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "node_unit": self.node_unit,
            "segment_size": self.segment_size,
            "timing": self.timing,
            "after_end": self.after_end,
            "works": True,
            "slice_nodes": self.slice_nodes,
            "peer_links": any(kind in PEERS for kind in self.kinds),
        }


def plan(rng_seed: int, *, wide: bool = True, kinds: Sequence[str] = ()) -> Plan:
    """Draw the settings of one seed. ``kinds``: exactly these besides; without ``wide``: none."""
    drawn, given = _plan(rng_seed), tuple(kinds)
    rng = random.Random(f"kinds {rng_seed}")
    if wide and not given:
        given = _kinds(rng_seed) if rng.random() >= 0.5 else ()
        given += tuple(kind for kind in OFTEN if _lot(kind, rng_seed) < OFTEN_SHARE)
    if not given:
        return drawn
    drawn = _widened(drawn, rng, given)
    return _segmented(drawn, rng_seed) if RACKS in given else drawn


def _kinds(rng_seed: int) -> tuple[str, ...]:
    """The kinds of a wide life. One more to draw changes only the lives that draw it."""
    lots = {kind: _lot(kind, rng_seed) for kind in KINDS if kind not in OFTEN}
    return tuple(sorted(lots, key=lots.__getitem__)[:KINDS_AT_ONCE])


def _lot(kind: str, rng_seed: int) -> float:
    return random.Random(f"{kind} {rng_seed}").random()


def _segmented(drawn: Plan, rng_seed: int) -> Plan:
    rng = random.Random(f"sizes of segments {rng_seed}")
    size = rng.choice([2, 2, 3, WHOLE_DOMAIN])
    if size == WHOLE_DOMAIN:
        least, most = rng.randint(1, 3), 6
    else:
        most = size * rng.randint(1, 3)
        least = size * rng.randint(1, most // size)
    return replace(
        drawn,
        min_nodes=least,
        max_nodes=most,
        node_unit=1,
        nodes=rng.randint(1, most + 2),
        segment_size=size,
        domains=rng.choice([2, 3]),
    )


def _widened(drawn: Plan, rng: random.Random, kinds: tuple[str, ...]) -> Plan:
    values: dict[str, Any] = {
        "closed_ttl": rng.choice([3, 20, 60, 300]),
        "job_lease_ttl": rng.choice([10, 60, 300]),
        "last_call_timeout": rng.choice([1.0, 5.0, 20.0, 60.0]),
        "settle": rng.choice([0.0, 0.2, 3.0]),
        # If it were shorter than the last call, no node would be there at its end.
        "join_timeout": rng.choice([90.0, 200.0]),
        "rejoin_timeout": rng.choice([5.0, 30.0, 60.0]),
    }
    later = random.Random(f"kinds of the second draw {rng.random()}")
    values["ended_ttl"] = later.choice([2, 30, 90])
    drawn_s = {f"{kind}_s": value for kind, value in values.items() if kind in kinds}
    if "lease_ttls" in kinds:  # what the longest one allows is waited for
        drawn_s["lease_ttl_s"] = max(TTLS_S)
    return replace(
        drawn,
        kinds=kinds,
        timing=replace(drawn.timing, **drawn_s),
        after_end=AfterEnd.FINISH if "after_end" in kinds else drawn.after_end,
    )


def _plan(rng_seed: int) -> Plan:
    rng = random.Random(f"plan {rng_seed}")
    unit = rng.choice([1, 1, 1, 2])
    least = rng.randint(1, 3)
    most = max(least, unit, rng.randint(least, 5))
    most += most % unit
    ttl_s = rng.choice(TTLS_S)
    return Plan(
        least,
        most,
        unit,
        nodes=rng.randint(1, most + 2),
        wipes=rng.random() < 0.3,
        closes=rng.choice([None, True, False]),
        closes_midway=rng.random() < 0.3,
        comes_back=rng.random() < 0.5,
        slice_nodes=random.Random(f"slices {rng_seed}").choice([DEFAULT_SLICE_NODES, 1, 2]),
        timing=replace(TIMING, lease_ttl_s=ttl_s, last_call_timeout_s=LAST_CALL_TIMEOUT_S),
    )

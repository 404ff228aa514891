"""What all faults of one life share: its job, its draws, who is there, what goes on beside it."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from rdzv_etcd.settings.fields import WHOLE_DOMAIN
from tests.sim import segments
from tests.sim.kinds import RACKS
from tests.sim.plan import TTLS_S, Plan
from tests.sim.world import SimJob, SimNode

SLOWEST_STOP_S = 60.0
"""Workers may need so long to stop; torch kills them after 30 s, and may need a while for it."""


class Stage:
    """One life's job and what happens beside it; knows no faults and judges nothing."""

    def __init__(self, job: SimJob, plan: Plan) -> None:
        self.job = job
        self.plan = plan
        self.background: set[asyncio.Future[None]] = set()
        self.calm = False
        """Whether the phase of faults is over."""
        self.asked: list[SimNode] = []
        """Nodes that an operator has asked to leave, and of which etcd has not lost that."""
        self._serial = 0
        self._context = contextvars.copy_context()
        """The life's: what a trap sets going is no part of the node that stepped into it."""

    @property
    def rng(self) -> random.Random:
        return self.job.loop.rng

    def newcomer(self) -> None:
        """Start one more node, unless there are more than enough."""
        idle = self.plan.domains * max(0, self.plan.segment_size - 1)  # in no segment, at most
        if len(self.at_work()) < self.plan.max_nodes + 2 + idle:
            self._start(self._domain())

    def _start(self, domain: str | None) -> None:
        self._serial += 1
        node = self.job.start(
            f"n{self._serial}",
            delay_s=self.rng.choice([0.001, 0.05]),
            rank_key=f"rack{self._serial % 3}" if "rank_keys" in self.plan.kinds else None,
            domain=domain,
            lease_ttl_s=self._lease_ttl_s(),
        )
        if "stop_slowly" in self.plan.kinds and not self.calm:
            node.stops_in_s = self.rng.choice([0.0, self.rng.uniform(0, SLOWEST_STOP_S)])

    def _domain(self) -> str | None:
        """Draw a domain; if segments are whole domains, of those with the fewest nodes."""
        if RACKS not in self.plan.kinds:
            return None
        names = [f"rack-{9 + number}" for number in range(self.plan.domains)]
        if self.plan.segment_size == WHOLE_DOMAIN:
            here = self._domains(self.at_work())
            names = [name for name in names if here[name] == min(here[each] for each in names)]
        return self.rng.choice(names)

    @staticmethod
    def _domains(nodes: Iterable[SimNode]) -> Counter[str | None]:
        return Counter(node.domain for node in nodes)

    def complete(self) -> None:
        """Start nodes until there are enough for the smallest world."""
        if self.calm:
            for domain in segments.missing(self._domains(self.at_work()), self.job.history.whole()):
                self._start(domain)
        while self.largest(self.at_work()) < self.least():
            self._start(self._domain())

    def largest(self, nodes: Iterable[SimNode]) -> int:
        """How many of these nodes the largest world takes."""
        job, whole = self.job.settings.job, self.job.history.whole()
        return segments.largest(self._domains(nodes), job, whole)

    def has_room(self, seated: Iterable[SimNode], nodes: Iterable[SimNode]) -> bool:
        """Whether some of these nodes could be in a world beside those that are seated."""
        job, whole = self.job.settings.job, self.job.history.whole()
        there = self._domains(seated)
        return segments.has_room(there, self._domains(nodes) - there, job, whole)

    def _lease_ttl_s(self) -> int | None:
        return self.rng.choice(TTLS_S) if "lease_ttls" in self.plan.kinds else None

    def stranger(self) -> None:
        """Start a node with settings other than the job's."""
        self._serial += 1
        name, job = f"s{self._serial}", self.job.settings.job
        other = replace(job, max_nodes=job.max_nodes + job.unit)
        self.job.start(name, job=other, domain=self._domain()).is_stranger = True

    def forget_asked(self) -> None:
        """Note that etcd may have lost what nodes were asked: data are gone, or all leases."""
        self.asked.clear()

    def least(self) -> int:
        """How many nodes the smallest world takes."""
        unit = self.plan.node_unit
        return (self.plan.min_nodes + unit - 1) // unit * unit

    def alive(self) -> list[SimNode]:
        return [node for node in self.job.nodes.values() if node.alive]

    def at_work(self) -> list[SimNode]:
        """Those that work, or want to."""
        return [node for node in self.alive() if not node.is_done]

    def some(self) -> list[SimNode]:
        """One or two nodes."""
        alive = self.alive()
        return self.rng.sample(alive, min(len(alive), self.rng.choice([1, 1, 2])))

    def one(self) -> list[SimNode]:
        """One node, if there is any."""
        alive = self.alive()
        return self.rng.sample(alive, min(1, len(alive)))

    def leader(self) -> list[SimNode]:
        """Whoever leads, if anybody does."""
        return [node for node in self.alive() if node.node.leads][:1]

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Let ``work`` go on beside everything else, as part of no node."""
        self._context.run(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.job.loop.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def all_done(self) -> None:
        """Wait until nothing goes on beside any more."""
        while self.background:
            await asyncio.wait(set(self.background))

    def note(self, text: str) -> None:
        self.job.history.note(self.job.loop.time(), f"-- {text}")


class Part:
    """One part of a life: faults of one kind, or what comes afterwards."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._job = stage.job
        self._plan = stage.plan
        self._rng = stage.rng

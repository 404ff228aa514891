"""Another job on the same etcd: whatever happens to the first one, nobody touches its keys."""

from __future__ import annotations

import random

from rdzv_etcd.protocol.keys import JobKeys
from tests.sim.stage import Part, Stage
from tests.sim.world import REQUEST_TIMEOUT_S, SimJob

NAMES = "xy"
BELOW = ("team", "store", "barrier", "ranks", "audit")
CONVERGES_S = 150.0


class Neighbour(Part):
    """A job of two nodes that meets the faults of etcd, and none of its own."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        job = stage.job
        job_id, prefix = f"{job.settings.job_id}s", job.settings.prefix  # begins with its letters
        rng = random.Random(f"neighbour {job.loop.seed}")
        if rng.random() < 0.5:  # a team's prefix that is below the job, as if it were its own
            job_id, prefix = rng.choice(BELOW), job.keys.root.decode().rstrip("/")
            job.history.below.add(JobKeys(prefix, job_id).root)
        self._other = SimJob(
            job.loop,
            job.server,
            job_id=job_id,
            prefix=prefix,
            min_nodes=2,
            max_nodes=2,
            timing=job.settings.timing,
            works=True,
        )
        job.neighbours.append(self._other)

    def start(self) -> None:
        for name in NAMES:
            self._other.start(name)

    async def end(self) -> None:
        """Both work in one world once everything is healed; then they leave."""
        other = self._other
        ends_s = other.loop.time() + CONVERGES_S
        while not other.works(NAMES) and other.loop.time() < ends_s:
            for name in NAMES:
                if other.nodes[name].error is not None:
                    await other.leave(name)
                    other.start(name)
            await other.pass_time(0.5)
        await other.until_works(NAMES, REQUEST_TIMEOUT_S)
        for name in NAMES:
            await other.leave(name)
        other.history.check()

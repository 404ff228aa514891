"""Runs of one job id that follow each other: what one leaves, and who belongs to which."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.work import Work
from tests.sim.world import TIMING, SimJob, SimNode, simulate


def work_of(node: SimNode) -> Work:
    assert node.world is not None
    return Work(node.node, node.world, node.history)


def test_a_new_run_s_first_round_does_not_read_the_store_of_the_run_that_ended() -> None:
    """A slow member of that run is still there and keeps its keys, when the marker has gone."""

    async def scenario(job: SimJob) -> None:
        a, b = job.start_all("ab")
        await job.until_works("ab")
        old = work_of(b)
        await old.store.set("exit/last", b"1", 5)
        await job.on(a, a.node.close_job(succeeded=True, reason="done"))
        await job.leave("a")
        await job.pass_time(TIMING.closed_ttl_s + 5)
        c, _ = job.start_all("cd")
        await job.until_works("cd")
        assert c.world is not None
        assert c.world.round == 1
        assert not await work_of(c).store.check(["exit/last"], 5)
        assert await old.store.check(["exit/last"], 5)  # nor does it take away what it still uses

    timing = replace(TIMING, job_lease_ttl_s=180)
    simulate(scenario, min_nodes=2, max_nodes=2, timing=timing)

"""Nodes whose leases live for different times, as while ``lease_ttl`` is being changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing.model import RenewLease
from tests.sim.world import TIMING, SimJob, simulated

MIXES = [(30, 5, 5), (5, 30, 30), (5, 5, 30), (30, 30, 5)]
"""The leases' TTLs by node; the first node leads."""


async def formed(job: SimJob, ttls_s: Sequence[int]) -> list[str]:
    """Form a world of nodes with these leases; the first one leads."""
    names = [f"n{number}" for number in range(len(ttls_s))]
    for name, ttl_s in zip(names, ttls_s, strict=True):
        job.start(name, lease_ttl_s=ttl_s)
        await job.pass_time(0.1)
    await job.until_works(names)
    assert job.leader.name == names[0]
    return names


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize(
    "cut_s",
    [
        *(6.0, 12.0, 40.0),
        *(pytest.param(s, marks=pytest.mark.slow) for s in (3.0, 28.0)),
        *(pytest.param(s, marks=pytest.mark.release) for s in (9.0, 100.0)),
    ],
)
@pytest.mark.parametrize("ttls_s", MIXES)
@simulated(range(4), max_nodes=3, min_nodes=3)
async def test_a_cut_of_all_restarts_nobody(
    job: SimJob, ttls_s: tuple[int, ...], cut_s: float, silent: bool
) -> None:
    """It costs some nodes their lease and others not; the leader judges by the shortest and by
    the longest of them."""
    names = await formed(job, ttls_s)
    await job.pass_time(45 + job.loop.rng.uniform(0, 10))  # the leader has been there for long
    for _ in range(2):
        job.cut(names, silent=silent)
        await job.pass_time(cut_s)
        for each in names:
            job.heal([each])
            await job.pass_time(job.loop.rng.uniform(0, 0.5))
        await job.pass_time(100)
        assert [job.nodes[name].joins for name in names] == [1] * len(names)


@pytest.mark.parametrize("ttls_s", MIXES)
@pytest.mark.parametrize("victim", [0, 1, 2])
@simulated(range(4), max_nodes=3, min_nodes=2)
async def test_a_loss_is_known_soon_after_the_lost_nodes_own_lease(
    job: SimJob, ttls_s: tuple[int, ...], victim: int
) -> None:
    names = await formed(job, ttls_s)
    await job.pass_time(60)
    lost = names.pop(victim)
    job.crash(lost)
    took_s = await job.until(
        lambda: all(job.nodes[name].joins == 2 for name in names), "the loss is known"
    )
    assert took_s < ttls_s[victim] + 2


@simulated(range(3), max_nodes=2, min_nodes=2)
async def test_each_renews_as_often_as_the_shortest_lease_of_its_world_asks(job: SimJob) -> None:
    names = await formed(job, (30, 5))
    renewed: list[str] = []
    job.server.observers.append(
        lambda applied: (
            renewed.append(applied.source) if isinstance(applied.request, RenewLease) else None
        )
    )
    await job.pass_time(50)
    for name in names:
        assert renewed.count(job.nodes[name].node_id) >= 25


@simulated(range(3), max_nodes=3, min_nodes=2)
async def test_the_jobs_lease_outlives_members_with_longer_ones(job: SimJob) -> None:
    """The first leader has granted it for a short time; who is left renews it in time."""
    names = await formed(job, (5, 60, 60))
    job.crash(names.pop(0))
    await job.until_works(names, 200)
    revision = job.nodes[names[0]].node.control.round_revision
    await job.pass_time(600)
    assert [job.nodes[name].node.control.round_revision for name in names] == [revision] * 2


@pytest.mark.parametrize("ttls_s", [(5, 30), (30, 5)])
@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_a_job_of_other_settings_is_outlasted_by_its_nodes_own_lease(
    job: SimJob, ttls_s: tuple[int, int]
) -> None:
    """A node that died leaves its presence for as long as its lease lives, whatever this one's."""
    dead_s, new_s = ttls_s
    dead = job.start("dead", job=JobSettings(2, 2), lease_ttl_s=dead_s)
    await job.until(lambda: dead.node.leads, "it leads")
    await job.pass_time(2 * dead_s)
    job.crash("dead")
    job.start("new", lease_ttl_s=new_s)
    await job.until_works(["new"], dead_s + TIMING.last_call_timeout_s)

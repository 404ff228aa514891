"""etcd is out of space (the NOSPACE alarm): who belongs to the job waits for an operator, who does
not is told at once. In virtual time; on real servers: ``tests/faults/test_nospace.py``."""

from __future__ import annotations

import pytest

from tests.node.test_refusals import warnings_of
from tests.sim.world import TTL_S, SimJob, simulated

CURE = "etcdctl alarm disarm"
LIMIT_S = 5.0
"""From the cure to the world: a try every 2 s, and what a round takes."""


@simulated(range(5), min_nodes=2, max_nodes=3)
async def test_members_that_must_join_again_wait_until_there_is_space(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    """They say so once, with the cure; and go on as soon as it has been applied."""
    nodes = await job.all_work("abc")
    job.crash(job.followers()[0].name)
    job.server.set_no_space(True)
    await job.pass_time(TTL_S + 1)  # the loss shows, but cannot be published
    left = [node for node in nodes if node.alive]
    assert all(node.is_working for node in left)
    for node in left:  # a worker fails, say: its agent joins again by itself
        job.rejoin(node)
    caplog.clear()
    await job.pass_time(200.0)
    assert [node.error for node in left] == [None] * len(left)
    for node in left:
        told = warnings_of(caplog, node)
        assert all(CURE in line for line in told)
        assert len([line for line in told if "waiting up to 600 s" in line]) == 1
        assert len(told) < 8  # the rest: how long it has waited so far
    job.server.set_no_space(False)
    assert await job.until_works([node.name for node in left]) < LIMIT_S


@simulated(range(5), min_nodes=2, max_nodes=3)
async def test_a_member_evicted_meanwhile_waits_too(job: SimJob) -> None:
    """Its lease is gone as well, so it needs a new one first, which is refused like any write."""
    await job.all_work("abc")
    away = job.followers()[0]
    away.connection.link.partition(silent=True)
    rest = [node.name for node in job.nodes.values() if node is not away]
    await job.until_works(rest)
    job.server.set_no_space(True)
    away.connection.link.heal()
    await job.until(lambda: away.world is None, "it joins again")
    await job.pass_time(100.0)
    assert away.error is None
    assert job.works(rest)
    job.server.set_no_space(False)
    await job.until_works("abc")


@simulated(range(5), min_nodes=2, max_nodes=2)
async def test_leaving_does_not_wait_for_space(job: SimJob) -> None:
    await job.all_work("ab")
    job.server.set_no_space(True)
    node = job.nodes["a"]
    job.rejoin(node)
    await job.pass_time(20.3)
    began_s = job.loop.time()
    await job.leave("a")
    assert job.loop.time() - began_s < 1.0

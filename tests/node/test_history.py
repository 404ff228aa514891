"""What the leaders note of a job's rounds: what is in it, how much of it, and for how long."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdRefusedError
from rdzv_etcd.etcd.port import Get
from rdzv_etcd.world_change import PROCESS_EXITED, rejoined
from tests.sim.world import TIMING, SimJob, simulate, simulated

WORKER_FAILED = "worker of rank 1 ended with exit code 1"


def audits(job: SimJob) -> list[dict[str, Any]]:
    """Those of all rounds, the oldest first."""
    found = [kv for kv in job.server.snapshot() if kv.key in job.keys.audits]
    return [json.loads(kv.value) for kv in sorted(found, key=lambda kv: kv.create_revision)]


async def rounds(job: SimJob, names: str, count: int) -> None:
    """Form so many worlds, one after another."""
    job.start_all(names)
    await job.until_works(names)
    for _ in range(count - 1):
        await one_more(job, names, names[-1])


async def one_more(job: SimJob, names: str, again: str, because: str = "") -> None:
    """Form one more world, because one node joins again."""
    formed = len(job.history.formed)
    await job.join_again(again, because)
    await job.until(lambda: len(job.history.formed) > formed and job.works(names), "a world", 10)


@simulated(range(5), min_nodes=2, max_nodes=2)
async def test_it_outlives_the_job_s_end_and_goes_with_what_remembers_that(job: SimJob) -> None:
    await rounds(job, "ab", 3)
    await job.pass_time(3 * TIMING.ended_ttl_s)  # it lives for as long as the job
    await job.end("ab")
    await job.pass_time(0.9 * TIMING.ended_ttl_s)
    assert [audit["round"] for audit in audits(job)] == [1, 2, 3]
    await job.pass_time(TIMING.ended_ttl_s)
    assert not job.server.snapshot()
    assert not job.server.leases()


@pytest.mark.parametrize("peer_links", [True, False])
def test_it_says_why_a_member_came_back_and_how_one_was_lost(
    peer_links: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(job: SimJob) -> None:
        nodes = await job.all_work("abc")
        await one_more(job, "abc", "b", WORKER_FAILED)
        came_back, gone = nodes[1].node_id, nodes[2].node_id
        await job.pass_time(5)  # the links are made
        job.kill("c")
        await job.until_works("ab")
        first, second, third = audits(job)
        assert (first["change"], first["came_back"]) == (None, {})
        assert second["came_back"] == {came_back: WORKER_FAILED}
        assert came_back in second["change"]["waiters"]
        assert third["came_back"] == {}  # it came back as all did
        (how,) = third["change"]["lost"].values()
        if peer_links:
            assert how.startswith(PROCESS_EXITED)
            assert 0 < third["change"]["lost_after_s"][gone] < 1
        else:
            assert how == "lease expired"
            assert third["change"]["lost_after_s"] == {}  # nobody has seen its end

    with caplog.at_level(logging.INFO):
        simulate(scenario, [1], min_nodes=2, max_nodes=3, peer_links=peer_links)
    told = [rejoined("b", WORKER_FAILED) in record.getMessage() for record in caplog.records]
    assert sum(told) >= 3, "the leader ends the round, and the members have their next world"


@simulated(range(8), min_nodes=2, max_nodes=2, history=3)
async def test_the_leader_forgets_the_oldest_rounds_also_those_of_earlier_runs(job: SimJob) -> None:
    await rounds(job, "ab", 2)
    await job.end("ab")
    await job.pass_time(2 * TIMING.closed_ttl_s)  # then rounds count from 1 again
    await rounds(job, "cd", 2)
    await job.until(lambda: len(audits(job)) == 3, "the last three are kept")
    assert [audit["round"] for audit in audits(job)] == [2, 1, 2]
    await one_more(job, "cd", "c")
    await job.until(lambda: len(audits(job)) == 3, "the last three are kept")
    assert [audit["round"] for audit in audits(job)] == [1, 2, 3]


@pytest.mark.parametrize("fate", ["refused", "unanswered"])
def test_what_cannot_be_forgotten_disturbs_no_round_and_goes_later(fate: str) -> None:
    def is_read_of_history(request: object) -> bool:
        return isinstance(request, Get) and request.keys_only and b"/audit/" in request.key

    async def scenario(job: SimJob) -> None:
        await rounds(job, "abc", 2)
        link = job.leader.connection.link
        if fate == "refused":
            link.fail(EtcdRefusedError("no"), 1, is_read_of_history)
        else:
            link.drop_requests(1, is_read_of_history)
        await one_more(job, "abc", "c")
        assert len(audits(job)) == 3
        await one_more(job, "abc", "b")
        await job.until(lambda: len(audits(job)) == 2, "the last two are kept")

    simulate(scenario, range(5), min_nodes=3, max_nodes=3, history=2)

"""Runs of one job id that follow each other: what one leaves, and who belongs to which."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from rdzv_etcd.errors import JobClosedError, JoinTimeoutError
from rdzv_etcd.protocol.member import Phase
from rdzv_etcd.settings import AfterEnd, JobSettings
from tests.sim.matching import noted, puts
from tests.sim.work import Work
from tests.sim.world import REQUEST_TIMEOUT_S, TIMING, TTL_S, SimJob, SimNode, simulate, simulated


def work_of(node: SimNode) -> Work:
    assert node.world is not None
    return Work(node.node, node.world, node.history)


@simulated(min_nodes=2, max_nodes=2, timing=replace(TIMING, job_lease_ttl_s=180))
async def test_a_new_run_s_first_round_does_not_read_the_store_of_the_run_that_ended(
    job: SimJob,
) -> None:
    """A slow member of that run is still there and keeps its keys, when the marker has gone."""
    a, b = await job.all_work("ab")
    old = work_of(b)
    await old.store.set("exit/last", b"1", 5)
    await job.close(a)
    await job.leave("a")
    await job.pass_time(TIMING.closed_ttl_s + 5)
    c, _ = await job.all_work("cd")
    assert c.world is not None
    assert c.world.round == 1
    assert not await work_of(c).store.check(["exit/last"], 5)
    assert await old.store.check(["exit/last"], 5)  # nor does it take away what it still uses


# --- who was cut off while its run ended ----------------------------------------------------------

AWAY_S = [5.0, 2 * TIMING.closed_ttl_s]


@pytest.mark.parametrize("away_s", AWAY_S)
@pytest.mark.parametrize("succeeded", [True, False])
@simulated(range(8), min_nodes=1, max_nodes=3)
async def test_a_member_that_was_cut_off_when_its_run_ended_does_not_put_it_back(
    job: SimJob, away_s: float, succeeded: bool
) -> None:
    """Alone it would train a finished job, with ever higher epochs."""
    job.start_all("abc")
    await job.until_works("abc", 60)
    away = job.loop.rng.choice("abc")
    node, rest = job.nodes[away], "abc".replace(away, "")
    node.connection.link.partition(silent=job.loop.rng.random() < 0.5)
    await job.pass_time(job.loop.rng.choice([0.1, 3 * TTL_S]))
    await job.end(rest, "it is over", succeeded=succeeded)
    rounds = len(job.history.formed)
    await job.pass_time(away_s)
    node.connection.link.heal()
    await job.until(lambda: node.node.closure() is not None, "it hears of the end", 40)
    await job.pass_time(100)
    assert len(job.history.formed) == rounds, job.tell()
    closure = node.node.closure()
    assert closure is not None
    assert closure.reason == "it is over"
    if not succeeded:
        assert isinstance(node.error, JobClosedError)


@pytest.mark.parametrize("away_s", AWAY_S)
@simulated(range(8), min_nodes=2, max_nodes=4)
async def test_a_member_that_was_cut_off_when_its_run_ended_does_not_join_the_next_one(
    job: SimJob, away_s: float
) -> None:
    nodes = job.start_all("abc")
    await job.until_works("abc", 60)
    away = job.loop.rng.choice(nodes)
    away.connection.link.partition(silent=job.loop.rng.random() < 0.5)
    rest = "abc".replace(away.name, "")
    await job.end(rest, "it is over", succeeded=False)
    await job.pass_time(away_s)
    job.start_all("def")
    await job.until_works("def", 60)
    away.connection.link.heal()
    await job.until(lambda: away.error is not None, "it hears of the end", 40)
    assert isinstance(away.error, JobClosedError)
    assert away.error.was_member
    await job.pass_time(100)
    assert job.works("def"), job.tell()
    assert all(job.nodes[name].joins == 1 for name in "def"), job.tell()


@pytest.mark.parametrize("away_s", AWAY_S)
@simulated(range(8), min_nodes=2, max_nodes=2)
async def test_a_spare_that_was_cut_off_when_its_run_ended_ends_with_it(
    job: SimJob, away_s: float
) -> None:
    await job.all_work("ab")
    spare = job.start("s")
    await job.until(lambda: spare.node.phase is Phase.WAITING, "the spare waits")
    await job.pass_time(1.0)
    spare.connection.link.partition(silent=job.loop.rng.random() < 0.5)
    await job.end("ab", "it is over")
    await job.pass_time(away_s)
    if job.loop.rng.random() < 0.5:
        await job.all_work("cd")
    spare.connection.link.heal()
    await job.until(lambda: spare.error is not None, "it hears of the end", 40)
    assert isinstance(spare.error, JobClosedError)
    assert spare.error.succeeded
    assert not spare.error.was_member


@simulated(range(3), min_nodes=1, max_nodes=2)
async def test_a_member_that_arrives_again_when_its_run_is_over_is_no_waiter_of_the_next_one(
    job: SimJob,
) -> None:
    """Putting its presence back takes long, and the arrival waits for that: the run ends meanwhile,
    and the next one has a seat for it."""
    await job.all_work("ab")
    await job.pass_time(2 * TTL_S)  # then the leader trusts what it misses
    leader, late = job.leader, job.followers()[0]
    leader.stops_in_s = 60.0
    restoring, under_way = noted(puts(job.keys.node(late.node_id)))
    late.connection.link.hold_requests(REQUEST_TIMEOUT_S, 1, restoring)
    job.server.expire(late.lease_id)
    await job.until(lambda: bool(under_way), "it puts its presence back", TTL_S)
    await job.until(lambda: late.node.phase is Phase.WAITING, "it joins again", TTL_S)
    await job.end(leader.name, "it is over")
    job.start("c")
    await job.until(lambda: late.error is not None, "it hears of the end", 40)
    assert isinstance(late.error, JobClosedError)
    await job.until_works("c", 2 * TIMING.last_call_timeout_s)
    assert job.nodes["c"].joins == 1
    assert late.node_id not in job.history.formed[-1].record.members


@simulated(min_nodes=2, max_nodes=2)
async def test_who_is_slow_to_leave_does_not_wait_for_the_next_run_if_the_marker_goes_early(
    job: SimJob,
) -> None:
    """The lease of the marker is revoked, but etcd remembers the end."""
    a, slow = await job.all_work("ab")
    await job.close(a)
    await job.leave("a")
    (marker,) = [kv for kv in job.server.snapshot() if kv.key == job.keys.round]
    job.server.expire(marker.lease_id)
    await job.all_work("cd")
    assert slow.node.closure() is not None
    await job.pass_time(2 * TTL_S)
    assert all(job.nodes[name].joins == 1 for name in "cd"), job.tell()


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_many_runs_of_one_id_leave_one_memory_and_its_lease(job: SimJob) -> None:
    for _ in range(12):
        await job.all_work("ab")
        await job.end("ab", "it is over")
        await job.pass_time(job.loop.rng.choice([0.1, 70.0]))
    await job.pass_time(TIMING.closed_ttl_s + 1)
    left = job.server.snapshot()
    rounds = [kv.key for kv in left if kv.key in job.keys.audits]
    assert len(rounds) == len(job.history.formed)
    assert [kv.key for kv in left] == [*rounds, job.keys.ended, job.keys.epoch]
    assert set(job.server.leases()) == {kv.lease_id for kv in left}
    assert len(job.server.leases()) == 1


# --- who is started after the end -----------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [0.1, 30.0, 70.0])
def test_a_node_started_after_the_end_waits_for_a_new_run_and_says_so(
    pause_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Its peers may come when the marker of the last run has gone."""

    async def scenario(job: SimJob) -> None:
        await job.all_work("ab")
        await job.end("ab", "it is over")
        job.start("c")
        await job.pass_time(pause_s)
        job.start("d")
        await job.until_works("cd", 5)
        assert len({each.record.origin for each in job.history.formed}) == 2

    with caplog.at_level(logging.WARNING):
        simulate(scenario, range(3), min_nodes=2, max_nodes=2)
    assert "closed by a, " in caplog.text
    assert "it is over" in caplog.text
    assert "begins a new one" in caplog.text


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_node_started_after_the_end_is_never_told_that_all_is_well_for_having_been_alone(
    job: SimJob,
) -> None:
    await job.all_work("ab")
    await job.end("ab", "it is over")
    late = job.start("c", join_timeout_s=200.0)
    await job.until(lambda: late.error is not None, "it gives up", 201)
    assert isinstance(late.error, JoinTimeoutError)
    assert "it is over" in str(late.error)


@pytest.mark.parametrize("cut_off", [False, True])
def test_one_of_other_settings_does_not_end_well_with_a_run_that_it_had_no_part_in(
    cut_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is started just before the end; ``cut_off``: and hears of it when the marker has gone."""

    async def scenario(job: SimJob) -> None:
        await job.all_work("ab")
        other = job.start("x", job=JobSettings(3, 3), join_timeout_s=300.0)
        await job.until(lambda: other.node.phase is Phase.WAITING, "it waits", 10.0)
        await job.pass_time(1.0)
        if cut_off:
            other.connection.link.partition(silent=True)
        await job.end("ab", "it is over")
        if cut_off:
            await job.pass_time(6.0)
            other.connection.link.heal()
        await job.pass_time(2 * TTL_S)
        assert other.error is None
        assert other.node.phase is Phase.WAITING
        await job.until(lambda: other.error is not None, "it gives up", 310.0)
        assert isinstance(other.error, JoinTimeoutError)
        if not cut_off:
            assert "had no part in that run and begins a new one" in caplog.text

    with caplog.at_level(logging.WARNING):
        timing = replace(TIMING, closed_ttl_s=3)
        simulate(scenario, range(5), min_nodes=2, max_nodes=2, timing=timing)


@pytest.mark.parametrize("succeeded", [True, False])
@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_a_node_started_after_the_end_may_be_told_to_end(
    job: SimJob, succeeded: bool
) -> None:
    job.settings = replace(job.settings, after_end=AfterEnd.FINISH)
    job.start("a")
    await job.until_works("a")
    await job.end("a", "it is over", succeeded=succeeded)
    late = job.start("b")
    await job.until(lambda: late.error is not None, "it ends", 5)
    assert isinstance(late.error, JobClosedError)
    assert late.error.succeeded == succeeded
    assert not late.error.was_member
    await job.pass_time(TIMING.closed_ttl_s + 2)
    job.start("c")
    await job.until_works("c")

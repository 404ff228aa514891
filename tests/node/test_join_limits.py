"""How long nodes wait for whom: live members of the round before, newcomers, spares. In virtual
time; lives are short here and waits are long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from rdzv_etcd.errors import DrainedError, JoinTimeoutError
from rdzv_etcd.settings import JobSettings
from tests.sim.world import TIMING, TTL_S, SimJob, simulated

QUICK_CALL = replace(TIMING, last_call_timeout_s=3.0)
REJOIN_S = TIMING.rejoin_timeout_s
FAR_S = 100_000.0
"""Workers that never stop."""


def sizes(job: SimJob) -> list[int]:
    return [formed.record.size for formed in job.history.formed]


def slow(job: SimJob, names: Iterable[str], stops_in_s: float) -> None:
    for name in names:
        job.nodes[name].stops_in_s = stops_in_s


def leads(job: SimJob) -> bool:
    return any(node.alive and node.node.leads for node in job.nodes.values())


# --- live members are waited for ------------------------------------------------------------------


@pytest.mark.parametrize("stops_in_s", [8.0, 31.0, 60.0])
@simulated(range(5), min_nodes=1, max_nodes=3, timing=QUICK_CALL)
async def test_a_member_whose_workers_stop_slowly_is_waited_for(
    job: SimJob, stops_in_s: float
) -> None:
    """Newcomers alone would be enough for a world, but it would begin again what the member has."""
    member = job.start("a")
    await job.until_works("a")
    member.stops_in_s = stops_in_s
    slow(job, [node.name for node in job.start_all("bc")], stops_in_s)
    await job.until_works("abc", stops_in_s + 30.0)
    assert member.rank == 0
    await job.pass_time(200.0)
    assert sizes(job) == [1, 3]


@simulated(range(5), min_nodes=2, max_nodes=3, timing=QUICK_CALL)
async def test_a_member_that_never_comes_back_is_expelled_after_the_rejoin_timeout(
    job: SimJob,
) -> None:
    await job.all_work("ab")
    slow(job, "b", FAR_S)
    job.start("c")
    took_s = await job.until_works("ac", REJOIN_S + 10.0)
    assert took_s > REJOIN_S - 5.0


@simulated(range(5), min_nodes=1, max_nodes=3, timing=QUICK_CALL)
async def test_an_expelled_member_that_is_back_gets_rank_0_of_a_world_begun_without_it(
    job: SimJob,
) -> None:
    member = job.start("a")
    await job.until_works("a")
    slow(job, "a", REJOIN_S + 60.0)
    job.start_all("bc")
    await job.until_works("bc", REJOIN_S + 10.0)
    await job.until_works("abc", 120.0)
    assert member.rank == 0
    slow(job, "a", 0.0)
    job.crash("c")
    await job.until_works("ab")
    assert member.rank == 0


@simulated(range(5), min_nodes=2, max_nodes=5, timing=QUICK_CALL)
async def test_a_new_leader_does_not_begin_to_wait_again(job: SimJob) -> None:
    await job.all_work("abcd")
    stuck = job.followers()[0].name
    slow(job, stuck, FAR_S)
    job.start("e")
    began_s = job.loop.time()
    await job.until(lambda: len(job.history.changes) == 1, "a change")
    for _ in range(2):
        await job.pass_time(40.0)
        job.crash(job.leader.name)
        await job.until(lambda: leads(job), "a new leader")
    left = [node.name for node in job.nodes.values() if node.alive and node.name != stuck]
    await job.until_works(left, REJOIN_S)
    assert job.loop.time() - began_s < REJOIN_S + 15.0


@pytest.mark.parametrize("how", ["no space", "away"])
@simulated(range(5), min_nodes=2, max_nodes=4, timing=QUICK_CALL)
async def test_time_in_which_nobody_can_arrive_is_not_held_against_returning_members(
    job: SimJob, how: str
) -> None:
    await job.all_work("abc")
    late = job.followers()[0].name
    slow(job, late, 20.0)
    job.start("d")
    await job.until(lambda: len(job.history.changes) == 1, "a change")
    await job.pass_time(10.0)
    if how == "no space":
        job.server.set_no_space(True)
    else:
        job.server.stop()
    await job.pass_time(REJOIN_S + 60.0)
    if how == "no space":
        job.server.set_no_space(False)
    else:
        job.server.start()
    await job.until_works("abcd")
    assert sizes(job)[-1] == 4
    assert not any(formed.record.expelled for formed in job.history.formed)


@simulated(range(5), min_nodes=2, max_nodes=4, slice_nodes=1)
async def test_live_members_of_a_large_world_are_not_lost_because_nobody_knows_their_names(
    job: SimJob,
) -> None:
    """They wait for the next round when the job lease runs out, and their slices with it; the
    record is put back by one who works on, and a newcomer leads."""
    await job.all_work("abc")
    leader = job.leader.name
    slow(job, [node.name for node in job.followers()][:1], FAR_S)
    returned = job.followers()[1]
    job.start("d")
    await job.until(lambda: returned.world is None, "one member is back")
    job.crash(leader)
    await job.until(lambda: leads(job), "a new leader")
    record = job.history.formed[0].record
    returned.connection.link.hold_requests(2.0 * TTL_S, 3)
    job.server.expire(record.job_lease)
    await job.pass_time(4.0 * TTL_S)
    named = [name for _, change in job.history.changes for name in change.lost]
    assert all(name.startswith((leader, "nobody~")) for name in named), named
    assert len([name for name in named if name.startswith("nobody~")]) <= 1


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("waited_s", [595.0, 599.9, 1199.0, 5000.0])
@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_spare_has_its_whole_join_timeout_when_its_seat_becomes_free(
    job: SimJob, waited_s: float
) -> None:
    """However long it has waited by then."""
    await job.all_work("ab")
    spare = job.start("s")
    await job.pass_time(waited_s)
    slow(job, [node.name for node in job.followers() if node is not spare], 60.0)
    job.crash(job.leader.name)
    await job.until(lambda: spare.world is not None or spare.error is not None, "its end", 200)
    assert spare.error is None


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_spare_gives_up_when_nobody_comes_to_fill_the_round(job: SimJob) -> None:
    await job.all_work("ab")
    spare = job.start("s", join_timeout_s=60.0)
    await job.pass_time(1000.0)
    assert spare.error is None
    job.crash("a", "b")
    await job.until(lambda: spare.error is not None, "it gives up", 90.0)
    assert isinstance(spare.error, JoinTimeoutError)


@simulated(range(5), min_nodes=2, max_nodes=3)
async def test_a_leader_closes_what_can_be_closed_before_its_own_join_ends(job: SimJob) -> None:
    job.start("a", join_timeout_s=40.0)
    await job.pass_time(30.0)
    job.start("b")
    await job.until_works("ab", 12.0)


@simulated(range(5), min_nodes=2, max_nodes=2, timing=replace(TIMING, job_lease_ttl_s=300))
async def test_a_node_that_waits_for_the_end_of_another_job_can_be_drained(job: SimJob) -> None:
    await job.all_work("ab")
    job.crash("a", "b")
    await job.pass_time(15.0)
    waits = job.start("c", job=JobSettings(1, 1, 1), join_timeout_s=2000.0)
    await job.pass_time(5.0)
    await waits.node.be_drained("SIGUSR1")
    await job.until(lambda: isinstance(waits.error, DrainedError), "it leaves", 1.0)

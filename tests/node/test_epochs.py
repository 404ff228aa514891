"""Epochs only grow: across runs, losses of data, wrong clocks and wrong claims."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.settings.fields import MAX_EPOCH_CLAIM
from tests.sim.world import TIMING, SimJob, SimNode, simulate, simulated

HOUR_S = 3600.0


def epoch_of(node: SimNode) -> int:
    assert node.world is not None
    return node.world.epoch


async def one_run(job: SimJob, names: str, ahead_s: dict[str, float] | None = None) -> int:
    """Form a world, close the job, and return the epoch; some clocks are ahead by so much."""
    nodes = [job.start(name, clock_ahead_s=(ahead_s or {}).get(name, 0.0)) for name in names]
    await job.until_works(names, 60)
    epoch = epoch_of(nodes[0])
    await job.end(names)
    return epoch


async def crashes(job: SimJob, names: str) -> int:
    """Form a world, and let all its nodes crash; return the epoch."""
    job.start_all(names)
    await job.until_works(names, 60)
    epoch = epoch_of(job.nodes[names[0]])
    job.crash(*names)
    return epoch


def embedded(job: SimJob) -> None:
    """Let the etcd count as embedded: it is new, and empty, in every run."""
    job.settings = replace(job.settings, embed=True)


@simulated(range(8), min_nodes=2, max_nodes=3)
async def test_epochs_grow_over_runs_in_which_etcd_lost_its_data(job: SimJob) -> None:
    """What the run had reached by then is remembered with its end."""
    epochs = []
    for _ in range(3):
        await job.all_work("ab")
        await job.pass_time(20)
        job.wipe()
        await job.pass_time(50)
        job.start("c")
        await job.until_works("abc")
        epochs.append(epoch_of(job.nodes["a"]))
        await job.end("abc")
        await job.pass_time(2 * TIMING.closed_ttl_s)
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("closed", [False, True])
@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_wrong_clocks_do_not_matter_to_an_etcd_that_outlives_its_runs(
    job: SimJob, closed: bool
) -> None:
    """Nor that a run ended by leaving, so that nothing remembers it."""
    if closed:
        first = await one_run(job, "a", {"a": HOUR_S})
    else:
        node = job.start("a", clock_ahead_s=HOUR_S)
        await job.until_works("a")
        first = epoch_of(node)
        await job.leave("a")
    assert await one_run(job, "b") > first


async def all_is_lost_between_runs(job: SimJob) -> None:
    """First etcd's data as well as all nodes; then what was written since a backup."""
    await crashes(job, "ab")
    job.wipe()
    await job.pass_time(60.0)
    await crashes(job, "cd")
    saved = job.save()
    await crashes(job, "ef")
    await job.pass_time(60.0)
    job.restore(saved, bump_revision=0)
    await crashes(job, "gh")


def test_epochs_go_on_when_all_nodes_and_then_etcd_s_data_were_lost() -> None:
    """Whatever etcd it is. That epochs grow is checked in each simulated job."""
    simulate(all_is_lost_between_runs, range(8), min_nodes=2, max_nodes=2)


async def crash_of_a_clock_ahead(job: SimJob) -> None:
    job.start("a", clock_ahead_s=HOUR_S)
    await job.until_works("a")
    await job.pass_time(3 * TIMING.ended_ttl_s)  # the memory lives for as long as the job
    job.crash("a")
    await job.pass_time(job.loop.rng.choice([5.0, 100.0, 550.0]))
    await one_run(job, "b")


def test_a_clock_that_was_ahead_does_not_matter_after_a_crash_of_all() -> None:
    """etcd remembers what epochs count from, though nobody was left to tell it."""
    simulate(crash_of_a_clock_ahead, min_nodes=1, max_nodes=1)


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_an_embedded_etcd_s_epochs_go_on_where_the_last_run_s_ended(job: SimJob) -> None:
    """Otherwise the checkpoints of the last run would look newer than those of this one."""
    embedded(job)
    epochs = []
    for names in ("ab", "cd", "ef"):
        epochs.append(await one_run(job, names))
        job.wipe()
        await job.pass_time(600.0)
    assert epochs == sorted(set(epochs))


@simulated(range(8), min_nodes=3, max_nodes=3)
async def test_one_clock_that_is_ahead_does_not_decide(job: SimJob) -> None:
    embedded(job)
    wrong = job.loop.rng.choice("abc")
    first = await one_run(job, "abc", {wrong: HOUR_S})
    job.wipe()  # and nobody knows what was
    await job.pass_time(60.0)
    assert await one_run(job, "def") > first


@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_a_clock_that_was_ahead_blocks_no_later_run(job: SimJob) -> None:
    """What a run has reached is remembered with its end."""
    embedded(job)
    first = await one_run(job, "a", {"a": HOUR_S})
    await job.pass_time(TIMING.closed_ttl_s / 2)
    assert await one_run(job, "b") > first


@simulated(range(3), min_nodes=1, max_nodes=1)
async def test_an_epoch_that_is_handed_back_is_exceeded(job: SimJob) -> None:
    embedded(job)
    first = await one_run(job, "a", {"a": HOUR_S})
    job.wipe()
    job.settings = replace(job.settings, epoch_floor=first)
    assert await one_run(job, "b") > first


@pytest.mark.parametrize("claim", [MAX_EPOCH_CLAIM, MAX_EPOCH_CLAIM + 1, 2**63 - 1])
@simulated(range(3), min_nodes=1, max_nodes=3)
async def test_a_claim_of_an_absurd_epoch_leaves_room_for_all_that_follow(
    job: SimJob, claim: int
) -> None:
    info = NodeInfo("x~1~x", "10.0.0.9", 1, 1, job.settings.job)
    value = json.dumps({**json.loads(values.encode_node(info)), "epoch_seen": claim}).encode()
    lease = (await job.server.connect().grant(600)).lease_id
    job.server.apply(Txn((), (Put(job.keys.node("x~1~x"), value, lease),)))
    job.start("a")
    await job.until(lambda: bool(job.history.formed), "a world", 60)
    job.server.expire(lease)
    await job.until_works("a", 60)
    job.start("b")
    await job.until_works("ab", 60)
    assert epoch_of(job.nodes["a"]) <= MAX_EPOCH_CLAIM + job.server.revision


@simulated(
    range(5), min_nodes=1, max_nodes=2, timing=replace(TIMING, job_lease_ttl_s=600, ended_ttl_s=90)
)
async def test_what_epochs_count_from_is_kept_while_the_job_lives_however_short_its_lease(
    job: SimJob,
) -> None:
    await job.all_work("ab")
    await job.pass_time(150.0)
    job.crash(job.leader.name)  # another one renews it from now on
    await job.pass_time(400.0)
    assert job.server.snapshot(job.keys.epoch)

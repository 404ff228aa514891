"""Real torchrun agents form worlds, lose nodes and take nodes in."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rdzv_etcd.world_change import rejoined
from tests.cli.tools import run_alone
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def test_killed_nodes_are_left_behind_though_their_leases_live(
    train: Callable[..., Training],
) -> None:
    """Agent and worker, as by a power cut; first the leader, then rank 0: the others train on.

    The first to arrive leads, and its rank key gives it the last rank: neither is the other.
    """
    conf = f"{QUICK.replace('lease_ttl=3', 'lease_ttl=3000')},rank_key=RACK"
    job = train("2:4", conf=conf, allreduce=True)
    (leads,) = job.start("leader", RACK="rack-11")
    job.wait_arrivals(1)
    (first,) = job.start("rank-0", RACK="rack-2")
    (second,) = job.start("rank-1", RACK="rack-9")
    (third,) = job.start("rank-2", RACK="rack-10")
    living = [first, second, third, leads]
    world = job.wait_for_world()
    assert [step.agent for step in world] == [agent.name for agent in living]
    assert job.leader() is leads

    for victim in (leads, first):
        killed_at = time.time()
        victim.kill()
        living.remove(victim)
        smaller = job.wait_for_world()
        print(f"first step {smaller[0].time - killed_at:.1f} s after {victim.name} was killed")
        assert [step.agent for step in smaller] == [agent.name for agent in living]
        assert smaller[0].epoch > world[0].epoch
        for survivor in living:
            assert ": its process exited (its host refuses the connection" in survivor.output
        world = smaller
    job.end_workers()


def test_a_spare_waits_takes_over_and_ends_well(train: Callable[..., Training]) -> None:
    """A node beyond max disturbs no other; after a loss it takes the seat; else it exits with 0."""
    job = train("2")
    killed, member = job.start("a", "b")
    job.wait_for_world()
    with job.undisturbed(killed, member, for_s=2):
        (spare,) = job.start("spare")
        job.wait_arrivals(3)
    assert not spare.steps()

    killed.kill()
    (second_spare,) = job.start("second-spare")
    job.wait_for_world(member, spare)
    job.wait_present()
    assert not second_spare.steps()
    job.finish()


def test_a_failing_worker_uses_up_a_restart(
    etcd: EtcdServer, train: Callable[..., Training]
) -> None:
    """All re-form, with the same nodes and the same ranks; why is known when the job has ended."""
    script_args = ("--raise-at=5", "--raise-rank=1")
    job = train("2", conf=f"{QUICK},ended_ttl=600", allreduce=True, script_args=script_args)
    started = job.start("a", "b")
    before = job.wait_for_world()
    failed = next(agent for agent in started if agent.name == before[1].agent)
    job.wait_until("a second attempt", lambda: any(step.restart_count for step in failed.steps()))
    after = job.wait_for_world(after=before[0].time)
    assert [step.agent for step in after] == [step.agent for step in before]
    assert after[1].restart_count == 1
    assert after[0].epoch > before[0].epoch
    job.end_workers()
    assert any(rejoined("", "worker of rank ")[:-1] in agent.output for agent in started)
    why = "worker of rank 1 ended with exit code 1: RuntimeError: rank 1 was told to fail in step 5"
    asked = ("history", job.job.run_id, "--endpoint", etcd.endpoint)
    history = run_alone(*asked, environ={"COLUMNS": "300"})
    assert rejoined("", why) in " ".join(history.out.split())
    told = run_alone(*asked, "--json").json["history"]
    # A third one if rank 0's agent was the first to see its own worker fail, of which rank 1's took
    # the restart for a change.
    back = {
        node.split("~")[1]: because
        for each in told["rounds"]
        for node, because in each.get("back_because", {}).items()
    }
    assert back[str(failed.process.pid)] == why
    assert told["ended"][0]["succeeded"]

"""Real torchrun agents form worlds, lose nodes and take nodes in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rdzv_etcd.world_change import rejoined
from tests.cli.tools import run_alone
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agents, Job
from tests.torchrun.in_etcd import finish, leader, node_pids

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.mark.release
def test_three_agents_with_two_workers_each_form_one_world(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Ranks 0 to 5, two on each agent; the workers themselves check that they agree and add up."""
    job = Job(etcd.target, tmp_path, nnodes="3", nproc=2, allreduce=True)
    started = agents.start(job, "a", "b", "c")
    world = agents.wait_for_world(started, size=6)
    assert [step.rank for step in world] == [0, 1, 2, 3, 4, 5]
    assert [world[rank].agent == world[rank + 1].agent for rank in (0, 2, 4)] == [True] * 3
    assert world[0].epoch > 0
    finish(agents, etcd, job, started)


def test_killed_nodes_are_left_behind_though_their_leases_live(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Agent and worker, as by a power cut; first the leader, then rank 0: the others train on.

    The first to arrive leads, and its rank key gives it the last rank: neither is the other.
    """
    conf = f"{QUICK.replace('lease_ttl=3', 'lease_ttl=3000')},rank_key=RACK"
    job = Job(etcd.target, tmp_path, nnodes="2:4", conf=conf, allreduce=True)
    (leads,) = agents.start(job, "leader", RACK="rack-11")
    agents.wait_until(
        "the first agent has arrived", lambda: leads.process.pid in node_pids(etcd, job)
    )
    (first,) = agents.start(job, "rank-0", RACK="rack-2")
    (second,) = agents.start(job, "rank-1", RACK="rack-9")
    (third,) = agents.start(job, "rank-2", RACK="rack-10")
    living = [first, second, third, leads]
    world = agents.wait_for_world(living, size=4)
    assert [step.agent for step in world] == [agent.name for agent in living]
    assert leader(etcd, job, living) is leads

    for victim in (leads, first):
        killed_at = time.time()
        victim.kill()
        living.remove(victim)
        smaller = agents.wait_for_world(living, size=len(living), after=killed_at)
        print(f"first step {smaller[0].time - killed_at:.1f} s after {victim.name} was killed")
        assert [step.agent for step in smaller] == [agent.name for agent in living]
        assert smaller[0].epoch > world[0].epoch
        for survivor in living:
            assert ": its process exited (its host refuses the connection" in survivor.output
        world = smaller
    job.stop_file.touch()
    assert [agent.wait() for agent in living] == [0, 0]


def test_a_spare_waits_takes_over_and_ends_well(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """A node beyond max disturbs nobody; after a loss it takes the seat; else it exits with 0."""
    job = Job(etcd.target, tmp_path, nnodes="2")
    members = agents.start(job, "a", "b")
    agents.wait_for_world(members, size=2)
    (spare,) = agents.start(job, "spare")
    agents.wait_until("the spare has arrived", lambda: spare.process.pid in node_pids(etcd, job))
    agents.wait_for_undisturbed_steps(members, 20)
    assert not spare.steps()

    killed_at = time.time()
    members[0].kill()
    (second_spare,) = agents.start(job, "second-spare")
    agents.wait_for_world([members[1], spare], size=2, after=killed_at)
    agents.wait_until(
        "the second spare has arrived",
        lambda: second_spare.process.pid in node_pids(etcd, job),
    )
    assert not second_spare.steps()
    finish(agents, etcd, job, [members[1], spare, second_spare])


def test_a_failing_worker_uses_up_a_restart(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """All re-form, with the same nodes and the same ranks; why is known when the job has ended."""
    script_args = ("--raise-at=5", "--raise-rank=1")
    conf = f"{QUICK},ended_ttl=600"
    job = Job(etcd.target, tmp_path, nnodes="2", conf=conf, allreduce=True, script_args=script_args)
    started = agents.start(job, "a", "b")
    before = agents.wait_for_world(started, size=2)
    failed = next(agent for agent in started if agent.name == before[1].agent)
    agents.wait_until(
        "a second attempt", lambda: any(step.restart_count for step in failed.steps())
    )
    after = agents.wait_for_world(started, size=2, after=before[0].time)
    assert [step.agent for step in after] == [step.agent for step in before]
    assert after[1].restart_count == 1
    assert after[0].epoch > before[0].epoch
    job.stop_file.touch()
    assert [agent.wait() for agent in started] == [0, 0]
    assert any(rejoined("", "worker of rank ")[:-1] in agent.output for agent in started), (
        "in a log"
    )
    why = "worker of rank 1 ended with exit code 1: RuntimeError: rank 1 was told to fail in step 5"
    wide = {"COLUMNS": "300"}
    history = run_alone("history", job.run_id, "--endpoint", etcd.endpoint, environ=wide)
    assert rejoined("", why) in " ".join(history.out.split())
    told = run_alone("history", job.run_id, "--endpoint", etcd.endpoint, "--json").json["history"]
    # A third one if rank 0's agent was the first to see its own worker fail, of which rank 1's took
    # the restart for a change.
    back = {
        node.split("~")[1]: because
        for each in told["rounds"]
        for node, because in each.get("back_because", {}).items()
    }
    assert back[str(failed.process.pid)] == why
    assert told["ended"][0]["succeeded"]


def test_the_same_id_works_again_at_once(etcd: EtcdServer, agents: Agents, tmp_path: Path) -> None:
    """After a job that finished, and after one that failed, without waiting for anything."""
    job = Job(
        etcd.target,
        tmp_path,
        nnodes="1",
        max_restarts=0,
        conf="lease_ttl=3",
        script_args=("--steps=3",),
    )
    for name, raises, code in (("1", False, 0), ("2", True, 1), ("3", False, 0)):
        job.script_args = ("--steps=3", "--raise-at=2") if raises else ("--steps=3",)
        (agent,) = agents.start(job, name)
        assert agent.wait() == code
        assert agent.steps()[-1].step == (1 if raises else 3)
    assert not etcd.keys(f"/rdzv_etcd/{job.run_id}/nodes/".encode())


def test_a_job_that_was_stopped_everywhere_starts_again_at_once(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """SIGTERM to all agents closes nothing: the same id goes on, with a newer epoch."""
    job = Job(etcd.target, tmp_path, nnodes="2")
    first = agents.start(job, "a", "b")
    before = agents.wait_for_world(first, size=2)
    for agent in first:
        agent.terminate()
    second = agents.start(job, "c", "d")
    after = agents.wait_for_world(second, size=2)
    assert after[0].epoch > before[0].epoch
    assert all(agent.wait() != 0 for agent in first)
    finish(agents, etcd, job, second)

"""Real torchrun agents form worlds, lose nodes and take nodes in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agents, Job
from tests.torchrun.in_etcd import finish, leader, node_pids

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def test_three_agents_with_two_workers_each_form_one_world(
    each_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Ranks 0 to 5, two on each agent; the workers themselves check that they agree and add up."""
    job = Job(each_etcd.target, tmp_path, nnodes="3", nproc=2)
    started = agents.start(job, "a", "b", "c")
    world = agents.wait_for_world(started, size=6)
    assert [step.rank for step in world] == [0, 1, 2, 3, 4, 5]
    assert [world[rank].agent == world[rank + 1].agent for rank in (0, 2, 4)] == [True] * 3
    assert world[0].epoch > 0
    finish(agents, each_etcd, job, started)


@pytest.mark.parametrize("role", ["plain member", "rank 0", "leader"])
def test_a_killed_node_is_left_behind(
    role: str, newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """SIGKILL of an agent and its worker: the two others re-form and train on.

    The first to arrive leads, and its rank key gives it the last rank: three roles, three agents.
    """
    job = Job(newest_etcd.target, tmp_path, nnodes="2:3", conf=f"{QUICK},rank_key=RACK")
    (leads,) = agents.start(job, "leader", RACK="rack-10")
    agents.wait_until(
        "the first agent has arrived", lambda: leads.process.pid in node_pids(newest_etcd, job)
    )
    (first,) = agents.start(job, "rank-0", RACK="rack-2")
    (plain,) = agents.start(job, "plain", RACK="rack-9")
    started = [first, plain, leads]
    world = agents.wait_for_world(started, size=3)
    assert [step.agent for step in world] == [agent.name for agent in started]
    assert leader(newest_etcd, job, started) is leads

    victim = {"plain member": plain, "rank 0": first, "leader": leads}[role]
    killed_at = time.time()
    victim.kill()
    others = [agent for agent in started if agent is not victim]
    smaller = agents.wait_for_world(others, size=2, after=killed_at)
    print(f"first step {smaller[0].time - killed_at:.1f} s after the {role} was killed")
    assert [step.agent for step in smaller] == [agent.name for agent in others]
    assert smaller[0].epoch > world[0].epoch
    finish(agents, newest_etcd, job, others)


def test_a_late_node_is_taken_in_and_a_stopped_one_let_go(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """A third node joins a running world of two; then SIGTERM ends one of the first two.

    Restart counts are not looked at: an agent whose workers lose their peers before it has asked
    for changes counts that as a failure of its own workers, whatever the backend.
    """
    job = Job(newest_etcd.target, tmp_path, nnodes="2:3")
    early = agents.start(job, "a", "b")
    pair = agents.wait_for_world(early, size=2)
    (late,) = agents.start(job, "late")
    three = agents.wait_for_world([*early, late], size=3)
    assert three[0].epoch > pair[0].epoch

    stopped = early[0]
    stopped_at = time.time()
    stopped.terminate()
    assert stopped.wait() != 0
    others = [early[1], late]
    again = agents.wait_for_world(others, size=2, after=stopped_at)
    print(f"first step {again[0].time - stopped_at:.1f} s after SIGTERM")
    assert again[0].epoch > three[0].epoch
    finish(agents, newest_etcd, job, others)


def test_a_spare_waits_takes_over_and_ends_well(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """A node beyond max disturbs nobody; after a loss it takes the seat; else it exits with 0."""
    job = Job(newest_etcd.target, tmp_path, nnodes="2")
    members = agents.start(job, "a", "b")
    agents.wait_for_world(members, size=2)
    (spare,) = agents.start(job, "spare")
    agents.wait_until(
        "the spare has arrived", lambda: spare.process.pid in node_pids(newest_etcd, job)
    )
    agents.wait_for_undisturbed_steps(members, 20)
    assert not spare.steps()

    killed_at = time.time()
    members[0].kill()
    (second_spare,) = agents.start(job, "second-spare")
    agents.wait_for_world([members[1], spare], size=2, after=killed_at)
    agents.wait_until(
        "the second spare has arrived",
        lambda: second_spare.process.pid in node_pids(newest_etcd, job),
    )
    assert not second_spare.steps()
    finish(agents, newest_etcd, job, [members[1], spare, second_spare])


def test_a_failing_worker_uses_up_a_restart(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """All re-form, with the same nodes and the same ranks."""
    script_args = ("--raise-at=5", "--raise-rank=1")
    job = Job(newest_etcd.target, tmp_path, nnodes="2", script_args=script_args)
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
    finish(agents, newest_etcd, job, started)


def test_the_same_id_works_again_at_once(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """After a job that finished, and after one that failed, without waiting for anything."""
    job = Job(
        newest_etcd.target,
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
    assert not newest_etcd.keys(f"/rdzv_etcd/{job.run_id}/nodes/".encode())

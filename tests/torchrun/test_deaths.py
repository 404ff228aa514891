"""Nodes that die between their arrival and the end of their lease."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agents, Job
from tests.torchrun.in_etcd import finish, node_pids

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.mark.parametrize("dead_rank", [0, pytest.param(1, marks=pytest.mark.release)])
def test_nobody_waits_for_a_node_that_died_after_it_arrived(
    dead_rank: int, etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """A round is formed with a dead node, because its lease still lives; the others get over it.

    Without help torch's agents would wait 300 s for the dead one's part in assigning the workers'
    ranks, and fail then.
    """
    conf = "lease_ttl=20,closed_ttl=3,ended_ttl=3,rank_key=RACK"
    job = Job(etcd.target, tmp_path, nnodes="3", conf=conf)
    (first,) = agents.start(job, "first", RACK=str(1 - dead_rank))
    # The first one leads: without a leader no round would be formed before the lease has run out.
    _wait_for_arrivals(agents, etcd, job, 1)
    (dead,) = agents.start(job, "dead", RACK=str(dead_rank))
    _wait_for_arrivals(agents, etcd, job, 2)
    with FaultBridge((etcd.host, etcd.port)) as bridge:
        bridge.black_hole()  # the last one is to arrive as soon as the second is dead
        (last,) = agents.start(replace(job, endpoint=bridge.target), "last", RACK="2")
        agents.wait_until("the last one's first request", lambda: bridge.connections > 0)
        dead.kill()
        killed_at = time.time()
        bridge.heal()
        agents.wait_until(
            "a round is formed with the dead node",
            lambda: "round 1 formed in" in first.output and "round 1 formed in" in last.output,
        )
        (replacement,) = agents.start(job, "replacement", RACK="3")
        alive = [first, last, replacement]
        agents.wait_for_world(alive, size=3, after=killed_at)
        finish(agents, etcd, job, alive)


def _wait_for_arrivals(agents: Agents, server: EtcdServer, job: Job, count: int) -> None:
    agents.wait_until(f"{count} arrivals", lambda: len(node_pids(server, job)) == count)


def test_the_workers_of_a_killed_agent_are_ended(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Only the agent is killed, as when its host is out of memory. The other node's live on."""
    job = Job(etcd.target, tmp_path, nnodes="1:2", nproc=2, conf=f"{QUICK},orphans=kill")
    dead, other = agents.start(job, "dead", "other")
    agents.wait_for_world([dead, other], size=4)
    workers = [psutil.Process(pid) for pid in {step.pid for step in dead.steps()}]
    dead.may_end = True
    dead.process.kill()
    dead.process.wait()
    killed_at = time.time()
    agents.wait_until("its workers are ended", lambda: not any(map(_lives, workers)))
    agents.wait_until("the guard says so", lambda: "died without leaving the job" in dead.output)
    agents.wait_for_world([other], size=2, after=killed_at)
    finish(agents, etcd, job, [other])
    assert "died without leaving the job" not in other.output


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

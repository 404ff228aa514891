"""Agents whose workers have finished while others still work: nobody waits for them, and they wait
for nothing that will not come."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rdzv_etcd.protocol.keys import JobKeys
from tests.cli.tools import run_alone
from tests.support.servers import EtcdServer
from tests.torchrun.agents import PATIENCE_S, QUICK, Agent, Agents, Job
from tests.torchrun.in_etcd import assert_nothing_left, node_pids

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

FOREVER = "rejoin_timeout=100000"
"""Whoever waits for a finished member waits longer than a test."""


def job_of(etcd: EtcdServer, folder: Path, nnodes: str = "1:3", max_restarts: int = 5) -> Job:
    conf = f"{QUICK},{FOREVER}"
    return Job(etcd.target, folder, nnodes=nnodes, conf=conf, max_restarts=max_restarts)


def start(agents: Agents, job: Job, *names: str) -> list[Agent]:
    """Start agents, each with a stop file of its own."""
    return [
        agents.start(replace(job, script_args=(f"--stop-file={stop_file(job, name)}",)), name)[0]
        for name in names
    ]


def stop_file(job: Job, name: str) -> Path:
    return job.directory / f"{name}.stop"


def finish_early(agents: Agents, etcd: EtcdServer, job: Job, agent: Agent) -> None:
    """Let the workers of one agent succeed, and wait until the other agents know that."""
    agent.may_end = True
    stop_file(job, agent.name).touch()
    agents.wait_until(f"{agent.name} is known to have finished", lambda: is_finished(etcd, job))


def is_finished(etcd: EtcdServer, job: Job) -> bool:
    presences = etcd.keys(JobKeys("/rdzv_etcd", job.run_id).nodes.start).values()
    return any(json.loads(value).get("finished") for value in presences)


def fail_worker(agent: Agent) -> float:
    """Kill the agent's worker; return when that was."""
    agent.may_end = True
    os.kill(agent.steps()[-1].pid, signal.SIGKILL)
    return time.time()


def end_well(etcd: EtcdServer, job: Job, *running: Agent) -> None:
    """Let all finish: each exits with 0, also those that have waited, and nothing is left."""
    for agent in running:
        agent.may_end = True
        stop_file(job, agent.name).touch()
    codes = {agent.name: agent.wait() for agent in running}
    assert codes == dict.fromkeys(codes, 0)
    assert_nothing_left(etcd, job)


def test_a_worker_that_fails_restarts_without_the_nodes_that_have_finished(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """As soon as all others are back; what those wait for is in ``status``, and they end with the
    job."""
    job = job_of(etcd, tmp_path)
    a, b = start(agents, job, "a", "b")
    agents.wait_for_world([a, b], size=2)
    finish_early(agents, etcd, job, a)
    wide = {"COLUMNS": "200"}
    status = run_alone("status", job.run_id, "--endpoint", etcd.endpoint, environ=wide)
    assert "finished" in status.out, status.out
    assert "waits for the others" in status.out, status.out

    agents.wait_for_world([b], size=1, after=fail_worker(b))
    assert "not back yet" not in b.output
    assert a.process.poll() is None, "it waits for the end of the job, as torch means it"
    end_well(etcd, job, a, b)
    assert "Error waiting on exit barrier" not in a.output


def test_a_loss_is_repaired_without_the_nodes_that_have_finished(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    job = job_of(etcd, tmp_path)
    a, b, c = start(agents, job, "a", "b", "c")
    agents.wait_for_world([a, b, c], size=3)
    finish_early(agents, etcd, job, a)
    killed_at = time.time()
    c.kill()
    agents.wait_for_world([b], size=1, after=killed_at)
    end_well(etcd, job, a, b)


def test_a_newcomer_replaces_a_finished_node_only_when_the_others_restart_anyway(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """The next world would not be larger, so nobody is disturbed for it."""
    job = job_of(etcd, tmp_path)
    a, b = start(agents, job, "a", "b")
    agents.wait_for_world([a, b], size=2)
    finish_early(agents, etcd, job, a)
    (c,) = start(agents, job, "c")
    agents.wait_until("the newcomer is there", lambda: c.process.pid in node_pids(etcd, job))
    agents.wait_for_undisturbed_steps([b], 20)
    agents.wait_for_world([b, c], size=2, after=fail_worker(b))
    end_well(etcd, job, a, b, c)


def test_an_agent_that_has_finished_ends_when_the_job_fails(
    etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """Its own work is done: it ends well, and does not wait for torch's 300 s to pass."""
    job = job_of(etcd, tmp_path, max_restarts=0)
    a, b = start(agents, job, "a", "b")
    agents.wait_for_world([a, b], size=2)
    finish_early(agents, etcd, job, a)
    fail_worker(b)
    assert b.wait() == 1
    assert a.wait(PATIENCE_S) == 0
    assert "closed the job as failed: the worker of rank" in a.output
    assert_nothing_left(etcd, job)

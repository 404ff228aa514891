"""Agents whose workers have finished while others still work: no node waits for them, and they do
not wait for what will not come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.cli.tools import run_alone
from tests.support.servers import EtcdServer
from tests.torchrun.agents import QUICK, Agent
from tests.torchrun.training import Training

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

CONF = f"{QUICK},rejoin_timeout=100000"
"""A node that waits for a finished member waits longer than a test."""


def start(job: Training, *names: str) -> list[Agent]:
    """Start agents, each with a stop file of its own."""
    stop = {name: f"--stop-file={job.own_stop_file(name)}" for name in names}
    return [job.start(name, script_args=(stop[name],))[0] for name in names]


def fail_worker(agent: Agent) -> None:
    os.kill(agent.steps()[-1].pid, signal.SIGKILL)


def test_a_worker_that_fails_restarts_without_the_nodes_that_have_finished(
    etcd: EtcdServer, train: Callable[..., Training]
) -> None:
    """As soon as all others are back; ``status`` shows what those wait for, and they end with the
    job."""
    job = train("1:2", conf=CONF)
    a, b = start(job, "a", "b")
    job.wait_for_world()
    job.finish_early(a)
    wide = {"COLUMNS": "200"}
    status = run_alone("status", job.job.run_id, "--endpoint", etcd.endpoint, environ=wide)
    assert "finished" in status.out, status.out
    assert "waits for the others" in status.out, status.out

    fail_worker(b)
    job.wait_for_world(b)
    assert "not back yet" not in b.output
    assert a.process.poll() is None, "it waits for the end of the job, as torch means it"
    job.own_stop_file("b").touch()
    job.finish(a, b)
    assert "Error waiting on exit barrier" not in a.output


def test_an_agent_that_has_finished_ends_when_the_job_fails(
    train: Callable[..., Training],
) -> None:
    """Its own work is done: it ends well, and does not wait for torch's 300 s to pass."""
    job = train("1:2", conf=CONF, max_restarts=0)
    a, b = start(job, "a", "b")
    job.wait_for_world()
    job.finish_early(a)
    fail_worker(b)
    assert b.wait() == 1
    assert a.wait() == 0
    assert "closed the job as failed: the worker of rank" in a.output
    job.assert_nothing_left()

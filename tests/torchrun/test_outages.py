"""Real torchrun agents while etcd is away, and a job that is stopped and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers import EtcdServer
from tests.torchrun.agents import Agents, Job
from tests.torchrun.in_etcd import finish, node_pids

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


def test_training_goes_on_while_etcd_is_away(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """A crash for longer than the lease, a restart, then all data wiped: no worker restarts.

    The job then takes in a third node, and it ends as ever.
    """
    job = Job(newest_etcd.target, tmp_path, nnodes="2:3")
    pair = agents.start(job, "a", "b")
    before = agents.wait_for_world(pair, size=2)

    newest_etcd.kill()
    agents.wait_for_undisturbed_steps(pair, 60)  # 0.1 s each; the lease is 3 s
    newest_etcd.start()
    agents.wait_for_undisturbed_steps(pair, 60)
    newest_etcd.wipe()
    agents.wait_until(
        "both nodes have put themselves back",
        lambda: node_pids(newest_etcd, job) == {agent.process.pid for agent in pair},
    )
    agents.wait_for_undisturbed_steps(pair, 60)

    (late,) = agents.start(job, "late")
    after = agents.wait_for_world([*pair, late], size=3)
    assert after[0].epoch > before[0].epoch
    finish(agents, newest_etcd, job, [*pair, late])


def test_a_job_that_was_stopped_everywhere_starts_again_at_once(
    newest_etcd: EtcdServer, agents: Agents, tmp_path: Path
) -> None:
    """SIGTERM to all agents closes nothing: the same id goes on, with a newer epoch."""
    job = Job(newest_etcd.target, tmp_path, nnodes="2")
    first = agents.start(job, "a", "b")
    before = agents.wait_for_world(first, size=2)
    for agent in first:
        agent.terminate()
    second = agents.start(job, "c", "d")
    after = agents.wait_for_world(second, size=2)
    assert after[0].epoch > before[0].epoch
    assert all(agent.wait() != 0 for agent in first)
    finish(agents, newest_etcd, job, second)

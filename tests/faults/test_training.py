"""Training through real torchrun while etcd's cluster is hurt; the workers' step log judges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nodes import assert_nothing_left
from tests.support.servers import EtcdCluster
from tests.torchrun.agents import Agents, Job

pytestmark = pytest.mark.torchrun

_STEPS_PER_S = 10  # what the worker sleeps


@pytest.fixture
def agents() -> Iterator[Agents]:
    started = Agents()
    yield started
    started.close()


@pytest.mark.parametrize(
    "away_s", [9, pytest.param(60, marks=pytest.mark.slow_faults)], ids=lambda s: f"{s}s"
)
def test_training_goes_on_without_quorum_and_after_a_new_cluster(
    cluster: EtcdCluster, agents: Agents, tmp_path: Path, away_s: int
) -> None:
    """Quorum lost for ``away_s``, back again, then killed, wiped and made anew: no worker restarts.

    The lease is 3 s. In the end the job finishes as ever, and leaves nothing.
    """
    job = Job(cluster.endpoints, tmp_path, nnodes="2")
    pair = agents.start(job, "a", "b")
    agents.wait_for_world(pair, size=2)
    for member in cluster.members[:2]:
        member.kill()
    agents.wait_for_undisturbed_steps(pair, away_s * _STEPS_PER_S)
    for member in cluster.members[:2]:
        member.start(wait=False)
    agents.wait_for_undisturbed_steps(pair, 5 * _STEPS_PER_S)
    cluster.wipe()
    agents.wait_for_undisturbed_steps(pair, 8 * _STEPS_PER_S)

    for agent in pair:
        agent.may_end = True
    job.stop_file.touch()
    assert [agent.wait() for agent in pair] == [0, 0]
    assert_nothing_left(cluster.gateway, job.run_id)

"""Training through real torchrun while etcd's cluster is hurt: the workers' step log judges.

One job on one cluster of three members takes one fault after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers import EtcdBinary, EtcdCluster
from tests.torchrun.agents import Job
from tests.torchrun.training import TTL_S, Training

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def cluster(
    etcd_binary: EtcdBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdCluster]:
    made = EtcdCluster(etcd_binary, tmp_path_factory.mktemp("cluster"), 3)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="module")
def shared_training(
    cluster: EtcdCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    job = Job(cluster.endpoints, tmp_path_factory.mktemp("job"), nnodes="2:3")
    made = Training(job, lambda: cluster.gateway)
    try:
        made.start("a", "b")
        yield made
    finally:
        made.close()


def test_etcds_leader_is_killed(cluster: EtcdCluster, training: Training) -> None:
    with training.undisturbed():
        leader = cluster.leader()
        leader.kill()
        training.train_for(2 * TTL_S)
        leader.start()
        training.wait_present()


def test_a_rolling_restart(cluster: EtcdCluster, training: Training) -> None:
    with training.undisturbed():
        for member in cluster.members:
            member.restart()
        training.wait_present()


@pytest.mark.parametrize(
    "away_s", [3 * TTL_S, pytest.param(60, marks=pytest.mark.release)], ids=lambda s: f"{s}s"
)
def test_quorum_is_lost(cluster: EtcdCluster, training: Training, away_s: float) -> None:
    with training.undisturbed():
        for member in cluster.members[:2]:
            member.kill()
        training.train_for(away_s)
        for member in cluster.members[:2]:
            member.start(wait=False)
        for member in cluster.members:
            member.wait_ready()
        training.wait_present()


def test_all_data_are_wiped_and_the_cluster_recreated(
    cluster: EtcdCluster, training: Training
) -> None:
    with training.undisturbed():
        cluster.wipe()
        training.wait_present()


def test_afterwards_a_node_is_taken_in_and_the_job_ends_well(training: Training) -> None:
    """The job is as alive as ever, its next world has a higher epoch, and it leaves nothing."""
    with training.reformed_once():
        training.start("late")
    training.finish()

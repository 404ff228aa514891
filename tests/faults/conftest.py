"""Fixtures of the fault tests: etcd servers and clusters to hurt, and node processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.nodes import Nodes
from tests.support.bridge import FaultBridge
from tests.support.servers import EtcdCluster, EtcdServer

if TYPE_CHECKING:
    from tests.torchrun.training import Training  # imports torch


@pytest.fixture
def etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """A server of this test's own."""
    return fresh_etcd()


@pytest.fixture
def cluster(fresh_cluster: Callable[..., EtcdCluster]) -> EtcdCluster:
    """Three members."""
    return fresh_cluster(3)


@pytest.fixture
def bridge(etcd: EtcdServer) -> Iterator[FaultBridge]:
    """A bridge before ``etcd``."""
    with FaultBridge((etcd.host, etcd.port)) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """A factory of jobs: ``job(endpoint, "2:3", **rdzv_conf)``. In the end the invariants are
    checked over the worlds that the nodes have entered, and their processes end."""
    with ExitStack() as stack:
        made: list[Nodes] = []

        def make(endpoint: str, nodes: str, **config: object) -> Nodes:
            folder = tmp_path / f"job{len(made)}"
            folder.mkdir()
            made.append(Nodes(folder, endpoint, nodes, **config))
            stack.callback(made[-1].close)
            return made[-1]

        yield make
        for nodes in made:
            nodes.check()


@pytest.fixture
def training(shared_training: Training) -> Iterator[Training]:
    """The one training of a file's tests, in a world."""
    shared_training.wait_for_world()
    yield shared_training
    shared_training.report()

"""What most of these tests work on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.servers import EtcdCluster, EtcdServer


@pytest.fixture
def server(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """A server of the test's own."""
    return fresh_etcd()


@pytest.fixture
def cluster(fresh_cluster: Callable[[int], EtcdCluster]) -> EtcdCluster:
    """A cluster of the test's own, of three members."""
    return fresh_cluster(3)

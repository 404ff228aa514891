"""Fixtures for tests through real torchrun: agents that are cleaned up, one newest etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import EtcdServer, find_binaries
from tests.torchrun.agents import Agents


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:  # their output is there, and is read in the end
    started = Agents()
    yield started
    started.close()


@pytest.fixture
def newest_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the newest version under test, for what need not be shown on every version."""
    server = EtcdServer(find_binaries()[0], tmp_path).start_on_free_ports()
    yield server
    server.stop()


@pytest.fixture(params=find_binaries(), ids=lambda binary: binary.label)
def each_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of every version under test, in turn."""
    server = EtcdServer(request.param, tmp_path).start_on_free_ports()
    yield server
    server.stop()

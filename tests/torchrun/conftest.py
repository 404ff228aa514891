"""Fixtures for tests through real torchrun: agents that are cleaned up, and an etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gloo_threads import none_left_behind
from tests.support.servers import EtcdBinary, EtcdServer
from tests.torchrun.agents import Agents


@pytest.fixture
def agents(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,  # their output is there, and is read in the end
) -> Iterator[Agents]:
    with none_left_behind(tmp_path_factory.mktemp("exits")):
        started = Agents()
        yield started
        started.close()


@pytest.fixture
def etcd(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of this test's own."""
    server = EtcdServer(etcd_binary, tmp_path).start_on_free_ports()
    yield server
    server.stop()

"""Fixtures for tests through real torchrun: agents that are cleaned up, one newest etcd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import EtcdBinary, EtcdServer, find_binaries
from tests.torchrun.agents import Agents


def _version(binary: EtcdBinary) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", binary.version))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:  # their output is there, and is read in the end
    started = Agents()
    yield started
    started.close()


@pytest.fixture
def newest_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the newest version under test, for what need not be shown on every version."""
    newest = max(find_binaries(), key=_version)
    server = EtcdServer(newest, tmp_path).start_on_free_ports()
    yield server
    server.stop()


@pytest.fixture(params=find_binaries(), ids=lambda binary: binary.label)
def each_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of every version under test, in turn."""
    server = EtcdServer(request.param, tmp_path).start_on_free_ports()
    yield server
    server.stop()

"""Ports, folders and agents, and nothing left of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from rdzv_etcd.embedded.launch import StartedEtcd
from rdzv_etcd.embedded.start import ensure_etcd
from tests.embedded.agents import SECRET, Agent, Cluster, environment, settings, wait_for_end
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary

Ensure: TypeAlias = Callable[..., StartedEtcd | None]
Start: TypeAlias = Callable[..., psutil.Process]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where supervisors put their data, to see that they remove it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def supervisors(port: int) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Find this port's supervisors; those that are left are ended, with their etcd."""

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            # An ended one that nobody has reaped yet has no command line.
            if any("embedded.supervisor" in part for part in line) and str(port) in line:
                found.append(process)
        return found

    yield find
    for process in find():
        process.terminate()
        wait_for_end(process)


@pytest.fixture
def ensure(etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object) -> Ensure:
    """Call ``ensure_etcd`` for this test's port."""

    def call(host: str = "127.0.0.1", **config: Any) -> StartedEtcd | None:
        return ensure_etcd(
            settings(f"{host}:{port}", **config), environment(etcd_binary.path, scratch)
        )

    return call


@pytest.fixture
def start(ensure: Ensure) -> Start:
    """Start an etcd, and return its supervisor."""

    def call(*host: str, **config: Any) -> psutil.Process:
        started = ensure(*host, **config)
        assert started is not None
        return psutil.Process(started.supervisor_pid)

    return call


@pytest.fixture
def own_address() -> str:
    """An address at which others reach this machine."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has a loopback address only")


@pytest.fixture
def cluster(
    etcd_binary: EtcdBinary, scratch: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    made = Cluster(etcd_binary.path, scratch, getattr(request, "param", SECRET))
    yield made
    made.close()


class Agents:
    """Starts agents that use this test's port, and ends them."""

    def __init__(self, environ: dict[str, str], port: int, folder: Path) -> None:
        self._environ = environ
        self._port = port
        self._folder = folder
        self._started: list[Agent] = []

    def __call__(self, count: int) -> list[Agent]:
        return [self.start() for _ in range(count)]

    def start(self, host: str = "127.0.0.1", port: int = 0, **how: Any) -> Agent:
        """Start one; see :class:`Agent` for ``how``."""
        log = self._folder / f"agent{len(self._started)}.log"
        agent = Agent(f"{host}:{port or self._port}", self._environ, log, **how)
        self._started.append(agent)
        return agent

    def close(self) -> None:
        for agent in self._started:
            agent.close()


@pytest.fixture
def agents(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object, tmp_path: Path
) -> Iterator[Agents]:
    started = Agents(environment(etcd_binary.path, scratch), port, tmp_path)
    yield started
    started.close()

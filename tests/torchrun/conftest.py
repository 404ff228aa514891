"""Fixtures for tests through real torchrun: an etcd, and jobs that are cleaned up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gloo_threads import none_left_behind
from tests.support.servers import EtcdBinary, EtcdServer
from tests.torchrun.agents import Job
from tests.torchrun.training import Training


@pytest.fixture
def etcd(etcd_binary: EtcdBinary, tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of this test's own."""
    server = EtcdServer(etcd_binary, tmp_path).start_on_free_ports()
    yield server
    server.stop()


@pytest.fixture
def train(
    etcd: EtcdServer,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,  # the agents' output is there, and is read in the end
) -> Iterator[Callable[..., Training]]:
    """A factory of jobs on ``etcd``: ``train("1:3")`` takes the fields of :class:`Job`, or of
    another ``kind`` of it."""
    with none_left_behind(tmp_path_factory.mktemp("exits")), ExitStack() as stack:

        def make(nnodes: str, kind: type[Job] = Job, **fields: Any) -> Training:
            job = kind(
                **{"endpoint": etcd.target, "directory": tmp_path, "nnodes": nnodes, **fields}
            )
            training = Training(job, lambda: etcd.gateway)
            stack.callback(training.close)
            return training

        yield make

"""A job whose nodes are handlers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from rdzv_etcd.torch_plugin.signals import DRAINS, ENDS
from tests.plugin.handlers import PluginJob
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


@pytest.fixture
def job(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> PluginJob:
    return PluginJob(etcd_server, job_id, leak_check)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Nothing handles or ignores the signals that an agent handles."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (DRAINS, *ENDS)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

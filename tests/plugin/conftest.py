"""A job whose nodes are handlers."""

from __future__ import annotations

import pytest

from tests.plugin.handlers import PluginJob
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer


@pytest.fixture
def job(leak_check: LeakCheck, etcd_server: EtcdServer, job_id: str) -> PluginJob:
    return PluginJob(etcd_server, job_id, leak_check)

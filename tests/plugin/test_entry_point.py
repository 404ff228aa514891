"""How torch finds the backend, and what it costs those who do not use it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler
from tests.plugin.handlers import PluginJob, leave

_IMPORT = """
import sys
import torch.distributed.elastic.rendezvous
import torch.distributed.elastic.rendezvous.registry
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
assert "etcd3" in rendezvous_handler_registry._registry, "not registered"
heavy = ("grpc", "google.protobuf", "etcd3", "tenacity", "rdzv_etcd.node", "rdzv_etcd.etcd")
print(sorted(name for name in sys.modules if name.startswith(heavy)))
"""


def test_torchs_registry_makes_our_handler(job: PluginJob) -> None:
    handler = get_rendezvous_handler(job.parameters())
    try:
        assert isinstance(handler, EtcdRendezvousHandler)
        assert handler.get_backend() == "etcd3"
        assert handler.get_run_id() == job.id
        assert handler.use_agent_store
    finally:
        assert isinstance(handler, EtcdRendezvousHandler)
        leave(handler)


@pytest.mark.timeout(120)
def test_importing_torchs_rendezvous_imports_nothing_of_ours() -> None:
    """Every training worker does that, and it must not pay for an agent's tools."""
    done = subprocess.run(
        [sys.executable, "-W", "error:entry point", "-c", _IMPORT],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]", done.stdout

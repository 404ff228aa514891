"""What goes wrong reaches torch as torch's own errors, with the cause in the message."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from rdzv_etcd.torch_plugin.handler import create_handler
from tests.plugin.handlers import PluginJob, parameters
from tests.support.leaks import LeakCheck
from tests.support.servers import USER, EtcdServer


def test_a_wrong_password(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "a secret of mine")
    with pytest.raises(RendezvousConnectionError, match=r"user|password") as caught:
        create_handler(parameters(auth_etcd, job_id, "1"))
    assert "a secret of mine" not in str(caught.value)


def test_a_foreign_value_at_the_start(job: PluginJob) -> None:
    """The error names the key, and nothing is left of the attempt."""
    key = job.root + b"ctl/round"
    job.server.gateway.put(key, b"\x80\x04\x95")  # a pickle
    try:
        with pytest.raises(RendezvousStateError, match=key.decode()):
            job.handler(lease_ttl=600)
        assert list(job.keys()) == [key]
    finally:
        job.server.gateway.delete_prefix(key)


def test_a_foreign_value_during_the_run(job: PluginJob) -> None:
    """Training goes on; who joins next is told, and once it is gone all works again."""
    key = job.root + b"ctl/round"
    # What hung on the overwritten record goes with its lease.
    with job.handlers(1, job_lease_ttl=5) as (handler,):
        handler.next_rendezvous()
        job.server.gateway.put(key, b"not JSON")
        assert handler.num_nodes_waiting() == 0
        with pytest.raises(RendezvousStateError, match=key.decode()):
            handler.next_rendezvous()
        job.server.gateway.delete_prefix(key)
        assert handler.next_rendezvous().world_size == 1


def test_a_time_limit(job: PluginJob) -> None:
    """It names who arrived."""
    options = {"join_timeout": 1, "last_call_timeout": 1}
    with job.handlers(1, "3", **options) as (handler,):
        host = handler._group.node_id.split("~")[0]
        with pytest.raises(RendezvousTimeoutError, match=rf"1 of at least 3 nodes.*{host}"):
            handler.next_rendezvous()


def test_a_gate_that_fails_is_a_rendezvous_error_that_says_why(job: PluginJob) -> None:
    config = {"gate_command": "sh -c 'echo no GPU; exit 3'"}
    refused = pytest.raises(RendezvousError, match=r"its gate .* ended with exit code 3: no GPU")
    with job.handlers(1, **config) as (handler,), refused:
        handler.next_rendezvous()

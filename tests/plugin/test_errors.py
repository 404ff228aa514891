"""What goes wrong reaches torch as torch's own errors, with the cause in the message."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.torch_plugin.handler import create_handler
from tests.library.nodes import ALONE
from tests.plugin.handlers import PluginJob, handlers, join_all, parameters
from tests.support.certificates import Certificates
from tests.support.leaks import LeakCheck
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


def test_a_wrong_endpoint(leak_check: LeakCheck, job_id: str) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RendezvousConnectionError, match=endpoint):
        create_handler(parameters(endpoint, job_id, "1", connect_timeout=1))


def test_a_wrong_password(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "a secret of mine")
    with pytest.raises(RendezvousConnectionError, match=r"user|password") as caught:
        create_handler(parameters(auth_etcd, job_id, "1"))
    assert "a secret of mine" not in str(caught.value)


def test_the_right_password(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)
    with handlers(auth_etcd, job_id, "2", 2) as made:
        assert {info.world_size for info in join_all(made)} == {2}


def test_a_client_certificate(
    leak_check: LeakCheck, mtls_etcd: EtcdServer, certificates: Certificates, job_id: str
) -> None:
    files = {"ca_cert": certificates.ca, "cert": certificates.client_cert}
    with handlers(mtls_etcd, job_id, "2", 2, key=certificates.client_key, **files) as made:
        assert {info.world_size for info in join_all(made)} == {2}


@pytest.mark.parametrize(
    "value",
    [b"", b"\x80\x04\x95", b"not JSON", b"[]", b'{"v": 99}', b'{"v": 1}', b"null"],
    ids=["empty", "pickle", "text", "list", "future", "incomplete", "null"],
)
def test_a_foreign_value_at_the_start(job: PluginJob, value: bytes) -> None:
    """The error names the key, and nothing is left of the attempt."""
    key = job.root + b"ctl/round"
    job.server.gateway.put(key, value)
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


def test_a_foreign_key_among_the_nodes(job: PluginJob, caplog: pytest.LogCaptureFixture) -> None:
    """It is a stranger: told once, and no node waits for it or fails because of it."""
    key = job.root + b"nodes/somebody"
    job.server.gateway.put(key, b"who?\x1b[2J")
    with job.handlers(1) as (handler,), caplog.at_level("WARNING"):
        assert handler.next_rendezvous().world_size == 1
        assert handler.next_rendezvous().world_size == 1
        # Where it is, nobody can know that he is the last to leave.
        job.server.gateway.delete_prefix(key)
    (told,) = [text for text in caplog.messages if key.decode() in text]
    assert "without a lease" in told


def test_other_numbers_of_nodes(job: PluginJob) -> None:
    with job.handlers(1, "1:2", **ALONE) as (member,), job.handlers(1, "2:3") as (stranger,):
        member.next_rendezvous()
        with pytest.raises(RendezvousError) as caught:
            stranger.next_rendezvous()
        assert "min_nodes=1, max_nodes=2" in str(caught.value)
        assert "min_nodes=2, max_nodes=3" in str(caught.value)
        assert member.num_nodes_waiting() == 0


def test_a_time_limit(job: PluginJob) -> None:
    """It names who arrived."""
    options = {"join_timeout": 1, "last_call_timeout": 1}
    with job.handlers(1, "3", **options) as (handler,):
        host = handler._group.node_id.split("~")[0]
        with pytest.raises(RendezvousTimeoutError, match=rf"1 of at least 3 nodes.*{host}"):
            handler.next_rendezvous()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"leese_ttl": 3}, "leese_ttl.*lease_ttl"),
        ({"lease_ttl": 1}, "lease_ttl.*1.*2"),
        ({"last_call_timeout": 700, "join_timeout": 600}, "last_call_timeout.*700.*600"),
    ],
)
def test_a_bad_setting(job_id: str, config: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        create_handler(parameters("127.0.0.1:1", job_id, "1:2", **config))


def test_a_gate_that_fails_is_a_rendezvous_error_that_says_why(job: PluginJob) -> None:
    config = {"gate_command": "sh -c 'echo no GPU; exit 3'"}
    refused = pytest.raises(RendezvousError, match=r"its gate .* ended with exit code 3: no GPU")
    with job.handlers(1, **config) as (handler,), refused:
        handler.next_rendezvous()

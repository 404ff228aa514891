"""What a group can be given to reach etcd with, and job ids of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdPermissionError,
    EtcdTlsError,
    EtcdUnavailableError,
    StateCorruptError,
)
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.world.group import Group
from tests.library.nodes import (
    ALONE,
    LIMIT_S,
    Job,
    RemoteNode,
    at_once,
    groups,
    join_all,
    node_options,
    node_settings,
)
from tests.support.certificates import Certificates
from tests.support.leaks import LeakCheck, job_root
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer

LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}


def test_an_async_connect(job: Job) -> None:
    settings = job.settings()

    async def connect() -> EtcdClient:
        client = EtcdClient(settings.connection)
        await client.connect()
        return client

    with Group(settings, connect=connect) as node:
        assert node.join().size == 1


def test_any_job_id_works(job: Job) -> None:
    """And holds its own keys only."""
    for suffix in ("a/b", "two words ", "größe-日本", "../other", "%2F", "/", "a~b", "*", "-"):
        odd = f"{job.id}{suffix}"
        job.leaks.watch_job(job.server.gateway, odd)
        before = job.server.keys()
        with groups(node_settings(job.server, odd, "2"), 2) as nodes:
            join_all(nodes)
            new = sorted(set(job.server.keys()) - set(before))
            assert new, odd
            assert [key for key in new if not key.startswith(job_root(odd))] == []


def test_jobs_whose_ids_look_like_each_others_keys_stay_apart(job: Job) -> None:
    names = [job.id, f"{job.id}/nodes", f"{job.id}/ctl/round", f"{job.id}%2Fnodes"]
    for name in names[1:]:
        job.leaks.watch_job(job.server.gateway, name)
    nodes = [Group(node_settings(job.server, name, "1:2", **ALONE)) for name in names]
    try:
        assert [(world.rank, world.size) for world in join_all(nodes)] == [(0, 1)] * len(names)
        assert not any(node.waiting_count() for node in nodes)
    finally:
        at_once([node.leave for node in nodes])


def test_another_prefix(job: Job) -> None:
    job.leaks.watch_job(job.server.gateway, job.id, prefix="/team/rdzv")
    with job.group(etcd_prefix="/team/rdzv") as there, job.group() as here:
        assert there.join().size == here.join().size == 1
        assert job.server.keys(job_root(job.id, "/team/rdzv"))


# -- TLS, users, several endpoints ---------------------------------------------------------------


@pytest.fixture
def guarded_etcd(fresh_etcd: Callable[..., EtcdServer], certificates: Certificates) -> EtcdServer:
    """TLS with client certificates, and users; tokens live two seconds."""
    server = fresh_etcd(
        certificates=certificates, require_client_cert=True, flags=("--auth-token-ttl", "2")
    )
    server.enable_auth()
    return server


def _files(certificates: Certificates) -> dict[str, Any]:
    return {"ca_cert": str(certificates.ca), "cert": str(certificates.client_combined)}


def test_tls_and_a_user_who_may_touch_the_prefix_only(
    guarded_etcd: EtcdServer, certificates: Certificates, job_id: str, tmp_path: Path
) -> None:
    """Round, barrier, change and end, in threads and in a process, beyond a token's life."""
    check = LeakCheck()
    check.watch_job(guarded_etcd.gateway, job_id)
    (tmp_path / "user").write_text(USER + "\n")
    (tmp_path / "password").write_text(USER_PASSWORD + "\n")
    files = _files(certificates)
    from_files: dict[str, Any] = {
        "user_file": str(tmp_path / "user"),
        "password_file": str(tmp_path / "password"),
    }
    with (
        Group(node_settings(guarded_etcd, job_id, "1:3", environ=LOGIN, **files)) as one,
        Group(node_settings(guarded_etcd, job_id, "1:3", **files, **from_files)) as two,
        RemoteNode(node_options(guarded_etcd, job_id, "1:3", **files, **from_files)) as three,
    ):
        assert three.node_id
        first, second, _ = at_once([one.join, two.join, lambda: three.call("join")])
        assert not first.wait_over(3.0)
        at_once(
            [
                lambda: first.barrier("saved", LIMIT_S),
                lambda: second.barrier("saved", LIMIT_S),
                lambda: three.call("barrier", "saved", LIMIT_S),
            ]
        )
        three.process.kill()
        assert first.wait_over(LIMIT_S)
        assert second.wait_over(LIMIT_S)
        assert {world.size for world in join_all([one, two])} == {2}
    check.check()


def test_a_prefix_the_user_may_not_touch(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str
) -> None:
    with pytest.raises(EtcdPermissionError, match="etcd"):
        Group(node_settings(auth_etcd, job_id, "1", environ=LOGIN, etcd_prefix="/others"))


def test_a_role_without_a_part_of_the_jobs_keys(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever arrives first would lead, and cannot; so in turn each is told what to grant: the next
    one waits for some time, as the role may just be edited."""
    gateway, role = auth_etcd.gateway, f"role-{job_id}"
    root = job_root(job_id)
    gateway.call("/v3/auth/user/add", {"name": role, "password": "secret"})
    gateway.call("/v3/auth/role/add", {"name": role})
    gateway.call("/v3/auth/user/grant", {"user": role, "role": role})
    for part in (b"ctl/", b"ranks/", b"audit/"):
        gateway.grant_prefix(role, root + part)
    gateway.grant_prefix(role, root + b"nodes/", "WRITE")
    environ = {"RDZV_ETCD_USER": role, "RDZV_ETCD_PASSWORD": "secret"}
    settings = node_settings(
        auth_etcd, job_id, "2", environ=environ, lease_ttl=3, join_timeout=10 * LIMIT_S
    )
    with groups(settings, 2) as nodes, ThreadPoolExecutor(2) as pool:
        for joining in [pool.submit(node.join) for node in nodes]:
            with pytest.raises(EtcdPermissionError) as refused:
                joining.result(LIMIT_S)
            told = str(refused.value)
            assert f"as user {role!r}: the etcd user may not do this" in told
            assert f"read all under '{root.decode()}nodes/'" in told
            assert f"grant-permission ROLE --prefix=true readwrite {root.decode()}" in told
    assert "cannot lead: " in caplog.text


def test_a_wrong_password(leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str) -> None:
    wrong = {**LOGIN, "RDZV_ETCD_PASSWORD": "a secret of mine"}
    with pytest.raises(EtcdAuthError) as caught:
        Group(node_settings(auth_etcd, job_id, "1", environ=wrong))
    assert "a secret of mine" not in str(caught.value)


def test_no_password(leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str) -> None:
    with pytest.raises(EtcdAuthError, match=r"user|password"):
        Group(node_settings(auth_etcd, job_id, "1"))


def test_a_foreign_ca(
    leak_check: LeakCheck, tls_etcd: EtcdServer, certificates: Certificates, job_id: str
) -> None:
    with pytest.raises(EtcdTlsError):
        Group(node_settings(tls_etcd, job_id, "1", ca_cert=str(certificates.foreign_ca)))


def test_the_first_endpoint_is_dead(job: Job) -> None:
    endpoints = f"127.0.0.1:{free_port()},{job.server.target}"
    with groups(node_settings(endpoints, job.id, "3"), 3) as nodes:
        assert {world.size for world in join_all(nodes)} == {3}


def test_no_endpoint_answers(leak_check: LeakCheck, job_id: str) -> None:
    """All are named, soon."""
    ports = [free_port(), free_port()]
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    with pytest.raises(EtcdUnavailableError) as caught:
        Group(node_settings(endpoints, job_id, "1", connect_timeout=1.0))
    assert all(str(port) in str(caught.value) for port in ports)


def test_a_failed_start_leaves_nothing(job: Job) -> None:
    """A foreign value among the job's keys: the session that was just opened is ended again."""
    key = job.root + b"ctl/round"
    job.server.gateway.put(key, json.dumps({"v": 99}).encode())
    with pytest.raises(StateCorruptError, match="ctl/round"):
        job.group(lease_ttl=600)
    assert job.server.leases() <= job.leases_before
    job.server.gateway.delete_prefix(key)

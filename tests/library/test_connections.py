"""What a group can be given to reach etcd with, and job ids of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.errors import (
    EtcdPermissionError,
)
from rdzv_etcd.world.group import Group
from tests.library.nodes import (
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
from tests.support.servers import USER, USER_PASSWORD, EtcdServer

LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}


def test_any_job_id_works(job: Job) -> None:
    """And holds its own keys only."""
    for suffix in ("a/b", "größe-日本", "../other", "%2F"):
        odd = f"{job.id}{suffix}"
        job.leaks.watch_job(job.server.gateway, odd)
        before = job.server.keys()
        with groups(node_settings(job.server, odd, "2"), 2) as nodes:
            join_all(nodes)
            new = sorted(set(job.server.keys()) - set(before))
            assert new, odd
            assert [key for key in new if not key.startswith(job_root(odd))] == []


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

"""The document's etcdctl commands work as described, on a real etcd with TLS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdAuthError, EtcdPermissionError
from rdzv_etcd.settings import Settings
from rdzv_etcd.world.group import Group
from tests.deploy.conftest import DocumentedEtcd, folder_of_etcdctl
from tests.deploy.examples import DOCUMENT
from tests.library.nodes import join_all, node_settings
from tests.support.gateway import GatewayError
from tests.support.servers import ENOUGH_TO_FILL, EtcdBinary, EtcdCluster, EtcdServer

pytestmark = pytest.mark.every_etcd

_FILLER = b"/rdzv_etcd/filler"


def test_two_nodes_meet_as_the_user_and_nothing_else_is_allowed(
    documented_etcd: Callable[..., DocumentedEtcd], job_id: str
) -> None:
    """The passwords are in no process list, and in no file that others can read."""
    etcd = documented_etcd()
    for name in ("password", "root.password"):
        password = (etcd.secret / name).read_text().strip()
        assert len(password) == 64
        assert password not in DOCUMENT.commands("users")
        assert (etcd.secret / name).stat().st_mode & 0o077 == 0
    with Group(_settings(etcd, job_id)) as one, Group(_settings(etcd, job_id)) as two:
        worlds = join_all([one, two])
        assert sorted(world.rank for world in worlds) == [0, 1]
        assert {world.size for world in worlds} == {2}
    done = etcd.run(DOCUMENT.commands("check"))
    assert done.returncode != 0
    assert done.stdout.split() == ["OK", "1"]
    assert "permission denied" in done.stderr
    with pytest.raises(EtcdPermissionError):
        Group(_settings(etcd, job_id, etcd_prefix="/elsewhere"))
    with pytest.raises(EtcdPermissionError):
        Group(_settings(etcd, job_id, etcd_prefix="/rdzv_etcd-b"))


def test_a_role_per_job_keeps_one_jobs_workers_from_another_jobs_keys(
    documented_etcd: Callable[..., DocumentedEtcd],
) -> None:
    etcd = documented_etcd()
    done = etcd.run(DOCUMENT.commands("job-role"), **etcd.as_root())
    assert done.returncode == 0, done.stderr
    (etcd.secret / "job-7.user").write_text("job-7")
    files = {"user_file": "job-7.user", "password_file": "job-7.password"}
    own = {name: str(etcd.secret / path) for name, path in files.items()}
    with (
        Group(_settings(etcd, "job-7", **own)) as one,
        Group(_settings(etcd, "job-7", **own)) as two,
    ):
        assert sorted(world.rank for world in join_all([one, two])) == [0, 1]
    for other in ("job-70", "job-8"):
        with pytest.raises(EtcdPermissionError):
            Group(_settings(etcd, other, **own))
    done = etcd.run(DOCUMENT.commands("job-role-end"), **etcd.as_root())
    assert done.returncode == 0, done.stderr
    with pytest.raises(EtcdAuthError):
        Group(_settings(etcd, "job-7", **own))


def test_a_full_etcd_takes_writes_again(documented_etcd: Callable[..., DocumentedEtcd]) -> None:
    etcd = documented_etcd(flags=("--quota-backend-bytes", str(2 << 20)))
    environment = etcd.as_root()
    password = environment["ETCDCTL_PASSWORD"]
    etcd.server.gateway.log_in_as("root", password)
    with pytest.raises(GatewayError, match="space"):
        _fill(etcd.server)
    done = etcd.run(DOCUMENT.commands("space"), **environment)
    assert done.returncode == 0, done.stderr
    etcd.server.gateway.put(_FILLER, b"fits")


def test_all_members_of_a_full_cluster_take_writes_again_though_one_is_named(
    fresh_cluster: Callable[..., EtcdCluster], etcd_binary: EtcdBinary
) -> None:
    """As behind a Service."""
    full = fresh_cluster(3, flags=("--quota-backend-bytes", str(2 << 20)))
    first = full.members[0]
    with pytest.raises(GatewayError, match="space"):
        _fill(first)
    subprocess.run(
        ["bash", "-euc", DOCUMENT.commands("space")],
        env=os.environ
        | {
            "PATH": f"{folder_of_etcdctl(etcd_binary.path)}:{os.environ['PATH']}",
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": first.endpoint,
        },
        check=True,
    )
    for member in full.members:
        member.gateway.put(_FILLER, b"fits")


def test_a_slow_election_makes_leases_longer(
    fresh_etcd: Callable[..., EtcdServer], etcd_binary: EtcdBinary
) -> None:
    """As *Heartbeat and election* says: 1.5 election timeouts."""
    server = fresh_etcd(flags=("--heartbeat-interval", "500", "--election-timeout", "5000"))
    granted = server.gateway.call("/v3/lease/grant", {"TTL": 3})
    assert int(granted["TTL"]) == 8


def _fill(server: EtcdServer) -> None:
    for _ in range(ENOUGH_TO_FILL):
        server.gateway.put(_FILLER, os.urandom(100_000))


def _settings(etcd: DocumentedEtcd, job_id: str, **config: object) -> Settings:
    files: dict[str, Any] = {n: str(etcd.secret / path) for n, path in _FILES.items()}
    return node_settings(etcd.server, job_id, "2", **{**files, **config})


_FILES = {
    "ca_cert": "ca.crt",
    "cert": "tls.crt",
    "key": "tls.key",
    "user_file": "user",
    "password_file": "password",
}

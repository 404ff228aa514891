"""An etcd that knows its users, by their certificates or passwords, and what their roles may do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv_etcd.etcd.port import prefix_end
from tests.faults.nodes import TTL_S
from tests.faults.servers import Job, ended_with
from tests.support.certificates import make_certificates
from tests.support.servers import ROLE, USER, USER_PASSWORD, EtcdServer

_ROOT = b"/rdzv_etcd/"


def test_a_user_known_by_its_certificate_with_a_role_limited_to_the_prefix(
    fresh_etcd: Callable[..., EtcdServer], job: Job, tmp_path: Path
) -> None:
    """No password: the certificate's common name is the user."""
    files = make_certificates(tmp_path / "certificates", client_name=USER)
    etcd = fresh_etcd(certificates=files, require_client_cert=True)
    tls = {"ca_cert": str(files.ca), "cert": str(files.client_cert), "key": str(files.client_key)}
    etcd.enable_auth(_ROOT)
    nodes = job(etcd.endpoint, "2:3", **tls)
    pair = nodes.start("a", "b")
    nodes.wait_for_world(pair)
    nodes.stay_undisturbed(pair, TTL_S)
    (elsewhere,) = nodes.start("elsewhere", config={**tls, "etcd_prefix": "/somebody/else"})
    kind, message = ended_with(elsewhere)
    assert kind == "EtcdPermissionError", message
    late = nodes.start("late")
    nodes.wait_for_world([*pair, *late])
    nodes.finish(etcd.gateway)


@pytest.mark.every_etcd
@pytest.mark.parametrize("part", ["nodes/", pytest.param("", marks=pytest.mark.release)])
def test_a_role_that_is_edited_for_longer_than_a_lease_lasts_restarts_nothing(
    etcd: EtcdServer, job: Job, tmp_path: Path, part: str
) -> None:
    """It lacks the presences, or everything. Whether the leases live on meanwhile depends on etcd's
    version. In virtual time, with more that it may lack: tests/node/test_refusals.py."""
    user, password = tmp_path / "user", tmp_path / "password"
    user.write_text(USER)
    password.write_text(USER_PASSWORD)
    etcd.enable_auth(_ROOT)
    nodes = job(etcd.endpoint, "2:3", user_file=str(user), password_file=str(password))
    three = nodes.start("a", "b", "c")
    nodes.wait_for_world(three)
    joins = [len(node.all("join")) for node in three]
    everything = (_ROOT, prefix_end(_ROOT))
    root = _ROOT + nodes.job_id.encode() + b"/"
    lacking = root + part.encode()
    etcd.gateway.grant_range(ROLE, _ROOT, lacking, "READWRITE")
    etcd.gateway.grant_range(ROLE, prefix_end(lacking), everything[1], "READWRITE")
    etcd.gateway.revoke_range(ROLE, *everything)
    nodes.stay_undisturbed(three, 3 * TTL_S)
    etcd.gateway.grant_range(ROLE, *everything, "READWRITE")
    nodes.stay_undisturbed(three, 2 * TTL_S)
    nodes.wait_present(etcd.gateway, three)
    assert [len(node.all("join")) for node in three] == joins
    three[1].kill()
    nodes.wait_for_world([three[0], three[2]])
    nodes.finish(etcd.gateway)

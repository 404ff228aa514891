"""An etcd that knows its users by their certificates."""

from __future__ import annotations

from pathlib import Path

from tests.faults.nodes import TTL_S
from tests.faults.servers import Job, ended_with, running
from tests.support.certificates import make_certificates
from tests.support.servers import USER, EtcdBinary, EtcdServer


def test_a_user_known_by_its_certificate_with_a_role_limited_to_the_prefix(
    etcd_binary: EtcdBinary, job: Job, tmp_path: Path
) -> None:
    """No password: the certificate's common name says who it is."""
    files = make_certificates(tmp_path / "certificates", client_name=USER)
    server = EtcdServer(etcd_binary, tmp_path, certificates=files, require_client_cert=True)
    tls = {"ca_cert": str(files.ca), "cert": str(files.client_cert), "key": str(files.client_key)}
    with running(server) as etcd:
        etcd.enable_auth(b"/rdzv_etcd/")
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

"""The etcd manifest's own command lines make a cluster with TLS that serves a rendezvous."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.world.group import Group
from tests.deploy.examples import EXAMPLES, documents, expanded
from tests.library.nodes import join_all, node_settings
from tests.support.certificates import Certificates
from tests.support.gateway import Gateway, GatewayError
from tests.support.processes import end, free_port, spawn
from tests.support.servers import EtcdBinary

pytestmark = pytest.mark.every_etcd

MEMBERS = 3
LIMIT_S = 60.0


@pytest.fixture
def endpoints(etcd_binary: EtcdBinary, certificates: Certificates, tmp_path: Path) -> Iterator[str]:
    """All members' client addresses, when they are healthy."""
    ports = {
        (member, port): free_port() for member in range(MEMBERS) for port in (2379, 2380, 2381)
    }
    with ExitStack() as stack:
        for member in range(MEMBERS):
            command = _command(member, ports, certificates, tmp_path)
            log = tmp_path / f"etcd-{member}.log"
            process = spawn([etcd_binary.path, *command[1:]], log)
            stack.callback(end, process)
        for member in range(MEMBERS):
            _wait_healthy(ports[member, 2381], tmp_path / f"etcd-{member}.log")
        yield ",".join(f"https://127.0.0.1:{ports[member, 2379]}" for member in range(MEMBERS))


def test_the_manifest_s_members_form_a_cluster_whose_certificate_is_checked(
    endpoints: str, certificates: Certificates, job_id: str
) -> None:
    assert len(endpoints.split(",")) == _stateful_set()["replicas"]
    files: dict[str, Any] = {
        "ca_cert": str(certificates.ca),
        "cert": str(certificates.client_cert),
        "key": str(certificates.client_key),
    }
    settings = [node_settings(endpoints, job_id, "2", **files) for _ in range(2)]
    with Group(settings[0]) as one, Group(settings[1]) as two:
        assert {world.size for world in join_all([one, two])} == {2}
    port = int(endpoints.rpartition(":")[2])
    stranger = ssl.create_default_context(cafile=str(certificates.foreign_ca))
    with pytest.raises(ssl.SSLError):
        Gateway("127.0.0.1", port, stranger).get_text("/version")


def _stateful_set() -> dict[str, Any]:
    (spec,) = (
        item["spec"] for item in documents(EXAMPLES / "etcd.yaml") if item["kind"] == "StatefulSet"
    )
    return dict(spec)


def _command(
    member: int, ports: dict[tuple[int, int], int], certificates: Certificates, folder: Path
) -> list[str]:
    """One member's command line, with this machine's addresses and files in it."""
    (container,) = _stateful_set()["template"]["spec"]["containers"]
    pod = {"POD_NAME": f"etcd-{member}", "POD_IP": "0.0.0.0"}  # replaced below, as all are
    line = "\n".join(expanded(word, pod) for word in container["command"])
    line = re.sub(
        r"etcd-(\d)\.etcd-peers\.rdzv\.svc:(\d+)",
        lambda match: f"127.0.0.1:{ports[int(match[1]), int(match[2])]}",
        line,
    )
    line = re.sub(
        r"0\.0\.0\.0:(\d+)", lambda match: f"127.0.0.1:{ports[member, int(match[1])]}", line
    )
    for documented, real in (
        ("/etc/etcd-tls/tls.crt", certificates.server_cert),
        ("/etc/etcd-tls/tls.key", certificates.server_key),
        ("/etc/etcd-tls/ca.crt", certificates.ca),
        ("/var/lib/etcd/data", folder / f"data-{member}"),
    ):
        assert documented in line
        line = line.replace(documented, str(real))
    return line.split("\n")


def _wait_healthy(port: int, log: Path) -> None:
    """As the readiness probe does it."""
    (container,) = _stateful_set()["template"]["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    page = Gateway("127.0.0.1", port)
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            if '"health":"true"' in page.get_text(probe["path"], timeout_s=2.0):
                return
        except (OSError, GatewayError):
            pass  # not yet
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)  # etcd does not announce that it is ready

"""An etcd as the document says to set one up: TLS with client certificates, and a user who may
touch the prefix only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.examples import DOCUMENT, MOUNTED
from tests.support.certificates import Certificates
from tests.support.servers import EtcdServer, find_binaries

ADDRESS = "etcd.rdzv.svc:2379"
"""The etcd's address in the document and the examples."""


@dataclass(frozen=True)
class DocumentedEtcd:
    """A server, and the folder where the document's commands were run."""

    server: EtcdServer
    secret: Path
    """Has ca.crt, tls.crt, tls.key, user and password, as in a pod that mounts the Secret."""

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run commands of the document, with this server in place of its example."""
        preamble = DOCUMENT.commands("connection")
        for documented, real in ((ADDRESS, self.server.target), (MOUNTED, str(self.secret))):
            assert documented in preamble
            preamble = preamble.replace(documented, real)
        folder = folder_of_etcdctl(self.server.binary.path)
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", preamble + script],
            cwd=self.secret,
            env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def as_root(self) -> dict[str, str]:
        password = (self.secret / "root.password").read_text().strip()
        return {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": password}


def folder_of_etcdctl(etcd: Path) -> Path:
    """The server's own, or another one: Debian has it in a package apart from the server's."""
    for folder in (etcd.parent, *(other.path.parent for other in find_binaries())):
        if (folder / "etcdctl").exists():
            return folder
    found = shutil.which("etcdctl")
    assert found is not None, f"no etcdctl beside {etcd} nor on PATH"
    return Path(found).parent


def set_up(server: EtcdServer, certificates: Certificates, folder: Path) -> DocumentedEtcd:
    """Make the users on a server that has started, by the document's commands."""
    secret = folder / "secret"
    secret.mkdir()
    shutil.copy(certificates.ca, secret / "ca.crt")
    shutil.copy(certificates.client_cert, secret / "tls.crt")
    shutil.copy(certificates.client_key, secret / "tls.key")
    (secret / "user").write_text("trainer")
    etcd = DocumentedEtcd(server, secret)
    done = etcd.run(DOCUMENT.commands("users"))
    assert done.returncode == 0, done.stderr
    assert "Authentication Enabled" in done.stdout
    return etcd


@pytest.fixture
def documented_etcd(
    fresh_etcd: Callable[..., EtcdServer], certificates: Certificates, tmp_path: Path
) -> Callable[..., DocumentedEtcd]:
    """A factory of servers with users; takes EtcdServer's keywords."""

    def make(**options: object) -> DocumentedEtcd:
        server = fresh_etcd(certificates=certificates, require_client_cert=True, **options)
        return set_up(server, certificates, tmp_path)

    return make

"""docker-compose.yml: who runs with which rights, and who gets which key. Starts no container."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tests.support.markdown import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = sorted(name for name in SERVICES if name.startswith("node"))
ETCDS = sorted(name for name in SERVICES if name.startswith("etcd"))
MAKER = "certificates"
"""The service that makes the certificates."""

every_service = pytest.mark.parametrize("name", sorted(SERVICES))


@every_service
def test_a_service_has_the_capabilities_that_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["CHOWN"] if name == MAKER else [])
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_image_s_user_is_not_root() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that runAsNonRoot can tell"
    assert lines.index(f"USER {user}") > max(
        index for index, line in enumerate(lines) if line.startswith("RUN")
    )
    assert {name for name, service in SERVICES.items() if "user" in service} == {MAKER}
    assert SERVICES[MAKER]["environment"]["NODE_OWNER"] == user


@every_service
def test_ports_are_published_on_the_loopback_interface(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


def test_nodes_get_the_clients_certificates_and_etcd_the_servers() -> None:
    mounted = {name: _volumes(name) for name in (*NODES, "users", *ETCDS)}
    for name, volumes in mounted.items():
        certificates = {volume for volume in volumes if volume.startswith("certificates")}
        assert certificates <= {
            "certificates-etcd:/certificates:ro"
            if name in ETCDS
            else "certificates-node:/certificates:ro"
        }
    assert _volumes("node-tls")
    assert _volumes("etcd-tls-1")
    assert {volume.partition(":")[0] for volume in _volumes(MAKER)} == {
        "certificates-etcd",
        "certificates-node",
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _made(tmp_path_factory.mktemp("made"))


def test_no_authority_s_key_is_kept_and_no_service_gets_another_s(made: tuple[Path, Path]) -> None:
    etcd, node = made
    for folder in (etcd, node):
        certified = {
            _public(x509.load_pem_x509_certificate(f.read_bytes()).public_key()): f.name
            for f in folder.glob("*.pem")
            if not f.name.endswith("-key.pem")
        }
        for file in folder.glob("*-key.pem"):
            key = serialization.load_pem_private_key(file.read_bytes(), None)
            assert certified[_public(key.public_key())] == file.name.replace("-key", "")
            assert file.stat().st_mode & 0o077 == 0
    assert {file.name for file in etcd.glob("*-key.pem")} == {"server-key.pem", "health-key.pem"}
    assert {file.name for file in node.glob("*-key.pem")} == {"client-key.pem", "foreign-key.pem"}


def test_what_was_made_is_signed_and_is_not_made_again(made: tuple[Path, Path]) -> None:
    etcd, node = made
    for folder, authority, names in (
        (etcd, "ca", ("server", "health")),
        (node, "ca", ("client",)),
        (node, "foreign-ca", ("foreign",)),
    ):
        files = [folder / f"{name}.pem" for name in names]
        command: list[str | Path] = ["openssl", "verify", "-CAfile", folder / f"{authority}.pem"]
        command += files
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    before = {file: file.read_bytes() for folder in (etcd, node) for file in folder.iterdir()}
    assert _made(etcd.parent) == made
    assert {file: file.read_bytes() for file in before} == before


def test_every_certificate_that_is_named_is_made(made: tuple[Path, Path]) -> None:
    etcd, node = made
    for names, folder in ((ETCDS, etcd), (("node-tls",), node)):
        for name in names:
            texts = map(str, SERVICES[name]["environment"].values())
            named = {
                found for text in texts for found in re.findall(r"/certificates/([\w.-]+pem)", text)
            }
            assert {one for one in named if not (folder / one).exists()} == set()


def _volumes(name: str) -> list[str]:
    return list(SERVICES[name].get("volumes", ()))


def _made(folder: Path) -> tuple[Path, Path]:
    """Run the script as the service does; return etcd's folder and the nodes'."""
    words = str(SERVICES[MAKER]["command"]).split()
    places = {"/certificates/etcd": folder / "etcd", "/certificates/node": folder / "node"}
    for place in places.values():
        place.mkdir(exist_ok=True)
    assert set(places) <= set(words)
    command = [places.get(word, word) for word in words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder / "etcd", folder / "node"


def _public(key: Any) -> bytes:
    pem: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem

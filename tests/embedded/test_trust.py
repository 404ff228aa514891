"""Who may use an embedded etcd, and whose etcd is used."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.child import EtcdProcess, Plan
from rdzv_etcd.embedded.cluster_start import cluster_endpoints, start_seat
from rdzv_etcd.embedded.launch import Wait
from rdzv_etcd.embedded.port import PortListener, listeners, reached_by
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import (
    EmbeddedEtcdError,
    EtcdTlsError,
    EtcdUnavailableError,
)
from rdzv_etcd.trust import client_context, in_memory, make_certificates, tls_context
from rdzv_etcd.world.group import Group
from tests.cli.tools import run_here
from tests.embedded.agents import (
    ALL,
    LIMIT_S,
    NOBODY,
    OTHER_SECRET,
    SECRET,
    Cluster,
    answer,
    gateway,
    has_ended,
    kill,
    settings,
    wait_for_end,
)
from tests.embedded.conftest import Agents, Ensure, Start
from tests.library.nodes import wait_until
from tests.support import netns
from tests.support.gateway import Gateway, GatewayError
from tests.support.processes import output
from tests.support.servers import EtcdBinary, EtcdServer

pytestmark = pytest.mark.every_etcd

# Becomes another user and then listens: what matters is whose it is. Behind the socket is a real
# etcd.
_STRANGER = """
import encodings.idna, os, socket, sys, threading
os.setuid(int(sys.argv[1]))
port, behind = int(sys.argv[2]), int(sys.argv[3])

def pump(source, sink):
    while piece := source.recv(65536):
        sink.sendall(piece)
    sink.shutdown(socket.SHUT_WR)

listener = socket.create_server(("127.0.0.1", port))
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", behind))
    for ends in ((client, server), (server, client)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
"""


@contextmanager
def stranger(port: int, behind: int) -> Iterator[None]:
    """Another user listens on ``port``, with the etcd ``behind``."""
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, str(NOBODY), str(port), str(behind)],
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def test_with_a_secret_nobody_gets_in_without_it(
    start: Start, ensure: Ensure, port: int, scratch: Path
) -> None:
    supervisor = start(secret=SECRET)
    for process in (supervisor, *supervisor.children()):
        assert SECRET not in " ".join(process.cmdline())
        assert SECRET not in json.dumps(process.environ())
    (folder,) = scratch.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = [file for file in folder.glob("*.pem") if "PRIVATE KEY" in file.read_text()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in keys] == [0o600]
    assert_closed("127.0.0.1", port)
    assert ensure(secret=SECRET) is None
    for embed in (0, 1):
        with Group(settings(f"127.0.0.1:{port}", secret=SECRET, embed=embed)) as group:
            assert group.join(60).size == 1
    assert not any(SECRET.encode() in it.value for it in gateway(port, SECRET).keys().values())


def strangers(host: str) -> tuple[ssl.SSLContext | None, ...]:
    """Without TLS, without a certificate, and with another secret's. Whoever breaks in does not
    mind whose server it is."""
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other = tls_context(in_memory(make_certificates(OTHER_SECRET, [host])))
    for context in (anonymous, other):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return None, anonymous, other


def assert_closed(host: str, port: int, path: str = "/version") -> None:
    """An etcd answers only who has a certificate from the secret."""
    for context in strangers(host):
        outside = Gateway(host, port, context)
        with pytest.raises((OSError, GatewayError)):
            outside.get_text(path)
        for call in ("kv/range", "kv/put", "cluster/member/list"):
            with pytest.raises((OSError, GatewayError)):
                outside.call(f"/v3/{call}", {"key": "AA=="})
    assert gateway(port, SECRET, host).get_text(path)


def test_a_cluster_is_closed_to_clients_peers_and_supervisors(cluster: Cluster) -> None:
    cluster.start(0, 1, 2)
    cluster.wait_for(ALL)
    host, port = cluster.addresses[0], cluster.port
    assert_closed(host, port)
    assert_closed(host, port + 1, "/members")
    assert [_supervisors_answer(host, port + 2, it) for it in strangers(host)] == [b"", b"", b""]
    assert _supervisors_answer(host, port + 2, client_context(SECRET)).startswith(b"{")
    with Group(cluster.job()):
        pass


def _supervisors_answer(host: str, port: int, context: ssl.SSLContext | None) -> bytes:
    """What is not TLS, such as an alert, is none."""
    try:
        sock = socket.create_connection((host, port))
        sock = sock if context is None else context.wrap_socket(sock, server_hostname=host)
        with sock, sock.makefile("rwb") as file:
            file.write(b'{"hosts": [], "waits": false}\n')
            file.flush()
            return b"" if (line := file.readline()).startswith(b"\x15\x03") else line
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("cluster", "ours", "why"),
    [
        (SECRET, None, "speaks only TLS.*has a secret: give every node the same RDZV_ETCD_EMBED"),
        (SECRET, OTHER_SECRET, "has another secret: give every node the same RDZV_ETCD_EMBED"),
        (None, SECRET, "has no TLS, although this node has a secret.*give every node the same"),
    ],
    indirect=["cluster"],
)
def test_a_host_with_another_secret_is_told_before_it_begins_a_member(
    cluster: Cluster, ours: str | None, why: str
) -> None:
    """Also while there is no etcd yet, as one host alone begins none."""
    cluster.start(0)
    with pytest.raises(EmbeddedEtcdError, match=f"{cluster.addresses[0]}.* cannot be used.*{why}"):
        ensure_etcd(settings(cluster.endpoints, secret=ours), cluster.environ)
    assert set(cluster.state().answers) == {0}


def test_strangers_cannot_use_up_a_supervisors_descriptors(cluster: Cluster) -> None:
    cluster.start(0)
    host, port = cluster.addresses[0], cluster.port + 2
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((host, port))) for _ in range(300)]
        assert _supervisors_answer(host, port, client_context(SECRET)).startswith(b"{")
        held[0].setblocking(False)
        assert held[0].recv(1) == b""  # it made room


@pytest.mark.parametrize("has", ["another secret", "another list"])
def test_one_host_that_differs(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, has: str
) -> None:
    """With another secret it counts as missing; a client could end up in a cluster of its list."""
    cluster.start(0, 1)
    cluster.wait_for({0, 1})
    differs = settings(cluster.endpoints, secret=OTHER_SECRET, embed_grace=60)
    seat = 2
    if has == "another list":
        third = f"{cluster.addresses[2]}:{cluster.port}"
        differs = settings(f"{third},192.0.2.1,192.0.2.2", secret=SECRET, embed_grace=60)
        seat = [it.target for it in cluster_endpoints(differs.connection)].index(third)
    endpoints = cluster_endpoints(differs.connection)
    wait = Wait("member", endpoints[seat].target, LIMIT_S)
    started = start_seat(differs, cluster.environ, endpoints, seat, wait)
    assert started is not None
    cluster.supervisors[2] = psutil.Process(started.supervisor_pid)
    caplog.clear()
    odd = f"{cluster.addresses[2]}:{cluster.port}"
    if has == "another list":
        why = f"here {cluster.endpoints}, there .*give every node the same --rdzv-endpoint"
        with pytest.raises(EmbeddedEtcdError, match=f"{odd} cannot be used: it belongs to.*{why}"):
            ensure_etcd(cluster.settings(), cluster.environ)
    else:
        assert ensure_etcd(cluster.settings(), cluster.environ) is None
        (warned,) = caplog.messages
        why = f"; {odd}: it has.*give every node the same RDZV_ETCD_EMBED_SECRET"
        assert re.search(
            f"members on {cluster.addresses[0]}.*{cluster.addresses[1]}.*{why}", warned
        )
        with Group(cluster.job()):
            pass
    kill(cluster.supervisors[2])
    cluster.start(2)
    cluster.wait_for(ALL)


_NAMES = """
from rdzv_etcd.embedded.port import certificates_at
from rdzv_etcd.settings import Connection, Endpoint
from cryptography import x509
made = certificates_at(Connection((Endpoint("node-a"),), secret="staple-battery-horse"), ())
found = x509.load_pem_x509_certificate(made.own.encode())
print(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
"""


def test_a_host_is_trusted_by_its_name_in_full_as_well(tmp_path: Path) -> None:
    if why_not := netns.why_not():
        pytest.skip(why_not)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 node-a.example node-a\n")
    within = ("unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "-")
    names = output([*within, sys.executable, "-c", _NAMES], cwd=Path(__file__).parents[2])
    assert "DNSName(value='node-a')" in names
    assert "DNSName(value='node-a.example')" in names


def test_a_zone_of_an_address_is_in_no_certificate(
    start: Start, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [it.address for entries in psutil.net_if_addrs().values() for it in entries]
    if not (linked := [it for it in found if it.startswith("fe80::")]):
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", SECRET)
    start(f"[{linked[0]}]", secret=SECRET)
    shown = run_here(capsys, ("doctor", "--endpoint", f"[{linked[0]}]:{port}")).out
    assert f"]:{port}: etcd 3." in shown  # read from a page of etcd's


def test_data_outlasts_a_crash_of_etcd_and_it_still_ends_by_itself(start: Start, port: int) -> None:
    supervisor = start(secret=SECRET)
    inside = gateway(port, SECRET)
    lease_id = int(inside.call("/v3/lease/grant", {"TTL": 60})["ID"])
    inside.put(b"k", b"v", lease_id)
    (etcd,) = supervisor.children()
    etcd.kill()
    wait_until(
        "etcd is back", lambda: has_ended(etcd) and answer(port, secret=SECRET).name == "ETCD"
    )
    assert inside.keys()[b"k"].lease_id == lease_id
    inside.revoke(lease_id)
    wait_for_end(supervisor)


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (SECRET, None, "speaks only TLS.*has a secret: give every node the same RDZV_ETCD_EMBED"),
        (
            SECRET,
            OTHER_SECRET,
            "has another secret: give every node the same RDZV_ETCD_EMBED_SECRET",
        ),
        (None, SECRET, "has no TLS, although this node has a secret"),
    ],
)
def test_who_does_not_have_the_same_secret_is_told_at_once(
    ensure: Ensure, start: Start, port: int, theirs: str | None, ours: str | None, why: str
) -> None:
    start(secret=theirs)
    with pytest.raises(EmbeddedEtcdError, match=why) as caught:
        ensure(secret=ours)
    assert not any(it and it in str(caught.value) for it in (theirs, ours))
    with pytest.raises(
        (EtcdTlsError, EtcdUnavailableError),
        match=r"secret.*give every node the same RDZV_ETCD_EMBED_SECRET",
    ):
        Group(settings(f"127.0.0.1:{port}", secret=ours, embed=0))


@pytest.mark.parametrize(
    ("host", "year", "why"),
    [
        ("127.0.0.1", 2001, "not valid at this time.*expired.*set the clocks"),
        ("127.0.0.1", 2100, "not valid at this time.*not yet.*set the clocks"),
        ("elsewhere", 2020, "is for other names: give every node"),
    ],
)
def test_a_certificate_that_does_not_count_is_told_from_another_secret(
    etcd_binary: EtcdBinary, port: int, host: str, year: int, why: str
) -> None:
    made = make_certificates(SECRET, [host], valid_from=datetime(year, 1, 1, tzinfo=timezone.utc))
    url = f"https://127.0.0.1:{port}"
    etcd = EtcdProcess(Plan(str(etcd_binary.path), (url,), url, made))
    try:
        etcd.start()
        with pytest.raises(EmbeddedEtcdError, match=why):
            ensure_etcd(settings(f"127.0.0.1:{port}", secret=SECRET))
        with pytest.raises(EtcdTlsError, match=why):
            Group(settings(f"127.0.0.1:{port}", secret=SECRET, embed=0))
    finally:
        etcd.remove()


def test_where_others_reach_it_a_warning_says_that_it_is_open(
    start: Start, caplog: pytest.LogCaptureFixture, own_address: str
) -> None:
    start(own_address)
    assert "has no secret: anyone who can reach port" in caplog.text


def test_with_a_secret_or_on_loopback_it_does_not(
    start: Start, caplog: pytest.LogCaptureFixture, own_address: str
) -> None:
    start(own_address, secret=SECRET)
    assert "anyone who can reach" not in caplog.text


def test_another_users_etcd_is_refused(
    etcd_server: EtcdServer, port: int, supervisors: object
) -> None:
    """What it says would make our workers connect to whomever it likes."""
    with (
        stranger(port, etcd_server.port),
        pytest.raises(
            EmbeddedEtcdError, match=rf"belongs to .*uid {NOBODY}.*another port.*leave out embed=1"
        ),
    ):
        ensure_etcd(settings(f"localhost:{port}"))


def test_roots_etcd_is_everybodys(agents: Agents, etcd_server: EtcdServer) -> None:
    agent = agents.start(port=etcd_server.port, uid=NOBODY)
    agent.go()
    assert agent.supervisor() is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_the_owner_of_a_listening_socket_is_found(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, port))
        except OSError:
            pytest.skip("this machine has no IPv6")
        assert listeners(port) == ()  # bound, but nobody could connect
        listener.listen()
        assert listeners(port) == (PortListener(address.removeprefix("::ffff:"), os.geteuid()),)


def test_which_addresses_lead_to_a_listener() -> None:
    def reached(bound: str, asked: str) -> bool:
        return reached_by(PortListener(bound, 0), asked)

    assert reached("0.0.0.0", "127.0.0.1")
    assert reached("::", "127.0.0.1")
    assert reached("::", "::1")
    assert reached("::ffff:127.0.0.1", "127.0.0.1")
    assert not reached("0.0.0.0", "::1")
    assert not reached("127.0.0.1", "10.0.0.1")
    assert not reached("::1", "127.0.0.1")

"""Who may use an embedded etcd, and whose etcd is used."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rdzv_etcd.embedded.port import PortListener, listeners, reached_by
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError, EtcdAuthError
from rdzv_etcd.world.group import Group
from tests.embedded.agents import NOBODY, answer, has_ended, settings, wait_for_end
from tests.embedded.conftest import Agents, Ensure, Start
from tests.library.nodes import wait_until
from tests.support.gateway import Gateway, GatewayError
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.every_etcd

LOGIN = ("ann", "s3cret-word")

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


def test_with_a_password_nobody_gets_in_without_it(start: Start, ensure: Ensure, port: int) -> None:
    supervisor = start(login=LOGIN)
    for process in (supervisor, *supervisor.children()):
        assert LOGIN[1] not in " ".join(process.cmdline())
        assert LOGIN[1] not in json.dumps(process.environ())
    gateway = Gateway("127.0.0.1", port)
    with pytest.raises(GatewayError, match="user name is empty"):
        gateway.put(b"/rdzv_etcd/job/ctl/round", b"mine")
    gateway.log_in_as(*LOGIN)
    gateway.put(b"/rdzv_etcd/job/nodes/a", b"")
    assert set(gateway.keys()) == {b"/rdzv_etcd/job/nodes/a"}
    with pytest.raises(GatewayError, match="permission denied"):
        gateway.call("/v3/auth/disable", {})
    assert ensure(login=LOGIN) is None
    with pytest.raises(EtcdAuthError, match="no user and password are configured"):
        Group(settings(f"127.0.0.1:{port}"))
    with pytest.raises(EtcdAuthError, match="refused the user name or password") as caught:
        Group(settings(f"127.0.0.1:{port}", login=("ann", "an0ther-word")))
    assert "an0ther-word" not in str(caught.value)
    with Group(settings(f"127.0.0.1:{port}", login=LOGIN)) as group:
        assert group.join(60).size == 1


def test_there_is_no_moment_in_which_it_is_open(start: Start, port: int) -> None:
    """The users are made before etcd listens where others reach it."""
    stop, refused, let_in = threading.Event(), threading.Event(), threading.Event()

    def intrude() -> None:
        while not stop.is_set():
            try:
                Gateway("127.0.0.1", port).put(b"k", b"v")
            except OSError:
                continue  # nothing listens
            except GatewayError:
                refused.set()
            else:
                let_in.set()

    intruder = threading.Thread(target=intrude)
    intruder.start()
    try:
        start(login=("root", "s3cret"))
        assert refused.wait(60)
    finally:
        stop.set()
        intruder.join()
    assert not let_in.is_set()


def test_users_and_data_outlast_a_crash_of_etcd_and_it_still_ends_by_itself(
    start: Start, port: int
) -> None:
    supervisor = start(login=LOGIN)
    gateway = Gateway("127.0.0.1", port)
    gateway.log_in_as(*LOGIN)
    lease_id = int(gateway.call("/v3/lease/grant", {"TTL": 60})["ID"])
    gateway.put(b"k", b"v", lease_id)
    (etcd,) = supervisor.children()
    etcd.kill()
    wait_until("etcd is back", lambda: has_ended(etcd) and answer(port).name == "ETCD")
    with pytest.raises(GatewayError, match="user name is empty"):
        Gateway("127.0.0.1", port).keys()
    gateway.log_in_as(*LOGIN)
    assert gateway.keys()[b"k"].lease_id == lease_id
    gateway.revoke(lease_id)
    wait_for_end(supervisor)


def test_an_open_etcd_is_refused_by_who_has_a_password(etcd_server: EtcdServer) -> None:
    with pytest.raises(EmbeddedEtcdError, match="requires no password"):
        ensure_etcd(settings(etcd_server.target, login=LOGIN))


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

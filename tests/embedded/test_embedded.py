"""The embedded etcd with real processes: races, killed starters, its own end, and refusals."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.launch import StartedEtcd
from rdzv_etcd.embedded.port import PortAnswer, listen_urls, own_addresses
from rdzv_etcd.embedded.program import take_lock
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Endpoint
from tests.embedded.agents import (
    LIMIT_S,
    Agent,
    answer,
    environment,
    grant,
    has_ended,
    settings,
    wait_for_end,
)
from tests.embedded.conftest import Ensure, Start
from tests.library.nodes import wait_until
from tests.support.gateway import Gateway
from tests.support.servers import EtcdBinary, EtcdServer


def test_without_embed_nothing_is_looked_at() -> None:
    assert ensure_etcd(settings("127.0.0.1:1", embed=0)) is None


def test_an_etcd_that_answers_is_used(etcd_server: EtcdServer) -> None:
    assert ensure_etcd(settings(etcd_server.target)) is None


def test_it_stops_by_itself_when_the_last_lease_is_gone(
    start: Start,
    etcd_binary: EtcdBinary,
    port: int,
    scratch: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    supervisor = start()
    assert f"started an embedded etcd {etcd_binary.version} ({etcd_binary.path}," in caplog.text
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    (etcd,) = supervisor.children()
    assert len(list(scratch.iterdir())) == 1
    lease_id = grant(port, 60)
    # Longer than the grace time with a lease: it stays. (Only a lower bound is waited for.)
    with pytest.raises(psutil.TimeoutExpired):
        supervisor.wait(2)
    assert not has_ended(supervisor)
    Gateway("127.0.0.1", port).revoke(lease_id)
    wait_for_end(supervisor)
    assert has_ended(etcd)
    assert list(scratch.iterdir()) == []


def test_of_four_starters_exactly_one_starts_it(
    agents: Callable[[int], list[Agent]], supervisors: Callable[[], list[psutil.Process]], port: int
) -> None:
    four = agents(4)
    for agent in four:
        agent.go()
    answers = [agent.supervisor() for agent in four]
    assert sum(answer is not None for answer in answers) == 1
    assert answer(port) is PortAnswer.ETCD
    wait_until("the losers' supervisors have ended", lambda: len(supervisors()) == 1)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_it_outlives_the_process_group_that_started_it(
    agents: Callable[[int], list[Agent]], port: int, how: signal.Signals
) -> None:
    (agent,) = agents(1)
    agent.go()
    supervisor = agent.supervisor()
    assert supervisor is not None
    lease_id = grant(port, 60)
    os.killpg(agent.process.pid, how)
    agent.process.wait(LIMIT_S)
    # End of file on the agent's output: the supervisor and etcd do not hold it open.
    assert agent.process.stdout is not None
    assert agent.process.stdout.read() == ""
    assert Gateway("127.0.0.1", port).leases() == {lease_id}
    assert psutil.pid_exists(supervisor)


def test_etcd_dies_with_its_supervisor_and_the_next_one_tidies_up(
    start: Start, scratch: Path
) -> None:
    supervisor = start()
    (etcd,) = supervisor.children()
    supervisor.kill()
    wait_for_end(etcd)
    (left,) = scratch.iterdir()
    assert start().pid != supervisor.pid
    (there,) = scratch.iterdir()
    assert there != left


def test_a_node_elsewhere_waits_until_it_is_started(
    ensure: Ensure, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """While another supervisor of the port is starting etcd this node only waits."""
    caplog.set_level("INFO")
    outcome: list[StartedEtcd | None] = []
    with take_lock(port):
        waiter = threading.Thread(target=lambda: outcome.append(ensure()))
        waiter.start()
        wait_until("a log line", lambda: "waiting up to 60 s for the etcd at" in caplog.text)
        assert outcome == []
    waiter.join()
    assert outcome[0] is not None  # nobody kept the lock any more, so it started one itself
    assert "started an embedded etcd" in caplog.text
    assert caplog.text.count("waiting up to") == 1


def test_nobody_starting_it_is_an_error_in_bounded_time() -> None:
    """Neither address causes traffic: an empty label is no name, and lo has no such neighbour."""
    for host, why in (
        ("no..name", r"no\.\.name cannot be resolved on this machine; is it spelt right"),
        ("[fe80::1%lo]", "fe80::1%lo is not this machine"),
    ):
        with pytest.raises(EmbeddedEtcdError, match=f"within 1 s: nothing listens there.*{why}"):
            ensure_etcd(settings(f"{host}:2379", join_timeout=1))


def test_a_port_taken_by_something_else_is_named(port: int) -> None:
    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", port)) as listener:
        server = threading.Thread(target=greet, args=(listener,))
        server.start()
        with pytest.raises(
            EmbeddedEtcdError, match=f"127.0.0.1:{port}: something that is not etcd"
        ):
            ensure_etcd(settings(f"127.0.0.1:{port}"))
        server.join()
        # The same listener, now silent: the kernel accepts, nobody answers.
        with pytest.raises(EmbeddedEtcdError, match=r"does not answer \(waited 0.1 s for etcd"):
            ensure_etcd(settings(f"127.0.0.1:{port}", connect_timeout="0.1"))


def test_an_etcd_with_tls_is_told_apart(tls_etcd: EtcdServer) -> None:
    with pytest.raises(EmbeddedEtcdError, match=r"https|does not answer"):
        ensure_etcd(settings(tls_etcd.target, connect_timeout=1))


def test_connections_that_cannot_be_embedded_are_refused() -> None:
    with pytest.raises(SettingsError, match="http only"):
        ensure_etcd(settings("https://h1"))
    with pytest.raises(SettingsError, match=r"survives no more"):
        ensure_etcd(settings("h1,h2"))
    with pytest.raises(SettingsError, match=r"in plain text.*allow_plain_password=1") as caught:
        ensure_etcd(settings("192.0.2.1", login=("ann", "s3cret")))
    assert "s3cret" not in str(caught.value)


def test_etcds_own_variables_do_not_reach_it(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object
) -> None:
    """Kubernetes sets ETCD_* for a service called etcd; etcd would read them as its flags."""
    environ = environment(
        etcd_binary.path, scratch, ETCD_LISTEN_CLIENT_URLS="tcp://x", ETCD_PORT="tcp://10.0.0.1:1"
    )
    assert ensure_etcd(settings(f"127.0.0.1:{port}"), environ) is not None


def test_a_reachable_name_listens_on_all_interfaces_and_loopback_stays_private() -> None:
    own = own_addresses("localhost")
    assert "127.0.0.1" in own or "::1" in own
    assert own_addresses("203.0.113.7") == ()
    assert listen_urls(Endpoint("localhost", 7), ("127.0.0.1", "::1")) == (
        "http://127.0.0.1:7",
        "http://[::1]:7",
    )
    # Debian's own-name entry: others resolve it to another address.
    assert listen_urls(Endpoint("node0", 7), ("127.0.1.1",)) == ("http://0.0.0.0:7",)
    assert listen_urls(Endpoint("node0", 7), ("127.0.1.1", "fd00::2")) == ("http://[::]:7",)
    # However it is written: these once listened on all interfaces.
    for typed in ("127.1", "0x7f000001"):
        assert listen_urls(Endpoint(typed, 7), own_addresses(typed)) == ("http://127.0.0.1:7",)


def test_it_works_on_ipv6_loopback(start: Start, port: int) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    start("[::1]")
    assert answer(port, "::1") is PortAnswer.ETCD


def test_this_machines_own_address_is_served_to_others_and_locally(start: Start, port: int) -> None:
    """Traffic to one of our own addresses does not leave the machine."""
    mine = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not mine:
        pytest.skip("this machine has a loopback address only")
    start(mine[0])
    assert answer(port, mine[0]) is PortAnswer.ETCD
    assert answer(port) is PortAnswer.ETCD

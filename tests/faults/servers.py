"""What a server may lack, what operators do to it, and how a node ends that it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.faults.nodes import LIMIT_S, NodeProcess, Nodes
from tests.support.gateway import Gateway, GatewayError
from tests.support.servers import ENOUGH_TO_FILL, EtcdServer

Job = Callable[..., Nodes]


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


def fill(gateway: Gateway) -> None:
    """Write until etcd refuses."""
    with pytest.raises(GatewayError, match="space exceeded"):  # noqa: PT012 - it is not the first
        for number in range(ENOUGH_TO_FILL):
            gateway.put(b"/ballast/%d" % number, b"x" * 400_000)


def make_room(gateway: Gateway) -> None:
    """What an operator does: delete, compact, defragment, disarm."""
    gateway.delete_prefix(b"/ballast/")
    gateway.compact(gateway.revision())
    gateway.call("/v3/maintenance/defragment", {})
    for alarm in gateway.call("/v3/maintenance/alarm", {"action": "GET"})["alarms"]:
        gateway.call("/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})


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

"""What a server may lack, what operators do to it, and how a node ends that it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.faults.nodes import LIMIT_S, NodeProcess, Nodes
from tests.support.gateway import Gateway, GatewayError
from tests.support.servers import ENOUGH_TO_FILL

Job = Callable[..., Nodes]


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


@contextmanager
def compacting(gateway: Gateway, every_s: float) -> Iterator[Callable[[], int]]:
    """Write something and compact away all history, again and again; yields what returns how
    often that was."""
    stop, done = threading.Event(), 0

    def work() -> None:
        nonlocal done
        while not stop.wait(every_s):
            for _ in range(3):
                revision = gateway.put(b"/elsewhere", b"")
            gateway.compact(revision)
            done += 1

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield lambda: done
        finally:
            stop.set()
        working.result(LIMIT_S)

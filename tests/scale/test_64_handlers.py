"""64 nodes form rounds quickly, and at a cost that etcd's own counters show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.servers import EtcdServer

PROCESSES = 8
THREADS = 8
NODES = PROCESSES * THREADS
MOST_REQUESTS = 6.0
"""Requests to etcd per node and round; a stream counts as one."""
LIMIT_S = 30.0
"""For a round on a slow machine; see the printed times for what it takes."""


class Fleet:
    """The processes, told the same thing at the same time."""

    def __init__(self, server: EtcdServer, job_id: str) -> None:
        program = Path(__file__).with_name("worker.py")
        arguments = [server.endpoint, job_id, str(NODES), str(THREADS)]
        self._workers = [
            subprocess.Popen(
                [sys.executable, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(PROCESSES)
        ]
        self._answers()

    def tell(self, command: str) -> list[str]:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(command + "\n")
            worker.stdin.flush()
        return self._answers()

    def _answers(self) -> list[str]:
        with ThreadPoolExecutor(PROCESSES) as pool:
            lines = list(pool.map(_line, self._workers))
        assert all(lines), "a worker has ended"
        return lines

    def close(self) -> None:
        for worker in self._workers:
            with worker:  # its input ends, and with it the process
                pass

    def join(self) -> float:
        """Let all join; returns the seconds from the last call to the last return."""
        joins = [join for line in self.tell("join") for join in json.loads(line)]
        assert sorted(rank for _, _, rank, _ in joins) == list(range(NODES))
        assert {size for _, _, _, size in joins} == {NODES}
        last_begin_s: float = max(begin for begin, _, _, _ in joins)
        last_end_s: float = max(end for _, end, _, _ in joins)
        return last_end_s - last_begin_s


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


@pytest.fixture
def counted_etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    return fresh_etcd()


@pytest.fixture
def fleet(counted_etcd: EtcdServer, job_id: str) -> Iterator[Fleet]:
    with ExitStack() as stack:
        made = Fleet(counted_etcd, job_id)
        stack.callback(made.close)
        yield made


@pytest.mark.slow
def test_64_handlers_in_8_processes(counted_etcd: EtcdServer, fleet: Fleet) -> None:
    """At most six requests per node and round; the first one's include connecting."""
    before = _requests(counted_etcd)
    fleet.tell("make")
    first_s = fleet.join()
    after_first = _requests(counted_etcd)
    second_s = fleet.join()
    after_second = _requests(counted_etcd)
    print(f"\n{counted_etcd.binary.label}: {NODES} handlers in {PROCESSES} processes")
    costs = (
        _report("first round, with start", first_s, before, after_first),
        _report("second round", second_s, after_first, after_second),
    )
    assert all(json.loads(line) == [True] * THREADS for line in fleet.tell("shutdown"))
    assert max(first_s, second_s) < LIMIT_S
    assert max(costs) <= MOST_REQUESTS


def _requests(server: EtcdServer) -> Mapping[str, float]:
    return server.metrics().requests()


def _report(
    what: str, seconds: float, before: Mapping[str, float], after: Mapping[str, float]
) -> float:
    spent = {name: count - before.get(name, 0.0) for name, count in after.items()}
    spent = {name: count for name, count in sorted(spent.items()) if count}
    cost = sum(spent.values()) / NODES
    each = ", ".join(f"{name} {count:.0f}" for name, count in spent.items())
    print(f"  {what}: {seconds:.3f} s, {cost:.2f} requests per node ({each})")
    return cost

"""64 nodes form rounds quickly, at a cost that etcd's own counters show; and when their links all
break at the same time, again and again, no node is taken for dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rdzv_etcd.protocol.keys import JobKeys
from tests.library.nodes import LIMIT_S, node_options, wait_until
from tests.support.servers import EtcdServer

pytestmark = pytest.mark.slow

PROCESSES = 8
EACH = 8
NODES = PROCESSES * EACH
MOST_REQUESTS = 6.0
"""Requests to etcd per node and round; a stream counts as one."""
ROUND_S = 30.0
"""For a round on a slow machine; see the printed times for what it takes."""
FOR_S = float(os.environ.get("RDZV_ETCD_TEST_LINKS_S", "15"))
"""How long links are broken; ten minutes were seen, too."""


class Fleet:
    """The processes, which get each command at the same time."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        program = [sys.executable, "-m", "tests.scale.nodes", json.dumps(options), str(EACH)]
        self._workers = [
            subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            for _ in range(PROCESSES)
        ]
        self._pool = ThreadPoolExecutor(PROCESSES)
        self._answers()

    def tell(self, command: str) -> list[Any]:
        """Return what all nodes answer."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(command + "\n")
            worker.stdin.flush()
        return self._answers()

    def join(self) -> float:
        """Let all join; returns the seconds from the last call to the last return."""
        joins = self.tell("join")
        assert sorted(rank for rank, _, _, _ in joins) == list(range(NODES))
        assert {size for _, size, _, _ in joins} == {NODES}
        last_began_s: float = max(began_s for _, _, began_s, _ in joins)
        last_ended_s: float = max(ended_s for _, _, _, ended_s in joins)
        return last_ended_s - last_began_s

    def _answers(self) -> list[Any]:
        return list(chain.from_iterable(self._pool.map(_answer, self._workers)))

    def close(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            with worker:
                pass
        self._pool.shutdown()


def _answer(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    assert line, "a process has ended"
    return json.loads(line)


@pytest.fixture
def etcd(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """A server of the test's own, so that its requests can be counted."""
    return fresh_etcd()


@pytest.fixture
def fleet(etcd: EtcdServer, job_id: str) -> Iterator[Fleet]:
    made = Fleet(node_options(etcd, job_id, str(NODES), lease_ttl=10))
    try:
        yield made
    finally:
        made.close()


def test_nodes_cost_etcd_no_more_than_docs_deploy_says(
    etcd: EtcdServer, fleet: Fleet, job_id: str
) -> None:
    """The first round's requests include connecting."""
    costs, times, pages = [], [], [etcd.metrics()]
    fleet.tell("make")
    for number in (1, 2):
        times.append(fleet.join())
        pages.append(etcd.metrics())
        before, after = (page.requests() for page in pages[-2:])
        spent = {name: count - before.get(name, 0.0) for name, count in sorted(after.items())}
        costs.append(sum(spent.values()) / NODES)
        each = ", ".join(f"{name} {count:.0f}" for name, count in spent.items() if count)
        print(f"round {number}: {times[-1]:.3f} s, {costs[-1]:.2f} requests per node ({each})")
    keys = etcd.keys(JobKeys("/rdzv_etcd", job_id).root)
    fleet.tell("leave")
    assert max(times) < ROUND_S
    assert max(costs) <= MOST_REQUESTS

    size = sum(len(key) + len(value) for key, value in keys.items())
    names = {
        "writes": "etcd_server_proposals_committed_total",
        "connections": "process_open_fds",
        "watchers": "etcd_debugging_mvcc_watcher_total",
        "bytes of memory": "process_resident_memory_bytes",
    }
    first = {what: pages[1].total(name) - pages[0].total(name) for what, name in names.items()}
    print(f"{etcd.binary.label}: {len(keys)} keys, {size} bytes in them; first round: {first}")
    assert len(keys) <= NODES + 10
    assert size <= 500 * NODES + 2000
    assert first["writes"] <= 3 * NODES + 10
    assert first["connections"] <= NODES + 5


def test_64_nodes_whose_links_all_break_at_once_work_on(fleet: Fleet) -> None:
    node_ids = set(fleet.tell("make"))
    fleet.join()

    def all_are_watched() -> bool:
        found = fleet.tell("look")
        assert not any(over for over, _, _ in found), found
        return {one for _, _, watched in found for one in watched} == node_ids

    wait_until("each node is watched", all_are_watched)
    until_s = time.monotonic() + FOR_S
    times = 0
    while times < 3 or time.monotonic() < until_s:
        assert sum(fleet.tell("reset")) >= NODES // 2
        times += 1
        wait_until("each node is watched again", all_are_watched, 2 * LIMIT_S)
    print(f"\nall links of {NODES} nodes were reset {times} times in {FOR_S:g} s")
    assert not any(over for over, _, _ in fleet.tell("look"))
    fleet.tell("leave")

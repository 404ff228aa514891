"""64 nodes whose links all break at the same time, again and again: nobody is taken for dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.library.nodes import LIMIT_S, node_options, wait_until
from tests.support.servers import EtcdServer

PROCESSES = 8
EACH = 8
NODES = PROCESSES * EACH
FOR_S = float(os.environ.get("RDZV_ETCD_TEST_LINKS_S", "15"))
"""How long links are broken; ten minutes were seen, too."""


class Fleet:
    """The processes, told the same thing at the same time."""

    def __init__(self, options: dict[str, Any]) -> None:
        program = [sys.executable, "-m", "tests.scale.linked_nodes"]
        self._workers = [
            subprocess.Popen(
                [*program, json.dumps(options), str(EACH)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            for _ in range(PROCESSES)
        ]
        self._pool = ThreadPoolExecutor(PROCESSES)
        self.node_ids = list(chain.from_iterable(self._pool.map(_answer, self._workers)))

    def tell(self, command: str) -> list[Any]:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(command + "\n")
            worker.stdin.flush()
        return list(self._pool.map(_answer, self._workers))

    def look(self) -> list[list[Any]]:
        return list(chain.from_iterable(self.tell("look")))

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
def fleet(etcd_server: EtcdServer, job_id: str) -> Iterator[Fleet]:
    made = Fleet(node_options(etcd_server, job_id, str(NODES), lease_ttl=10))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_64_nodes_whose_links_all_break_at_once_work_on(fleet: Fleet) -> None:
    ranks = [rank for rank, _ in chain.from_iterable(fleet.tell("join"))]
    assert sorted(ranks) == list(range(NODES))

    def all_are_watched() -> bool:
        found = fleet.look()
        assert not any(over for over, _, _ in found), found
        return {one for _, _, watched in found for one in watched} == set(fleet.node_ids)

    wait_until("each node is watched", all_are_watched)
    until_s = time.monotonic() + FOR_S
    times = 0
    while times < 3 or time.monotonic() < until_s:
        assert sum(fleet.tell("reset")) >= NODES // 2
        times += 1
        wait_until("each node is watched again", all_are_watched, 2 * LIMIT_S)
    print(f"\nall links of {NODES} nodes were reset {times} times in {FOR_S:g} s")
    assert not any(over for over, _, _ in fleet.look())

"""What is done with a store while the clock runs. One class per kind of work.

Knows the store's methods and the code of torch's agents that uses them; knows no store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.store_clients import open_clients

VALUE = b"v" * 100
_STACK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Where:
    """Which store, and how long anything may take."""

    kind: str
    endpoint: str
    job: str
    limit_s: float


class _Work:
    """A process with one client."""

    def __init__(self, where: Where, index: int) -> None:
        self.where, self.index = where, index

    def prepare(self) -> None:
        where = self.where
        self.clients = open_clients(
            where.kind, where.endpoint, where.job, self.index, where.limit_s
        )
        self.store: Any = self.clients.open()

    def run(self) -> dict[str, Any]:
        raise NotImplementedError

    def finish(self) -> None:
        self.clients.close()


def operations(batch: int) -> tuple[str, ...]:
    """Name the single calls; ``batch``: how many keys the last two have."""
    return ("set", "get", "add, 1 writer", f"multi_set of {batch}", f"multi_get of {batch}")


class Operations(_Work):
    """One client, one operation after another."""

    def __init__(self, where: Where, count: int, batch: int, index: int) -> None:
        super().__init__(where, index)
        self._count, self._batch = count, batch

    def run(self) -> dict[str, Any]:
        store = self.store
        keys = [f"batch/{i}" for i in range(self._batch)]
        values = [VALUE] * self._batch
        few = max(2, self._count // 20)
        seconds = (
            _timed(self._count, lambda i: store.set(f"key/{i}", VALUE)),
            _timed(self._count, lambda i: store.get(f"key/{i}")),
            _timed(self._count, lambda _: store.add("sum", 1)),
            _timed(few, lambda _: store.multi_set(keys, values)),
            _timed(few, lambda _: store.multi_get(keys)),
        )
        return dict(zip(operations(self._batch), seconds, strict=True))


class Waiting(_Work):
    """Process 0 waits for keys that process 1 sets: from the set's begin to the wait's return."""

    def __init__(self, where: Where, count: int, index: int) -> None:
        super().__init__(where, index)
        self._count = count

    def run(self) -> dict[str, Any]:
        moments = []
        for i in range(self._count):
            if self.index == 0:
                self.store.wait([f"signal/{i}"])
                moments.append(time.monotonic())
                self.store.set(f"seen/{i}", VALUE)
            else:
                time.sleep(0.02)  # so that the other one waits
                moments.append(time.monotonic())
                self.store.set(f"signal/{i}", VALUE)
                self.store.wait([f"seen/{i}"])
        return {"moments": moments}


class Adding(_Work):
    """Every process adds to the same number."""

    def __init__(self, where: Where, count: int, index: int) -> None:
        super().__init__(where, index)
        self._count = count

    def run(self) -> dict[str, Any]:
        sums: list[int] = []
        seconds = _timed(self._count, lambda _: sums.append(self.store.add("sum", 1)))
        return {"seconds": seconds, "sums": sums}


class Agents(_Work):
    """A share of many agents, a thread each, that do what torch's agents do with their store."""

    def __init__(self, where: Where, what: str, agents: int, processes: int, index: int) -> None:
        super().__init__(where, index)
        self._ranks = range(index, agents, processes)
        self._agents = agents
        self._act: Callable[[Any, int], None] = getattr(self, f"_{what}")

    def prepare(self) -> None:
        super().prepare()
        self._go = threading.Event()
        self._failed: list[threading.ExceptHookArgs] = []
        threading.excepthook = self._failed.append
        threading.stack_size(_STACK_BYTES)
        self._threads = [threading.Thread(target=self._agent, args=(r,)) for r in self._ranks]
        self._ready = threading.Barrier(len(self._threads) + 1)
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        self._ready.wait(self.where.limit_s)

    def run(self) -> dict[str, Any]:
        self._go.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise RuntimeError(f"{len(self._failed)} agents failed: {self._failed[0].exc_value}")
        return {}

    def _agent(self, rank: int) -> None:
        store = self.clients.open()
        self._ready.wait(self.where.limit_s)
        self._go.wait()
        self._act(store, rank)

    def _exchange(self, store: Any, rank: int) -> None:
        """torch's own code; it uses nothing of the agent it is a method of."""
        from torch.distributed.elastic.agent.server.api import (  # noqa: PLC0415
            SimpleElasticAgent,
        )

        spec: Any = SimpleNamespace(role="default", local_world_size=8)
        agent: Any = None
        workers = SimpleElasticAgent._assign_worker_ranks(agent, store, rank, self._agents, spec)
        if workers[0].global_rank != 8 * rank:
            raise RuntimeError(f"agent {rank} got rank {workers[0].global_rank}")

    def _barrier(self, store: Any, rank: int) -> None:  # noqa: ARG002 - as torch calls it
        from torch.distributed.elastic.utils.store import barrier  # noqa: PLC0415

        barrier(store, self._agents, "terminal_state", barrier_timeout=self.where.limit_s)


def _timed(count: int, operation: Callable[[int], object]) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    seconds = []
    for i in range(count):
        begin_s = time.perf_counter()
        operation(i)
        seconds.append(time.perf_counter() - begin_s)
    return seconds

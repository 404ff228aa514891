"""A store on an in-memory etcd, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rdzv_etcd.etcd.port import Txn
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.testing import MemoryConnection, MemoryEtcd, SimClock, SimLoop, run_simulation
from tests.support.scenarios import as_test

KEYS = JobKeys("/rdzv_etcd", "job").store(1, "run")
LIMIT_S = 60.0

Scenario = Callable[[MemoryEtcd], Coroutine[Any, Any, None]]


def simulate(scenario: Scenario, seed: int = 0) -> None:
    """Run in virtual time, on the seed's schedule."""

    async def main(loop: SimLoop) -> None:
        async with MemoryEtcd(SimClock(loop), seed=seed) as server:
            await scenario(server)

    run_simulation(main, seed=seed)


simulated = as_test(simulate, given=1)
"""Decorates a scenario; see :func:`tests.support.scenarios.as_test`."""


async def open_store(
    server: MemoryEtcd, writer: str = "writer"
) -> tuple[KeyValueStore, MemoryConnection]:
    etcd = server.connect(writer)
    lease = await etcd.grant(86_400)
    if not server.snapshot(StoreKeys(KEYS).whole):
        await etcd.txn(Txn((), (StoreKeys(KEYS).begin(lease.lease_id),)))
    store = KeyValueStore(etcd, KEYS, lease.lease_id, writer=writer, clock=server.clock)
    return store, etcd


def next_request(server: MemoryEtcd) -> asyncio.Future[None]:
    """Return a future that is done when a request has been worked on."""
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def observe(_: object) -> None:
        if not arrived.done():
            arrived.set_result(None)

    server.observers.append(observe)
    return arrived

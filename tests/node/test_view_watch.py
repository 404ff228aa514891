"""A watched view by itself, on an in-memory etcd."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import EtcdUnavailableError, StateCorruptError
from rdzv_etcd.etcd.port import Get, GetResult, Put, Txn
from rdzv_etcd.node.views import ViewWatch
from rdzv_etcd.node.waiting import Wakeup
from rdzv_etcd.testing import MemoryConnection, MemoryEtcd, SimClock, SimLoop, run_simulation

KEY = b"/here/key"


def build(result: GetResult) -> bytes:
    (kv,) = result.kvs
    if kv.value == b"nonsense":
        raise StateCorruptError(KEY.decode(), "nonsense")
    return kv.value


def view_of(etcd: MemoryConnection, loop: SimLoop) -> ViewWatch[bytes]:
    clock = SimClock(loop)
    return ViewWatch(
        etcd,
        clock,
        Wakeup(clock),
        request=Get(KEY),
        build=build,
        fold=lambda _, batch: batch.events[-1].kv.value,
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_feed_that_could_not_open_leaves_nothing_running(seed: int) -> None:
    """Whichever is first to fail or to be done, the read or the watch."""

    async def scenario(loop: SimLoop) -> None:
        async with MemoryEtcd(SimClock(loop), seed=seed) as server:
            etcd = server.connect()
            etcd.link.delay(0.0, 1.0)
            server.apply(Txn((), (Put(KEY, b"nonsense"),)))
            view = view_of(etcd, loop)
            alone = asyncio.all_tasks()
            with pytest.raises(StateCorruptError):
                await view.open(30)
            assert asyncio.all_tasks() == alone

            etcd.link.partition(silent=True)
            with pytest.raises(EtcdUnavailableError):
                await view.open(seed)
            assert asyncio.all_tasks() == alone

    run_simulation(scenario, seed)

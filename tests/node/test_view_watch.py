"""A watched view by itself, on an in-memory etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv_etcd.clock import beside
from rdzv_etcd.errors import EtcdUnavailableError, StateCorruptError
from rdzv_etcd.etcd.port import Get, GetResult, Put, Txn, WatchBatch
from rdzv_etcd.node.views import ViewWatch
from rdzv_etcd.node.waiting import Wakeup
from rdzv_etcd.testing import MemoryConnection, MemoryEtcd, SimClock, SimLoop, run_simulation

KEY = b"/here/key"


def build(result: GetResult) -> bytes:
    (kv,) = result.kvs
    if kv.value == b"nonsense":
        raise StateCorruptError(KEY.decode(), "nonsense")
    return kv.value


def fold(_: bytes, batch: WatchBatch) -> bytes:
    return batch.events[-1].kv.value


def view_of(
    etcd: MemoryConnection,
    loop: SimLoop,
    fold: Callable[[bytes, WatchBatch], bytes] = fold,
    wakeup: Wakeup | None = None,
) -> ViewWatch[bytes]:
    clock = SimClock(loop)
    wakeup = Wakeup(clock) if wakeup is None else wakeup
    return ViewWatch(etcd, clock, wakeup, request=Get(KEY), build=build, fold=fold)


def test_changes_that_nobody_has_looked_at_are_folded_together() -> None:
    """A leader that decides about thousands of arrivals copies its view once, not at each."""

    async def scenario(loop: SimLoop) -> None:
        folded: list[list[bytes]] = []

        def counted(view: bytes, batch: WatchBatch) -> bytes:
            folded.append([event.kv.value for event in batch.events])
            return fold(view, batch)

        async with MemoryEtcd(SimClock(loop), seed=loop.seed) as server:
            wakeup = Wakeup(SimClock(loop))
            server.apply(Txn((), (Put(KEY, b"0"),)))
            view = view_of(server.connect(), loop, counted, wakeup)
            await view.open()
            async with beside(view.run()):
                server.apply(Txn((), (Put(KEY, b"1"),)))
                await wakeup.wait(when=lambda: view.view == b"1")
                for value in (b"2", b"3", b"4"):
                    server.apply(Txn((), (Put(KEY, value),)))
                await asyncio.sleep(1)
                assert folded == [[b"1"]]
                assert view.seen == view.view == b"4"
                assert folded == [[b"1"], [b"2", b"3", b"4"]]
                server.apply(Txn((), (Put(KEY, b"5"),)))  # who waits again is woken again
                await wakeup.wait(when=lambda: view.view == b"5")

    run_simulation(scenario, 0)


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

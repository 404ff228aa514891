"""Waiting for keys: nothing is missed, and nothing is read twice without need."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import EtcdUnavailableError, StoreTimeoutError
from rdzv_etcd.etcd.port import Get, Put, Txn
from rdzv_etcd.kv.reads import QUICK_ANSWER_S
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.testing import Applied, MemoryEtcd
from tests.store.simulated import LIMIT_S, next_request, open_store, simulate, simulated

QUICK_S, SLOW_S = 0.002, 2 * QUICK_ANSWER_S
"""How long an answer takes."""


def count_reads(server: MemoryEtcd) -> list[object]:
    """Return what will hold the requests that only read."""
    reads: list[object] = []

    def observe(applied: Applied) -> None:
        request = applied.request
        if isinstance(request, Get) or (isinstance(request, Txn) and request.reads_only):
            reads.append(request)

    server.observers.append(observe)
    return reads


@pytest.mark.parametrize(("answer_s", "second_reads"), [(QUICK_S, 1), (SLOW_S, 0)])
@simulated
async def test_what_comes_between_the_read_and_the_watch_is_not_missed(
    server: MemoryEtcd, answer_s: float, second_reads: int
) -> None:
    """If answers are quick it is read; otherwise the watch catches up."""
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    reads = count_reads(server)
    etcd.link.delay(answer_s / 2)
    read = next_request(server)
    waiting = asyncio.ensure_future(store.get("key", LIMIT_S))
    await read
    await other.set("key", b"value", LIMIT_S)
    assert await waiting == b"value"
    assert len(reads) == 1 + second_reads


@pytest.mark.parametrize("answer_s", [QUICK_S, SLOW_S])
@simulated
async def test_nothing_is_read_again_if_nothing_has_happened(
    server: MemoryEtcd, answer_s: float
) -> None:
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    reads = count_reads(server)
    etcd.link.delay(answer_s / 2)
    waiting = asyncio.ensure_future(store.get("key", LIMIT_S))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    await other.set("key", b"value", LIMIT_S)
    assert await waiting == b"value"
    assert len(reads) == 1


@simulated
async def test_what_else_happens_meanwhile_does_not_end_the_wait(server: MemoryEtcd) -> None:
    """Keys of the same store before, between and after those that are waited for."""
    store, _ = await open_store(server)
    other, _ = await open_store(server, "other")
    waiting = asyncio.ensure_future(store.multi_get(["b", "d"], LIMIT_S))
    for key in "acbe":
        await other.set(key, key.encode(), LIMIT_S)
        await asyncio.sleep(0.5)
        assert not waiting.done()
    await other.delete("b", LIMIT_S)  # it has been there
    await other.set("d", b"d", LIMIT_S)
    assert await waiting == [b"b", b"d"]


@pytest.mark.parametrize("answer_s", [QUICK_S, SLOW_S])
@simulated
async def test_a_wait_that_nobody_ends_names_what_is_missing(
    server: MemoryEtcd, answer_s: float
) -> None:
    store, etcd = await open_store(server)
    etcd.link.delay(answer_s / 2)
    await store.set("here", b"", LIMIT_S)
    with pytest.raises(StoreTimeoutError, match=r"keys: gone$") as caught:
        await store.wait(["here", "gone"], 3.0)
    assert caught.value.keys == ("gone",)


@pytest.mark.parametrize("seed", range(20))
def test_many_wait_for_each_other_and_write_meanwhile(seed: int) -> None:
    """As torch's agents do: each sets its own key, and waits for those of all others."""

    async def act(store: KeyValueStore, index: int) -> list[bytes]:
        await store.set(f"rank/{index}", b"%d" % index, LIMIT_S)
        return await store.multi_get([f"rank/{i}" for i in range(12)], LIMIT_S)

    async def scenario(server: MemoryEtcd) -> None:
        stores = []
        for index in range(12):
            store, etcd = await open_store(server, f"agent-{index}")
            etcd.link.delay(0.0, 4 * QUICK_ANSWER_S / (1 + index % 3 * 4))
            stores.append(store)
        answers = await asyncio.gather(*(act(store, i) for i, store in enumerate(stores)))
        assert answers == [[b"%d" % i for i in range(12)]] * 12

    simulate(scenario, seed)


@pytest.mark.parametrize("unanswered", [0, 2])
@simulated
async def test_what_comes_in_a_break_in_which_etcd_goes_back_is_not_missed(
    server: MemoryEtcd, unanswered: int
) -> None:
    """Others have written as much again by its end, so the watch goes on behind it.

    ``unanswered``: how many reads after it etcd does not answer.
    """
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    saved = server.save()
    write = Txn((), (Put(b"/another application", b""),))
    for _ in range(20):
        server.apply(write)
    waiting = asyncio.ensure_future(store.get("key", LIMIT_S))
    await asyncio.sleep(1)
    etcd.link.partition()
    revision = server.revision
    server.restore(saved)
    await other.set("key", b"value", LIMIT_S)
    while server.revision <= revision:
        server.apply(write)
    etcd.link.fail(EtcdUnavailableError("no leader"), unanswered)
    etcd.link.heal()
    assert await waiting == b"value"


@pytest.mark.parametrize("answer_s", [QUICK_S, SLOW_S])
@simulated
async def test_a_key_is_found_though_the_watch_for_it_is_silent(
    server: MemoryEtcd, answer_s: float
) -> None:
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    etcd.link.delay(answer_s / 2)
    waiting = asyncio.ensure_future(store.get("key", LIMIT_S))
    await asyncio.sleep(1.0)
    etcd.link.stall_watches(lambda _key, _end: True)
    await other.set("key", b"value", LIMIT_S)
    assert await waiting == b"value"

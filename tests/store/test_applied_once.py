"""Lost replies, late copies, wiped data: a write counts once, and the caller learns its outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rdzv_etcd.errors import EtcdError, OutcomeUnknownError, StateCorruptError, StoreLostError
from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.testing import Link, MemoryConnection, MemoryEtcd
from tests.store.simulated import KEYS, LIMIT_S, next_request, open_store, simulate, simulated


def is_write(request: object) -> bool:
    return isinstance(request, Txn) and bool(request.guards)


@simulated
async def test_an_add_whose_reply_is_lost_counts_once_and_returns_its_own_sum(
    server: MemoryEtcd,
) -> None:
    """Although another node has added since, the sum returned is that of this add."""
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    assert await store.add("n", 1, LIMIT_S) == 1

    def add_by_other_in_between(_: object) -> None:
        server.observers.clear()
        others.append(asyncio.ensure_future(other.add("n", 1, LIMIT_S)))

    others: list[asyncio.Future[int]] = []
    server.observers.append(add_by_other_in_between)
    etcd.link.drop_replies(matching=is_write)
    assert await store.add("n", 1, LIMIT_S) == 2
    assert await others[0] == 3
    assert await store.get("n", LIMIT_S) == b"3"
    assert await store.add("n", 1, LIMIT_S) == 4


@simulated
async def test_every_write_survives_lost_replies(server: MemoryEtcd) -> None:
    store, etcd = await open_store(server)

    async def lossy(coro: Coroutine[Any, Any, Any]) -> Any:
        etcd.link.drop_replies(2, matching=is_write)
        return await coro

    await lossy(store.set("key", b"a", LIMIT_S))
    await lossy(store.append("key", b"b", LIMIT_S))
    assert await store.get("key", LIMIT_S) == b"ab"
    assert await lossy(store.compare_set("key", b"ab", b"c", LIMIT_S)) == b"c"
    assert await lossy(store.compare_set("key", b"x", b"d", LIMIT_S)) == b"c"
    assert await lossy(store.compare_set("absent", b"x", b"d", LIMIT_S)) == b"x"
    assert await lossy(store.delete("key", LIMIT_S)) is True
    assert await lossy(store.delete("key", LIMIT_S)) is False
    await lossy(store.set("n", b"5", LIMIT_S))
    assert await lossy(store.add("n", 3, LIMIT_S)) == 8
    assert await lossy(store.add("n", -1, LIMIT_S)) == 7
    assert await lossy(store.add("zero", 0, LIMIT_S)) == 0


@simulated
async def test_a_write_that_arrives_late_does_not_undo_a_newer_one(server: MemoryEtcd) -> None:
    """The first copy of a set is held up in the network; its retry and a second set overtake it."""
    store, etcd = await open_store(server)
    await store.set("key", b"0", LIMIT_S)
    copies: list[Txn] = []

    async def keep_copy(request: Txn, **options: Any) -> Any:
        copies.append(request)
        return await MemoryConnection.txn(etcd, request, **options)

    etcd.txn = keep_copy  # type: ignore[method-assign]
    await store.set("key", b"1", LIMIT_S)
    await store.add("n", 1, LIMIT_S)
    await store.compare_set("key", b"nothing like it", b"2", LIMIT_S)
    await store.set("key", b"nothing like it", LIMIT_S)
    before = server.snapshot()
    for late in copies:
        server.apply(late)
    assert server.snapshot() == before


@simulated
async def test_a_write_of_unknown_outcome_that_arrives_later_does_not_disturb_others(
    server: MemoryEtcd,
) -> None:
    store, etcd = await open_store(server)
    assert await store.add("n", 1, LIMIT_S) == 1
    etcd.link.hold_requests(1.5, matching=is_write)
    with pytest.raises(EtcdError):  # the limit of one request, 1 s, passes first
        await store.add("n", 1, 0.01)
    assert await store.add("n", 1, LIMIT_S) == 2
    await asyncio.sleep(1.5)  # until the held request arrives
    assert await store.add("n", 1, LIMIT_S) == 4
    etcd.link.drop_replies(matching=is_write)
    assert await store.add("n", 1, LIMIT_S) == 5


def spoil(link: Link, rng: random.Random) -> None:
    """Lose requests and replies, and let some requests arrive after their retries."""
    link.delay(0.0, 1.0)
    link.lose(requests=0.1, replies=0.1)
    link.drop_replies(rng.randint(1, 5), matching=lambda _: rng.random() < 0.5)
    link.hold_requests(8.0, rng.randint(1, 5), matching=lambda _: rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(50))
def test_concurrent_adders_on_a_bad_network_count_exactly(seed: int) -> None:
    """Every sum is returned exactly once, whatever was lost."""

    async def scenario(server: MemoryEtcd) -> None:
        rng = random.Random(seed)
        stores = []
        for index in range(8):
            store, etcd = await open_store(server, f"writer-{index}")
            spoil(etcd.link, rng)
            stores.append(store)
        sums = await asyncio.gather(
            *(store.add("n", 1, None) for store in stores for _ in range(6))
        )
        assert sorted(sums) == list(range(1, 49))

    simulate(scenario, seed)


@pytest.mark.parametrize("seed", range(25))
def test_amounts_that_differ_and_appends_are_applied_once_on_a_bad_network(seed: int) -> None:
    async def scenario(server: MemoryEtcd) -> None:
        rng = random.Random(seed)
        writes: list[Coroutine[Any, Any, object]] = []
        for index, amount in enumerate((1, 2, -3, 10)):
            store, etcd = await open_store(server, f"writer-{index}")
            spoil(etcd.link, rng)
            writes += [store.add("n", amount, None) for _ in range(3)]
            writes += [store.append("text", b"%d" % index, None) for _ in range(2)]
        await asyncio.gather(*writes)
        reader, _ = await open_store(server, "reader")
        assert await reader.get("n", LIMIT_S) == b"30"
        assert sorted(await reader.get("text", LIMIT_S)) == list(b"00112233")

    simulate(scenario, seed)


@simulated
async def test_a_sum_that_cannot_be_told_any_more_is_reported_as_unknown(
    server: MemoryEtcd,
) -> None:
    """The add was applied, its reply lost, and etcd has forgotten the history since."""
    store, etcd = await open_store(server)
    await store.add("n", 1, LIMIT_S)

    def overwrite_and_compact(_: object) -> None:
        server.observers.clear()
        server.apply(Txn((), (Put(KEYS.start + b"other", b"x"),)))
        server.compact()

    server.observers.append(overwrite_and_compact)
    etcd.link.drop_replies(matching=is_write)
    with pytest.raises(OutcomeUnknownError, match="applied once"):
        await store.add("n", 1, LIMIT_S)
    assert await store.get("n", LIMIT_S) == b"2"


Work = Callable[[KeyValueStore], Coroutine[Any, Any, object]]


@pytest.mark.parametrize(
    ("make", "make_again", "write"),
    [
        pytest.param(
            lambda other: other.add("key", 10, LIMIT_S),
            lambda other: other.add("key", 20, LIMIT_S),
            lambda store: store.add("key", 1, LIMIT_S),
            id="add to a counter",
        ),
        pytest.param(
            lambda other: other.set("key", b"10", LIMIT_S),
            lambda other: other.set("key", b"20", LIMIT_S),
            lambda store: store.add("key", 1, LIMIT_S),
            id="add to a number",
        ),
        pytest.param(
            lambda other: other.set("key", b"10", LIMIT_S),
            lambda other: other.set("key", b"20", LIMIT_S),
            lambda store: store.append("key", b"1", LIMIT_S),
            id="append",
        ),
        pytest.param(
            lambda other: other.add("key", 10, LIMIT_S),
            lambda other: other.add("key", 20, LIMIT_S),
            lambda store: store.compare_set("key", b"10", b"1", LIMIT_S),
            id="compare and set a counter",
        ),
    ],
)
@simulated
async def test_what_was_read_before_etcd_went_back_is_not_built_upon(
    server: MemoryEtcd, make: Work, make_again: Work, write: Work
) -> None:
    """The key, made again by then, has the revision that was read."""
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    later, _ = await open_store(server, "later")
    saved = [server.save()]
    await make(other)
    revision = server.revision

    async def go_back_after_the_first(request: Txn, **options: Any) -> Any:
        result = await MemoryConnection.txn(etcd, request, **options)
        if saved:
            server.restore(saved.pop())
            await make_again(later)
            assert server.revision == revision
        return result

    etcd.txn = go_back_after_the_first  # type: ignore[method-assign]
    with pytest.raises(StoreLostError):
        await write(store)


@simulated
async def test_a_wait_survives_compaction_restart_and_partition(server: MemoryEtcd) -> None:
    store, etcd = await open_store(server)
    other, _ = await open_store(server, "other")
    arrived = next_request(server)
    waiting = asyncio.ensure_future(store.get("key", LIMIT_S))
    await arrived
    etcd.link.partition()
    for index in range(5):
        await other.set(f"noise {index}", b"", LIMIT_S)
    server.compact()
    server.restart()
    etcd.link.heal()
    await other.set("key", b"value", LIMIT_S)
    assert await waiting == b"value"


@simulated
async def test_a_foreign_value_is_reported_with_its_key(server: MemoryEtcd) -> None:
    store, _ = await open_store(server)
    name = StoreKeys(KEYS).value("key")
    server.apply(Txn((), (Put(name, b"written by hand"),)))
    with pytest.raises(StateCorruptError, match=name.decode()):
        await store.get("key", LIMIT_S)


@simulated
async def test_operations_cost_the_requests_they_promise(server: MemoryEtcd) -> None:
    store, _ = await open_store(server)

    async def cost(coro: Coroutine[Any, Any, object]) -> int:
        before = server.requests.total()
        await coro
        return server.requests.total() - before

    assert await cost(store.set("key", b"value", LIMIT_S)) == 1
    assert await cost(store.get("key", LIMIT_S)) == 1
    assert await cost(store.wait(["key"], LIMIT_S)) == 1
    assert await cost(store.check(["key", "absent"], LIMIT_S)) == 1
    assert await cost(store.add("n", 1, LIMIT_S)) == 1
    assert await cost(store.add("n", 1, LIMIT_S)) == 1
    assert await cost(store.add("n", 0, LIMIT_S)) == 1
    assert await cost(store.compare_set("key", b"value", b"new", LIMIT_S)) == 1
    assert await cost(store.compare_set("key", b"value", b"new", LIMIT_S)) == 1
    assert await cost(store.append("fresh", b"value", LIMIT_S)) == 1
    assert await cost(store.append("fresh", b"value", LIMIT_S)) == 2
    assert await cost(store.delete("key", LIMIT_S)) == 1
    assert await cost(store.num_keys(LIMIT_S)) == 1
    await store.set("five", b"5", LIMIT_S)
    assert await cost(store.add("five", 1, LIMIT_S)) == 2
    many = [(f"k{index}", b"v") for index in range(250)]
    assert await cost(store.multi_set(many, LIMIT_S)) == 3
    assert await cost(store.multi_get([key for key, _ in many], LIMIT_S)) == 3

    before = server.requests.total()
    arrived = next_request(server)
    waiting = asyncio.ensure_future(store.multi_get(["late 1", "late 2"], LIMIT_S))
    await arrived
    await store.set("late 1", b"1", LIMIT_S)
    await store.set("late 2", b"2", LIMIT_S)
    await waiting
    # Its read, the two sets, and its second read: the first set was there before its watch.
    assert server.requests.total() - before == 4


@simulated
async def test_64_adders_have_no_failed_attempt(server: MemoryEtcd) -> None:
    """Counting by version is free of contention: as many requests as adds."""
    stores = [(await open_store(server, f"writer-{index}"))[0] for index in range(64)]
    before = server.requests.total()
    await asyncio.gather(*(store.add("n", 1, None) for store in stores))
    assert server.requests.total() - before == 64

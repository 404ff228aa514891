"""A store that has lost data says so to everybody, and for good; one that has not never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from rdzv_etcd.errors import EtcdPermissionError, StoreLostError
from rdzv_etcd.etcd.port import Delete, Txn
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.testing import MemoryEtcd
from tests.store.simulated import LIMIT_S, next_request, open_store, simulate, simulated

Call: TypeAlias = Callable[[KeyValueStore], Coroutine[Any, Any, object]]
Lose: TypeAlias = Callable[[MemoryEtcd, int], None]

WRITES: dict[str, Call] = {
    "set": lambda store: store.set("other", b"", LIMIT_S),
    "multi_set": lambda store: store.multi_set([("a", b""), ("b", b"")], LIMIT_S),
    "add": lambda store: store.add("n", 1, LIMIT_S),
    "add another amount": lambda store: store.add("n", 2, LIMIT_S),
    "add nothing": lambda store: store.add("n", 0, LIMIT_S),
    "append": lambda store: store.append("key", b"", LIMIT_S),
    "compare_set": lambda store: store.compare_set("fresh", b"", b"1", LIMIT_S),
    "delete": lambda store: store.delete("key", LIMIT_S),
}
READS: dict[str, Call] = {
    "get": lambda store: store.get("key", LIMIT_S),
    "multi_get": lambda store: store.multi_get(["key", "n"], LIMIT_S),
    "wait": lambda store: store.wait(["key"], LIMIT_S),
    "check": lambda store: store.check(["key"], LIMIT_S),
    "list_keys": lambda store: store.list_keys(LIMIT_S),
    "num_keys": lambda store: store.num_keys(LIMIT_S),
}
CALLS = WRITES | READS


def expire(server: MemoryEtcd, lease_id: int) -> None:
    server.expire(lease_id)


def wipe(server: MemoryEtcd, _: int) -> None:
    server.wipe()


LOSSES: dict[str, Lose] = {"the lease runs out": expire, "etcd is wiped": wipe}


async def used(store: KeyValueStore) -> None:
    await store.set("key", b"value", LIMIT_S)
    assert await store.add("n", 1, LIMIT_S) == 1


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("put_back", [False, True], ids=["lease gone", "lease granted again"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@simulated
async def test_every_call_on_a_store_that_is_gone_says_so(
    server: MemoryEtcd, call: Call, put_back: bool, lose: Lose
) -> None:
    """Whether its caller has used the store before or not, and again and again."""
    store, etcd = await open_store(server)
    fresh, _ = await open_store(server, "fresh")
    lease_id = store._lease_id
    fresh._writes._lease_id = fresh._lease_id = lease_id
    await used(store)
    lose(server, lease_id)
    if put_back:
        await etcd.grant(600, lease_id=lease_id)
    for each in (fresh, store, fresh):
        with pytest.raises(StoreLostError, match="Join again"):
            await call(each)
    assert not server.snapshot(), "something was written"


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@simulated
async def test_a_wait_under_way_ends_when_the_store_is_lost(server: MemoryEtcd, lose: Lose) -> None:
    store, _ = await open_store(server)
    await used(store)
    asked = next_request(server)
    waiting = asyncio.ensure_future(store.multi_get(["key", "absent"], None))
    await asked
    await asyncio.sleep(1.0)
    assert not waiting.done()
    lose(server, store._lease_id)
    with pytest.raises(StoreLostError):
        await waiting


@pytest.mark.parametrize("bump_revision", [0, 1_000_000])
@pytest.mark.parametrize("seen_by", ["a write", "a wait", "a wait under way"])
@simulated
async def test_what_one_writer_knows_to_be_lost_everybody_is_told(
    server: MemoryEtcd, seen_by: str, bump_revision: int
) -> None:
    """etcd is restored from a snapshot that has the store, but not the last thing written to it.
    Only who has written that can know."""
    store, _ = await open_store(server)
    other, _ = await open_store(server, "other")
    await used(other)
    saved = server.save()
    assert await store.add("n", 1, LIMIT_S) == 2
    others = asyncio.ensure_future(other.get("absent", None))
    mine = asyncio.ensure_future(store.get("absent", None))
    await asyncio.sleep(1.0)
    if seen_by != "a wait under way":
        mine.cancel()
    server.restore(saved, bump_revision=bump_revision)
    if seen_by == "a write":
        with pytest.raises(StoreLostError):
            await store.add("n", 1, LIMIT_S)
    elif seen_by == "a wait":
        with pytest.raises(StoreLostError):
            await store.get("absent", None)
    else:
        with pytest.raises(StoreLostError):
            await mine
    with pytest.raises(StoreLostError):
        await others
    with pytest.raises(StoreLostError):
        await other.add("n", 1, LIMIT_S)


@simulated
async def test_a_writer_that_cannot_let_the_others_know_writes_no_more(server: MemoryEtcd) -> None:
    store, etcd = await open_store(server)
    saved = server.save()
    await used(store)
    server.restore(saved, bump_revision=1_000_000)

    def deletes(request: object) -> bool:
        return isinstance(request, Txn) and isinstance(request.success[0], Delete)

    etcd.link.fail(EtcdPermissionError("may not delete"), 2, deletes)
    for _ in range(3):
        with pytest.raises(StoreLostError):
            await store.add("n", 1, LIMIT_S)
    assert [kv.key for kv in server.snapshot()] == []


@pytest.mark.parametrize("seed", range(5))
def test_what_etcd_does_not_forget_is_not_lost(seed: int) -> None:
    """Restarts and lost replies lose nothing, whatever many do at once."""

    async def act(store: KeyValueStore, index: int) -> int:
        total = 0
        for turn in range(12):
            total = await store.add("n", 1 + index % 2, None)
            await store.set(f"{index}/{turn}", b"", None)
            assert await store.check([f"{index}/{turn}"], None)
            await store.get(f"{(index + 1) % 4}/{turn}", None)
        return total

    async def scenario(server: MemoryEtcd) -> None:
        stores = []
        for index in range(4):
            store, etcd = await open_store(server, f"agent-{index}")
            etcd.link.delay(0.0, 0.2)
            etcd.link.lose(0.02, 0.05)
            stores.append(store)

        async def hurt() -> None:
            for _ in range(6):
                await asyncio.sleep(1.0)
                server.restart()

        hurting = asyncio.ensure_future(hurt())
        totals = await asyncio.gather(*(act(store, i) for i, store in enumerate(stores)))
        await hurting
        assert max(totals) == 72
        assert await stores[0].num_keys(None) == 49

    simulate(scenario, seed)

"""Many and large values: no answer and no request holds more than a slow link carries in time."""

from __future__ import annotations

import pytest

from rdzv_etcd.etcd.port import Get, GetResult, Txn, TxnResult
from rdzv_etcd.etcd.reads import PART_BYTES
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.testing import Applied, MemoryEtcd
from tests.store.simulated import KEYS, LIMIT_S, open_store, simulate, simulated

SIZES = {"small": 200, "medium": 20_000, "large": 1_200_000}
"""Bytes of one value."""


class _Traffic:
    """How many bytes of values one request has sent or brought at most, and how often each key was
    read."""

    def __init__(self, server: MemoryEtcd) -> None:
        self.largest = 0
        self.requests = 0
        self.reads: dict[bytes, int] = {}
        server.observers.append(self._observe)

    def _observe(self, applied: Applied) -> None:
        self.requests += 1
        puts = applied.request.puts() if isinstance(applied.request, Txn) else ()
        outcome = applied.outcome
        results = outcome.results if isinstance(outcome, TxnResult) else (outcome,)
        kvs = [kv for part in results if isinstance(part, GetResult) for kv in part.kvs]
        for kv in kvs:
            if kv.key in StoreKeys(KEYS).values:
                self.reads[kv.key] = self.reads.get(kv.key, 0) + 1
        sent = sum(len(put.value) for put in puts)
        self.largest = max(self.largest, sent, sum(len(kv.value) for kv in kvs))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_many_values_are_read_and_set_in_parts(size: int) -> None:
    """By a store that has set one like them, as in an exchange, and by one that has not, as long as
    there are not many before it knows."""
    most = max(PART_BYTES, size) + 10_000

    async def scenario(server: MemoryEtcd) -> None:
        values = {f"rank/{n}": b"%d" % n * (size // len(b"%d" % n)) for n in range(40)}
        store, _ = await open_store(server)
        other, _ = await open_store(server, "other")
        traffic = _Traffic(server)
        await store.multi_set(list(values.items()), LIMIT_S)
        assert traffic.largest <= most
        await other.set("mine", b"x" * size, LIMIT_S)
        assert await other.multi_get(list(values), LIMIT_S) == list(values.values())
        assert traffic.largest <= most
        assert set(traffic.reads.values()) == {1}

    simulate(scenario)


@simulated
async def test_many_small_values_take_few_requests(server: MemoryEtcd) -> None:
    store, _ = await open_store(server)
    values = {f"rank/{n}": b"value %d" % n for n in range(4096)}
    traffic = _Traffic(server)
    await store.multi_set(list(values.items()), LIMIT_S)
    assert await store.multi_get(list(values), LIMIT_S) == list(values.values())
    assert await store.check(list(values), LIMIT_S)
    assert await store.num_keys(LIMIT_S) == 4096
    assert traffic.requests <= 3 * 45 + 8


@simulated
async def test_only_the_part_whose_reply_is_lost_is_read_again(server: MemoryEtcd) -> None:
    store, etcd = await open_store(server)
    keys = [f"large/{n}" for n in range(8)]
    await store.multi_set([(key, b"x" * SIZES["large"]) for key in keys], LIMIT_S)
    traffic = _Traffic(server)

    def is_the_fourth(request: object) -> bool:
        return isinstance(request, Get) and request.key.endswith(b"large/3")

    etcd.link.drop_replies(2, is_the_fourth)
    assert len(await store.multi_get(keys, LIMIT_S)) == 8
    times = {key.decode()[-7:]: count for key, count in traffic.reads.items()}
    assert times == {**dict.fromkeys(keys, 1), "large/3": 3}

"""A ``queue_pop`` that is cancelled, at whatever step of the loop, or fails, takes nothing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rdzv_etcd.errors import EtcdError
from rdzv_etcd.kv.queue import Taken
from rdzv_etcd.testing import Applied, MemoryEtcd
from tests.store.simulated import LIMIT_S, open_store, simulate
from tests.store.test_applied_once import is_write


def test_a_cancelled_pop_takes_nothing_and_keeps_the_order() -> None:
    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server)
        other, _ = await open_store(server, "other")
        for item in (b"first", b"second"):
            await store.queue_push("q", item, LIMIT_S)
        for requests in (1, 2, 3):  # list, read, take
            seen = 0
            popping: asyncio.Task[bytes | None] = asyncio.ensure_future(
                store.queue_pop("q", LIMIT_S)
            )

            def cancel(
                _: object, after: int = requests, task: asyncio.Task[bytes | None] = popping
            ) -> None:
                nonlocal seen
                seen += 1
                if seen == after:
                    task.cancel()

            server.observers.append(cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await popping
            server.observers.remove(cancel)
            assert popping.cancelled()
            assert await other.queue_len("q", LIMIT_S) == 2
        assert await other.queue_pop("q", LIMIT_S) == b"first"
        assert await store.queue_pop("q", LIMIT_S) == b"second"

    simulate(scenario)


def test_what_was_not_handed_over_is_put_back_where_it_was() -> None:
    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server)
        for item in (b"a", b"b", b"c"):
            await store.queue_push("q", item, LIMIT_S)
        for _ in range(2):  # also one that was put back before
            taken = Taken()
            assert await store.queue_pop("q", LIMIT_S, taken=taken) == b"a"
            await store.queue_put_back(taken)
        assert [await store.queue_pop("q", LIMIT_S) for _ in "abc"] == [b"a", b"b", b"c"]

    simulate(scenario)


def test_what_is_taken_when_nobody_wants_it_any_more_is_put_back() -> None:
    """The work on the loop goes on for a moment after its caller has gone."""

    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server)
        for item in (b"a", b"b"):
            await store.queue_push("q", item, LIMIT_S)
        taken = Taken()
        await store.queue_put_back(taken)
        assert await store.queue_pop("q", LIMIT_S, taken=taken) == b"a"
        assert await store.queue_len("q", LIMIT_S) == 2
        assert [await store.queue_pop("q", LIMIT_S) for _ in "ab"] == [b"a", b"b"]

    simulate(scenario)


def test_a_pop_that_gets_no_reply_in_time_takes_nothing() -> None:
    """etcd had done as it was asked; the item was lost, if the call was given up or not."""

    async def scenario(server: MemoryEtcd) -> None:
        store, etcd = await open_store(server)
        other, _ = await open_store(server, "other")
        for item in (b"first", b"second"):
            await store.queue_push("q", item, LIMIT_S)
        for interrupted in (False, True):
            taken = asyncio.Event()

            def cut(applied: Applied, taken: asyncio.Event = taken) -> None:
                if is_write(applied.request):
                    etcd.link.partition(silent=True)
                    taken.set()

            server.observers.append(cut)
            popping = asyncio.ensure_future(store.queue_pop("q", 1.0))
            await taken.wait()
            server.observers.remove(cut)
            if interrupted:
                popping.cancel()
            with pytest.raises(asyncio.CancelledError if interrupted else EtcdError):
                await popping
            assert await other.queue_len("q", LIMIT_S) == 1
            etcd.link.heal()
            await asyncio.sleep(60.0)
            assert await other.queue_len("q", LIMIT_S) == 2
        assert await other.queue_pop("q", LIMIT_S) == b"first"
        assert await store.queue_pop("q", LIMIT_S) == b"second"

    simulate(scenario)


def test_what_etcd_does_not_take_back_now_is_put_back_later() -> None:
    """It is full, so that an operator is needed."""

    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server)
        await store.queue_push("q", b"item", LIMIT_S)
        taken = Taken()
        assert await store.queue_pop("q", LIMIT_S, taken=taken) == b"item"
        server.set_no_space(True)
        await store.queue_put_back(taken)
        await asyncio.sleep(60.0)
        assert await store.queue_len("q", LIMIT_S) == 0
        server.set_no_space(False)
        await asyncio.sleep(60.0)
        assert await store.queue_pop("q", LIMIT_S) == b"item"

    simulate(scenario)

"""A ``queue_pop`` that is cancelled, at whatever step of the loop, or fails, takes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest

from rdzv_etcd.errors import (
    EtcdAuthError,
    EtcdError,
    EtcdNoSpaceError,
    EtcdUnavailableError,
    RequestTooLargeError,
    StateCorruptError,
)
from rdzv_etcd.etcd.api import EventKind, Get, Put, Txn
from rdzv_etcd.kv.queue import Taken
from rdzv_etcd.schema.store_values import StoreKeys
from rdzv_etcd.testing import Applied, MemoryEtcd
from tests.store.simulated import KEYS, LIMIT_S, open_store, simulate
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


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("refusal", [EtcdNoSpaceError, EtcdAuthError, EtcdUnavailableError])
def test_a_taking_that_is_refused_when_it_is_sent_again_takes_nothing(
    refusal: type[EtcdError], interrupted: bool
) -> None:
    """The first copy was applied, and its reply lost."""

    async def scenario(server: MemoryEtcd) -> None:
        store, etcd = await open_store(server)
        for item in (b"first", b"second"):
            await store.queue_push("q", item, LIMIT_S)

        def refuse(applied: Applied) -> None:
            if is_write(applied.request):
                server.observers.remove(refuse)
                etcd.link.fail(refusal("not now"), 1, is_write)
                if interrupted:
                    popping.cancel()

        server.observers.append(refuse)
        etcd.link.drop_replies(matching=is_write)
        popping = asyncio.ensure_future(store.queue_pop("q", LIMIT_S))
        with pytest.raises(asyncio.CancelledError if interrupted else EtcdError):
            await popping
        await asyncio.sleep(60.0)
        assert [await store.queue_pop("q", LIMIT_S) for _ in "ab"] == [b"first", b"second"]

    simulate(scenario)


def test_what_was_not_taken_stays_where_it_is_all_the_time() -> None:
    """The request never arrives: to find out what became of it must not take the item."""

    async def scenario(server: MemoryEtcd) -> None:
        store, etcd = await open_store(server)
        await store.queue_push("q", b"item", LIMIT_S)
        deleted: list[Applied] = []

        def look(applied: Applied) -> None:
            events = [event for revision in applied.changes for event in revision.events]
            deleted.extend(applied for event in events if event.kind is EventKind.DELETE)

        server.observers.append(look)
        etcd.link.hold_requests(3600.0, 10, is_write)
        with pytest.raises(EtcdError):
            await store.queue_pop("q", 1.0)
        etcd.link.heal()
        await asyncio.sleep(7200.0)  # the late copies, too, have come
        assert not deleted
        assert await store.queue_pop("q", LIMIT_S) == b"item"

    simulate(scenario)


def test_an_item_that_cannot_be_put_back_yet_keeps_nobody_waiting_twice() -> None:
    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server)
        loop = asyncio.get_running_loop()
        await store.queue_push("q", b"item", LIMIT_S)
        taken = Taken()
        await store.queue_pop("q", LIMIT_S, taken=taken)
        server.set_no_space(True)
        await store.queue_put_back(taken)
        began_s = loop.time()
        assert await store.queue_len("other", LIMIT_S) == 0
        assert loop.time() - began_s < 0.1
        for _ in range(10):
            assert await store.queue_pop("q", LIMIT_S, block=False) is None
        assert loop.time() - began_s < 2.0
        server.set_no_space(False)

    simulate(scenario)


def test_the_largest_item_can_be_put_back() -> None:
    async def scenario(server: MemoryEtcd) -> None:
        store, _ = await open_store(server, uuid.uuid4().hex)  # as round_store.py names it

        async def push(size: int) -> bool:
            try:
                await store.queue_push("q", b"x" * size, LIMIT_S)
            except RequestTooLargeError:
                return False
            assert await store.queue_pop("q", LIMIT_S)
            return True

        fits, too_large = 1_500_000, 1_600_000
        while too_large - fits > 1:
            size = (fits + too_large) // 2
            fits, too_large = (size, too_large) if await push(size) else (fits, size)
        await store.queue_push("q", b"x" * fits, LIMIT_S)
        for _ in range(2):
            taken = Taken()
            await store.queue_pop("q", LIMIT_S, taken=taken)
            await store.queue_put_back(taken)
        assert await store.queue_len("q", LIMIT_S) == 1

    simulate(scenario)


def test_what_another_has_written_into_a_queue_stays_there() -> None:
    async def scenario(server: MemoryEtcd) -> None:
        store, etcd = await open_store(server)
        queue = StoreKeys(KEYS).queue("q")
        foreign = queue.start + b"foreign"
        await etcd.txn(Txn((), (Put(foreign, b"?"),)))
        for _ in range(2):
            with pytest.raises(StateCorruptError, match="foreign"):
                await store.queue_pop("q", LIMIT_S)
        assert [kv.value for kv in (await etcd.get(Get(foreign))).kvs] == [b"?"]

    simulate(scenario)


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_put_back_over_a_closed_connection(
    asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """``asked``: whether it is not known that the item was taken."""

    async def scenario(server: MemoryEtcd) -> None:
        store, etcd = await open_store(server)
        await store.queue_push("q", b"item", LIMIT_S)
        before = asyncio.all_tasks()
        if asked:

            def cut(applied: Applied) -> None:
                if is_write(applied.request):
                    etcd.link.partition(silent=True)

            server.observers.append(cut)
            with pytest.raises(EtcdError):
                await store.queue_pop("q", 1.0)
        else:
            taken = Taken()
            await store.queue_pop("q", LIMIT_S, taken=taken)
            etcd.link.partition(silent=True)
            await store.queue_put_back(taken)
        assert asyncio.all_tasks() - before
        await etcd.close()
        await asyncio.sleep(2.0)
        assert not asyncio.all_tasks() - before

    simulate(scenario)
    assert "item" in caplog.text

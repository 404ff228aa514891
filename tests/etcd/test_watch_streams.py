"""Watches that share a stream do not disturb one another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import CompactedError, EtcdPermissionError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.watch import UNREAD_LIMIT, EtcdWatch
from rdzv_etcd.settings.connection import Credentials
from tests.etcd.test_watch import names
from tests.etcd.tools import END, PREFIX, awaited, client_of, in_background, put, run, soon
from tests.library.nodes import wait_until
from tests.support.servers import USER, USER_PASSWORD, EtcdCluster, EtcdServer

MANY = 20


@pytest.fixture
def server(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    return fresh_etcd()


async def many(client: EtcdClient, number: int = MANY) -> list[EtcdWatch]:
    """Watches of the tests' range that are known to be running."""
    revision = (await client.txn(put(b"before"))).revision
    made = [client.watch(PREFIX, END, start_revision=revision + 1) for _ in range(number)]
    for watch in made:
        await watch.ready()
    return made


async def count(server: EtcdServer, what: str, wanted: int) -> None:
    """Wait until etcd has so many watchers or streams."""

    name = f"etcd_debugging_mvcc_{what}_total"
    await in_background(
        lambda: wait_until(f"{wanted} {what}", lambda: server.metrics().total(name) == wanted)
    )


def streams_begun(server: EtcdServer) -> float:
    """How many watch streams this member has been asked for since its start."""
    return sum(
        sample.value
        for sample in server.metrics().samples
        if sample.name == "grpc_server_started_total"
        and sample.labels.get("grpc_method") == "Watch"
    )


@awaited
async def test_one_stream_is_enough(server: EtcdServer) -> None:
    async with client_of(server) as client:
        made = await many(client)
        await count(server, "watch_stream", 1)
        await count(server, "watcher", MANY)
        for watch in made[::2]:
            await watch.close()
        await count(server, "watcher", MANY // 2)
        await client.txn(put(b"after"))
        for watch in made[1::2]:
            assert await names(watch, 1) == [b"after"]
        for watch in made:
            await watch.close()
        await count(server, "watcher", 0)
        await count(server, "watch_stream", 0)
        assert await names((await many(client))[0], 0) == []
        await count(server, "watch_stream", 1)


@awaited
async def test_all_go_on_after_a_restart(server: EtcdServer) -> None:
    async with client_of(server) as client:
        made = await many(client)
        await client.txn(put(b"one"))
        await in_background(server.restart)
        await client.txn(put(b"two"), repeatable=True)
        for watch in made:
            assert await names(watch, 2) == [b"one", b"two"]
        await count(server, "watch_stream", 1)


@awaited
async def test_watches_may_be_closed_at_any_point(server: EtcdServer) -> None:
    """Before they are asked for, before etcd has confirmed them, and right after."""
    async with client_of(server) as client:
        kept = (await many(client))[0]
        for steps in range(30):
            brief = client.watch(PREFIX, END, start_revision=1)
            for _ in range(steps):
                await asyncio.sleep(0)
            await brief.close()
        await client.txn(put(b"after"))
        assert await names(kept, 1) == [b"after"]
        await count(server, "watcher", MANY)


def test_a_refused_watch_ends_alone(server: EtcdServer) -> None:
    server.enable_auth()

    async def scenario() -> None:
        async with client_of(server, credentials=Credentials(USER, USER_PASSWORD)) as client:
            made = await many(client)
            refused = [client.watch(b"/elsewhere", start_revision=1) for _ in range(3)]
            for watch in refused:
                with pytest.raises(EtcdPermissionError):
                    await soon(watch.__anext__())
            made += [client.watch(PREFIX, END, start_revision=0)]
            await made[-1].ready()
            await client.txn(put(b"after"))
            for watch in made:
                assert await names(watch, 1) == [b"after"]

    run(scenario())


def test_a_refused_watch_moves_nobody_to_another_endpoint(
    fresh_cluster: Callable[[int], EtcdCluster],
) -> None:
    first, second = fresh_cluster(2).members
    first.enable_auth()

    async def scenario() -> None:
        login = Credentials(USER, USER_PASSWORD)
        async with client_of(first, second, credentials=login) as client:
            made = await many(client)
            with pytest.raises(EtcdPermissionError):
                await soon(client.watch(b"/elsewhere", start_revision=1).__anext__())
            await client.txn(put(b"after"))
            for watch in made:
                assert await names(watch, 1) == [b"after"]
            await count(first, "watch_stream", 1)
            assert streams_begun(second) == 0

    run(scenario())


@awaited
async def test_a_watch_from_a_compacted_revision_ends_alone(server: EtcdServer) -> None:
    async with client_of(server) as client:
        made = await many(client)
        revision = (await client.txn(put(b"one"))).revision
        await in_background(lambda: server.gateway.compact(revision))
        late = client.watch(PREFIX, END, start_revision=1)
        with pytest.raises(CompactedError):
            await soon(late.__anext__())
        await client.txn(put(b"two"))
        for watch in made:
            assert await names(watch, 2) == [b"one", b"two"]


@pytest.mark.slow
def test_a_slow_reader_holds_nobody_up_and_misses_nothing(server: EtcdServer) -> None:
    puts = [b"%d" % n for n in range(UNREAD_LIMIT + 100)]

    async def scenario() -> None:
        async with client_of(server) as client:
            quick, slow = (await many(client))[:2]
            reading = asyncio.create_task(names(quick, len(puts)))
            for name in puts:
                await client.txn(put(name))
            assert await reading == puts
            assert await names(slow, len(puts)) == puts

    run(scenario())


@pytest.mark.slow
def test_a_slow_reader_moves_nobody_to_another_endpoint(
    fresh_cluster: Callable[[int], EtcdCluster],
) -> None:
    """That a reader here is slow says nothing against the member of etcd that it reads from."""
    first, second = fresh_cluster(2).members
    puts = [b"%d" % n for n in range(UNREAD_LIMIT + 100)]

    async def scenario() -> None:
        async with client_of(first, second) as client:
            quick, slow = await many(client, 2)
            reading = asyncio.create_task(names(quick, len(puts)))
            for name in puts:  # each in a response of its own
                await client.txn(put(name))
            assert await reading == puts
            await count(first, "watcher", 1)  # the slow one waits for its reader
            assert await names(slow, len(puts)) == puts
            late = client.watch(PREFIX, END, start_revision=0)
            await late.ready()
            await count(first, "watch_stream", 1)
            await count(first, "watcher", 3)
            assert streams_begun(first) == 1
            assert streams_begun(second) == 0

    run(scenario())


@awaited
async def test_a_stream_that_does_not_answer_is_given_up(server: EtcdServer) -> None:
    async with client_of(server) as client:
        made = await many(client)
        silent = client._streams._current
        server.pause()
        late = client.watch(PREFIX, END, start_revision=0)
        await in_background(
            lambda: wait_until("given up", lambda: client._streams._current is not silent)
        )
        server.resume()
        await soon(late.ready())
        await client.txn(put(b"after"), repeatable=True)
        for watch in (*made, late):
            assert (await names(watch, 1))[0] == b"after"

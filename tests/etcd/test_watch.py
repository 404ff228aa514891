"""The watch: gapless through restarts and failover, and loud where a gap cannot be excluded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import CompactedError, EtcdPermissionError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Watch
from rdzv_etcd.settings.connection import Credentials
from tests.etcd.tools import END, PREFIX, awaited, client_of, in_background, put, run, soon
from tests.support.servers import USER, USER_PASSWORD, EtcdCluster, EtcdServer


async def names(watch: Watch, count: int) -> list[bytes]:
    """The next ``count`` keys that the watch tells of, without the prefix."""
    found: list[bytes] = []
    batches = watch.__aiter__()
    while len(found) < count:
        batch = await soon(batches.__anext__())
        assert batch.revision == batch.events[-1].kv.mod_revision
        found += [event.kv.key.removeprefix(PREFIX) for event in batch.events]
    return found


async def opened(client: EtcdClient) -> Watch:
    """A watch of the tests' range that is known to be running."""
    done = await client.txn(put(b"first"))
    watch = client.watch(PREFIX, END, start_revision=done.revision)
    assert await names(watch, 1) == [b"first"]
    return watch


def test_it_starts_in_the_past_and_keeps_order(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd()

    async def scenario() -> None:
        async with client_of(server) as client:
            first = await client.txn(put(b"0"))
            for start in range(1, 1501, 100):  # more revisions than etcd sends in one response
                batch = range(start, start + 100)
                await asyncio.gather(*(client.txn(put(b"%d" % n)) for n in batch))
            watch = client.watch(PREFIX, END, start_revision=first.revision)
            seen = await names(watch, 1501)
            assert seen[0] == b"0"
            assert len(set(seen)) == 1501

    run(scenario())


def test_it_goes_on_after_a_restart_without_a_gap(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd()

    async def scenario() -> None:
        async with client_of(server) as client:
            watch = await opened(client)
            server.kill()
            await in_background(server.start)
            await in_background(lambda: server.gateway.put(PREFIX + b"second", b""))
            assert await names(watch, 1) == [b"second"]
            await in_background(server.restart)
            await client.txn(put(b"third"), repeatable=True)
            assert await names(watch, 1) == [b"third"]

    run(scenario())


def test_another_member_takes_over(fresh_cluster: Callable[[int], EtcdCluster]) -> None:
    cluster = fresh_cluster(3)
    first, second, _ = cluster.members

    async def scenario() -> None:
        async with client_of(*cluster.members) as client:
            watch = await opened(client)
            first.pause()  # the connection stays; only pings tell
            async with client_of(second) as writer:
                await writer.txn(put(b"second"), repeatable=True)
            assert await names(watch, 1) == [b"second"]
            first.resume()

    run(scenario())


async def has_leader(member: EtcdServer) -> bool:
    metrics = await in_background(member.metrics)
    return metrics.total("etcd_server_has_leader") > 0


def test_a_member_without_a_quorum_is_left(fresh_cluster: Callable[[int], EtcdCluster]) -> None:
    """etcd ends a watch that asks for a leader; the watch must outlive that."""
    cluster = fresh_cluster(3)
    first, second, third = cluster.members

    async def scenario() -> None:
        async with client_of(first, second, third) as client:
            watch = await opened(client)
            second.kill()
            third.kill()
            while await has_leader(first):  # it takes an election timeout to find out
                pass
            await in_background(lambda: (second.start(wait=False), third.start(wait=False)))
            await in_background(second.wait_ready)
            async with client_of(second) as writer:
                await writer.txn(put(b"second"), repeatable=True)
            assert await names(watch, 1) == [b"second"]

    run(scenario())


def test_a_compaction_during_an_outage_is_reported(
    fresh_cluster: Callable[[int], EtcdCluster],
) -> None:
    cluster = fresh_cluster(3)
    first, second, _ = cluster.members

    async def scenario() -> None:
        async with client_of(first) as client, client_of(second) as writer:
            watch = await opened(client)
            await in_background(first.kill)
            await writer.txn(put(b"unseen"), repeatable=True)
            last = await writer.txn(put(b"unseen"), repeatable=True)
            await in_background(lambda: second.gateway.compact(last.revision))
            await in_background(first.start)
            with pytest.raises(CompactedError):
                await soon(watch.__aiter__().__anext__())

    run(scenario())


@awaited
async def test_closing_ends_a_pending_iteration(etcd_server: EtcdServer) -> None:
    async with client_of(etcd_server) as client:
        watch = client.watch(PREFIX + b"nothing", start_revision=1)
        step = asyncio.ensure_future(watch.__anext__())
        await asyncio.sleep(0)
        await watch.close()
        await watch.close()
        with pytest.raises(StopAsyncIteration):
            await step
        other = client.watch(PREFIX + b"nothing", start_revision=1)
        await client.close()
        with pytest.raises(StopAsyncIteration):
            await other.__anext__()


def test_opening_during_an_outage_waits_for_its_end(fresh_etcd: Callable[..., EtcdServer]) -> None:
    server = fresh_etcd()
    revision = server.gateway.put(PREFIX + b"early", b"")
    server.kill()

    async def scenario() -> None:
        async with client_of(server) as client:
            watch = client.watch(PREFIX, END, start_revision=revision)
            await in_background(server.start)
            assert await names(watch, 1) == [b"early"]

    run(scenario())


@awaited
async def test_a_forbidden_range_is_reported(auth_etcd: EtcdServer) -> None:
    async with client_of(auth_etcd, credentials=Credentials(USER, USER_PASSWORD)) as client:
        watch = client.watch(b"/elsewhere", start_revision=1)
        with pytest.raises(EtcdPermissionError):
            await soon(watch.__anext__())

"""The watch: gapless through restarts and failover, and loud where a gap cannot be excluded."""

from __future__ import annotations

import asyncio

import pytest

from rdzv_etcd.errors import CompactedError
from rdzv_etcd.etcd import watch as watch_module
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.etcd.port import Watch
from tests.etcd.tools import END, PREFIX, client_of, in_background, put, soon
from tests.library.nodes import wait_until
from tests.support.servers import EtcdCluster, EtcdServer

pytestmark = pytest.mark.every_etcd


async def names(watch: Watch, count: int) -> list[bytes]:
    """The next ``count`` keys that the watch reports, without the prefix."""
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


async def test_it_starts_in_the_past_and_keeps_order(server: EtcdServer) -> None:
    async with client_of(server) as client:
        first = await client.txn(put(b"0"))
        for start in range(1, 1501, 100):  # more revisions than etcd sends in one response
            batch = range(start, start + 100)
            await asyncio.gather(*(client.txn(put(b"%d" % n)) for n in batch))
        watch = client.watch(PREFIX, END, start_revision=first.revision)
        seen = await names(watch, 1501)
        assert seen[0] == b"0"
        assert len(set(seen)) == 1501


async def test_another_member_takes_over(cluster: EtcdCluster) -> None:
    first, second, _ = cluster.members
    async with client_of(*cluster.members) as client:
        watch = await opened(client)
        first.pause()  # the connection stays; only pings tell
        late = client.watch(PREFIX, END, start_revision=0)
        await soon(late.ready())
        async with client_of(second) as writer:
            await writer.txn(put(b"second"), repeatable=True)
        for each in (watch, late):
            assert await names(each, 1) == [b"second"]
        first.resume()


async def has_leader(member: EtcdServer) -> bool:
    metrics = await in_background(member.metrics)
    return metrics.total("etcd_server_has_leader") > 0


async def test_a_member_without_a_quorum_is_left(cluster: EtcdCluster) -> None:
    """etcd ends a watch that asks for a leader; the watch must outlive that."""
    first, second, third = cluster.members
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


async def test_a_compaction_during_an_outage_is_reported(cluster: EtcdCluster) -> None:
    first, second, _ = cluster.members
    async with client_of(first) as client, client_of(second) as writer:
        watch = await opened(client)
        await in_background(first.kill)
        await writer.txn(put(b"unseen"), repeatable=True)
        last = await writer.txn(put(b"unseen"), repeatable=True)
        await in_background(lambda: second.gateway.compact(last.revision))
        await in_background(first.start)
        with pytest.raises(CompactedError):
            await soon(watch.__aiter__().__anext__())


async def test_opening_during_an_outage_waits_for_its_end(server: EtcdServer) -> None:
    revision = server.gateway.put(PREFIX + b"early", b"")
    server.kill()
    async with client_of(server) as client:
        watch = client.watch(PREFIX, END, start_revision=revision)
        await in_background(server.start)
        assert await names(watch, 1) == [b"early"]


async def test_watches_may_be_closed_at_any_point(etcd_server: EtcdServer, job_id: str) -> None:
    """Before they are asked for, before etcd has confirmed them, and right after."""

    def watchers() -> float:
        return etcd_server.metrics().total("etcd_debugging_mvcc_watcher_total")

    async with client_of(etcd_server) as client:
        key = job_id.encode()
        kept = client.watch(PREFIX + key, start_revision=0)
        await kept.ready()
        before = await in_background(watchers)
        for steps in range(30):
            brief = client.watch(PREFIX, END, start_revision=1)
            for _ in range(steps):
                await asyncio.sleep(0)
            await brief.close()
        await client.txn(put(key))
        assert await names(kept, 1) == [key]
        await in_background(lambda: wait_until("they have ended", lambda: watchers() == before))


async def test_a_slow_reader_delays_no_other_and_misses_nothing(
    etcd_server: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "UNREAD_LIMIT", 10)
    async with client_of(etcd_server) as client:
        stem = job_id.encode()
        quick, slow = (
            client.watch(PREFIX + stem, PREFIX + stem + b"~", start_revision=0) for _ in range(2)
        )
        await asyncio.gather(quick.ready(), slow.ready())
        puts = [stem + b"%d" % n for n in range(100)]
        for name in puts:
            await client.txn(put(name))
            assert await names(quick, 1) == [name]
        assert len(slow._batches) == 10
        assert await names(slow, len(puts)) == puts

"""Watches and closing, through the port."""

from __future__ import annotations

import asyncio
import random

import pytest

from rdzv_etcd.errors import (
    CompactedError,
    EtcdError,
    EtcdUnavailableError,
    RevisionRegressedError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import Delete, Event, EventKind, Get, KeyValue, Put, Txn, Watch
from tests.contract.lab import Lab, events_of, next_batch
from tests.etcd.tools import soon


async def test_a_watch_reports_puts_and_deletes(lab: Lab) -> None:
    watch = lab.watch(start_revision=await lab.revision() + 1)
    one = await lab.put("a", b"1")
    two = await lab.put("a", b"2")
    three = await lab.delete("a")
    first, second, third = await events_of(watch, 3)
    assert first == Event(EventKind.PUT, KeyValue(lab.key("a"), b"1", one, one, 1))
    assert second == Event(EventKind.PUT, KeyValue(lab.key("a"), b"2", one, two, 2))
    assert third == Event(EventKind.DELETE, KeyValue(lab.key("a"), b"", 0, three, 0))


async def test_a_watch_starts_in_the_past(lab: Lab) -> None:
    first = await lab.put("a", b"1")
    await lab.put("a", b"2")
    await lab.delete("a")
    await lab.put("b", b"3")
    watch = lab.watch(start_revision=first)
    values = [event.kv.value for event in await events_of(watch, 4)]
    assert values == [b"1", b"2", b"", b"3"]
    await watch.close()
    watch = lab.watch(start_revision=first + 1)
    assert [event.kv.value for event in await events_of(watch, 3)] == [b"2", b"", b"3"]


async def test_read_then_watch_misses_and_repeats_nothing(lab: Lab) -> None:
    writing = asyncio.create_task(_write(lab, 50))
    for _ in range(5):
        snapshot = await lab.all()
        seen = {kv.key for kv in snapshot.kvs}
        watch = lab.watch(start_revision=snapshot.revision + 1)
        events = await events_of(watch, 50 - len(seen)) if len(seen) < 50 else []
        keys = [event.kv.key for event in events]
        assert seen.isdisjoint(keys)
        assert len(keys) == len(set(keys)) == 50 - len(seen)
        await watch.close()
    await writing


async def test_a_read_behind_a_confirmed_watch_leaves_no_gap(lab: Lab) -> None:
    writing = asyncio.create_task(_write(lab, 50))
    for _ in range(5):
        watch = lab.watch(start_revision=0)
        confirmed = await soon(watch.ready())
        snapshot = await lab.all()
        assert confirmed <= snapshot.revision
        seen = {kv.key for kv in snapshot.kvs}
        fresh: list[bytes] = []
        while len(seen) + len(fresh) < 50:
            batch = await next_batch(watch)
            assert batch.revision > confirmed
            later = (e for e in batch.events if e.kv.mod_revision > snapshot.revision)
            fresh += [event.kv.key for event in later]
        assert len(seen | set(fresh)) == 50
        await watch.close()
    await writing


async def test_waiting_for_a_watch_that_cannot_begin_is_an_error(lab: Lab) -> None:
    watch = lab.watch(start_revision=0)
    await soon(watch.ready())
    await watch.close()
    closed = lab.watch(start_revision=0)
    await closed.close()
    with pytest.raises(EtcdUnavailableError, match="closed"):
        await soon(closed.ready())


async def test_several_may_wait_for_a_watch_to_be_confirmed(lab: Lab) -> None:
    watch = lab.watch(start_revision=0)
    waiting = [asyncio.create_task(watch.ready()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting.pop().cancel()
    first, second = await soon(asyncio.gather(*waiting))
    assert first == second == await watch.ready()


async def _write(lab: Lab, count: int) -> None:
    for number in range(count):
        await lab.put(f"{number:03}")


@pytest.mark.parametrize(("end", "seen"), [(None, "b b"), ("d", "b ba c cc c b")])
async def test_a_watch_sees_its_key_or_half_open_range_only(
    lab: Lab, end: str | None, seen: str
) -> None:
    start = await lab.revision() + 1
    watch = lab.etcd.watch(
        lab.key("b"), None if end is None else lab.key(end), start_revision=start
    )
    for name in ("a", "b", "ba", "c", "cc", "d", "c", "b"):
        await lab.put(name)
    wanted = [lab.key(name) for name in seen.split()]
    assert [event.kv.key for event in await events_of(watch, len(wanted))] == wanted


async def test_all_events_of_a_revision_come_in_one_batch_in_their_order(lab: Lab) -> None:
    await lab.put("old")
    start = await lab.revision() + 1
    live = lab.watch(start_revision=start)
    names = [f"{number:02}" for number in range(100, 40, -1)]
    puts = [Put(lab.key(name), b"x") for name in names]
    done = await lab.do(*puts, Delete(lab.key("old")))
    for watch in (live, lab.watch(start_revision=start)):  # as it happens, and from the past
        batch = await next_batch(watch)
        assert [event.kv.key for event in batch.events] == [*map(lab.key, names), lab.key("old")]
        assert {event.kv.mod_revision for event in batch.events} == {done.revision}
        assert batch.revision == done.revision
        await watch.close()


async def test_batches_carry_the_revision_of_their_last_event(lab: Lab) -> None:
    start = await lab.put("0")
    for number in range(1, 10):
        await lab.put(str(number))
    await lab.do(Put(b"elsewhere/" + lab.root, b"x"))
    watch = lab.watch(start_revision=start)
    seen: list[Event] = []
    while len(seen) < 10:
        batch = await next_batch(watch)
        assert batch.revision == batch.events[-1].kv.mod_revision
        seen += batch.events
    revisions = [event.kv.mod_revision for event in seen]
    assert revisions == list(range(start, start + 10))
    await lab.do(Delete(b"elsewhere/" + lab.root))


async def test_a_range_delete_is_reported_key_by_key_in_one_revision(lab: Lab) -> None:
    for name in "cab":
        last = await lab.put(name)
    watch = lab.watch(start_revision=last + 1)
    await lab.do(Delete(lab.root, lab.end))
    batch = await next_batch(watch)
    assert [event.kv.key for event in batch.events] == [lab.key(name) for name in "abc"]
    assert {event.kind for event in batch.events} == {EventKind.DELETE}


async def test_giving_up_one_step_loses_nothing(lab: Lab) -> None:
    watch = lab.watch(start_revision=await lab.revision() + 1)
    for number in range(20):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(aiter(watch)), 0.01)
        await lab.put(f"{number:02}")
        assert (await next_batch(watch)).events[0].kv.key == lab.key(f"{number:02}")


async def test_a_compacted_revision_cannot_be_watched(lab: Lab) -> None:
    old = await lab.put("a")
    await lab.put("a")
    newest = await lab.put("a")
    lab.operator.compact(newest)
    watch = lab.watch(start_revision=old)
    for _ in range(2):  # it never ends silently
        with pytest.raises(CompactedError) as caught:
            await next_batch(watch)
        assert caught.value.compact_revision == newest
    await watch.close()
    watch = lab.watch(start_revision=newest + 1)
    await lab.put("a", b"later")
    assert (await events_of(watch, 1))[0].kv.value == b"later"


async def test_a_watch_from_the_compacted_revision_does_not_miss_its_deletion(lab: Lab) -> None:
    """etcd itself would: it keeps that revision's puts, but not its deletions."""
    await lab.put("a")
    deleted = await lab.delete("a")
    lab.operator.compact(deleted)
    await lab.put("b")
    watch = lab.watch(start_revision=deleted)
    with pytest.raises(CompactedError):
        await next_batch(watch)
    await watch.close()
    watch = lab.watch(start_revision=deleted + 1)
    assert (await events_of(watch, 1))[0].kv.key == lab.key("b")


@pytest.mark.parametrize("begun", ["before", "afterwards"])
async def test_a_watch_may_leave_out_deletions(lab: Lab, begun: str) -> None:
    start = await lab.revision() + 1
    watch = lab.watch(start_revision=start, puts_only=True)
    if begun == "before":
        await soon(watch.ready())
    else:
        await watch.close()
    for value in (b"1", b"2"):
        await lab.put("a", value)
        await lab.delete("a")
    if begun == "afterwards":
        watch = lab.watch(start_revision=start, puts_only=True)
    await lab.put("a", b"3")
    events = await events_of(watch, 3)
    assert [(event.kind, event.kv.value) for event in events] == [
        (EventKind.PUT, value) for value in (b"1", b"2", b"3")
    ]


async def test_a_watch_without_deletions_sees_the_put_of_the_compacted_revision(lab: Lab) -> None:
    before = await lab.revision()
    compacted = await lab.put("a", b"kept")
    lab.operator.compact(compacted)
    await lab.delete("a")
    await lab.put("a", b"later")
    watch = lab.watch(start_revision=compacted, puts_only=True)
    assert [event.kv.value for event in await events_of(watch, 2)] == [b"kept", b"later"]
    await watch.close()
    watch = lab.watch(start_revision=before, puts_only=True)
    with pytest.raises(CompactedError):
        await next_batch(watch)


async def test_compaction_disturbs_neither_current_keys_nor_current_watches(
    lab: Lab,
) -> None:
    watch = lab.watch(start_revision=await lab.revision() + 1)
    created = await lab.put("a", b"1")
    await events_of(watch, 1)
    for number in range(10):
        revision = await lab.put("a", str(number).encode())
        await events_of(watch, 1)
        lab.operator.compact(revision)
    assert await lab.read("a") == KeyValue(lab.key("a"), b"9", created, revision, 11)
    await lab.put("a", b"last")
    assert (await events_of(watch, 1))[0].kv.value == b"last"


@pytest.mark.usefixtures("own_server")
async def test_a_watch_resumes_after_a_restart_without_a_gap(lab: Lab) -> None:
    watch = lab.watch(start_revision=await lab.revision() + 1)
    await lab.put("a")
    await events_of(watch, 1)
    lab.operator.restart()
    names = [f"{number:02}" for number in range(20)]
    for name in names:
        await lab.put(name)
    assert [event.kv.key for event in await events_of(watch, 20)] == [*map(lab.key, names)]


@pytest.mark.usefixtures("own_server")
async def test_a_watch_marks_that_it_has_resumed_if_asked_to(lab: Lab) -> None:
    watch = lab.watch(start_revision=0, mark_resumes=True)
    await watch.ready()
    revision = await lab.put("a")
    assert (await next_batch(watch)).events
    lab.operator.restart()
    batch = await next_batch(watch)
    assert (batch.revision, batch.events) == (revision, ())
    await lab.put("b")
    assert [event.kv.key for event in await events_of(watch, 1)] == [lab.key("b")]


@pytest.mark.usefixtures("own_server")
@pytest.mark.parametrize("how", ["wiped", "restored from an older snapshot"])
async def test_a_watch_notices_that_etcd_went_back(lab: Lab, how: str) -> None:
    current = 1 if how == "wiped" else await lab.put("kept")
    lab.operator.save()
    for number in range(20):
        revision = await lab.put(str(number))
    watch = lab.watch(start_revision=revision + 1)
    await lab.put("a")
    await events_of(watch, 1)
    if how == "wiped":
        lab.operator.wipe()
    else:
        lab.operator.restore()
    with pytest.raises(RevisionRegressedError) as caught:
        await next_batch(watch)
    assert isinstance(caught.value, WatchLostError)
    assert (caught.value.seen, caught.value.current) == (revision + 1, current)
    result = await lab.all()
    assert (result.count, result.revision) == (0 if how == "wiped" else 1, current)


# -- closing --------------------------------------------------------------------------------------


async def test_closing_a_watch_ends_its_iteration(lab: Lab) -> None:
    watch = lab.watch(start_revision=await lab.revision() + 1)

    async def follow() -> int:
        return len([batch async for batch in watch])

    task = asyncio.create_task(follow())
    await lab.put("a")
    await events_of(lab.watch(start_revision=await lab.revision()), 1)
    await watch.close()
    assert await soon(task) <= 1
    with pytest.raises(StopAsyncIteration):
        await anext(aiter(watch))


async def test_closing_a_connection_ends_its_watches_and_refuses_calls(lab: Lab) -> None:
    await lab.connect().close()  # never used
    etcd = lab.connect()
    watch = etcd.watch(lab.key("a"), start_revision=(await lab.revision()) + 1)
    task = asyncio.create_task(_ends(watch))
    await etcd.get(Get(lab.key("a")))
    await etcd.close()
    await soon(task)
    for call in (
        etcd.get(Get(lab.key("a"))),
        etcd.txn(Txn((), ())),
        etcd.grant(10),
        etcd.revoke(1),
        etcd.keep_alive(1),
    ):
        with pytest.raises(EtcdUnavailableError):
            await call
    with pytest.raises(EtcdUnavailableError):
        etcd.watch(b"a", start_revision=1)
    await etcd.close()
    await lab.put("a")  # other connections are not concerned


async def _ends(watch: object) -> None:
    async for _ in watch:  # type: ignore[attr-defined]
        raise AssertionError("nothing was written")


async def test_a_watch_that_works_is_never_taken_for_silent(lab: Lab) -> None:
    """Whatever is put, put again and deleted, by hand and with leases, while reads are compared
    with what it brings; and though it began before, or long after, those keys did."""
    health = lab.etcd.watch_health
    health.check_every(4.0)  # how long a read may take: it is asked for more often
    problems: list[EtcdError | None] = []
    health.listeners.append(lambda: problems.append(health.problem))
    first = await lab.put("a")
    await lab.put("b")
    watches = [
        lab.watch(start_revision=0),
        lab.watch(start_revision=0, puts_only=True),
        lab.watch(start_revision=first),
    ]
    for watch in watches:
        await watch.ready()
    watches[0].count_from(await lab.all())
    readers = [asyncio.ensure_future(_until_done(watch, lab.key("done"))) for watch in watches]
    rng = random.Random(lab.root)
    checks = []
    for _ in range(60):
        checks.append(asyncio.ensure_future(health.check_now()))
        lease = await lab.etcd.grant(60)
        for name in rng.sample("abcdef", 3):
            if rng.random() < 0.3:
                await lab.delete(name)
            else:
                await lab.put(name, lease_id=rng.choice([0, lease.lease_id]))
        if rng.random() < 0.5:
            await lab.etcd.revoke(lease.lease_id)
        await asyncio.sleep(0.01)
    await lab.put("done")
    for reader in readers:
        await soon(reader)
    await soon(asyncio.gather(*checks))
    # Nothing more comes in which a mistake could hide, and reads are newer than what came.
    for elsewhere in (Put(lab.end, b""), Delete(lab.end)):
        await lab.do(elsewhere)
    await soon(health.check_now())
    assert problems == []
    assert health.problem is None


async def _until_done(watch: Watch, key: bytes) -> None:
    async for batch in watch:
        if any(event.kv.key == key for event in batch.events):
            return

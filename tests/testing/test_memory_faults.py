"""The faults of the in-memory etcd, each in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from rdzv_etcd.errors import (
    CompactedError,
    EtcdNoSpaceError,
    EtcdPermissionError,
    EtcdUnavailableError,
    LeaseExistsError,
    LeaseNotFoundError,
    OutcomeUnknownError,
    RevisionRegressedError,
)
from rdzv_etcd.etcd.port import Delete, Get, Op, Put, Txn, TxnResult
from rdzv_etcd.testing import (
    Applied,
    MemoryConnection,
    MemoryEtcd,
    MemoryWatch,
    SimClock,
    SimLoop,
    run_simulation,
)
from tests.support.scenarios import as_test

T = TypeVar("T")
KEY = b"k"


def simulate(
    test: Callable[[SimLoop, MemoryEtcd], Coroutine[Any, Any, T]], seeds: int = 5
) -> list[T]:
    """Run a test on a fresh server under several schedules."""

    async def main(loop: SimLoop) -> T:
        async with MemoryEtcd(SimClock(loop, offset_s=123.4), seed=loop.seed) as server:
            return await test(loop, server)

    return [run_simulation(main, seed) for seed in range(seeds)]


simulated = as_test(lambda scenario: simulate(lambda _, server: scenario(server)), given=1)
simulated_on_loop = as_test(simulate, given=2)


def txn(*ops: Op) -> Txn:
    return Txn((), ops)


async def put(etcd: MemoryConnection, value: bytes = b"x", **options: Any) -> TxnResult:
    return await etcd.txn(txn(Put(KEY, value)), **options)


async def value(server: MemoryEtcd) -> bytes | None:
    kvs = server.snapshot(KEY)
    return kvs[0].value if kvs else None


async def batch_values(watch: MemoryWatch, count: int) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < count:
        values += [event.kv.value for event in (await watch.__anext__()).events]
    return values


# -- calls ----------------------------------------------------------------------------------------


@simulated_on_loop
async def test_a_write_whose_first_copy_had_no_reply_may_have_been_applied(
    loop: SimLoop, server: MemoryEtcd
) -> None:
    """However the call ends: no server is reached any more, or one refuses the second copy."""
    etcd = server.connect()
    etcd.link.drop_replies()
    etcd.link.drop_requests()
    with pytest.raises(OutcomeUnknownError):
        await put(etcd, timeout_s=7, repeatable=True)
    assert await value(server) is not None
    etcd.link.drop_replies()
    etcd.link.fail(EtcdNoSpaceError("full"))
    with pytest.raises(EtcdNoSpaceError) as refused:
        await put(etcd, timeout_s=7, repeatable=True)
    assert refused.value.maybe_applied
    etcd.link.fail(EtcdNoSpaceError("full"))
    with pytest.raises(EtcdNoSpaceError) as refused:
        await put(etcd, timeout_s=7, repeatable=True)
    assert not refused.value.maybe_applied


@simulated_on_loop
async def test_a_dropped_request_is_not_applied_and_fails_at_its_deadline(
    loop: SimLoop, server: MemoryEtcd
) -> None:
    etcd = server.connect()
    etcd.link.drop_requests()
    with pytest.raises(EtcdUnavailableError):
        await put(etcd, timeout_s=7)
    assert loop.time() == 7
    assert await value(server) is None
    await put(etcd)


@simulated
async def test_a_lost_reply_leaves_the_outcome_of_a_write_unknown(server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.drop_replies()
    with pytest.raises(OutcomeUnknownError):
        await put(etcd)
    assert await value(server) == b"x"


@simulated
async def test_a_repeatable_write_whose_reply_was_lost_is_applied_twice(server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.drop_replies()
    await put(etcd, repeatable=True)
    assert server.snapshot(KEY)[0].version == 2


@simulated
async def test_what_may_be_repeated_is_repeated_until_it_succeeds(server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.drop_replies(5)
    assert (await etcd.get(Get(KEY))).count == 0
    etcd.link.drop_replies(2)
    assert (await etcd.grant(10, lease_id=7)).ttl_s == 10
    etcd.link.drop_replies(2)
    assert await etcd.revoke(7) is True
    assert await etcd.revoke(7) is False
    await etcd.grant(10, lease_id=7)
    with pytest.raises(LeaseExistsError):
        await etcd.grant(10, lease_id=7)
    etcd.link.drop_replies(1)
    orphaned = await etcd.grant(10)  # the first attempt's lease is nobody's, and expires
    assert {7, orphaned.lease_id} < server.leases().keys()
    assert len(server.leases()) == 3


@simulated
async def test_a_held_write_lands_after_its_caller_has_given_up(server: MemoryEtcd) -> None:
    slow, fast = server.connect(), server.connect()
    slow.link.hold_requests(10)
    with pytest.raises(OutcomeUnknownError):
        await put(slow, b"late", timeout_s=5)
    await put(fast, b"early")
    assert await value(server) == b"early"
    await asyncio.sleep(6)
    assert await value(server) == b"late"


def test_slow_links_reorder_concurrent_writes() -> None:
    async def test(_loop: SimLoop, server: MemoryEtcd) -> tuple[bytes, ...]:
        etcd = server.connect()
        etcd.link.delay(0.001, 0.2)
        requests = [etcd.txn(txn(Put(b"%d" % number, b""))) for number in range(5)]
        await asyncio.gather(*requests)
        return tuple(kv.key for kv in sorted(server.snapshot(), key=lambda kv: kv.create_revision))

    assert len(set(simulate(test, seeds=10))) > 3


@simulated
async def test_a_lossy_link_loses_neither_counts_nor_certainty(server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.lose(0.2, 0.2)
    done = unknown = 0
    for _ in range(50):
        try:
            await put(etcd, timeout_s=10)
            done += 1
        except OutcomeUnknownError:
            unknown += 1
    await etcd.get(Get(KEY))
    version = server.snapshot(KEY)[0].version
    assert done <= version <= done + unknown
    assert unknown > 0


# -- partitions -----------------------------------------------------------------------------------


@simulated_on_loop
async def test_a_partition_makes_calls_hang_until_their_deadline(
    loop: SimLoop, server: MemoryEtcd
) -> None:
    cut, whole = server.connect(), server.connect()
    cut.link.partition()
    for call in (cut.get(Get(KEY), timeout_s=3), put(cut, timeout_s=3)):
        began_s = loop.time()
        with pytest.raises(EtcdUnavailableError):
            await call
        assert loop.time() - began_s == 3
    with pytest.raises(EtcdUnavailableError):
        await cut.keep_alive(1, timeout_s=3)
    await put(whole)
    loop.call_later(20, cut.link.heal)
    assert (await cut.get(Get(KEY), timeout_s=60)).count == 1
    assert loop.time() < 60


@simulated_on_loop
async def test_a_silent_partition_leaves_writes_unknown(loop: SimLoop, server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.partition(silent=True)
    with pytest.raises(OutcomeUnknownError):
        await put(etcd, timeout_s=4)
    assert loop.time() == 4
    with pytest.raises(EtcdUnavailableError):
        await etcd.get(Get(KEY), timeout_s=4)
    assert await value(server) is None
    etcd.link.heal()
    await put(etcd)


@simulated_on_loop
async def test_a_partition_breaks_calls_under_way(loop: SimLoop, server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.delay(1)
    loop.call_later(1.5, etcd.link.partition)  # applied, the reply is on its way
    with pytest.raises(OutcomeUnknownError):
        await put(etcd)
    assert await value(server) == b"x"


def test_a_watch_stalls_while_cut_off_and_goes_on_without_a_gap() -> None:
    async def test(loop: SimLoop, server: MemoryEtcd) -> None:
        reader, writer = server.connect(), server.connect()
        reader.link.delay(0.0, 0.3)
        watch = reader.watch(KEY, start_revision=2)

        async def write() -> None:
            for number in range(200):
                await put(writer, b"%d" % number)
                await asyncio.sleep(loop.rng.random() * 0.2)

        async def disturb() -> None:
            for _ in range(20):
                await asyncio.sleep(loop.rng.random())
                reader.link.partition(silent=loop.rng.random() < 0.5)
                await asyncio.sleep(loop.rng.random())
                reader.link.heal()

        writing, disturbing = asyncio.create_task(write()), asyncio.create_task(disturb())
        assert await batch_values(watch, 200) == [b"%d" % number for number in range(200)]
        await asyncio.gather(writing, disturbing)
        await watch.close()

    simulate(test, seeds=20)


@simulated
async def test_a_watch_cut_off_hears_nothing(server: MemoryEtcd) -> None:
    reader, writer = server.connect(), server.connect()
    watch = reader.watch(KEY, start_revision=2)
    reader.link.partition()
    await put(writer)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(watch.__anext__(), 1000)
    reader.link.heal()
    assert await batch_values(watch, 1) == [b"x"]
    await watch.close()


@simulated
async def test_a_watch_that_was_cut_off_during_a_compaction_is_lost(server: MemoryEtcd) -> None:
    reader, writer = server.connect(), server.connect()
    watch = reader.watch(KEY, start_revision=2)
    await put(writer)
    await batch_values(watch, 1)
    reader.link.partition()
    await put(writer)
    await put(writer)
    server.compact()
    reader.link.heal()
    for _ in range(2):
        with pytest.raises(CompactedError):
            await watch.__anext__()
    await watch.close()


# -- the cluster ----------------------------------------------------------------------------------


@simulated
async def test_a_wipe_loses_everything_and_watches_notice(server: MemoryEtcd) -> None:
    etcd = server.connect()
    lease = await etcd.grant(10)
    for _ in range(5):
        await etcd.txn(txn(Put(KEY, b"x", lease.lease_id)))
    watch = etcd.watch(KEY, start_revision=server.revision + 1)
    await asyncio.sleep(1)
    server.wipe()
    with pytest.raises(RevisionRegressedError):
        await watch.__anext__()
    assert (server.revision, server.snapshot(), server.leases()) == (1, (), {})
    assert await etcd.keep_alive(lease.lease_id) == 0
    with pytest.raises(LeaseNotFoundError):
        await etcd.txn(txn(Put(KEY, b"x", lease.lease_id)))
    await asyncio.sleep(20)  # nothing is left of the old lease's timer
    await put(etcd)


@simulated
async def test_a_restart_extends_leases_by_their_whole_ttl(server: MemoryEtcd) -> None:
    etcd = server.connect()
    lease = await etcd.grant(10)
    await asyncio.sleep(9)
    server.restart(downtime_s=30)
    with pytest.raises(EtcdUnavailableError):
        await etcd.get(Get(KEY), timeout_s=5)
    await asyncio.sleep(34)  # 25 s of downtime, 9 s of life
    assert list(server.leases()) == [lease.lease_id]
    await asyncio.sleep(2)
    assert not server.leases()


@simulated
async def test_a_lease_may_be_made_to_expire_at_once(server: MemoryEtcd) -> None:
    etcd = server.connect()
    lease = await etcd.grant(10)
    await etcd.txn(txn(Put(KEY, b"x", lease.lease_id)))
    server.expire(lease.lease_id)
    assert not server.snapshot()
    assert await etcd.keep_alive(lease.lease_id) == 0
    with pytest.raises(LeaseNotFoundError):
        server.expire(lease.lease_id)


@simulated
async def test_all_leases_may_run_out_in_one_moment(server: MemoryEtcd) -> None:
    etcd = server.connect()
    for number in range(3):
        grant = await etcd.grant(60)
        await etcd.txn(txn(Put(b"%d" % number, b"", grant.lease_id)))
    server.expire_all()
    assert not server.snapshot()
    assert not server.leases()


@simulated_on_loop
async def test_leases_may_be_extended_without_a_restart(loop: SimLoop, server: MemoryEtcd) -> None:
    etcd = server.connect()
    grant = await etcd.grant(10)
    await asyncio.sleep(9)
    server.extend_leases()
    await asyncio.sleep(9)
    assert grant.lease_id in server.leases()
    await asyncio.sleep(2)
    assert not server.leases()
    assert loop.time() < 21


@simulated
async def test_restored_revisions_that_were_raised_end_watches_as_compacted(
    server: MemoryEtcd,
) -> None:
    etcd = server.connect()
    await put(etcd, b"before")
    saved = server.save()
    watch = etcd.watch(KEY, start_revision=2)
    assert await batch_values(watch, 1) == [b"before"]
    await put(etcd, b"after")
    assert await batch_values(watch, 1) == [b"after"]
    server.restore(saved, bump_revision=1000)
    with pytest.raises(CompactedError):
        await watch.__anext__()
    assert server.revision == 1002
    assert await value(server) == b"before"


@simulated_on_loop
async def test_a_watch_may_lag_seconds_behind_reads(loop: SimLoop, server: MemoryEtcd) -> None:
    etcd = server.connect()
    watch = etcd.watch(KEY, start_revision=1)
    await watch.ready()
    etcd.link.lag_watches(5.0)
    await put(etcd, b"1")
    assert (await etcd.get(Get(KEY))).count == 1
    assert loop.time() == 0
    assert await batch_values(watch, 1) == [b"1"]
    assert loop.time() == 5
    etcd.link.lag_watches(0)
    await put(etcd, b"2")
    assert await batch_values(watch, 1) == [b"2"]
    assert loop.time() == 5


@simulated
async def test_only_what_may_be_repeated_comes_a_second_time(server: MemoryEtcd) -> None:
    etcd = server.connect()
    etcd.link.repeat_requests(10.0, 2)
    await put(etcd, b"once")
    await put(etcd, b"twice", repeatable=True)
    await put(etcd, b"newer")
    await asyncio.sleep(11)
    assert await value(server) == b"twice"
    assert server.snapshot(KEY)[0].version == 4


@simulated
async def test_without_space_only_puts_and_grants_are_refused(server: MemoryEtcd) -> None:
    etcd = server.connect()
    await put(etcd)
    server.set_no_space(True)
    with pytest.raises(EtcdNoSpaceError):
        await put(etcd)
    with pytest.raises(EtcdNoSpaceError):
        await etcd.grant(10)
    await etcd.get(Get(KEY))
    await etcd.txn(txn(Delete(KEY)))
    server.set_no_space(False)
    await put(etcd)


@simulated
async def test_an_overloaded_etcd_renews_no_lease_and_does_all_else(server: MemoryEtcd) -> None:
    etcd = server.connect()
    grant = await etcd.grant(10)
    server.set_overloaded(True)
    with pytest.raises(EtcdUnavailableError, match="overloaded"):
        await etcd.keep_alive(grant.lease_id)
    await etcd.txn(txn(Put(KEY, b"x", grant.lease_id)))
    await asyncio.sleep(11)
    assert await value(server) is None
    server.set_overloaded(False)
    later = await etcd.grant(10)
    assert await etcd.keep_alive(later.lease_id) == 10


@simulated
async def test_a_stalled_request_outlives_the_connection_and_the_data(server: MemoryEtcd) -> None:
    """One under way does not."""
    etcd = server.connect()
    etcd.link.stall_requests(2.0)
    etcd.link.hold_requests(2.0)
    stalled = asyncio.ensure_future(put(etcd, b"stalled"))
    await asyncio.sleep(0.1)
    under_way = asyncio.ensure_future(put(etcd, b"under way"))
    await asyncio.sleep(1.0)
    server.wipe()
    with pytest.raises(OutcomeUnknownError):
        await under_way
    await stalled
    assert [kv.value for kv in server.snapshot()] == [b"stalled"]


@simulated
async def test_who_is_refused_keeps_what_it_has(server: MemoryEtcd) -> None:
    """As with etcd's roles: a watch goes on, and so does a lease; nothing else is allowed."""
    etcd, other = server.connect(), server.connect()
    lease = await etcd.grant(10)
    watch = etcd.watch(KEY, start_revision=0)
    await watch.ready()
    etcd.link.refuse(lambda: EtcdPermissionError("no role"))
    with pytest.raises(EtcdPermissionError):
        await etcd.get(Get(KEY))
    with pytest.raises(EtcdPermissionError):
        await put(etcd)
    refused = etcd.watch(KEY, start_revision=0)
    with pytest.raises(EtcdPermissionError):
        await refused.ready()
    with pytest.raises(EtcdPermissionError):
        await anext(refused)
    assert await etcd.keep_alive(lease.lease_id) == 10
    await put(other)
    assert (await anext(watch)).events
    etcd.link.refuse(None)
    await put(etcd)


@simulated
async def test_observers_see_every_request_and_its_changes(server: MemoryEtcd) -> None:
    seen: list[Applied] = []
    server.observers.append(seen.append)
    etcd = server.connect("node a")
    lease = await etcd.grant(3)
    await etcd.txn(txn(Put(KEY, b"x", lease.lease_id)))
    await asyncio.sleep(5)
    kinds = [(each.source, type(each.request).__name__) for each in seen]
    assert kinds == [("node a", "Grant"), ("node a", "Txn"), ("", "Revoke")]
    assert [change.number for each in seen for change in each.changes] == [2, 3]
    assert server.requests == {"Grant": 1, "Txn": 1}


@simulated_on_loop
async def test_a_paused_node_loses_its_lease_and_hears_of_it_when_it_wakes(
    loop: SimLoop, server: MemoryEtcd
) -> None:
    etcd = server.connect()
    renewals: list[int] = []

    async def keep(lease_id: int) -> None:
        while not renewals or renewals[-1]:
            await asyncio.sleep(1)
            renewals.append(await etcd.keep_alive(lease_id))

    lease = await etcd.grant(5)
    with loop.node("a"):
        task = asyncio.create_task(keep(lease.lease_id))
    await asyncio.sleep(20)
    assert len(server.leases()) == 1
    loop.pause("a")
    await asyncio.sleep(20)
    assert not server.leases()
    loop.resume("a")
    await task
    assert renewals[-1] == 0
    assert set(renewals[:-1]) == {5}


def test_many_calls_leave_nothing_behind() -> None:
    async def test(loop: SimLoop, server: MemoryEtcd) -> None:
        etcd = server.connect()
        for _ in range(300):
            watch = etcd.watch(KEY, start_revision=1)
            await put(etcd)
            await watch.close()
        assert not etcd._watches
        assert not etcd.link._listeners
        assert len(loop.tasks()) == 1

    simulate(test, seeds=1)


@pytest.mark.parametrize("fault", ["stall", "hang"])
@simulated_on_loop
async def test_a_silent_watch_goes_on_over_another_connection(
    loop: SimLoop, server: MemoryEtcd, fault: str
) -> None:
    etcd, other = server.connect(), server.connect()
    watch, next_one = etcd.watch(KEY, start_revision=0), etcd.watch(KEY, start_revision=0)
    await watch.ready()
    if fault == "stall":
        etcd.link.stall_watches(lambda key, _end: key == KEY)
        assert (await etcd.get(Get(KEY))).count == 0
    else:
        etcd.link.hang()
        lease = await other.grant(10)
        assert await etcd.keep_alive(lease.lease_id) == 10
        with pytest.raises(OutcomeUnknownError):
            await etcd.txn(Txn((), (Put(KEY, b"0"),)), timeout_s=1.0)
        assert await value(server) == b"0"
        for each in (watch, next_one):  # that call has moved the client on
            assert await batch_values(each, 1) == [b"0"]
        etcd.link.hang()
    await put(other, b"1")
    silent = asyncio.ensure_future(watch.__anext__())
    await asyncio.sleep(5.0)
    assert not silent.done()
    assert watch.missed_since_s == loop.time() - 5.0
    etcd.link.move()
    assert (await silent).events[-1].kv.value == b"1"
    assert watch.missed_since_s is None
    assert (await batch_values(next_one, 1))[-1] == b"1"


@simulated_on_loop
async def test_calls_go_on_where_a_client_has_left_a_connection(
    loop: SimLoop, server: MemoryEtcd
) -> None:
    etcd = server.connect()
    etcd.link.delay(1.0)
    writing = asyncio.ensure_future(put(etcd, b"1"))
    await asyncio.sleep(0.5)
    etcd.link.move()
    await writing
    assert loop.time() == 2

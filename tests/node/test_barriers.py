"""Barriers, and what a call of several members promises when one gives up. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rdzv_etcd.errors import (
    BarrierTimeoutError,
    EtcdUnavailableError,
    WorldOverError,
)
from rdzv_etcd.etcd.port import Compare, Delete, Put, Txn
from rdzv_etcd.protocol import collective_requests
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Request
from rdzv_etcd.world.collectives import Collective, Collectives
from rdzv_etcd.world_change import MovedOn
from tests.sim import world
from tests.sim.commits import OPERATOR
from tests.sim.matching import noted
from tests.sim.mutants import does_nothing, on, swapped, without_guard
from tests.sim.world import Scenario, SimJob, SimNode, simulate, simulated

SOON_S = 1.0


def given(job: SimJob) -> int:
    """How many arrivals etcd holds."""
    return sum(b"/given/" in kv.key for kv in job.server.snapshot())


@pytest.mark.parametrize("wiped_after_s", [0.15, 0.25, 5.0])
@simulated(min_nodes=2, max_nodes=3)
async def test_an_arrival_at_a_barrier_that_was_wiped_is_put_again(
    job: SimJob, wiped_after_s: float
) -> None:
    """Also if that happens before its watch begins."""
    nodes = await job.all_work("abc")
    early = nodes[0]
    early.connection.link.delay(0.1)  # the arrival is applied after that, known after 0.2 s
    arrivals = job.keys.barriers.start

    def observe(applied: Applied) -> None:
        request = applied.request
        if isinstance(request, Txn) and any(p.key.startswith(arrivals) for p in request.puts()):
            job.server.observers.remove(observe)
            job.server.call_later(wiped_after_s, job.wipe)

    job.server.observers.append(observe)
    waiting = asyncio.ensure_future(at_barrier(job, early))
    await job.pass_time(60)
    assert not waiting.done()
    await asyncio.gather(waiting, *(at_barrier(job, node) for node in nodes[1:]))


def calls_of(node: SimNode) -> Collectives:
    assert node.world is not None
    return Collectives(node.node, node.world)


async def at_barrier(job: SimJob, node: SimNode, limit_s: float = 3600) -> None:
    await job.on(node, calls_of(node).barrier("saved", limit_s))


async def is_held_up(
    job: SimJob, node: SimNode, late: Collectives | SimNode, for_s: float = 10.0
) -> None:
    """The barrier holds ``node`` until the late one is there."""
    waiting = asyncio.ensure_future(at_barrier(job, node))
    await job.pass_time(for_s)
    assert not waiting.done(), job.tell()
    theirs = calls_of(late) if isinstance(late, SimNode) else late
    await asyncio.gather(theirs.barrier("saved", 3600), waiting)


async def gives_up(job: SimJob, node: SimNode, limit_s: float) -> BarrierTimeoutError:
    with pytest.raises(BarrierTimeoutError) as caught:
        await at_barrier(job, node, limit_s)
    return caught.value


@simulated(min_nodes=2, max_nodes=2)
async def test_a_barrier_that_etcd_forgets_when_one_has_not_heard_of_it_is_passed(
    job: SimJob,
) -> None:
    """Those who are at the next one say that all were at this one."""
    nodes = await job.all_work("ab")
    barriers = [calls_of(node) for node in nodes]

    def calls(which: int) -> asyncio.Task[None]:
        return job.on(nodes[which], barriers[which].barrier("saved", 60))

    await asyncio.gather(calls(0), calls(1))
    before = job.save()
    waiting = calls(1)
    await job.pass_time(1)
    nodes[1].connection.link.lag_watches(5.0)
    await calls(0)
    assert not waiting.done()
    job.restore(before)
    third = calls(0)
    await waiting
    await asyncio.gather(third, calls(1))


async def one_has_passed_what_etcd_forgets(job: SimJob) -> None:
    """A member that is between two calls says again that all were there: another waits for that."""
    nodes = await job.all_work("ab")
    barriers = [calls_of(node) for node in nodes]
    before = job.save()
    waiting = job.on(nodes[1], barriers[1].barrier("saved", 60))
    await job.pass_time(1)
    nodes[1].connection.link.lag_watches(5.0)
    await job.on(nodes[0], barriers[0].barrier("saved", 60))
    assert not waiting.done()
    job.restore(before)
    await waiting


def test_what_etcd_has_forgotten_is_given_again_between_calls() -> None:
    simulate(one_has_passed_what_etcd_forgets, min_nodes=2, max_nodes=2)
    with swapped(Collective, "put_right", does_nothing), pytest.raises(BarrierTimeoutError):
        simulate(one_has_passed_what_etcd_forgets, min_nodes=2, max_nodes=2)


@pytest.mark.parametrize("whose", ["its session", "the job"])
@simulated(min_nodes=3, max_nodes=3)
async def test_an_arrival_at_a_barrier_outlives_a_lease_that_ran_out(
    job: SimJob, whose: str
) -> None:
    nodes = await job.all_work("abc")
    early, late = nodes[0], nodes[1:]
    waiting = asyncio.ensure_future(at_barrier(job, early))
    await job.pass_time(5)
    session = early.lease_id
    record = job.history.formed[0].record
    job.server.expire(session if whose == "its session" else record.job_lease)
    await job.pass_time(30)
    assert not waiting.done(), job.tell()
    assert given(job) == 1
    await asyncio.gather(waiting, *(at_barrier(job, node) for node in late))
    assert all(node.joins == 1 for node in nodes), job.tell()


@simulated(min_nodes=2, max_nodes=2)
async def test_all_pass_a_barrier_or_none_whenever_one_of_them_gives_up(job: SimJob) -> None:
    """Its limit ends in the moment in which the last one arrives."""
    a, b = await job.all_work("ab")
    waiting = asyncio.ensure_future(at_barrier(job, b))
    limit_s = job.loop.rng.uniform(0.0, 0.01)
    try:
        await at_barrier(job, a, limit_s)
    except BarrierTimeoutError:
        await job.pass_time(5)
        assert not waiting.done(), job.tell()
        await at_barrier(job, a)
    await waiting


@simulated(min_nodes=2, max_nodes=2)
async def test_who_ran_out_of_time_is_not_there_although_its_arrival_is_late(job: SimJob) -> None:
    """What takes the arrival back does not overtake it."""
    a, b = await job.all_work("ab")
    a.connection.link.hold_requests(1.0)  # later than what is sent next
    await gives_up(job, a, job.loop.rng.uniform(0.0, 0.9))
    await is_held_up(job, b, a, 5)


def gives(request: Request) -> bool:
    return isinstance(request, Txn) and any(b"/given/" in put.key for put in request.puts())


def takes_back(request: Request) -> bool:
    return isinstance(request, Txn) and any(
        isinstance(op, Delete) and b"/given/" in op.key for op in request.success
    )


def announces(request: Request) -> bool:
    return isinstance(request, Txn) and any(put.key.endswith(b"/done") for put in request.puts())


@pytest.mark.parametrize("late_s", [0.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("is_copy", [False, True])
@simulated(min_nodes=2, max_nodes=2)
async def test_a_late_arrival_of_who_gave_up_lets_nobody_pass(
    job: SimJob, late_s: float, is_copy: bool
) -> None:
    """A member of etcd whose disk stalls applies it long after everything else."""
    a, b = await job.all_work("ab")
    link = a.connection.link
    (link.repeat_requests if is_copy else link.hold_requests)(late_s, 1, gives)
    assert (await gives_up(job, a, 0.3)).missing == (b.node_id,)
    await job.pass_time(job.loop.rng.choice([0.0, late_s + 1.0]))
    await is_held_up(job, b, a, late_s + 10.0)


@pytest.mark.parametrize("late_s", [0.5, 3.0, 7.0])
@pytest.mark.parametrize("is_copy", [False, True])
@simulated(min_nodes=2, max_nodes=2)
async def test_what_takes_an_arrival_back_late_does_not_take_the_next_one(
    job: SimJob, late_s: float, is_copy: bool
) -> None:
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    link = a.connection.link
    (link.repeat_requests if is_copy else link.hold_requests)(late_s, 1, takes_back)
    with pytest.raises(BarrierTimeoutError):
        await job.on(a, mine.barrier("saved", 1.0))
    again = job.on(a, mine.barrier("saved", 60.0))
    await job.pass_time(late_s + 10.0)
    assert not again.done()
    began_s = job.loop.time()
    await asyncio.gather(again, at_barrier(job, b, 40.0))
    assert job.loop.time() - began_s < SOON_S, job.tell()


async def an_arrival_comes_late(job: SimJob) -> None:
    """A copy of one that was taken back since."""
    a, b = await job.all_work("ab")
    a.connection.link.repeat_requests(2.0, 1, gives)
    await gives_up(job, a, 0.3)
    await job.pass_time(3.0)
    waiting = asyncio.ensure_future(at_barrier(job, b))
    await job.pass_time(10.0)
    assert not waiting.done(), job.tell()
    waiting.cancel()


async def a_turn_is_said_to_be_done_late(job: SimJob) -> None:
    """What says that the first turn is done is applied once more when the second one is done, just
    before a member looks that was slow to hear how many were there when it came."""
    a, b = await job.all_work("ab")
    mine, theirs = calls_of(a), calls_of(b)
    first = job.on(a, mine.barrier("saved", 60.0))
    await job.pass_time(1.0)
    b.connection.link.repeat_requests(10.0, 1, announces)
    await job.on(b, theirs.barrier("saved", 60.0))
    await first
    await job.pass_time(9.55)
    a.connection.link.delay(0.3)  # it has arrived after 0.3 s, and knows it after 0.6 s
    slow = job.on(a, mine.barrier("saved", 60.0))
    await job.pass_time(0.35)
    await job.on(b, theirs.barrier("saved", 60.0))
    await job.pass_time(5.0)
    assert slow.done(), job.tell()


async def an_arrival_is_taken_back_after_a_wipe(job: SimJob) -> None:
    """A copy of what takes it back is applied when etcd has lost its data, and its revisions have
    begun anew; by then the member has called again."""
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    for number in range(100):
        job.server.apply(Txn((), (Put(b"/others", b"%d" % number),)), OPERATOR)
    a.connection.link.repeat_requests(8.0, 1, takes_back)
    with pytest.raises(BarrierTimeoutError):
        await job.on(a, mine.barrier("saved", 1.0))
    job.wipe()
    again = job.on(a, mine.barrier("saved", 60.0))
    await job.pass_time(15.0)
    other = asyncio.ensure_future(at_barrier(job, b, 20.0))
    await job.pass_time(2.0)
    assert again.done(), job.tell()
    await other


async def an_arrival_is_taken_back_late(job: SimJob) -> None:
    """That is under way, and nobody knows what becomes of it, when the member calls again: it comes
    before the last one does."""
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    a.connection.link.hold_requests(8.0, 1, takes_back)

    async def twice() -> None:
        with pytest.raises(BarrierTimeoutError, match="it may count as being there"):
            await mine.barrier("saved", 1.0)
        await mine.barrier("saved", 60.0)

    calling = job.on(a, twice())
    await job.pass_time(5.0)
    away = EtcdUnavailableError("away for a moment")
    a.connection.link.fail(away, 1, lambda request: isinstance(request, Txn) and request.reads_only)
    await job.pass_time(15.0)
    other = asyncio.ensure_future(at_barrier(job, b, 20.0))
    await job.pass_time(2.0)
    assert calling.done(), job.tell()
    await other


async def all_arrive_as_one_gives_up(job: SimJob) -> None:
    """What takes its arrival back is under way when the last one comes."""
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    a.connection.link.hold_requests(1.0, 1, takes_back)
    calling = job.on(a, mine.barrier("saved", 1.0))
    await job.pass_time(1.5)
    await at_barrier(job, b)
    await calling


async def what_is_given_again_is_late(job: SimJob) -> None:
    """It must not come into a world that has ended, whose members may do without it."""
    a, b, c = await job.all_work("abc")
    calls = []
    for each in (a, b, c):
        assert each.world is not None
        calls.append(job.on(each, calls_of(each).exchange(b"now", 60.0)))
    await asyncio.gather(*calls)
    again, requests = noted(gives)
    a.connection.link.repeat_requests(60.0, 1, again)
    job.wipe()
    await job.pass_time(10)
    assert requests
    for gone in (b, c):
        await job.leave(gone.name)
        await job.pass_time(5)
    await job.until_works("a")
    await job.pass_time(80)
    assert given(job) == 0, job.tell()


SCENES: dict[str, tuple[Scenario, int]] = {
    scene.__name__: (scene, nodes)
    for scene, nodes in (
        (an_arrival_comes_late, 2),
        (a_turn_is_said_to_be_done_late, 2),
        (an_arrival_is_taken_back_after_a_wipe, 2),
        (an_arrival_is_taken_back_late, 2),
        (all_arrive_as_one_gives_up, 2),
        (what_is_given_again_is_late, 3),
    )
}


@pytest.mark.parametrize("scene", SCENES)
def test_late_copies_and_givers_up_do_no_harm(scene: str) -> None:
    play, nodes = SCENES[scene]
    simulate(play, range(10), min_nodes=1 if nodes > 2 else 2, max_nodes=nodes)


@pytest.mark.parametrize(
    ("scene", "function", "guards"),
    [
        ("an_arrival_comes_late", "give", lambda guard: b"/by/" in guard.key),
        ("a_turn_is_said_to_be_done_late", "announce", on(b"/done")),
        ("an_arrival_is_taken_back_after_a_wipe", "take_back", lambda guard: b"/by/" in guard.key),
        ("all_arrive_as_one_gives_up", "take_back", lambda guard: guard.range_end is not None),
        ("what_is_given_again_is_late", "give", on(b"ctl/round")),
    ],
)
def test_each_guard_is_missed(
    scene: str, function: str, guards: Callable[[Compare], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "SEEDS_AT_MOST", None)  # it ends with the first one that notices
    play, nodes = SCENES[scene]
    mutant = swapped(collective_requests, function, without_guard(guards))
    with mutant, pytest.raises((AssertionError, BarrierTimeoutError)):
        simulate(play, range(10), min_nodes=1 if nodes > 2 else 2, max_nodes=nodes)


@simulated(min_nodes=2, max_nodes=2)
async def test_who_gave_up_unheard_is_not_there_once_etcd_hears_it(job: SimJob) -> None:
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    calling = job.on(a, mine.barrier("saved", 1.0))
    await job.pass_time(0.5)
    assert given(job) == 1
    a.connection.link.partition(silent=True)
    with pytest.raises(BarrierTimeoutError, match="it may count as being there") as caught:
        await calling
    assert caught.value.missing is None
    assert given(job) == 1
    a.connection.link.heal()
    await job.until(lambda: given(job) == 0, "the arrival is taken back", 10.0)
    await is_held_up(job, b, mine)


@simulated(min_nodes=2, max_nodes=2)
async def test_an_arrival_that_a_restored_etcd_still_holds_is_taken_back_again(job: SimJob) -> None:
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    calling = job.on(a, mine.barrier("saved", 1.0))
    await job.pass_time(0.5)
    before = job.save()
    with pytest.raises(BarrierTimeoutError):
        await calling
    job.restore(before)
    assert given(job) == 1
    await job.until(lambda: given(job) == 0, "the arrival is taken back", 10.0)
    await is_held_up(job, b, mine)


@simulated(min_nodes=2, max_nodes=2)
async def test_a_late_arrival_lets_nobody_pass_in_an_etcd_that_was_restored(job: SimJob) -> None:
    """It knows of no write of that member's."""
    a, b = await job.all_work("ab")
    mine = calls_of(a)
    before = job.save()
    a.connection.link.repeat_requests(20.0, 1, gives)
    with pytest.raises(BarrierTimeoutError):
        await job.on(a, mine.barrier("saved", 1.0))
    job.restore(before)
    await job.pass_time(25.0)
    assert given(job) == 0, job.tell()
    await is_held_up(job, b, mine)


@simulated(min_nodes=2, max_nodes=2)
async def test_the_last_one_to_give_again_says_that_all_have(job: SimJob) -> None:
    """Its own call has ended, and etcd lost what all had given before anybody knew of it."""
    a, b = await job.all_work("ab")
    mine, theirs = calls_of(a), calls_of(b)
    with pytest.raises(BarrierTimeoutError):
        await job.on(a, mine.exchange(b"a", 1.0))

    def wipe(applied: Applied) -> None:
        if gives(applied.request):
            job.server.observers.remove(wipe)
            job.server.call_later(0.0, job.wipe)

    job.server.observers.append(wipe)
    a.connection.link.delay(0.3)
    b.connection.link.drop_replies(1, gives)
    waiting = job.on(b, theirs.exchange(b"b", 120.0))
    await job.pass_time(30.0)
    assert waiting.done(), job.tell()
    assert sorted(await waiting) == [b"a", b"b"]
    assert await job.on(a, mine.exchange(b"again", 10.0)) == await waiting


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("what", ["barrier", "exchange"])
@simulated(range(4), min_nodes=2, max_nodes=2)
async def test_an_interrupted_call_ends_its_members_part_in_the_world(
    job: SimJob, what: str, reachable: bool
) -> None:
    a, b = await job.all_work("ab")
    mine, theirs = calls_of(a), calls_of(b)

    def call(on: Collectives) -> Coroutine[Any, Any, object]:
        return on.barrier("saved", 60) if what == "barrier" else on.exchange(b"mine", 60)

    interrupted = job.on(a, call(mine))
    await job.pass_time(1)
    if not reachable:
        a.connection.link.partition(silent=True)
    interrupted.cancel()
    world = a.world
    assert world is not None
    await job.until(lambda: a.node.change_of(world) is not None, "it is over at once", 0.1)
    change = a.node.change_of(world)
    assert isinstance(change, MovedOn)
    assert change.because.startswith(f"was interrupted in {what}")
    for later in ("barrier", "exchange"):
        with pytest.raises(WorldOverError, match=r"which ended its part in this world"):
            await (mine.barrier("b", 1.0) if later == "barrier" else mine.exchange(b"", 1.0))
    with pytest.raises(asyncio.CancelledError):
        await interrupted
    with pytest.raises(WorldOverError):
        await job.on(b, call(theirs))
    (lost,) = [change.lost for _, change in job.history.changes]
    assert set(lost) == {a.node_id}
    assert not reachable or f"was interrupted in {what}" in lost[a.node_id]
    a.connection.link.heal()
    await job.join_again("a")
    await job.until_works("ab")
    await asyncio.gather(*(at_barrier(job, each) for each in (a, b)))

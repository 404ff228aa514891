"""What the members of a world do together: barriers and exchanges, which share one protocol."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from rdzv_etcd import Failed, Left, World
from rdzv_etcd.errors import (
    BarrierTimeoutError,
    JobClosedError,
    MisuseError,
    RequestTooLargeError,
    WorldOverError,
)
from rdzv_etcd.world import collectives
from rdzv_etcd.world.group import Group
from tests.library.nodes import (
    LIMIT_S,
    Job,
    RemoteError,
    at_once,
    groups,
    join_all,
    node_settings,
    notified_of_nothing,
    wait_until,
)
from tests.support.bridge import FaultBridge

Call = Callable[[World, float], object]
CALLS: dict[str, Call] = {
    "barrier 'saved'": lambda world, limit_s: world.barrier("saved", limit_s),
    "exchange 1": lambda world, limit_s: world.exchange(b"%d" % world.rank, limit_s),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


def _arrivals(job: Job) -> list[bytes]:
    """The keys of the members that count as being there."""
    return [key for key in job.keys(b"barrier/") if b"/given/" in key]


def _wait_for_arrivals(job: Job, count: int) -> None:
    wait_until("members in the call", lambda: len(_arrivals(job)) == count)


def _begun(job: Job, pool: ThreadPoolExecutor, world: World, call: Call) -> Future[object]:
    """Call in another thread; return when that member counts as being there."""
    waiting = pool.submit(call, world, LIMIT_S)
    _wait_for_arrivals(job, 1)
    return waiting


# --- both -----------------------------------------------------------------------------------------


def test_nobody_is_done_before_all_are_there(job: Job, call: Call) -> None:
    with job.worlds(3) as (_, worlds), ThreadPoolExecutor(2) as pool:
        early = [pool.submit(call, world, LIMIT_S) for world in worlds[:2]]
        _wait_for_arrivals(job, 2)
        assert not any(waiting.done() for waiting in early)
        result = call(worlds[2], LIMIT_S)
        assert [waiting.result(LIMIT_S) for waiting in early] == [result, result]


@pytest.mark.parametrize("sizes", [{}, {"slice_nodes": 1}], ids=["", "large"])
def test_a_time_limit_names_who_is_missing_and_the_call_may_be_made_again(
    job: Job, call: Call, sizes: dict[str, Any]
) -> None:
    with job.worlds(3, **sizes) as (nodes, worlds):
        with pytest.raises(BarrierTimeoutError, match="2 of 3 members are missing") as caught:
            call(worlds[0], 0.3)
        missing = tuple(node.node_id for node in nodes[1:])
        assert caught.value.missing == missing
        host, _, _ = missing[0].partition("~")
        (name,) = (name for name, each in CALLS.items() if each is call)
        for words in (host, f"round {worlds[0].round}", name):
            assert words in str(caught.value)
        results = at_once([partial(call, world, LIMIT_S) for world in worlds])
        assert results == results[:1] * 3


def test_a_change_breaks_it(job: Job, call: Call) -> None:
    with job.worlds(2, "1:2") as (nodes, worlds), ThreadPoolExecutor(1) as pool:
        waiting = _begun(job, pool, worlds[0], call)
        nodes[1].leave("has to go")
        with pytest.raises(WorldOverError, match=r"round 1 is over.*has to go") as caught:
            waiting.result(LIMIT_S)
        assert caught.value.change == Left({nodes[1].node_id: "has to go"})
        with pytest.raises(WorldOverError, match="has to go"):
            call(worlds[0], LIMIT_S)


def test_who_waits_hears_at_once_that_the_job_has_ended(job: Job, call: Call) -> None:
    with job.worlds(2) as (nodes, worlds), ThreadPoolExecutor(1) as pool:
        waiting = _begun(job, pool, worlds[0], call)
        nodes[1].fail("no more data")
        with pytest.raises(JobClosedError, match="no more data"):
            waiting.result(LIMIT_S)
        assert worlds[0].change == Failed(nodes[1].node_id, "no more data")
        with pytest.raises(JobClosedError, match="no more data") as caught:
            call(worlds[1], LIMIT_S)
        assert (caught.value.reason, caught.value.closed_by) == ("no more data", nodes[1].node_id)


@pytest.mark.parametrize("goes_on", [Group.leave, Group.finish, Group.join])
def test_all_are_done_although_one_goes_on_as_soon_as_it_is(
    job: Job, call: Call, monkeypatch: pytest.MonkeyPatch, goes_on: Callable[[Group], object]
) -> None:
    monkeypatch.setattr(collectives, "puts_after", notified_of_nothing)
    with job.worlds(2, "1:2") as (nodes, worlds), ThreadPoolExecutor(2) as pool:
        waiting = _begun(job, pool, worlds[0], call)
        result = call(worlds[1], LIMIT_S)
        gone_on = pool.submit(goes_on, nodes[1])
        assert waiting.result(LIMIT_S) == result
        nodes[0].leave()
        gone_on.result(LIMIT_S)


def test_whose_node_joins_again_hears_it_at_once(job: Job, call: Call) -> None:
    """At a barrier it does not count any more: others may not have heard of it, and all pass, or
    none."""
    with job.worlds(2) as (nodes, worlds), ThreadPoolExecutor(2) as pool:
        waiting = _begun(job, pool, worlds[0], call)
        joining = pool.submit(nodes[0].join)
        with pytest.raises(WorldOverError):
            waiting.result(LIMIT_S / 2)
        assert call is not CALLS["barrier 'saved'"] or not _arrivals(job)
        nodes[1].join()
        assert joining.result(LIMIT_S).round == 2


def test_a_second_thread_in_the_same_call_is_refused(job: Job, call: Call) -> None:
    with job.worlds(2) as (_, worlds), ThreadPoolExecutor(1) as pool:
        waiting = _begun(job, pool, worlds[0], call)
        with pytest.raises(MisuseError, match=r"waits at barrier 'saved' already|in an exchange a"):
            call(worlds[0], LIMIT_S)
        assert call(worlds[1], LIMIT_S) == waiting.result(LIMIT_S)


def test_across_processes_and_rounds(job: Job) -> None:
    with job.remote("2") as one, job.remote("2") as two:
        for _ in range(2):
            joined = at_once([partial(node.call, "join") for node in (one, two)])
            texts = [f"of {world['rank']}" for world in joined]
            gave = [partial(n.call, "exchange", t) for n, t in zip((one, two), texts, strict=True)]
            assert at_once(gave) == [["of 0", "of 1"]] * 2
            at_once([partial(node.call, "barrier", "saved", LIMIT_S) for node in (one, two)])
        with pytest.raises(RemoteError, match="1 of 2 members"):
            two.call("barrier", "alone", 0.3)
        at_once([one.finish, two.finish])


# --- barriers -------------------------------------------------------------------------------------


def test_a_name_used_again_is_a_new_barrier(job: Job) -> None:
    with job.worlds(2) as (_, worlds), ThreadPoolExecutor(1) as pool:
        left = []
        for turn in range(6):
            waiting = pool.submit(worlds[turn % 2].barrier, "step", LIMIT_S)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            worlds[1 - turn % 2].barrier("step", LIMIT_S)
            waiting.result(LIMIT_S)
            left.append(len(job.keys(b"barrier/")))
        assert left[2:] == left[-1:] * 4  # what it leaves does not grow
        with pytest.raises(BarrierTimeoutError, match="1 of 2 members"):
            worlds[0].barrier("step", 0.3)
        at_once([partial(world.barrier, "step", LIMIT_S) for world in worlds])


def test_a_name_is_text_and_has_a_limit(job: Job) -> None:
    """The names 7 and "7" would be the same barrier, counted twice."""
    with job.worlds(1) as (_, (world,)):
        name: Any
        for name in (7, None, b"saved", ["saved"]):
            with pytest.raises(MisuseError, match=f"must be text, not {type(name).__name__}"):
                world.barrier(name)
        world.barrier("ä" * 1000)
        with pytest.raises(MisuseError, match="has 1001 characters; it must have at most 1000"):
            world.barrier("ä" * 1001)


# --- exchanges ------------------------------------------------------------------------------------


def test_everybody_has_everybodys_bytes_by_rank(job: Job) -> None:
    with job.worlds(3) as (_, worlds):
        for turn in range(3):
            mine = [b"", b"\x00\xff", b"x" * 100_000]
            give = [partial(world.exchange, mine[(world.rank + turn) % 3]) for world in worlds]
            answers = at_once(give)
            assert answers == [[mine[(rank + turn) % 3] for rank in range(3)]] * 3


def test_what_was_given_first_stands_and_no_more_than_two_exchanges_are_kept(job: Job) -> None:
    with job.worlds(2) as (_, worlds):
        for turn in range(1, 6):
            with pytest.raises(BarrierTimeoutError):  # whoever tries again still finds all
                worlds[0].exchange(b"%d" % turn, 0.2)
            assert worlds[1].exchange(b"-", LIMIT_S) == [b"%d" % turn, b"-"]
            assert worlds[0].exchange(b"other", LIMIT_S) == [b"%d" % turn, b"-"]
            turns = [turn - 1, turn] if turn > 1 else [turn]
            kept = {key.rpartition(b"/given/")[2] for key in _arrivals(job)}
            assert kept == {b"%d/%06d" % (each, rank) for each in turns for rank in (0, 1)}


def test_what_is_no_bytes_does_not_count_as_given(job: Job) -> None:
    with job.worlds(1) as (_, (world,)):
        given: Any
        for given in ("text", 5, None, [b"x"]):
            with pytest.raises(MisuseError, match=rf"\({type(given).__name__}\); it must be bytes"):
                world.exchange(given)
        assert world.exchange(bytearray(b"bytes")) == [b"bytes"]
        assert world.exchange(memoryview(b"more")) == [b"more"]


def test_what_is_too_large_for_etcd_is_refused(job: Job) -> None:
    with job.worlds(1) as (_, (world,)):
        world.exchange(b"x")
        why = r"^what this member gives in exchange 2 takes 2000000 bytes, more than etcd .* cut"
        with pytest.raises(RequestTooLargeError, match=why):
            world.exchange(b"x" * 2_000_000)
        assert world.exchange(b"less") == [b"less"]


def test_members_exchange_more_than_an_attempt_carries(job: Job) -> None:
    """Over slow links to several endpoints: all values at once take longer than a read may take at
    one endpoint while there are others, however often it is tried; each takes a second."""
    address = job.server.address
    with FaultBridge(address) as one, FaultBridge(address) as two:
        settings = node_settings(f"{one.target},{two.target}", job.id, "4", lease_ttl=10)
        with groups(settings, 4) as nodes:
            worlds = join_all(nodes)
            for way in (one, two):
                way.shape(bytes_per_s=1_200_000)
            values = [bytes([world.rank]) * 1_200_000 for world in worlds]
            calls = [
                partial(world.exchange, value, LIMIT_S)
                for world, value in zip(worlds, values, strict=True)
            ]
            assert at_once(calls) == [sorted(values)] * 4
            for way in (one, two):
                way.shape()

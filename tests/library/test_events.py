"""What happens in a job, as its nodes and tools outside it are told. On a real etcd."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import (
    Group,
    JobEnded,
    JobEvent,
    JobEvents,
    Joined,
    Left,
    Missed,
    NodeLeft,
    Observer,
    Role,
    Snapshot,
    Stage,
    WorldFormed,
    WorldOver,
)
from rdzv_etcd.errors import (
    EtcdPermissionError,
    EtcdUnavailableError,
    MisuseError,
    RendezvousFailedError,
    SettingsError,
    StateCorruptError,
)
from rdzv_etcd.settings.parse import PASSWORD_VARIABLE, USER_VARIABLE
from tests.library.nodes import (
    LIMIT_S,
    Job,
    groups,
    join_all,
    node_settings,
    run_program,
    wait_until,
)
from tests.support.leaks import LeakCheck, job_root
from tests.support.servers import USER, USER_PASSWORD, EtcdServer


def until(events: JobEvents, kind: type[Any]) -> list[JobEvent]:
    """All events up to the first one of that kind."""
    told: list[JobEvent] = []
    while not told or not isinstance(told[-1], kind):
        event = events.next(LIMIT_S)
        assert event is not None, f"no {kind.__name__} after {told}"
        told.append(event)
    return told


@pytest.fixture
def observer(job: Job) -> Iterator[Observer]:
    with rdzv_etcd.observe(job.server.endpoint, job=job.id) as observer:
        yield observer


def test_a_job_s_life_from_outside(observer: Observer, job: Job) -> None:
    assert observer.job == job.id
    assert observer.state().stage is Stage.ABSENT
    with observer.events() as events:
        (first,) = until(events, Snapshot)
        assert isinstance(first, Snapshot)
        assert first.state.stage is Stage.ABSENT
        with job.worlds(3, "2:3") as (nodes, worlds):
            *joined, formed = until(events, WorldFormed)
            assert {event for event in joined if isinstance(event, Joined)} == {
                Joined(node.node_id) for node in nodes
            }
            assert isinstance(formed, WorldFormed)
            assert (formed.round, formed.epoch) == (1, worlds[0].epoch)
            assert formed.members == worlds[0].node_ids
            assert formed.formed_in_s is not None
            assert formed.at_s > 0 < formed.wall_s
            state = observer.state()
            assert state.stage is Stage.WORKING
            assert state.members == worlds[0].node_ids
            assert {node.role for node in state.nodes} == {Role.MEMBER}
            assert state.job_lease_left_s
            nodes[0].leave("has to go")
            told = until(events, WorldOver)
            reason = {nodes[0].node_id: "has to go"}
            assert NodeLeft(nodes[0].node_id, "has to go") in told
            assert told[-1] == WorldOver(1, worlds[0].epoch, Left(reason))
            join_all(nodes[1:])
            until(events, WorldFormed)
            assert nodes[1].finish("all done")
            told = until(events, JobEnded)
            assert told[-1] == JobEnded(True, nodes[1].node_id, "all done")
            assert observer.state().stage is Stage.FINISHED
        assert {until(events, NodeLeft)[-1], until(events, NodeLeft)[-1]} == {
            NodeLeft(node.node_id, "its run is over") for node in nodes[1:]
        }


def test_the_job_as_its_own_nodes_are_told(job: Job) -> None:
    with job.groups(2) as nodes:
        events = nodes[0].events()
        join_all(nodes)
        told = until(events, WorldFormed)
        assert isinstance(told[0], Snapshot)
        assert Joined(nodes[1].node_id) in told
        waiting: list[JobEvent | None] = []
        reader = threading.Thread(target=lambda: waiting.extend(events))
        reader.start()
        nodes[0].leave()
        reader.join(LIMIT_S)
        assert not reader.is_alive()
        assert events.is_closed
        assert events.next() is None
        with pytest.raises(RendezvousFailedError, match="has left"):
            nodes[0].events()


def test_a_slow_reader_is_told_how_much_it_missed_and_what_the_job_is(
    observer: Observer, job: Job
) -> None:
    events = observer.events()
    events._watch._events_kept = 2
    until(events, Snapshot)
    with job.groups(3) as nodes:
        join_all(nodes)
        wait_until("events were dropped", lambda: events._watch._missed == 4)
        missed, snapshot = events.next(LIMIT_S), events.next(LIMIT_S)
        assert missed == Missed(4)
        assert isinstance(snapshot, Snapshot)
        assert set(snapshot.state.members) == {node.node_id for node in nodes}
        assert nodes[0].fail("enough")
        told = until(events, JobEnded)
        assert told[-1] == JobEnded(False, nodes[0].node_id, "enough")


@pytest.mark.every_etcd
def test_events_go_on_after_etcd_was_away(
    leak_check: LeakCheck, fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    server = fresh_etcd()
    with rdzv_etcd.observe(server.endpoint, job=job_id) as observer, ExitStack() as stack:
        events = observer.events()
        nodes = stack.enter_context(groups(node_settings(server, job_id, "2"), 2))
        join_all(nodes)
        until(events, WorldFormed)
        server.restart()
        assert nodes[0].fail("enough")
        assert isinstance(until(events, JobEnded)[-1], JobEnded)


def test_whoever_may_only_read_may_observe(
    leak_check: LeakCheck, auth_etcd: EtcdServer, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = auth_etcd.gateway.call
    reader = f"reader-{job_id}"
    call("/v3/auth/user/add", {"name": reader, "password": "secret"})
    call("/v3/auth/role/add", {"name": reader})
    call("/v3/auth/user/grant", {"user": reader, "role": reader})
    auth_etcd.gateway.grant_prefix(reader, job_root(job_id), "READ")
    environ = {USER_VARIABLE: USER, PASSWORD_VARIABLE: USER_PASSWORD}
    with groups(node_settings(auth_etcd, job_id, "1", environ=environ), 1) as nodes:
        nodes[0].join()
        monkeypatch.setenv(USER_VARIABLE, reader)
        monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
        with rdzv_etcd.observe(auth_etcd.endpoint, job=job_id) as observer:
            assert observer.state().members == (nodes[0].node_id,)
            assert isinstance(observer.events().next(LIMIT_S), Snapshot)
        with pytest.raises(EtcdPermissionError, match="read all under"):
            rdzv_etcd.observe(auth_etcd.endpoint, job=job_id, etcd_prefix="/elsewhere")


def test_what_is_no_job_of_this_library_is_named(observer: Observer, job: Job) -> None:
    key = job.root + b"ctl/round"
    job.server.gateway.put(key, b"mine")
    try:
        with pytest.raises(StateCorruptError, match="ctl/round"):
            observer.state()
        with pytest.raises(StateCorruptError, match="ctl/round"):
            observer.events()
    finally:
        job.server.gateway.delete_prefix(key)


def test_after_its_end(job: Job) -> None:
    observer = rdzv_etcd.observe(job.server.endpoint, job=job.id)
    events = observer.events()
    until(events, Snapshot)
    observer.close()
    observer.close()
    assert events.is_closed
    assert list(events) == []
    with pytest.raises(MisuseError, match="was closed: make another one"):
        observer.state()


def test_one_that_is_dropped_closes(job: Job) -> None:
    threads = set(threading.enumerate())
    observer = rdzv_etcd.observe(job.server.endpoint, job=job.id)
    watch = observer.events()._watch
    wait_until("the dropped events end", lambda: gc.collect() is not None and watch.is_closed)
    del observer
    # Nobody waits for it, and gRPC's thread ends with the garbage that is left then.
    wait_until("it ends", lambda: gc.collect() is not None and threads >= {*threading.enumerate()})


def test_what_is_no_observer() -> None:
    given: dict[str, Any] = {"lease_ttl": 5}
    with pytest.raises(SettingsError, match="lease_ttl is not an option of observe"):
        rdzv_etcd.observe("localhost:2379", job="a", **given)
    with pytest.raises(SettingsError, match=r"endpoints is None .* it must be the address"):
        rdzv_etcd.observe(job="a")
    with pytest.raises(EtcdUnavailableError):
        rdzv_etcd.observe("127.0.0.1:9", job="a", connect_timeout=0.3)


def test_on_asyncio(job: Job) -> None:
    async def work() -> None:
        settings = job.settings()
        async with await rdzv_etcd.aio.observe(job.server.endpoint, job=job.id) as observer:
            assert observer.job == job.id
            assert (await observer.state()).stage is Stage.ABSENT
            async with observer.events() as events:
                assert isinstance(await events.next(LIMIT_S), Snapshot)
                group = rdzv_etcd.aio.Group(await asyncio.to_thread(Group, settings))
                async with group:
                    mine = group.events()
                    await group.join()
                    async for event in events:
                        if isinstance(event, WorldFormed):
                            break
                    assert isinstance(await mine.next(LIMIT_S), Snapshot)
                    waits = asyncio.ensure_future(mine.next())
                    await asyncio.sleep(0)
                    waits.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waits
                    await group.finish("done")
                    assert isinstance(await _until(mine, JobEnded), JobEnded)
                assert [event async for event in mine] == []
                assert await mine.next(0.1) is None
            assert events.is_closed

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


def test_a_call_that_is_cancelled_has_taken_no_event(job: Job) -> None:
    """Not even if the event was on its way to it."""

    async def work() -> None:
        async with (
            await rdzv_etcd.aio.observe(job.server.endpoint, job=job.id) as observer,
            observer.events() as events,
        ):
            waits = asyncio.ensure_future(events.next())
            await asyncio.sleep(0)
            wait_until("it is on its way", lambda: not events._watch._events)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert isinstance(await events.next(LIMIT_S), Snapshot)

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


async def _until(events: rdzv_etcd.aio.JobEvents, kind: type[Any]) -> JobEvent | None:
    async for event in events:
        if type(event) is kind:
            return event
    return None


READER = """
import atexit, sys, threading

def tell():
    reader.join()
    print(*outcome)

atexit.register(tell)  # before the library's own: so it is called after those

import rdzv_etcd

who, endpoint, job = sys.argv[1:]
observer = rdzv_etcd.observe(endpoint, job=job)
group = rdzv_etcd.connect(endpoint, job=job, nodes=1)
events = (observer if who == "observer" else group).events()
events.next()
outcome = []

def read():
    try:
        for _ in events:
            pass
        outcome.append("ended")
    except BaseException as error:
        outcome.append(repr(error))

reader = threading.Thread(target=read, daemon=True)
reader.start()
"""


@pytest.mark.parametrize("who", ["group", "observer"])
def test_the_events_end_with_the_process(job: Job, who: str) -> None:
    assert run_program(READER, who, job.server.endpoint, job.id) == "ended\n"

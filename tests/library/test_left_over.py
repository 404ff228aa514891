"""Nodes that their program forgets."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import rdzv_etcd
from rdzv_etcd import Left, aio
from rdzv_etcd.errors import MisuseError, RendezvousFailedError, StateCorruptError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.runtime.loop_thread import THREAD_NAME, LoopHold
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.observer import Observer
from rdzv_etcd.world.world import World
from tests.library.nodes import (
    LIMIT_S,
    Job,
    join_all,
    node_settings,
    wait_until,
)
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


def wait_for_leaving(job: Job) -> None:
    wait_until("its leaving", lambda: not job.keys(b"nodes/"))
    wait_until(
        "the loop's end",
        lambda: THREAD_NAME not in [thread.name for thread in threading.enumerate()],
    )
    gc.collect()  # what the loop's thread held until now


def test_a_group_that_nobody_refers_to_any_more_leaves(job: Job) -> None:
    node = job.group(lease_ttl=LONG_S)
    node.join()
    del node
    gc.collect()
    wait_for_leaving(job)
    assert not job.left()


def test_a_group_that_is_dropped_after_an_error_leaves(
    leak_check: LeakCheck, fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    """Though the node remembers the error, and with its traceback who was told of it."""
    job = Job(fresh_etcd(), job_id, leak_check)

    def fail() -> None:
        node = job.group(lease_ttl=LONG_S)
        node.join()
        job.server.gateway.put(job.root + b"ctl/round", b"a foreign value")
        with pytest.raises(StateCorruptError):
            node.join()

    fail()
    gc.collect()
    wait_for_leaving(job)


def test_whoever_holds_the_world_takes_part(job: Job) -> None:
    """Without the group as well: the world keeps it."""
    world = job.group(lease_ttl=LONG_S).join()
    gc.collect()
    assert not world.wait_over(0.5)
    assert job.keys(b"nodes/")
    del world
    wait_for_leaving(job)


def test_a_group_dropped_on_the_loops_own_thread_leaves(job: Job) -> None:
    """The garbage collector runs wherever it is due."""
    node = job.group(lease_ttl=LONG_S)
    node.join()
    held = [node]

    async def drop() -> None:
        held.clear()
        gc.collect()

    del node
    with LoopHold.acquire() as loop_thread:
        loop_thread.run(drop())
    wait_for_leaving(job)
    assert not job.left()


def test_a_group_that_is_left_on_the_loops_own_thread_leaves(job: Job) -> None:
    """By a ``__del__`` method, say, that the garbage collector calls there."""
    with job.groups(2, lease_ttl=LONG_S) as (one, other), LoopHold.acquire() as loop_thread:
        worlds = join_all([one, other])

        async def leave() -> None:
            one.leave("is collected")

        loop_thread.run(leave())
        assert one.has_left
        assert worlds[1].wait_over(LIMIT_S)
        assert worlds[1].change == Left({one.node_id: "is collected"})


@pytest.mark.parametrize(
    "call",
    [
        lambda group, _: group.join(),
        lambda group, _: group.finish(),
        lambda _, world: world.barrier("saved"),
        lambda _, world: world.exchange(b"mine"),
        lambda _, world: world.wait_over(),
        lambda _, world: world.store.get("key"),
    ],
    ids=["join", "finish", "barrier", "exchange", "wait_over", "get"],
)
def test_what_blocks_is_refused_on_the_loops_own_thread(
    job: Job, call: Callable[[Group, World], object]
) -> None:
    with job.group() as node, LoopHold.acquire() as loop_thread:
        world = node.join()

        async def block() -> None:
            call(node, world)

        with pytest.raises(MisuseError, match="on the library's own thread"):
            loop_thread.run(block())
        assert not world.over


def test_a_second_node_in_the_place_of_one_left_over_warns_and_tells_the_way_out(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    settings = job.settings(lease_ttl=LONG_S)
    left_over = Group(settings)
    left_over.join()
    with Group(settings) as again:
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert left_over.node_id in record.getMessage()
        assert f"rdzv_etcd.leave_all({job.id!r})" in record.getMessage()
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(again.join)
            left_over.leave()
            assert joining.result(LIMIT_S).size == 1


def test_leave_all_ends_the_nodes_of_this_process(job: Job) -> None:
    with job.groups(2, lease_ttl=LONG_S) as nodes:
        rdzv_etcd.leave_all("another job")
        assert not any(node.has_left for node in nodes)
        rdzv_etcd.leave_all(job.id)
        for node in nodes:
            with pytest.raises(RendezvousFailedError, match="left"):
                node.join()


def test_leave_all_goes_through_all_although_one_fails(job: Job) -> None:
    class Stubborn(EtcdClient):
        async def close(self) -> None:
            await super().close()
            raise OSError("does not close")

    settings = job.settings("3", lease_ttl=LONG_S)
    nodes = [Group(settings, connect=lambda: Stubborn(settings.connection)) for _ in range(3)]
    with pytest.raises(OSError, match="does not close"):
        rdzv_etcd.leave_all(job.id)
    assert [node.has_left for node in nodes] == [True] * 3


def test_nodes_made_side_by_side_are_no_reason_to_warn(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with job.groups(2) as nodes, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(nodes[0].join)
        nodes[1].join()
        joining.result(LIMIT_S)
    assert caplog.records == []


@pytest.mark.parametrize("how", ["leave", "leave_all", "dropped"])
def test_what_belongs_to_a_node_hears_once_that_it_has_left(job: Job, how: str) -> None:
    group = job.group()
    group.join()
    told: list[str] = []
    heard = threading.Event()
    group.when_left(lambda: told.append("first"))
    group.when_left(heard.set)
    if how == "leave":
        group.leave()
        group.when_left(lambda: told.append("at once"))
        assert told == ["first", "at once"]
        group.leave()
    elif how == "leave_all":
        rdzv_etcd.leave_all(job.id)
    else:
        del group
        gc.collect()
    assert heard.wait(LIMIT_S)
    assert told[0] == "first"
    assert told.count("first") == 1


@pytest.mark.parametrize(
    "raised", [ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_what_is_called_and_raises_keeps_nothing_from_being_ended(
    job: Job, caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    """Nor does it touch the other groups of the process, whatever it raises."""
    other_job = f"{job.id}-other"
    job.leaks.watch_job(job.server.gateway, other_job)
    heard = threading.Event()

    def fail() -> None:
        raise raised("what the program does")

    with Group(node_settings(job.server, other_job, "1")) as other:
        world = other.join()
        group = job.group()
        group.join()
        group.when_left(fail)
        group.when_left(heard.set)
        group.leave()
        assert heard.is_set()
        assert "what the program does" in caplog.text
        world.barrier("goes on", timeout_s=LIMIT_S)
        assert not world.over


@pytest.mark.parametrize("what", ["connect", "observe"])
def test_what_is_called_cannot_connect_on_the_librarys_thread(job: Job, what: str) -> None:
    """It is told so, and keeps no thread."""
    settings = job.settings()
    make: Callable[[], object] = partial(Group if what == "connect" else Observer, settings)
    caught: list[MisuseError] = []
    heard = threading.Event()

    def connect() -> None:
        try:
            make()
        except MisuseError as error:
            caught.append(error)
        finally:
            heard.set()

    group = Group(settings)
    group.when_left(connect)
    group.leave()
    assert heard.is_set()
    (error,) = caught
    assert "on the library's own thread" in str(error)


@pytest.mark.parametrize("callback", [None, "leave", 3])
def test_what_cannot_be_called_is_refused_at_once(
    job: Job, caplog: pytest.LogCaptureFixture, callback: Any
) -> None:
    with job.group() as group:
        for face in (group, aio.Group(group)):
            with pytest.raises(MisuseError, match=re.escape(f"when_left is {callback!r};")):
                face.when_left(callback)
    assert caplog.records == []


def test_what_is_called_at_once_may_end_the_program_that_asked_for_it(job: Job) -> None:
    group = job.group()
    group.leave()
    with pytest.raises(SystemExit, match="3"):
        group.when_left(partial(sys.exit, 3))

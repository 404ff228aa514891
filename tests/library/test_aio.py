"""The library on asyncio: several nodes in one event loop, cancellation, and what it leaves."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvloop

import rdzv_etcd
from rdzv_etcd import Finished, Left, Waiting
from rdzv_etcd.aio import Group, World
from rdzv_etcd.errors import (
    JobClosedError,
    MisuseError,
    SettingsError,
)
from rdzv_etcd.runtime.loop_thread import THREAD_NAME
from tests.library.nodes import LIMIT_S, Job, wait_until, when_entered
from tests.support.scenarios import as_test


def connect(job: Job, nodes: int | tuple[int, int], **given: Any) -> Coroutine[Any, Any, Group]:
    quick: dict[str, Any] = {"lease_ttl": 3, "settle": 0.1, "closed_ttl": 5, "ended_ttl": 5}
    where: dict[str, Any] = {"job": job.id, "nodes": nodes, "local_addr": "127.0.0.1"}
    return rdzv_etcd.aio.connect(job.server.endpoint, **where, **{**quick, **given})


@asynccontextmanager
async def joined(
    job: Job, count: int, nodes: int | tuple[int, int] = 0, **given: Any
) -> AsyncIterator[tuple[list[Group], list[World]]]:
    """So many nodes, which have joined: groups and worlds in the order of their ranks."""
    async with AsyncExitStack() as stack:
        groups = [
            await stack.enter_async_context(await connect(job, nodes or count, **given))
            for _ in range(count)
        ]
        worlds = await asyncio.gather(*(group.join() for group in groups))
        pairs = sorted(zip(worlds, groups, strict=True), key=lambda pair: pair[0].rank)
        yield [group for _, group in pairs], [world for world, _ in pairs]


async def until_there(job: Job, count: int) -> None:
    """Until that many presences are there."""
    while len(job.keys(b"nodes/")) != count:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0.05)


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def loop_policy(request: pytest.FixtureRequest) -> Iterator[None]:
    """The program's event loops are asyncio's own or uvloop's; the library's own is neither."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(request.param())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


awaited = as_test(lambda scenario: run(scenario()))


@awaited
async def test_what_members_do_together(loop_policy: None, job: Job) -> None:
    async with joined(job, 3, data={"gpus": 8}) as (groups, worlds):
        assert [world.rank for world in worlds] == [0, 1, 2]
        assert {world.epoch for world in worlds} == {worlds[0].epoch}
        given = [b"%d" % world.rank for world in worlds]
        taken = await asyncio.gather(*(w.exchange(given[w.rank], LIMIT_S) for w in worlds))
        assert taken == [given] * 3
        await asyncio.gather(*(world.barrier("here", LIMIT_S) for world in worlds))
        waiting = asyncio.ensure_future(worlds[0].store.get("seed", LIMIT_S))
        await worlds[1].store.set("seed", b"17")
        assert await waiting == b"17"
        members = await worlds[2].members()
        assert [member.node_id for member in members] == [group.node_id for group in groups]
        assert {member.data["gpus"] for member in members} == {8}
        assert await worlds[1].node_ids() == tuple(group.node_id for group in groups)
        listener = worlds[0].take_listener()
        assert listener is not None
        assert listener.port == worlds[0].master.port
        listener.close()
        assert not worlds[0].over
        assert await groups[1].fail("no more data")
        with pytest.raises(JobClosedError, match="no more data"):
            await anext(groups[0].worlds())


def test_a_loop_over_worlds_ends_when_the_job_is_finished(job: Job) -> None:
    async def member(group: Group, seen: list[World]) -> None:
        async for world in group.worlds():
            seen.append(world)
            if world.round == 2:
                assert await group.finish("all done")
            elif world.rank == 0:
                continue  # joins again, which ends this world for all
            await world.wait_over()

    async def work() -> None:
        seen: list[World] = []
        async with AsyncExitStack() as stack:
            groups = [await stack.enter_async_context(await connect(job, 2)) for _ in range(2)]
            await asyncio.gather(*(member(group, seen) for group in groups))
            assert sorted(world.round for world in seen) == [1, 1, 2, 2]
            assert all(isinstance(world.change, Finished) for world in seen if world.round == 2)
            assert {group.closure() for group in groups} != {None}

    run(work())


@awaited
async def test_a_member_says_why_it_is_back(job: Job) -> None:
    async with joined(job, 2) as (groups, worlds):
        why = "its worker was killed by SIGSEGV"
        back = asyncio.ensure_future(groups[1].join(because=why))
        assert await worlds[0].wait_over(LIMIT_S)
        node_id = groups[1].node_id
        assert worlds[0].change == Waiting((node_id,), {node_id: why})
        assert await asyncio.gather(groups[0].join(), back)


@awaited
async def test_a_join_that_is_cancelled_is_taken_back_and_may_be_tried_again(job: Job) -> None:
    async with await connect(job, 2) as one, await connect(job, 2) as other:
        for _ in range(2):  # the second one binds a socket of its own
            joining = asyncio.ensure_future(one.join())
            await until_there(job, 1)
            beside = asyncio.ensure_future(one.join())
            await asyncio.sleep(0)
            beside.cancel()
            await asyncio.wait([beside])
            with pytest.raises(MisuseError):
                await one.join()
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            await until_there(job, 0)
        worlds = await asyncio.gather(one.join(), other.join())
        assert {world.rank for world in worlds} == {0, 1}


@awaited
async def test_a_join_that_is_cancelled_when_it_is_done_leaves_the_world(
    loop_policy: None, job: Job
) -> None:
    """Nobody would work in it. The others are told at once, and the node may join again."""
    async with await connect(job, 2) as one, await connect(job, 2) as other:
        joining = asyncio.ensure_future(one.join())
        loop = asyncio.get_running_loop()
        with when_entered(one._part.node, lambda: loop.call_soon_threadsafe(joining.cancel)):
            world = await other.join()
            with pytest.raises(asyncio.CancelledError):
                await joining
        assert await world.wait_over(LIMIT_S)
        assert world.change == Left({one.node_id: "was interrupted in its join"})
        again = await asyncio.gather(one.join(), other.join())
        await asyncio.gather(*(world.barrier("all", LIMIT_S) for world in again))


WAITS: dict[str, Callable[[World], Coroutine[Any, Any, object]]] = {
    "barrier": lambda world: world.barrier("never"),
    "exchange": lambda world: world.exchange(b"mine"),
    "wait_over": lambda world: world.wait_over(),
    "get": lambda world: world.store.get("never"),
}


@pytest.mark.parametrize("name", WAITS)
@awaited
async def test_what_waits_can_be_cancelled(job: Job, name: str) -> None:
    """What others may have counted on ends this node's part in the world."""
    async with joined(job, 2) as (groups, worlds):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(WAITS[name](worlds[0]), 0.3)
        assert worlds[0].over is (name in ("barrier", "exchange"))
        now = worlds
        if worlds[0].over:
            assert await worlds[1].wait_over(LIMIT_S)
            now = await asyncio.gather(*(group.join() for group in groups))
        await asyncio.gather(*(world.barrier("goes on", LIMIT_S) for world in now))


def test_a_connection_that_is_cancelled_leaves_no_node_behind(job: Job) -> None:
    async def work() -> None:
        connecting = asyncio.ensure_future(connect(job, 1))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    run(work())
    wait_until(
        "it has left",
        lambda: not any(each.name.startswith(THREAD_NAME) for each in threading.enumerate()),
    )
    gc.collect()  # what gRPC's thread lives for


def test_an_event_loop_that_ends_while_a_call_waits(loop_policy: None, job: Job) -> None:
    groups: list[Group] = []

    async def work() -> None:
        group = await connect(job, 2)
        groups.append(group)
        waiting = asyncio.ensure_future(group.join())
        await until_there(job, 1)
        assert not waiting.done()  # asyncio.run cancels it

    run(work())
    run(groups[0].leave())


def test_a_node_leaves_and_others_start_while_all_threads_are_busy(job: Job) -> None:
    """The event loop's own threads may wait for anything, this very node's leaving included."""
    release = threading.Event()

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.ensure_future(asyncio.to_thread(release.wait, LIMIT_S))
        try:
            async with joined(job, 2, (1, 2)) as (groups, worlds):
                for _ in range(2):  # the second join binds a socket of its own
                    await asyncio.gather(*(group.join(LIMIT_S / 4) for group in groups))
                await groups[1].leave("has to go")
                assert await worlds[0].wait_over()
            assert not busy.done()
        finally:
            release.set()
        assert await busy

    run(work())


@awaited
async def test_a_node_leaves_although_its_leaving_is_cancelled(job: Job) -> None:
    async with joined(job, 2, (1, 2)) as (groups, worlds):
        leaving = asyncio.ensure_future(groups[1].leave("has to go"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert groups[1].has_left
        assert await worlds[0].wait_over()
        assert worlds[0].change == Left({groups[1].node_id: "has to go"})


def test_several_event_loops_one_after_the_other(job: Job) -> None:
    groups: list[Group] = []

    async def first() -> None:
        groups.append(await connect(job, 1))
        assert (await groups[0].join()).round == 1

    async def second() -> None:
        assert (await groups[0].join()).round == 2
        await groups[0].leave()

    run(first())
    run(second())


def test_the_interpreter_does_not_wait_for_a_connect_that_was_cancelled() -> None:
    """Nor for the etcd that does not answer it."""
    program = (
        "import asyncio, sys, rdzv_etcd\n"
        "async def main():\n"
        "    connecting = rdzv_etcd.aio.connect(\n"
        "        sys.argv[1], job='job', nodes=1, connect_timeout=3600\n"
        "    )\n"
        "    try:\n"
        "        await asyncio.wait_for(connecting, 0.5)\n"
        "    except asyncio.TimeoutError:\n"
        "        print('cancelled')\n"
        "asyncio.run(main())\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", program, endpoint],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "cancelled\n"), done.stderr


def test_a_bad_setting_is_an_error_at_once() -> None:
    with pytest.raises(SettingsError, match="nodes"):
        asyncio.run(rdzv_etcd.aio.connect("localhost:1", job="j", nodes="many"))  # type: ignore[arg-type]

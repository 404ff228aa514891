"""Calls that a signal's handler interrupts by raising, wherever that is."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import rdzv_etcd
from rdzv_etcd import aio
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.observer import Observer
from tests.library.nodes import LIMIT_S, Job
from tests.support.interruptions import interrupted_at
from tests.support.servers import EtcdServer

pytestmark = [  # what an interruption lets lie, for Python to collect
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


@contextmanager
def other_user(server: EtcdServer) -> Iterator[Observer]:
    """Keeps the library's thread going when a node or an observer is gone."""
    with rdzv_etcd.observe(server.endpoint, job="another") as observer:
        yield observer


def test_a_node_whose_leaving_was_interrupted_leaves(job: Job) -> None:
    """By itself if it had begun, otherwise when it is told again."""
    settings = job.settings(lease_ttl=LONG_S)
    with other_user(job.server):
        for line in itertools.count(1):
            group = Group(settings)
            group.join()
            was_interrupted = interrupted_at(line, group.leave)
            group.leave()
            assert not job.keys(b"nodes/"), line
            if not was_interrupted:
                break
    assert line > 10


def test_a_node_whose_leaving_was_interrupted_leaves_with_all(job: Job) -> None:
    """Even if no call has come further than to note that it leaves."""
    with other_user(job.server):
        group = job.group(lease_ttl=LONG_S)
        group.join()
        assert job.keys(b"nodes/")
        group._part.has_ended = True
        rdzv_etcd.leave_all(job.id)
        assert not job.keys(b"nodes/")


def test_an_observer_whose_closing_was_interrupted_is_closed(job: Job) -> None:
    """The check for leaks finds its connection otherwise."""
    with other_user(job.server):
        for line in itertools.count(1):
            observer = rdzv_etcd.observe(job.server.endpoint, job=job.id)
            hold = observer._part.loop_thread
            was_interrupted = interrupted_at(line, observer.close)
            observer.close()
            assert hold._released, line
            if not was_interrupted:
                break
    assert line > 10


def test_a_join_that_was_interrupted_may_be_made_again(job: Job) -> None:
    """At each line, also when its world is there, which the node leaves."""
    with job.groups(1) as (node,):
        for line in itertools.count(1):
            was_interrupted = interrupted_at(line, node.join)
            assert node.join().size == 1, line
            if not was_interrupted:
                break
    assert line > 20


Twice = Callable[[Group, Callable[[], None]], None]


def blocking_twice(group: Group, begun: Callable[[], None]) -> None:
    """Leave while another thread does; what ``begun`` does comes between the two calls."""
    first = threading.Thread(target=group.leave)
    first.start()
    begun()
    group.leave()
    first.join(LIMIT_S)


def awaited_twice(group: Group, begun: Callable[[], None]) -> None:
    """The same on asyncio, where another task does."""

    async def leave() -> None:
        first = asyncio.ensure_future(aio.Group(group).leave())
        await asyncio.sleep(0)
        begun()
        await aio.Group(group).leave()
        await first

    asyncio.run(asyncio.wait_for(leave(), LIMIT_S))


@pytest.mark.parametrize("face", [blocking_twice, awaited_twice])
def test_leaving_again_waits_for_the_leaving_that_is_under_way(
    job: Job, monkeypatch: pytest.MonkeyPatch, face: Twice
) -> None:
    group = job.group()
    begun, go, left = (threading.Event() for _ in range(3))
    group.when_left(left.set)
    leave = group._part.node.leave

    async def leave_slowly(reason: str) -> None:
        begun.set()
        while not go.is_set():  # noqa: ASYNC110 - it is another thread's event
            await asyncio.sleep(0.01)
        await leave(reason)

    monkeypatch.setattr(group._part.node, "leave", leave_slowly)

    def let_go() -> None:
        assert begun.wait(LIMIT_S)
        threading.Timer(0.2, go.set).start()

    face(group, let_go)
    assert left.is_set()
    group.leave()

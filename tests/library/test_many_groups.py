"""Many groups in one process, and one of many members that dies."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import psutil
import pytest

from rdzv_etcd import Group, Lost, World
from rdzv_etcd.errors import BarrierBrokenError, WorldOverError
from rdzv_etcd.world_change import PROCESS_EXITED
from tests.library.nodes import LIMIT_S, Job, at_once, join_all, node_settings, wait_until
from tests.library.test_peer_links import watched_by
from tests.support.leaks import left_of_job
from tests.support.servers import EtcdServer

MEMBERS = 16


def test_who_waits_at_a_barrier_is_told_which_of_16_has_died(job: Job) -> None:
    """It dies in the barrier itself; the last to come is told as well."""
    job.leaks.timeout_s = 40.0  # the lease of who was killed
    quick: dict[str, Any] = {"lease_ttl": 8, "peer_links": True, "last_call_timeout": 60}
    count = f"{MEMBERS - 1}:{MEMBERS}"
    with ExitStack() as stack:
        victim = stack.enter_context(job.remote(count, **quick))
        stack.callback(victim.process.kill)
        nodes = stack.enter_context(job.groups(MEMBERS - 1, count, **quick))
        assert victim.node_id
        _, *worlds = at_once([partial(victim.call, "join"), *[node.join for node in nodes]])
        wait_until(
            "the victim is watched", lambda: any(victim.node_id in watched_by(n) for n in nodes)
        )
        pool = stack.enter_context(ThreadPoolExecutor(MEMBERS))
        dying = pool.submit(victim.call, "barrier", "all", LIMIT_S)
        waiting = [pool.submit(told_at_barrier, world) for world in worlds[1:]]
        wait_until("all but one are there", lambda: arrivals(job) == MEMBERS - 1)
        victim.process.kill()
        told = [each.result(LIMIT_S) for each in waiting]
        assert worlds[0].wait_over(LIMIT_S)
        told.append(told_at_barrier(worlds[0]))
        with pytest.raises(EOFError):
            dying.result(LIMIT_S)
        for error in told:
            assert isinstance(error.change, Lost)
            assert list(error.change.members) == [victim.node_id]
            assert PROCESS_EXITED in str(error)
        again = join_all(nodes)
        assert {world.size for world in again} == {MEMBERS - 1}


def told_at_barrier(world: World) -> WorldOverError:
    with pytest.raises(BarrierBrokenError) as caught:
        world.barrier("all", LIMIT_S)
    return caught.value


def arrivals(job: Job) -> int:
    return len([key for key in job.keys(b"barrier/") if b"/given/" in key])


def one_life(server: EtcdServer, job_id: str) -> None:
    """All that a group has, used and left."""
    with Group(node_settings(server, job_id, "1", closed_ttl=1, ended_ttl=1)) as group:
        world = group.join()
        world.barrier("here", LIMIT_S)
        assert world.exchange(b"mine", LIMIT_S) == [b"mine"]
        with group.events() as events:
            world.store.set("state", b"1")
            assert events.next(LIMIT_S) is not None


class Process:
    """What this process has."""

    def __init__(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.threads = set(threading.enumerate())
        self.descriptors = process.num_fds()
        self.memory = process.memory_info().rss
        self.objects = len(gc.get_objects())


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.release)])
def test_groups_one_after_the_other_leave_nothing_behind(job: Job, count: int) -> None:
    for number in range(10):  # what is made once
        one_life(job.server, f"{job.id}-first-{number}")
    before = Process()
    for number in range(count):
        one_life(job.server, f"{job.id}-{number}")
    after = Process()
    assert after.threads <= before.threads | set(threading.enumerate())
    assert len(after.threads) <= len(before.threads)
    assert after.descriptors <= before.descriptors
    # gRPC keeps the event loop of each, which is closed: some 17 objects. A group has thousands.
    assert after.objects - before.objects < 1000 + 25 * count
    assert after.memory - before.memory < 20e6 + 10e3 * count
    for number in (0, count - 1):
        assert left_of_job(job.server.gateway, f"{job.id}-{number}") == []


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.release)])
def test_groups_at_once_leave_nothing_behind(job: Job, count: int) -> None:
    before = Process()
    with job.groups(count, lease_ttl=15) as nodes:
        worlds = join_all(nodes)
        assert {world.size for world in worlds} == {count}
        at_once([partial(world.barrier, "here", LIMIT_S) for world in worlds])
    wait_until("threads and sockets have gone", lambda: Process().descriptors <= before.descriptors)
    assert job.left() == []

"""Many groups in one process, and one of many members that dies."""

from __future__ import annotations

import gc
import threading
from functools import partial

import psutil
import pytest

from rdzv_etcd import Group
from tests.library.nodes import LIMIT_S, Job, at_once, join_all, node_settings, wait_until
from tests.support.leaks import left_of_job
from tests.support.servers import EtcdServer


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
    # gRPC closes its own a moment later, and announces that to nobody.
    wait_until("their end", lambda: Process().descriptors <= before.descriptors)
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

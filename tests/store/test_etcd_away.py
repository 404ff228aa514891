"""Without etcd the store neither hangs nor loses anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rdzv_etcd.torch_plugin.store import EtcdStore
from tests.store.conftest import place_on
from tests.support.leaks import LeakCheck
from tests.support.servers import EtcdServer

SHORT = timedelta(seconds=1)
BOUND_S = 30.0
"""Far above the timeout, far below for ever."""


@pytest.fixture
def server(fresh_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    return fresh_etcd()


@pytest.fixture
def store(leak_check: LeakCheck, server: EtcdServer, job_id: str) -> Iterator[EtcdStore]:
    with place_on(server, job_id) as place:
        yield place.open()


OPERATIONS: dict[str, Callable[[EtcdStore], object]] = {
    "get": lambda store: store.get("there"),
    "get of a missing key": lambda store: store.get("absent"),
    "wait": lambda store: store.wait(["there"]),
    "check": lambda store: store.check(["there"]),
    "set": lambda store: store.set("other", "1"),
    "add": lambda store: store.add("n", 1),
    "num_keys": lambda store: store.num_keys(),
}


@pytest.mark.parametrize("how", ["paused", "killed"])
def test_every_call_ends_within_its_timeout(store: EtcdStore, server: EtcdServer, how: str) -> None:
    store.set("there", "1")
    if how == "paused":
        server.pause()
    else:
        server.kill()
    store.set_timeout(SHORT)
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        calls = {name: pool.submit(call, store) for name, call in OPERATIONS.items()}
        for name, call in calls.items():
            assert isinstance(call.exception(BOUND_S), dist.DistStoreError), name
    if how == "paused":
        server.resume()


def test_a_restart_of_etcd_is_waited_out(store: EtcdStore, server: EtcdServer) -> None:
    """Calls under way, waiting ones included, end well; nothing counts twice."""
    store.add("n", 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(store.get, "late")
        server.kill()
        adding = pool.submit(store.add, "n", 1)
        server.start()
        assert adding.result(60) == 2
        store.set("late", "value")
        assert waiting.result(60) == b"value"
    assert store.add("n", 1) == 3

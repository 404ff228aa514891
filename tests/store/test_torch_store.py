"""What torch expects of a store, on every etcd."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist
import torch.distributed.elastic.utils.store as store_util
from torch._C._distributed_c10d import PrefixStore, Store

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.protocol.store import StoreKeys
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.torch_plugin.store import EtcdStore
from rdzv_etcd.world.round_store import RoundStore
from tests.store.conftest import BRIEF, GENEROUS, Place
from tests.support.signals import handling

T = TypeVar("T")
Open = Callable[[], EtcdStore]
THREADS = 64


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work(i)`` in as many threads at the same time; return the results in order.

    Raises what was raised first: others may only have waited for that thread.
    """
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, number) for number in range(count)]
        for future in as_completed(futures):
            future.result()
    return [future.result() for future in futures]


# --- waiting --------------------------------------------------------------------------------------


def test_a_wait_in_one_thread_is_released_by_sets_in_another(open_store: Open) -> None:
    waiter, writer = open_store(), open_store()
    writer.set("there before", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.wait, ["a", "there before", "b"])
        writer.set("b", "1")
        writer.set("unrelated", "1")
        with pytest.raises(dist.DistStoreError):
            writer.wait(["a"], BRIEF)
        assert not waiting.done()
        writer.add("a", 1)
        waiting.result(60)


def test_a_missing_key_times_out_and_the_error_names_it(store: EtcdStore) -> None:
    store.set("there", "1")
    store.set_timeout(BRIEF)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms, keys: absent"):
        store.get("absent")
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 50ms, keys: a, b$"):
        store.multi_get(["a", "there", "b"])
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 1ms, keys: a$"):
        store.wait(["there", "a"], timedelta(milliseconds=1))
    with pytest.raises(dist.DistStoreError, match="and 984 more"):
        store.wait([f"key{i}" for i in range(1000)])


def test_timeouts_are_torchs(store: EtcdStore, place: Place) -> None:
    assert EtcdStore(place.round_store()).timeout == timedelta(seconds=300)
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    with store_util.store_timeout(store, 3):
        assert store.timeout == timedelta(seconds=3)
    assert store.timeout == timedelta(seconds=7)


def test_zero_means_no_limit(open_store: Open) -> None:
    """As torch's kNoTimeout."""
    waiter, writer = open_store(), open_store()
    waiter.set_timeout(timedelta(0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.get, "key")
        with pytest.raises(dist.DistStoreError):
            writer.wait(["key"], BRIEF)
        assert not waiting.done()
        writer.set("key", "value")
        assert waiting.result(60) == b"value"


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["", "abc", "1.5", "1_000", "7 apples", str(2**63), "-" + 20 * "9", 5000 * "9"]
)
def test_adding_to_something_else_than_a_number_is_refused(store: EtcdStore, value: str) -> None:
    store.set("n", value)
    with pytest.raises(ValueError, match="is not a 64-bit number") as raised:
        store.add("n", 1)
    assert isinstance(raised.value, RdzvEtcdError)
    assert store.get("n") == value.encode()


@pytest.mark.parametrize("value", [b"#" + 5000 * b"9" + b",1", b"#1,-" + 5000 * b"9"])
def test_a_counter_of_thousands_of_digits_is_none_of_this_library(
    place: Place, store: EtcdStore, value: bytes
) -> None:
    key = StoreKeys(place.keys).value("n")
    place.loop_thread.run(place.etcd.txn(Txn((), (Put(key, value, place.lease_id),))))
    for operation in (store.get, lambda key: store.add(key, 1), lambda key: store.add(key, 0)):
        with pytest.raises(dist.DistStoreError, match=key.decode()):
            operation("n")


def test_64_concurrent_adders_each_see_their_own_sum(open_store: Open) -> None:
    def add(_: int) -> list[int]:
        store = open_store()
        return [store.add("n", 1) for _ in range(5)]

    sums = [number for numbers in in_threads(THREADS, add) for number in numbers]
    assert sorted(sums) == list(range(1, 5 * THREADS + 1))


# --- compare_set, append, delete ------------------------------------------------------------------


def test_only_one_of_many_compare_sets_wins(open_store: Open) -> None:
    def claim(index: int) -> bytes:
        return open_store().compare_set("leader", "", str(index))

    results = in_threads(32, claim)
    assert len(set(results)) == 1
    assert open_store().get("leader") == results[0]


# --- many keys ------------------------------------------------------------------------------------


def test_many_large_values(store: EtcdStore) -> None:
    """More than etcd takes in one request, and more than a gRPC client takes in one answer."""
    keys = [f"k{index}" for index in range(10)]
    values = [bytes([index]) * 700_000 for index in range(10)]
    store.multi_set(keys, values)
    assert store.multi_get(keys) == values


def test_multi_set_needs_as_many_values_as_keys(store: EtcdStore) -> None:
    with pytest.raises(dist.DistStoreError, match="2 keys but 1 values"):
        store.multi_set(["a", "b"], ["1"])


def test_queues_are_refused_as_torch_refuses_them(store: EtcdStore) -> None:
    refusals = (NotImplementedError, AttributeError)  # torch has had queues since 2.7
    with pytest.raises(refusals, match="queue"):
        store.queue_push("queue", "item")
    with pytest.raises(refusals, match="queue"):
        store.queue_pop("queue")


# --- through torch --------------------------------------------------------------------------------


def test_a_prefix_store_over_it_offers_the_same(store: EtcdStore) -> None:
    prefixed = PrefixStore("outer", PrefixStore("inner", store))
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"
    assert store.get("inner/outer/key") == b"value"
    assert prefixed.add("n", 2) == 2
    assert prefixed.compare_set("cas", "", "x") == b"x"
    prefixed.append("key", "+")  # type: ignore[attr-defined]
    prefixed.multi_set(["a", "b"], ["1", "2"])  # type: ignore[attr-defined]
    assert prefixed.multi_get(["key", "a", "b"]) == [b"value+", b"1", b"2"]
    assert prefixed.check(["a", "b"])
    assert not prefixed.check(["absent"])
    prefixed.wait(["a"])
    prefixed.wait(["a"], GENEROUS)
    assert prefixed.num_keys() == 5
    assert prefixed.delete_key("a") is True
    assert prefixed.delete_key("a") is False
    assert prefixed.has_extended_api()  # type: ignore[attr-defined]


def test_a_prefix_stores_timeout_counts_and_its_error_is_torchs(store: EtcdStore) -> None:
    prefixed = PrefixStore("p", store)
    prefixed.set_timeout(BRIEF)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms, keys: p/absent"):
        prefixed.get("absent")
    with pytest.raises(dist.DistStoreError, match="wait timeout after 1ms, keys: p/absent"):
        prefixed.wait(["absent"], timedelta(milliseconds=1))


def test_a_clone_shares_keys_but_not_the_timeout(store: EtcdStore) -> None:
    clone = store.clone()
    clone.set_timeout(timedelta(seconds=1))
    clone.add("n", 1)
    assert store.add("n", 1) == 2
    assert store.timeout == GENEROUS


def test_a_clone_that_only_torch_holds_is_used(store: EtcdStore) -> None:
    clone = PrefixStore("p", store).clone()  # type: ignore[attr-defined]
    gc.collect()
    clone.set("key", "value")
    assert store.get("p/key") == b"value"
    assert clone.clone().get("key") == b"value"


def test_torchs_own_test_of_stores_in_python(store: EtcdStore) -> None:
    dist._test_python_store(store)  # type: ignore[attr-defined]


def test_clones_live_no_longer_than_the_hold_on_the_runtime(place: Place) -> None:
    loop_thread = LoopHold.acquire()
    store = EtcdStore(RoundStore(place.etcd, loop_thread, place.keys, place.lease_id))
    clone = weakref.ref(store.clone())
    assert clone() is not None
    loop_thread.release()
    assert clone() is None


@pytest.mark.parametrize("prefixed", [False, True])
def test_torchs_barrier_of_64(open_store: Open, prefixed: bool) -> None:
    def arrive(rank: int) -> None:
        store = open_store()
        target: Store = PrefixStore("p", store) if prefixed else store
        store_util.barrier(target, THREADS, "exit", barrier_timeout=60)

    in_threads(THREADS, arrive)


def test_torchs_barrier_names_the_missing(open_store: Open) -> None:
    with pytest.raises(dist.DistStoreError, match=r"missing_ranks=\[node [12], node [12]\]"):
        store_util.barrier(
            open_store(),
            3,
            "exit",
            barrier_timeout=0.05,
            rank=0,
            rank_tracing_decoder=lambda rank: f"node {rank}",
            trace_timeout=0.05,
        )


def test_the_exchange_of_ranks_that_torchs_agent_does(open_store: Open) -> None:
    """As ``SimpleElasticAgent._assign_worker_ranks``: all set, rank 0 reads all and answers all."""
    size = 32

    def assign(rank: int) -> bytes:
        store = open_store()
        store.set(f"torchelastic/role_info/{rank}", f"role of {rank}")
        if rank == 0:
            roles = store.multi_get([f"torchelastic/role_info/{i}" for i in range(size)])
            answers = [role + b" assigned" for role in roles]
            store.multi_set([f"torchelastic/assigned_ranks/{i}" for i in range(size)], answers)
        return store.get(f"torchelastic/assigned_ranks/{rank}")

    assert in_threads(size, assign) == [b"role of %d assigned" % rank for rank in range(size)]


def test_interrupting_a_wait_leaves_the_store_usable(place: Place, store: EtcdStore) -> None:
    """torchrun's SIGTERM handler raises inside whatever the agent waits for."""

    class Terminated(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Terminated

    with handling(signal.SIGUSR1, handler):
        sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
        sender.start()
        with pytest.raises(Terminated):
            store.get("absent")
        sender.join()
    store.set("key", "value")
    assert store.get("key") == b"value"

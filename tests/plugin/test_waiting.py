"""``num_nodes_waiting`` and closing: how changes reach the agent, and what it does without etcd."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.multiprocessing.api import (
    SignalException,
    _terminate_process_handler,
)

import rdzv_etcd
from rdzv_etcd import NodeLeft, Snapshot
from rdzv_etcd.torch_plugin.handler import EtcdRendezvousHandler
from tests.library.nodes import ALONE, LIMIT_S, wait_until
from tests.plugin.handlers import PluginJob, handlers, join_all
from tests.support.leaks import LeakCheck, job_root
from tests.support.servers import EtcdServer
from tests.support.signals import handling

FROM_MEMORY_S = 3.0
"""An answer from memory takes microseconds, and what a busy machine adds; one that etcd were asked
for would take the five seconds of ``read_timeout``."""


def test_a_waiter_is_counted_until_it_is_taken_in(job: PluginJob) -> None:
    with job.handlers(2, "1:2", **ALONE) as (early, late), ThreadPoolExecutor(1) as pool:
        assert early.num_nodes_waiting() == 0
        assert early.next_rendezvous().world_size == 1
        joining = pool.submit(late.next_rendezvous)
        wait_until("the waiter", lambda: early.num_nodes_waiting() == 1)
        assert early.next_rendezvous().world_size == 2
        assert joining.result(LIMIT_S).world_size == 2
        assert (early.num_nodes_waiting(), late.num_nodes_waiting()) == (0, 0)


@pytest.mark.parametrize("waits", [True, False], ids=["it waits", "it works"])
def test_the_others_are_told_which_signal_stopped_an_agent(job: PluginJob, waits: bool) -> None:
    """torch's handler raises in the main thread, wherever that is, and its agent shuts down."""
    reason = "was interrupted in its join: SIGTERM" if waits else "was told to stop (SIGTERM)"
    with (
        job.handlers(1, "2" if waits else "1") as (handler,),
        rdzv_etcd.observe(job.server.endpoint, job=job.id) as observer,
        observer.events() as events,
        ThreadPoolExecutor(1) as pool,
        handling(signal.SIGTERM, _terminate_process_handler),
    ):
        assert isinstance(events.next(LIMIT_S), Snapshot)
        if waits:
            pool.submit(_terminate_when_there, job)
        with pytest.raises(SignalException):
            _be_an_agent(handler)
        while not isinstance(event := events.next(LIMIT_S), NodeLeft):
            assert event is not None
        assert event.reason == reason


def _be_an_agent(handler: EtcdRendezvousHandler) -> None:
    try:
        handler.next_rendezvous()
        signal.raise_signal(signal.SIGTERM)  # while it works
    finally:
        handler.shutdown()


def _terminate_when_there(job: PluginJob) -> None:
    wait_until("its arrival", lambda: job.keys(b"nodes/"))
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def test_while_etcd_does_not_answer_it_answers_from_memory_and_nothing_restarts(
    fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    server = fresh_etcd()
    with handlers(server, job_id, "2", 2, read_timeout=5, close_timeout=5) as made:
        join_all(made)
        server.pause()
        until_s = time.monotonic() + 5.0  # longer than the lease
        slowest_s = 0.0
        while time.monotonic() < until_s:
            begin_s = time.monotonic()
            assert [handler.num_nodes_waiting() for handler in made] == [0, 0]
            assert not any(handler.is_closed() for handler in made)
            slowest_s = max(slowest_s, time.monotonic() - begin_s)
            time.sleep(0.1)  # as the agent's own monitoring interval
        assert slowest_s < FROM_MEMORY_S
        server.resume()
        nodes = job_root(job_id) + b"nodes/"
        wait_until("both are back", lambda: len(server.keys(nodes)) == 2)
        assert [handler.num_nodes_waiting() for handler in made] == [0, 0]
        assert {info.world_size for info in join_all(made)} == {2}


def test_a_handler_whose_etcd_is_gone_for_good_shuts_down_soon(
    fresh_etcd: Callable[..., EtcdServer], job_id: str
) -> None:
    """It cannot confirm, and says so; it does not raise."""
    check = LeakCheck()
    server = fresh_etcd()
    with handlers(server, job_id, "1", 1, close_timeout=1) as (handler,):
        handler.next_rendezvous()
        server.kill()
        begin_s = time.monotonic()
        assert handler.shutdown() is False
        assert time.monotonic() - begin_s < 30
        assert handler.num_nodes_waiting() == 0
    check.check()

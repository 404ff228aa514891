"""Drains and gates on a real etcd, on both faces of the library."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

import rdzv_etcd
from rdzv_etcd import Arrival, Left
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.errors import DrainedError, GateError, SettingsError
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.node.leave import request_drain
from rdzv_etcd.process import Latch
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.settings import Connection, parse_endpoints
from rdzv_etcd.settings.fields import gate_words
from rdzv_etcd.world.group import Group
from tests.library.nodes import ALONE, LIMIT_S, Job, at_once, join_all, wait_until

LONG_S = 600
"""A lease that will not end by itself while a test runs."""


def work(group: Group, stops: list[bool]) -> None:
    """A loop that stops at its commit points only."""
    for world in group.worlds():
        while not world.should_yield:
            time.sleep(0.02)
        stops.append(world.over)


# --- drains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["itself", "an operator"])
def test_a_drained_node_s_loop_ends_and_the_others_continue(job: Job, who: str) -> None:
    with job.worlds(3, "2:3", lease_ttl=LONG_S) as (nodes, worlds):
        drained, others = nodes[0], nodes[1:]
        if who == "itself":
            drained.drain("its fan is loud")
            drained.drain("again")
        else:
            assert asyncio.run(_ask(job, drained.node_id))
        wait_until("all may stop", lambda: all(world.should_yield for world in worlds))
        assert not any(world.over for world in worlds)
        by = "" if who == "itself" else " by an operator"
        assert drained.drain_reason == f"drained{by}: its fan is loud"
        assert list(drained.worlds()) == []
        assert drained.has_left
        with pytest.raises(DrainedError, match="its fan is loud") as raised:
            drained.join()
        assert raised.value.reason == "its fan is loud"
        for world in worlds[1:]:
            assert world.wait_over(LIMIT_S)
            assert world.change == Left({drained.node_id: f"drained{by}: its fan is loud"})
        again = join_all(others)
        assert [world.size for world in again] == [2, 2]
        assert not any(world.should_yield for world in again)
    assert not job.left()


async def _ask(job: Job, node_id: str) -> bool:
    etcd = EtcdClient(Connection(parse_endpoints(job.server.endpoint).endpoints))
    try:
        keys = JobKeys("/rdzv_etcd", job.id)
        return await request_drain(etcd, keys, SystemClock(), node_id, "its fan is loud")
    finally:
        await etcd.close()


# --- gates ----------------------------------------------------------------------------------------


def test_a_gate_is_asked_before_each_arrival_and_gets_to_know_why(job: Job) -> None:
    asked: list[Arrival] = []

    def gate(arrival: Arrival) -> None:
        assert threading.current_thread().name != "rdzv-etcd"
        asked.append(arrival)
        if len(asked) == 2:
            raise OSError("2 of 8 GPUs answer")

    settings = job.settings("1:2", lease_ttl=LONG_S, **ALONE)
    with Group(settings, gate=gate) as group, Group(settings) as other:
        worlds = at_once([group.join, other.join])
        with pytest.raises(GateError, match="raised OSError: 2 of 8 GPUs answer") as raised:
            group.join()
        assert raised.value.node == group.node_id
        assert isinstance(raised.value.__cause__, OSError)
        assert worlds[1].wait_over(LIMIT_S)
        change = worlds[1].change
        assert isinstance(change, Left)  # at once, and not after rejoin_timeout
        assert "its gate raised OSError: 2 of 8 GPUs answer" in change.members[group.node_id]
        assert other.join().size == 1
        joining = at_once([group.join, other.join])
        assert [world.size for world in joining] == [2, 2]
    assert [arrival.round for arrival in asked] == [1, 2, 3]
    assert all(arrival.node_id == group.node_id for arrival in asked)


def test_a_signal_is_handled_while_a_gate_is_asked(job: Job) -> None:
    """Also one that does not interrupt the main thread's wait for the gate."""
    handled = threading.Event()

    def is_waited_for() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[main])
        return any(frame.f_code is Latch.wait.__code__ for frame, _ in stack)

    def gate(arrival: Arrival) -> None:
        wait_until("the main thread waits", is_waited_for)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not handled.wait(LIMIT_S):
            raise TimeoutError("nobody has handled the signal")

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    try:
        with Group(job.settings(gate_timeout=8), gate=gate) as group:
            assert group.join().size == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("command", ["", "  ", "a 'b", "a\0b"])
def test_what_cannot_be_a_command_is_refused(command: str) -> None:
    with pytest.raises(SettingsError, match="gate_command"):
        gate_words(command)


def test_a_gate_on_asyncio_that_is_cancelled_ends(job: Job, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = f"sh -c 'touch {begun}; exec sleep 600'"
    asked: list[Arrival] = []

    async def main() -> None:
        settings = job.settings(gate_command=command)
        async with rdzv_etcd.aio.Group(Group(settings, gate=asked.append)) as group:
            joining = asyncio.ensure_future(group.join())
            await asyncio.to_thread(wait_until, "its gate is asked", begun.exists)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining

    began_s = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert not asked  # the function comes after the command, and nobody waits for its answer

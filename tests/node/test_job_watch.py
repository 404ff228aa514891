"""Whoever adds up the events of a job knows what it is, whatever happens to etcd meanwhile."""

from __future__ import annotations

import contextlib
import logging

import pytest

from rdzv_etcd.errors import CompactedError, EtcdPermissionError
from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.node.job_watch import JobWatch, read_state
from rdzv_etcd.protocol.events import (
    JobEnded,
    JobEvent,
    Joined,
    Missed,
    NodeLeft,
    NodeLost,
    NodeMissing,
    Snapshot,
    WorldFormed,
    WorldOver,
)
from rdzv_etcd.protocol.job_state import Role
from rdzv_etcd.testing import MemoryConnection, SimClock
from tests.sim.world import TIMING, TTL_S, SimJob, simulate, simulated

SOON_S = 2.0


class Reader:
    """An observer with a link of its own, who adds up what it is told."""

    def __init__(self, job: SimJob, *, events_kept: int = 10_000) -> None:
        self.clock = SimClock(job.loop, offset_s=0.0, wall_skew_s=0.0, seed="observer")
        self.keys = job.keys
        self.connection: MemoryConnection = job.server.connect("observer")
        self.watch = JobWatch(self.connection, job.keys, self.clock, events_kept=events_kept)
        self.events: list[JobEvent] = []
        self.there: set[str] = set()
        self.members: tuple[str, ...] | None = None
        """Of the world, if it is not over."""

    async def take(self, for_s: float = 0.0) -> None:
        """Take what there is, and what comes in that time."""
        while True:
            event = await self.watch.next(for_s)
            if event is None:
                return
            self.events.append(event)
            self._add(event)

    def _add(self, event: JobEvent) -> None:
        if isinstance(event, Snapshot):
            state = event.state
            self.there = {node.node_id for node in state.nodes if node.role is not Role.LEAVING}
            is_over = state.change is not None or state.closure is not None or not state.round
            self.members = None if is_over else state.members
        elif isinstance(event, Joined):
            assert event.node not in self.there
            self.there.add(event.node)
        elif isinstance(event, NodeMissing | NodeLost | NodeLeft):
            self.there.discard(event.node)
        elif isinstance(event, WorldFormed):
            assert self.members is None, self.events
            self.members = event.members
        elif isinstance(event, WorldOver):
            self.members = None

    async def check(self) -> None:
        """What was added up is what there is."""
        state = await read_state(self.connection, self.keys, self.clock)
        assert self.there == {
            node.node_id for node in state.nodes if node.role is not Role.LEAVING
        }, self.events
        is_over = state.change is not None or state.closure is not None
        assert self.members == (None if is_over else state.members), self.events

    async def close(self) -> None:
        await self.watch.close()
        await self.connection.close()


@pytest.mark.parametrize("slice_nodes", [128, 2])
@pytest.mark.parametrize("events_kept", [10_000, 3])
@simulated(range(8), options=["slice_nodes"], min_nodes=1, max_nodes=4, peer_links=True)
async def test_what_is_told_adds_up_to_what_there_is(job: SimJob, events_kept: int) -> None:
    """Nodes come, go and die; etcd is cut off, restarted, compacted; the reader is slow."""
    reader, rng = Reader(job, events_kept=events_kept), job.loop.rng
    await reader.watch.open()
    await job.all_work("abcd")
    for _ in range(8):
        alive = [name for name, node in job.nodes.items() if node.alive]
        kind = rng.randrange(7)
        if kind == 0 and len(alive) > 2:
            job.crash(rng.choice(alive))
        elif kind == 1 and len(alive) > 2:
            await job.leave(rng.choice(alive))
        elif kind == 2 and len(alive) < 4:
            job.start(f"n{len(job.nodes)}")
        elif kind == 3:
            reader.connection.link.partition()
            await job.pass_time(rng.uniform(0.0, 30.0))
            reader.connection.link.heal()
        elif kind == 4:
            job.server.restart(rng.uniform(0.0, 5.0))
        elif kind == 5:
            with contextlib.suppress(CompactedError):  # once more, just now
                job.server.compact()
        else:
            await reader.take()
        await job.pass_time(rng.choice([0.0, 0.5, 2 * TTL_S]))
    await job.pass_time(5 * TTL_S)
    await reader.take(SOON_S)
    await reader.check()
    assert any(isinstance(event, Missed) for event in reader.events) or events_kept > 3
    await reader.close()


@pytest.mark.parametrize("wiped", [True, False], ids=["wiped", "restored"])
@simulated(min_nodes=2, max_nodes=3)
async def test_an_etcd_that_goes_back_is_no_new_world(job: SimJob, wiped: bool) -> None:
    reader = Reader(job)
    await reader.watch.open()
    await job.all_work("ab")
    saved = job.save()
    job.start("c")
    await job.until_works("abc")
    await reader.take(SOON_S)
    if wiped:
        job.wipe()
    else:
        job.restore(saved)
    await job.pass_time(5 * TTL_S)
    await reader.take(SOON_S)
    worlds = [event.epoch for event in reader.events if isinstance(event, WorldFormed)]
    assert worlds == sorted(set(worlds))
    if job.works("abc"):
        assert len(worlds) == len(job.nodes["a"].worlds)
    await reader.close()


@pytest.mark.parametrize("bump_revision", [0, 1_000_000])
@simulated(range(5), min_nodes=2, max_nodes=2)
async def test_the_end_of_an_earlier_run_is_no_news_when_etcd_is_restored(
    job: SimJob, bump_revision: int
) -> None:
    await job.all_work("ab")
    await job.end("ab", "the first one")
    await job.pass_time(2 * TIMING.closed_ttl_s)
    saved = job.save()
    await job.pass_time(TIMING.ended_ttl_s + 2 * TTL_S)  # it is forgotten
    reader = Reader(job)
    await reader.watch.open()
    await job.all_work("cd")
    job.restore(saved, bump_revision=bump_revision)
    await job.pass_time(4 * TTL_S)
    await reader.take(SOON_S)
    assert job.works("cd")
    assert not any(isinstance(event, JobEnded) for event in reader.events)
    await job.nodes["c"].node.close_job(succeeded=True, reason="the second one")
    await reader.take(SOON_S)
    ends = [event.reason for event in reader.events if isinstance(event, JobEnded)]
    assert ends == ["the second one"]
    await reader.close()


def test_what_cannot_be_read_is_told_once_and_read_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(job: SimJob) -> None:
        reader = Reader(job)
        await reader.watch.open()
        await job.all_work("ab")
        (record,) = job.server.snapshot(job.keys.round)
        job.server.apply(Txn((), (Put(record.key, b"mine", record.lease_id),)))
        await job.pass_time(SOON_S)
        job.server.apply(Txn((), (Put(record.key, record.value, record.lease_id),)))
        await job.pass_time(2 * TTL_S)
        await reader.take(SOON_S)
        await reader.check()
        reader.connection.link.refuse(lambda: EtcdPermissionError("denied"))
        await job.pass_time(SOON_S)
        reader.connection.link.refuse(None)
        await reader.close()

    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        simulate(scenario, range(1), min_nodes=2, max_nodes=2)
    told = [line for line in caplog.messages if "watching the job: uses what was read" in line]
    assert len(told) == 1
    assert "ctl/round" in told[0]


@pytest.mark.parametrize("fault", ["stall", "hang"])
@simulated(min_nodes=1, max_nodes=2)
async def test_an_observer_that_hears_nothing_finds_out(job: SimJob, fault: str) -> None:
    reader = Reader(job)
    await reader.watch.open()
    await job.all_work("ab")
    await reader.take(SOON_S)
    link = reader.connection.link
    link.hang() if fault == "hang" else link.stall_watches(lambda _key, _end: True)
    await job.leave("b")
    await reader.take(25.0)
    assert reader.there == {job.nodes["a"].node_id}
    await reader.watch.close()


def test_an_observer_warns_once_that_nothing_shows_whether_it_hears(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        caplog.clear()
        reader = Reader(job)
        await reader.watch.open()
        await job.all_work("ab")
        reader.connection.link.lose(1.0, 1.0)
        await reader.take(90.0)
        told = [
            text for record in caplog.records if "watching the job" in (text := record.getMessage())
        ]
        assert len(told) == 1
        assert "etcd does not show whether anything has changed since" in told[0]
        reader.connection.link.lose()
        await reader.take(90.0)
        assert "is up to date again" in caplog.records[-1].getMessage()
        await reader.watch.close()

    with caplog.at_level(logging.WARNING, "rdzv_etcd"):
        simulate(scenario, min_nodes=1, max_nodes=2)

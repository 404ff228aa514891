"""Nodes that are drained, left behind, or kept out by their gate, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rdzv_etcd.errors import DrainedError, EtcdUnavailableError, GateError
from rdzv_etcd.etcd.port import Etcd, Put, Txn
from rdzv_etcd.node.gate import Failure, Gate
from rdzv_etcd.node.leave import request_drain
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.testing import SimClock
from tests.node.test_refusals import warnings_of
from tests.sim.commits import OPERATOR
from tests.sim.matching import puts
from tests.sim.world import TIMING, TTL_S, SimJob, SimNode, simulated

SEEDS = range(6)
KNOWN_S = 0.2
"""Two writes and their events."""


def yields(node: SimNode) -> bool:
    return node.world is not None and node.node.should_yield(node.world)


async def commit(node: SimNode) -> None:
    """An agent that leaves its world at a commit point only, and the job if it is drained."""
    with contextlib.suppress(DrainedError):
        while True:
            seat = await node.join()
            while not node.node.waiting_count():
                await asyncio.sleep(0.5)
                if node.node.should_yield(seat):
                    break
    node.alive = False
    drain = node.node.drain
    assert drain is not None
    await node.node.leave(f"drained: {drain.reason}")
    await node.connection.close()


def start(job: SimJob, names: str) -> None:
    for name in names:
        node = job.make(name)
        node.agent = job.on(node, commit(node))


def end_agent(node: SimNode) -> None:
    """Let nobody call the node's library any more, though its process lives."""
    assert node.agent is not None
    node.agent.cancel()


async def ask(job: SimJob, node_id: str, why: str = "why", etcd: Etcd | None = None) -> bool:
    """Ask a node to leave, as an operator does."""
    etcd = etcd or job.server.connect(OPERATOR)
    return await request_drain(etcd, job.keys, SimClock(job.loop), node_id, why)


# --- drains ---------------------------------------------------------------------------------------


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_drain_outlives_the_session_it_stood_on(job: SimJob) -> None:
    nodes = await job.all_work("abc")
    await nodes[0].node.be_drained("soon")
    await job.until(lambda: all(map(yields, nodes)), "all know", KNOWN_S)
    (before,) = job.server.snapshot(job.keys.drains.start)
    job.revoke([nodes[0].lease_id])
    assert not job.server.snapshot(job.keys.drains.start)
    await job.pass_time(TTL_S)
    (after,) = job.server.snapshot(job.keys.drains.start)
    assert (after.value, after.lease_id == before.lease_id) == (before.value, False)
    assert all(map(yields, nodes))


@pytest.mark.parametrize(
    "how", ["all are cut off", "it is cut off", "its lease is revoked", "etcd is restored"]
)
@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_what_a_node_is_asked_outlives_the_session_that_it_had(job: SimJob, how: str) -> None:
    """It has not heard of it when its lease ends."""
    start(job, "abc")
    await job.until_works("abc")
    await job.pass_time(TTL_S)
    node = job.nodes["b"]
    cut = {"all are cut off": "abc", "it is cut off": "b"}.get(how, "")
    job.cut(cut, silent=True)
    await job.pass_time(2.0 if cut else 0.0)
    node.connection.link.lag_watches(2.0)
    assert await ask(job, node.node_id)
    assert node.node.drain is None
    if cut:
        await job.pass_time(3 * TTL_S)
    else:
        saved = job.save()
        await job.pass_time(0.2)
        job.server.expire(node.lease_id)
        if how == "etcd is restored":
            await job.pass_time(0.2)
            job.restore(saved)
    job.heal(cut)
    await job.until(lambda: not node.alive, "it has left", 60.0)
    await job.until_works("ac", limit_s=60.0)
    assert not job.server.snapshot(job.keys.drains.start)  # it is done


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_request_to_leave_that_is_not_taken_leaves_no_lease_behind(job: SimJob) -> None:
    nodes = await job.all_work("ab")
    etcd, there = job.server.connect(OPERATOR), set(job.server.leases())
    etcd.link.hold_requests(1.0, 1, puts(job.keys.drain(nodes[0].node_id)))
    asking = asyncio.ensure_future(ask(job, nodes[0].node_id, etcd=etcd))
    await job.pass_time(0.5)  # its lease is there, and a presence no more when it arrives
    job.crash("a")
    job.server.expire(nodes[0].lease_id)
    assert not await asking
    assert set(job.server.leases()) <= there


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_drain_waits_for_an_etcd_that_is_away(job: SimJob) -> None:
    nodes = await job.all_work("abc")
    nodes[0].connection.link.fail(
        EtcdUnavailableError("away"), 3, puts(job.keys.drain(nodes[0].node_id))
    )
    await nodes[0].node.be_drained("soon")
    await job.until(lambda: yields(nodes[0]), "it knows itself", KNOWN_S)
    await job.until(lambda: all(map(yields, nodes)), "all know", 10.0)


@pytest.mark.parametrize("value", [b"?", b'{"v":1}', b"\xff" * 1000])
@simulated(range(2), min_nodes=2, max_nodes=3)
async def test_an_invalid_drain_stops_nobody_and_gives_way_to_a_valid_one(
    job: SimJob, value: bytes
) -> None:
    nodes = await job.all_work("ab")
    for key in (job.keys.drain(nodes[0].node_id), job.keys.drains.start + b"\xff"):
        job.server.apply(Txn((), (Put(key, value),)))
    await job.pass_time(2 * TTL_S)
    assert job.works("ab")
    assert not any(map(yields, nodes))
    job.start("c")
    await job.until_works("abc")  # a node that reads all of it is not stopped either
    assert await ask(job, nodes[0].node_id)
    await job.until(lambda: nodes[0].node.drain is not None, "it hears of it", KNOWN_S)


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_only_a_node_that_is_there_is_asked_to_leave(job: SimJob) -> None:
    nodes = await job.all_work("ab")
    assert not await ask(job, "c~1~x")
    assert await ask(job, nodes[0].node_id, "why")
    assert await ask(job, nodes[0].node_id, "another")
    await job.until(lambda: nodes[0].node.drain is not None, "it hears of it", KNOWN_S)
    assert nodes[0].node.drain is not None
    assert nodes[0].node.drain.reason == "why"


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("lives", [True, False])
@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_node_that_is_wrongly_accused_just_then_is_asked_when_it_has_answered(
    job: SimJob, lives: bool, certain: bool
) -> None:
    nodes = await job.all_work("abc", delay_s=0.02)
    await job.pass_time(TTL_S)
    node, by = job.loop.rng.sample(job.followers(), 2)
    if not lives:
        job.crash(node.name)
    job.accuse(node, by, certain=certain)
    assert await ask(job, node.node_id) is lives
    if lives:
        await job.until(lambda: node.node.drain is not None, "it hears of it", KNOWN_S)
        assert [each.joins for each in nodes] == [1, 1, 1]


@simulated(range(3), min_nodes=2, max_nodes=3)
async def test_a_request_to_leave_that_had_to_connect_first_waits_no_longer_for_an_answer(
    job: SimJob,
) -> None:
    await job.all_work("abc")
    await job.pass_time(TTL_S)
    node, by = job.followers()
    etcd = job.server.connect(OPERATOR)
    etcd.link.stall_requests(15.0, 1)
    asking = asyncio.ensure_future(ask(job, node.node_id, etcd=etcd))
    await job.pass_time(14.99)
    node.connection.link.delay(0.1, 0.2)  # it answers after the request has come
    job.accuse(node, by)
    began_s = job.loop.time()
    assert await asking
    assert job.loop.time() - began_s < TTL_S


# --- gates ----------------------------------------------------------------------------------------


async def fails(node: SimNode, how: str) -> GateError:
    with pytest.raises(GateError) as raised:
        await Gate(node.node).settle(Failure(how, 3, "last line"))
    return raised.value


async def process_of(job: SimJob, name: str) -> SimNode:
    process = job.make(name)
    await process.node.start()
    return process


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_nodes_that_wait_are_shown_why_one_cannot_join_until_its_host_passes(
    job: SimJob, caplog: pytest.LogCaptureFixture
) -> None:
    waits = job.start("a", join_timeout_s=2000.0)
    job.start("b", join_timeout_s=2000.0)
    await job.pass_time(70.0)
    caplog.clear()
    for _ in range(2):  # a supervisor starts it again: that is no news
        process = await process_of(job, "c")
        await job.on(process, fails(process, "raised OSError: no GPU"))
        await job.leave("c")
        await job.pass_time(1.0)
        (line,) = [each for each in warnings_of(caplog, waits) if "c cannot join" in each]
    assert "c cannot join: its gate raised OSError: no GPU; fix what its gate checks" in line
    assert "are the others started" not in line
    (kv,) = (kv for kv in job.server.snapshot() if kv.key == job.keys.refused)
    for name in "dc":
        assert kv.lease_id in job.server.leases()  # what another host does changes nothing
        process = await process_of(job, name)
        await job.on(process, Gate(process.node).settle(None))
        await job.leave(name)
    assert kv.lease_id not in job.server.leases()
    assert not [kv for kv in job.server.snapshot() if kv.key == job.keys.refused]
    job.start("c")
    await job.until_works("abc", 30.0)


@simulated(range(2), min_nodes=2, max_nodes=2)
async def test_a_pass_takes_back_no_note_about_other_settings(job: SimJob) -> None:
    leader = job.start("a")
    await job.until(lambda: leader.node.leads, "it leads")
    other = job.start("c", job=JobSettings(3, 3))
    await job.until(lambda: other.error is not None, "it is refused", 20.0)
    process = await process_of(job, "c")
    await job.on(process, Gate(process.node).settle(None))
    assert [kv for kv in job.server.snapshot() if kv.key == job.keys.refused]
    await job.leave("c")


@simulated(range(2), min_nodes=1, max_nodes=3)
async def test_a_gate_s_failure_is_raised_though_etcd_does_not_answer(job: SimJob) -> None:
    process = await process_of(job, "c")
    process.connection.link.partition()
    error = await job.on(process, fails(process, "said no"))
    assert "its gate said no" in str(error)
    assert job.loop.time() < 2 * TTL_S


@simulated(SEEDS, min_nodes=2, max_nodes=3)
async def test_a_member_that_was_left_behind_and_hangs_does_not_lead_a_dead_job(
    job: SimJob,
) -> None:
    """It would keep the nodes of a job with other settings waiting for as long as it hangs."""
    nodes = await job.all_work("abc")
    node, *others = job.loop.rng.sample(nodes, 3)
    end_agent(node)
    node.node._member.evicted = True
    job.crash(*(each.name for each in others))
    await job.pass_time(TIMING.job_ttl_s + 2 * TTL_S)
    assert not node.node.leads
    job.start("d", job=JobSettings(1, 2))
    await job.until_works("d", 60)

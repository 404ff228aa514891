"""Leaving: the others learn why. If etcd refuses the goodbye, the session still ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import DrainedError, EtcdError, EtcdNoSpaceError, EtcdPermissionError
from rdzv_etcd.etcd.port import Put, Txn
from rdzv_etcd.protocol.events import NodeLeft, NodeLost, NodeMissing
from rdzv_etcd.testing.model import Revoke
from rdzv_etcd.world_change import Left, Waiting, WorldChange
from tests.node.test_job_watch import Reader
from tests.sim.matching import puts
from tests.sim.world import TTL_S, SimJob, SimNode, simulate, simulated

REFUSALS = pytest.mark.parametrize(
    "why",
    [lambda: EtcdPermissionError("permission denied"), lambda: EtcdNoSpaceError("alarm")],
    ids=["permission", "no space"],
)


@REFUSALS
@pytest.mark.parametrize("who", ["the leader", "another member"])
@simulated(range(5), min_nodes=2, max_nodes=3)
async def test_a_member_whose_goodbye_is_refused_ends_its_session(
    job: SimJob, why: Callable[[], EtcdError], who: str
) -> None:
    await job.all_work("abc")
    node = job.leader if who == "the leader" else job.followers()[0]
    session = node.lease_id
    assert session in job.server.leases()
    node.connection.link.fail(why(), 1, lambda request: isinstance(request, Txn))
    await job.leave(node.name)
    assert session not in job.server.leases()
    assert job.keys.node(node.node_id) not in [kv.key for kv in job.server.snapshot()]


@simulated(range(5), min_nodes=2, max_nodes=3)
async def test_a_member_whose_goodbye_is_not_answered_ends_its_session_in_time(
    job: SimJob,
) -> None:
    """The goodbye may take a part of the time for leaving, not all of it."""
    await job.all_work("abc")
    node = job.followers()[0]
    session = node.lease_id
    node.connection.link.hold_requests(
        2 * TTL_S, 10, lambda request: isinstance(request, Txn) and bool([*request.puts()])
    )
    began_s = job.loop.time()
    await job.leave(node.name)
    assert session not in job.server.leases()
    assert job.loop.time() - began_s < TTL_S


@pytest.mark.parametrize("which", ["round", "leader", "change"])
@simulated(range(5), min_nodes=2, max_nodes=2)
async def test_nodes_leave_although_a_control_value_cannot_be_read(job: SimJob, which: str) -> None:
    nodes = await job.all_work("ab")
    sessions = {node.lease_id for node in nodes}
    job.server.apply(Txn((), (Put(getattr(job.keys, which), b"?"),)))
    for name in job.loop.rng.sample("ab", 2):
        await job.leave(name)
    assert not sessions & set(job.server.leases())


@simulated(range(5), min_nodes=1, max_nodes=2)
async def test_a_member_that_comes_back_while_the_last_one_leaves_works_on(job: SimJob) -> None:
    """Both were cut off until their leases ended. One leaves, and finds nobody there; between its
    last two requests the other is back and puts the round back, onto the lease that goes next."""
    leaver, other = await job.all_work("ab")
    lease = job.history.formed[0].record.job_lease
    leaver.connection.link.hold_requests(
        1.0, 1, lambda request: isinstance(request, Revoke) and request.lease_id == lease
    )
    job.cut((leaver, other), silent=False)
    await job.pass_time(TTL_S - 2.0)
    leaving = asyncio.ensure_future(job.leave("a"))
    await job.until(lambda: not job.server.snapshot(job.keys.nodes.start), "both are gone")
    leaver.connection.link.heal()
    await job.until(lambda: not job.server.snapshot(job.keys.round), "the job is removed", 3.0)
    other.connection.link.heal()
    await leaving
    await job.until_works("b", 3 * TTL_S)
    assert job.history.formed[1].record.epoch_fixed is not None


@simulated(range(8), min_nodes=1, max_nodes=1)
async def test_a_node_that_starts_while_the_last_one_leaves_forms_a_round_at_once(
    job: SimJob,
) -> None:
    """It has seen the round, but nobody is left who could put its record back."""
    job.start("a")
    await job.until_works("a")
    await job.pass_time(job.loop.rng.uniform(0, 60))
    late = job.make("b")
    late.connection.link.stall_requests(0.5, 1, puts(job.keys.node(late.node_id)))
    late.agent = job.on(late, late.run())
    await job.pass_time(0.2)
    await job.leave("a")
    await job.until_works("b", TTL_S / 2)


# --- why a node has left ------------------------------------------------------------------------


async def begin_to_read(job: SimJob) -> Reader:
    reader = Reader(job)
    await reader.watch.open()
    await reader.take(1.0)
    reader.events.clear()
    return reader


async def what_was_told_of(node: SimNode, reader: Reader) -> list[tuple[type, str]]:
    """How that node went, and why, as often as an observer was told."""
    await reader.take(3.0)
    await reader.close()
    told: list[tuple[type, str]] = []
    for event in reader.events:
        if isinstance(event, NodeLeft) and event.node == node.node_id:
            told.append((NodeLeft, event.reason))
        elif isinstance(event, NodeMissing | NodeLost) and event.node == node.node_id:
            told.append((type(event), event.how))
    return told


async def join_in_vain(node: SimNode) -> None:
    """Join though this node is to leave, and leave."""
    with pytest.raises(DrainedError):
        await node.join()
    node.alive = False
    await node.node.leave("is drained")


@pytest.mark.parametrize("who", ["the leader", "another member"])
@simulated(range(10), min_nodes=2, max_nodes=3)
async def test_a_drained_member_says_why_it_goes_though_the_others_were_first(
    job: SimJob, who: str
) -> None:
    """They come to their commit points before it does: the world is over when it leaves."""
    nodes = [job.make(name) for name in "abc"]
    await asyncio.gather(*(job.on(each, each.join()) for each in nodes))
    reader = await begin_to_read(job)
    node = job.leader if who == "the leader" else job.followers()[0]
    await node.node.be_drained("its fan is loud")
    again = [job.on(each, each.join()) for each in nodes if each is not node]
    await job.pass_time(job.loop.rng.uniform(0.05, 1.0))
    with pytest.raises(DrainedError):
        await node.join()
    node.alive = False
    await job.on(node, node.node.leave("drained: its fan is loud"))
    await asyncio.gather(*again)
    assert await what_was_told_of(node, reader) == [(NodeLeft, "drained: its fan is loud")]


@simulated(range(10), min_nodes=2, max_nodes=3)
async def test_a_leader_that_leaves_in_an_open_round_says_why(job: SimJob) -> None:
    """A worker has failed on another node; the leader gets SIGTERM while it stops its own."""
    nodes = await job.all_work("abc")
    reader = await begin_to_read(job)
    for each in nodes:
        each.stops_in_s = 3.0
    node, other = job.leader, job.followers()[0]
    await job.join_again(other.name, "its worker failed")
    await job.pass_time(1.0)
    await job.leave(node.name, "SIGTERM")
    assert await what_was_told_of(node, reader) == [(NodeLeft, "SIGTERM")]
    await job.until_works([each.name for each in nodes if each is not node])


@pytest.mark.parametrize("who", ["the leader", "another member"])
def test_a_member_that_has_come_back_and_is_drained_is_not_lost(who: str) -> None:
    """The leader, 50 ms away, may not have published yet that a member is back when that goes."""
    ends: list[WorldChange] = []

    async def scenario(job: SimJob) -> None:
        nodes = [job.make(name) for name in "abc"]
        await asyncio.gather(*(job.on(each, each.join()) for each in nodes))
        await job.pass_time(5.0)
        node = job.leader if who == "the leader" else job.followers()[0]
        others = [each for each in nodes if each is not node]
        job.leader.connection.link.delay(0.0, 0.05)
        vain = job.on(node, join_in_vain(node))
        await asyncio.sleep(job.loop.rng.uniform(0.002, 0.01))
        await node.node.be_drained("its fan is loud")
        for each in others:
            assert each.world is not None
            end = await each.node.over(each.world)
            assert isinstance(end, Left | Waiting)
            if isinstance(end, Left):
                assert end == Left({node.node_id: "drained: its fan is loud"})
            ends.append(end)
        await vain

    simulate(scenario, range(20), min_nodes=2, max_nodes=3)
    assert any(isinstance(end, Left) for end in ends)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ("a", "is drained"),
        ("a", "is interrupted"),
        ("a", "has no time left"),
        ("ab", "is drained"),
        ("ab", "is interrupted"),
    ],
)
def test_a_node_that_waits_says_why_it_goes(others: str, why: str) -> None:
    """A spare, or one of a round that is not formed yet; only the latter runs out of time."""
    reasons = {
        "is drained": "drained: its fan is loud",
        "is interrupted": "was interrupted in its join",
        "has no time left": "gave up its join: round 1 was not formed within 30 s: ",
    }

    async def scenario(job: SimJob) -> None:
        job.start_all(others)
        await job.pass_time(2.0)
        node = job.start("c", join_timeout_s=30.0)
        await job.pass_time(1.0)
        reader = await begin_to_read(job)
        if why == "is drained":
            await node.node.be_drained("its fan is loud")
        elif why == "is interrupted":
            await job.leave("c", "SIGTERM")
        else:
            await job.until(lambda: node.error is not None, "it gives up")
        ((how, reason),) = await what_was_told_of(node, reader)
        assert how is NodeLeft
        assert reason.startswith(reasons[why])

    least = 3 if others == "a" else 2
    simulate(scenario, range(5), min_nodes=least, max_nodes=least)

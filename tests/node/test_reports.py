"""A program reports other members dead: known early if it is true, one write if it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.errors import MisuseError, RendezvousFailedError, TaskFailedError
from rdzv_etcd.node.accuse import Accuser
from rdzv_etcd.protocol.liveness import MOST_MISTAKES, QUIET_S
from rdzv_etcd.protocol.model import Accusation, Closure, NodeInfo
from rdzv_etcd.protocol.views import place_in
from tests.sim.world import TIMING, SimJob, SimNode, simulate, simulated

LONG_LEASE = replace(TIMING, lease_ttl_s=30)
LINKS = pytest.mark.parametrize("peer_links", [False, True], ids=["", "links"])


async def report(
    job: SimJob, by: SimNode, node_id: Any, evidence: Any = "no heartbeat", *, certain: bool = False
) -> bool:
    told: bool = await job.on(by, by.node.report_dead(node_id, evidence, certain=certain))
    return told


def restarts(job: SimJob) -> int:
    return sum(node.joins - 1 for node in job.nodes.values())


def accusations(job: SimJob) -> list[Accusation]:
    places = [place_in(job.keys, kv) for kv in job.server.snapshot(job.keys.nodes.start)]
    return [place for place in places if isinstance(place, Accusation)]


@LINKS
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("slice_nodes", [128, 2])
@simulated(
    range(10), options=["peer_links", "slice_nodes"], min_nodes=2, max_nodes=3, timing=LONG_LEASE
)
async def test_a_dead_member_that_is_reported_is_lost_long_before_its_lease_ends(
    job: SimJob, certain: bool
) -> None:
    nodes = await job.all_work("abc")
    await job.pass_time(35.0)  # the leader may trust what it does not hear
    victim = job.loop.rng.choice(nodes)
    rest = [node for node in nodes if node is not victim]
    job.crash(victim.name)
    began_s = job.loop.time()
    assert await report(job, rest[0], victim.node_id, "fell from the rack", certain=certain)
    await job.until_works([node.name for node in rest], 5.0)
    assert job.loop.time() - began_s < 1.5
    ((_, how),) = [item for _, change in job.history.changes for item in change.lost.items()]
    assert how == f"reported dead: fell from the rack (by {rest[0].name})"
    await job.pass_time(1.0)
    assert accusations(job) == []  # withdrawn


@LINKS
@pytest.mark.parametrize("certain", [False, True])
@simulated(options=["peer_links"], min_nodes=2, max_nodes=3, timing=LONG_LEASE)
async def test_a_wrong_report_costs_one_write_and_no_restart(job: SimJob, certain: bool) -> None:
    """Whenever after the world was formed it is made."""
    nodes = await job.all_work("abc")
    await job.pass_time(job.loop.rng.choice([0.0, 0.2, 5.0, 60.0]))
    by, about = job.loop.rng.sample(nodes, 2)
    assert await report(job, by, about.node_id, certain=certain)
    await job.pass_time(5.0)
    assert accusations(job) == []
    job.assert_undisturbed("abc")
    # It was wrong: it may not report that again for a minute.
    assert not await report(job, by, about.node_id, certain=certain)
    await job.pass_time(QUIET_S + 5.0)
    assert await report(job, by, about.node_id, certain=certain)
    await job.pass_time(5.0)
    assert restarts(job) == 0


@simulated(range(5), min_nodes=2, max_nodes=3, timing=LONG_LEASE)
async def test_a_node_that_was_wrong_is_not_believed_in_the_next_world_either(job: SimJob) -> None:
    by, about, other = await job.all_work("abc")
    await job.pass_time(5.0)
    assert await report(job, by, about.node_id)
    await job.pass_time(2.0)
    await job.join_again(other.name)
    await job.until_works("abc")
    await job.pass_time(2.0)
    assert not await report(job, by, about.node_id)
    assert restarts(job) == 3


def test_a_node_that_was_wrong_too_often_is_not_believed_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(job: SimJob) -> None:
        nodes = await job.all_work("abcde")
        by, *others = nodes
        made = [await report(job, by, node.node_id, certain=True) for node in others]
        assert made == [True] * MOST_MISTAKES + [False]
        await job.pass_time(5.0)
        assert restarts(job) == 0

    simulate(scenario, range(3), min_nodes=2, max_nodes=5, timing=LONG_LEASE)
    assert "this node was wrong about it or about others a moment ago" in caplog.text


@LINKS
@pytest.mark.parametrize("min_nodes", [2, 3], ids=["a world without it", "no world without it"])
@simulated(options=["min_nodes", "peer_links"], max_nodes=3, timing=LONG_LEASE)
async def test_a_member_that_was_lost_and_came_back_can_be_reported_again(job: SimJob) -> None:
    """It had hung: the report was right then. Where nobody works without it, it comes back while
    the change still stands that has declared it lost."""
    nodes = await job.all_work("abc")
    await job.pass_time(35.0)  # the leader may trust what it does not hear
    by, *others = nodes
    victim = job.loop.rng.choice(others)
    certain = job.loop.rng.random() < 0.5
    job.pause(victim.name)
    assert await report(job, by, victim.node_id, "hangs", certain=certain)
    await job.pass_time(5.0)
    without = [node.name for node in nodes if node is not victim]
    assert job.works(without) is (job.settings.job.min_nodes == 2)
    job.resume(victim.name)
    await job.until_works("abc")
    await job.pass_time(5.0)
    job.crash(victim.name)
    assert await report(job, by, victim.node_id, "no power", certain=certain)


def test_a_member_that_has_gone_already_is_not_reported() -> None:
    async def scenario(job: SimJob) -> None:
        nodes = await job.all_work("abc")
        gone = nodes[0].node_id
        await job.leave("a")
        await job.until_works("bc")
        with pytest.raises(MisuseError, match=r"no member of the present world \(round 2\)"):
            await report(job, nodes[1], gone)
        job.crash("c")
        await job.pass_time(2.0)
        first = await report(job, nodes[1], nodes[2].node_id, certain=True)
        assert first
        assert not await _again(job, nodes[1], nodes[2].node_id)

    async def _again(job: SimJob, by: SimNode, node_id: str) -> bool:
        return await report(job, by, node_id, certain=True)

    simulate(scenario, range(5), min_nodes=2, max_nodes=3, timing=LONG_LEASE)


@pytest.mark.parametrize("out", ["expelled", "closed", "broken"])
@simulated(range(2), min_nodes=2, max_nodes=3)
async def test_a_report_without_a_session_that_will_not_come_is_not_kept_waiting(
    job: SimJob, out: str
) -> None:
    nodes = await job.all_work("abc")
    await job.pass_time(35.0)
    reporter, other = nodes[0], nodes[1]
    member, session = reporter.node._member, reporter.node.context.session
    assert reporter.agent is not None
    reporter.agent.cancel()  # or it joins again at once
    if out == "expelled":
        member.evicted = True
    elif out == "closed":
        member.closure = Closure(other.node_id, "done", True, 0.0)
    else:
        member.failure = ("session", OSError("by the test"))
    session.lost(session.lease_id)
    reporting = job.on(reporter, report(job, reporter, other.node_id))
    await job.until(reporting.done, "it is answered", 5.0)
    if out == "broken":
        with pytest.raises(TaskFailedError):
            reporting.result()
    else:
        assert reporting.result() is False
    assert not job.history.changes


@simulated(range(3), min_nodes=2, max_nodes=2, timing=LONG_LEASE)
async def test_an_invalid_report_is_refused(job: SimJob) -> None:
    nodes = await job.all_work("ab")
    by, other = nodes
    for node_id, evidence, problem in (
        (by.node_id, "it", "reports itself dead"),
        ("c~1~x", "it", "no member of the present world"),
        (None, "it", "one of world.members"),
        (other.node_id, "", "must say in words"),
        (other.node_id, "  ", "must say in words"),
        (other.node_id, None, "must say in words"),
    ):
        with pytest.raises(MisuseError, match=problem):
            await report(job, by, node_id, evidence)
    idle = job.make("c")
    with pytest.raises(MisuseError, match="is in no world"):
        await report(job, idle, other.node_id)
    await job.leave("a")
    with pytest.raises(RendezvousFailedError, match="has left"):
        await report(job, by, other.node_id)


@simulated(range(3), min_nodes=1, max_nodes=2, timing=LONG_LEASE)
async def test_long_and_hostile_evidence_is_cut(job: SimJob) -> None:
    nodes = await job.all_work("ab")
    await job.pass_time(15.0)
    job.crash("b")
    assert await report(job, nodes[0], nodes[1].node_id, "\x1b[2J" + "x" * 10_000)
    (accusation,) = accusations(job)
    assert len(accusation.how) < 300
    assert accusation.how.isprintable()
    assert not isinstance(accusation, NodeInfo)


@simulated(range(3), min_nodes=2, max_nodes=2)
async def test_a_node_that_has_no_session_just_then_accuses_nobody(job: SimJob) -> None:
    """What it wrote would be on no lease, and would stay when the whole job has gone."""
    a, b = await job.all_work("ab")
    context, key = a.node.context, job.keys.node(b.node_id)
    (presence,) = [kv for kv in job.server.snapshot() if kv.key == key]

    async def accuse() -> bool:
        context.session.lost(context.session.lease_id)
        accusation = Accusation(a.node_id, "gone", True)
        return await Accuser(context).accuse(b.node_id, presence, accusation)

    is_made: bool = await job.on(a, accuse())
    assert not is_made
    assert presence in job.server.snapshot()

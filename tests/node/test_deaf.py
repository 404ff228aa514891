"""Watches that fall silent while all else works: the node finds out, and the job goes on.

A member of etcd whose disk hangs does so, a proxy that stalls one stream, or an etcd that forgets a
watch: keep-alives are answered, and nobody reports an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv_etcd.errors import EtcdPermissionError
from rdzv_etcd.etcd.port import Delete, Get, Txn
from rdzv_etcd.protocol.member import Phase
from rdzv_etcd.testing.model import Request
from tests.sim.world import TTL_S, SimJob, SimNode, simulated

FOUND_OUT_S = 2 * TTL_S
"""A check begins within a TTL, waits a little for the watch, and the next one may find the rest."""


def hang(job: SimJob, node: SimNode) -> None:
    node.connection.link.hang()


def stall(which: Callable[[SimJob, SimNode], bytes]) -> Callable[[SimJob, SimNode], None]:
    def stalled(job: SimJob, node: SimNode) -> None:
        start = which(job, node)
        node.connection.link.stall_watches(lambda key, _end: key == start)

    return stalled


WAYS = {
    "a member of etcd that hangs": hang,
    "no control keys": stall(lambda job, _node: job.keys.control.start),
    "no presences": stall(lambda job, _node: job.keys.nodes.start),
    "no word of its own presence": stall(lambda job, node: job.keys.node(node.node_id)),
    "nothing": lambda _job, node: node.connection.link.stall_watches(lambda _key, _end: True),
}


@pytest.mark.parametrize("deafen", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("peer_links", [False, True], ids=["leases only", "links"])
@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
@simulated(options=["peer_links"], min_nodes=1, max_nodes=3)
async def test_the_others_learn_of_a_killed_member_though_one_of_them_is_deaf(
    job: SimJob, leads: bool, deafen: Callable[[SimJob, SimNode], None]
) -> None:
    await job.all_work("abc")
    await job.pass_time(job.loop.rng.uniform(TTL_S, 2 * TTL_S))
    deaf = job.leader if leads else job.followers()[0]
    victim = next(node for node in job.followers() if node is not deaf)
    deafen(job, deaf)
    await job.pass_time(job.loop.rng.uniform(0, TTL_S))
    linked = job.switch is not None
    (job.kill if linked else job.crash)(victim.name)
    rest = [node for node in job.nodes.values() if node is not victim]
    lease_s = 0 if linked else TTL_S
    await job.until(
        lambda: all(node.joins == 2 for node in rest), "all hear of it", lease_s + FOUND_OUT_S
    )
    await job.until_works([node.name for node in rest], 2 * FOUND_OUT_S)
    assert {node.joins for node in rest} == {2}


@pytest.mark.parametrize("deafen", WAYS.values(), ids=WAYS)
@simulated(max_nodes=3, peer_links=True)
async def test_a_node_that_finds_out_that_it_is_deaf_restarts_nobody(
    job: SimJob, deafen: Callable[[SimJob, SimNode], None]
) -> None:
    nodes = await job.all_work("abc")
    for _ in range(10):
        await job.pass_time(job.loop.rng.uniform(0, 2 * TTL_S))
        deafen(job, job.loop.rng.choice(nodes))
    await job.pass_time(2 * FOUND_OUT_S)
    assert [node.joins for node in nodes] == [1, 1, 1]


@simulated(min_nodes=3, max_nodes=3)
async def test_a_waiting_node_that_does_not_hear_of_its_presence_finds_that_it_is_gone(
    job: SimJob,
) -> None:
    a, _ = job.start_all("ab")
    await job.pass_time(TTL_S)
    assert a.node.phase is Phase.WAITING
    presence = job.keys.node(a.node_id)
    stall(lambda *_: presence)(job, a)
    job.server.apply(Txn((), (Delete(presence),)), "operator")
    await job.until(
        lambda: any(kv.key == presence for kv in job.server.snapshot()),
        "its presence is back",
        FOUND_OUT_S,
    )


def compares(request: Request) -> bool:
    """Whether it is a read that watches are compared with."""
    return isinstance(request, Get) and request.newest_first


@simulated(min_nodes=1, max_nodes=3)
async def test_a_leader_that_does_not_know_whether_it_hears_declares_nobody_lost(
    job: SimJob,
) -> None:
    """Its keep-alives are answered, and its watches work; but nothing shows that they do."""
    await job.all_work("abc")
    leader, (victim, other) = job.leader, job.followers()
    link = leader.connection.link
    link.fail(EtcdPermissionError("refused by the test"), 10**6, compares)
    session = leader.node.context.session
    await job.pass_time(3 * TTL_S)
    clock = leader.node.context.clock
    assert session.lease_id
    assert session.in_contact_since_s() == clock.now_s()
    job.crash(victim.name)
    await job.pass_time(3 * TTL_S)
    assert leader.joins == other.joins == 1
    link._planned.clear()
    await job.until(lambda: leader.joins == other.joins == 2, "all hear of it", 3 * TTL_S)


@simulated(max_nodes=4)
async def test_to_find_out_costs_a_small_read_of_each_watch_per_ttl(job: SimJob) -> None:
    nodes = await job.all_work("abcd")
    await job.pass_time(2 * TTL_S)
    reads: list[Get] = []
    job.server.observers.append(
        lambda applied: reads.append(applied.request) if isinstance(applied.request, Get) else None
    )
    await job.pass_time(20 * TTL_S)
    assert all(read.limit == 1 and read.keys_only for read in reads)
    assert len(reads) <= 20 * 1.4 * (2 * len(nodes) + 1)  # the leader's presences besides
    assert not any(node.connection.link.moves for node in nodes)

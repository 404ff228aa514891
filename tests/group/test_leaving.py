"""Leaving when etcd refuses what is only a courtesy: the session ends all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rdzv_etcd.errors import EtcdError, EtcdNoSpaceError, EtcdPermissionError
from rdzv_etcd.etcd.api import Put, Txn
from rdzv_etcd.testing.requests import Revoke
from tests.sim.matching import puts
from tests.sim.world import TTL_S, SimJob, simulate

REFUSALS = pytest.mark.parametrize(
    "why",
    [lambda: EtcdPermissionError("permission denied"), lambda: EtcdNoSpaceError("alarm")],
    ids=["permission", "no space"],
)


@REFUSALS
@pytest.mark.parametrize("who", ["the leader", "another member"])
def test_a_member_whose_good_bye_is_refused_ends_its_session(
    why: Callable[[], EtcdError], who: str
) -> None:
    async def scenario(job: SimJob) -> None:
        job.start_all("abc")
        await job.until_works("abc")
        node = job.leader if who == "the leader" else job.followers()[0]
        session = node.node.context.session.lease_id
        assert session in job.server.leases()
        node.connection.link.fail(why(), 1, lambda request: isinstance(request, Txn))
        await job.leave(node.name)
        assert session not in job.server.leases()
        assert job.keys.node(node.node_id) not in [kv.key for kv in job.server.snapshot()]

    simulate(scenario, range(5), min_nodes=2, max_nodes=3)


def test_a_member_whose_good_bye_is_not_answered_ends_its_session_in_time() -> None:
    """The goodbye may take a part of the time for leaving, not all of it."""

    async def scenario(job: SimJob) -> None:
        job.start_all("abc")
        await job.until_works("abc")
        node = job.followers()[0]
        session = node.node.context.session.lease_id
        node.connection.link.hold_requests(
            2 * TTL_S, 10, lambda request: isinstance(request, Txn) and bool([*request.puts()])
        )
        began_s = job.loop.time()
        await job.leave(node.name)
        assert session not in job.server.leases()
        assert job.loop.time() - began_s < TTL_S

    simulate(scenario, range(5), min_nodes=2, max_nodes=3)


@pytest.mark.parametrize("which", ["round", "leader", "change"])
def test_nodes_leave_although_a_control_value_cannot_be_read(which: str) -> None:
    async def scenario(job: SimJob) -> None:
        nodes = job.start_all("ab")
        await job.until_works("ab")
        sessions = {node.node.context.session.lease_id for node in nodes}
        job.server.apply(Txn((), (Put(getattr(job.keys, which), b"?"),)))
        for name in job.loop.rng.sample("ab", 2):
            await job.leave(name)
        assert not sessions & set(job.server.leases())

    simulate(scenario, range(5), min_nodes=2, max_nodes=2)


def test_a_member_that_comes_back_while_the_last_one_leaves_works_on() -> None:
    """Both were cut off until their leases ended. One leaves, and finds nobody there; between its
    last two requests the other is back and puts the round back, onto the lease that goes next."""

    async def scenario(job: SimJob) -> None:
        leaver, other = job.start_all("ab")
        await job.until_works("ab")
        lease = job.history.formed[0].record.job_lease
        leaver.connection.link.hold_requests(
            1.0, 1, lambda request: isinstance(request, Revoke) and request.lease_id == lease
        )
        for each in (leaver, other):
            each.connection.link.partition(silent=False)
        await job.pass_time(TTL_S - 2.0)
        leaving = asyncio.ensure_future(job.leave("a"))
        await job.until(lambda: not job.server.snapshot(job.keys.nodes.start), "both are gone")
        leaver.connection.link.heal()
        await job.until(lambda: not job.server.snapshot(job.keys.round), "the job is removed", 3.0)
        other.connection.link.heal()
        await leaving
        await job.until_works("b", 3 * TTL_S)
        assert job.history.formed[1].record.epoch_fixed is not None

    simulate(scenario, range(5), min_nodes=1, max_nodes=2)


def test_a_node_that_starts_while_the_last_one_leaves_forms_a_round_at_once() -> None:
    """It has seen the round, but nobody is left who could put its record back."""

    async def scenario(job: SimJob) -> None:
        job.start("a")
        await job.until_works("a")
        await job.pass_time(job.loop.rng.uniform(0, 60))
        late = job.make("b")
        late.connection.link.stall_requests(0.5, 1, puts(job.keys.node(late.node_id)))
        late.agent = job.on(late, late.run())
        await job.pass_time(0.2)
        await job.leave("a")
        await job.until_works("b", TTL_S / 2)

    simulate(scenario, range(8), min_nodes=1, max_nodes=1)

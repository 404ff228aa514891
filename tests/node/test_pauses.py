"""A node that is stopped in the midst of its work, between any two looks at its clock.

What it has seen is old when it goes on, and its decision may be wrong by then; and whatever it
measures contains the pause.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from rdzv_etcd.testing import Applied
from tests.sim import world
from tests.sim.world import TTL_S, SimJob, SimNode, simulate
from tests.support.machines import MachineClock

READINGS = range(1, 25)
"""A node is stopped just before it looks at its clock for that time, once it has something to do.
More looks than these are of later keep-alives."""
ROOM_S = 3.0
"""For what takes no time to speak of: etcd looks twice a second which leases have run out."""


def stall(node: SimNode, at_reading: int, for_s: float) -> None:
    clock = node.node.context.clock
    assert isinstance(clock, MachineClock)
    clock.stall(at_reading, for_s)


def once_gone(job: SimJob, node_id: str, then: Callable[[], None]) -> None:
    """Do something when etcd takes a node's presence away."""
    key = job.keys.node(node_id)

    def look(applied: Applied) -> None:
        if any(event.kv.key == key for change in applied.changes for event in change.events):
            then()

    job.server.observers.append(look)


def at_each_reading(scenario: Callable[..., object], **job: object) -> None:
    seeds = range(2 if world.SEEDS_AT_MOST is None else 1)
    for at_reading in READINGS:
        simulate(partial(scenario, at_reading=at_reading), seeds, **job)  # type: ignore[arg-type]


in_slices_and_for_so_long = pytest.mark.parametrize(
    ("slice_nodes", "pause_s"),
    [
        *((1, 4.0), (512, 20.0), (1, 60.0)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((512, 4.0), (1, 20.0), (512, 60.0))
        ),
    ],
)


@in_slices_and_for_so_long
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_leader_that_is_stopped_tells_of_a_loss_when_it_goes_on(
    slice_nodes: int, names: str, pause_s: float
) -> None:
    """After the lease and the pause, and one more TTL if others may have been stopped as well."""

    async def scenario(job: SimJob, at_reading: int) -> None:
        job.start_all(names)
        await job.until_works(names)
        await job.pass_time(30)
        leader, lost = job.leader, job.followers()[0]
        survivors = [node for node in job.nodes.values() if node is not lost]
        once_gone(job, lost.node_id, lambda: stall(leader, at_reading, pause_s))
        job.crash(lost.name)
        took_s = await job.until(
            lambda: all(node.joins > 1 for node in survivors), "the loss is known", 300
        )
        assert took_s < TTL_S + pause_s + TTL_S + ROOM_S

    at_each_reading(scenario, slice_nodes=slice_nodes)


@in_slices_and_for_so_long
def test_who_leads_next_and_is_stopped_tells_of_the_loss_of_the_leader(
    slice_nodes: int, pause_s: float
) -> None:
    async def scenario(job: SimJob, at_reading: int) -> None:
        await job.all_work("ab")
        await job.pass_time(30)
        (next_one,), lost = job.followers(), job.leader
        once_gone(job, lost.node_id, lambda: stall(next_one, at_reading, pause_s))
        job.crash(lost.name)
        took_s = await job.until(lambda: next_one.joins > 1, "the loss is known", 300)
        assert took_s < TTL_S + pause_s + TTL_S + ROOM_S

    at_each_reading(scenario, slice_nodes=slice_nodes)


@in_slices_and_for_so_long
@pytest.mark.parametrize("who", ["leader", "newcomer"])
def test_who_is_stopped_while_another_one_joins_is_in_a_world_when_it_goes_on(
    slice_nodes: int, who: str, pause_s: float
) -> None:
    async def scenario(job: SimJob, at_reading: int) -> None:
        await job.all_work("ab")
        await job.pass_time(30)
        leader, newcomer = job.leader, job.make("c")
        newcomer.agent = job.on(newcomer, newcomer.run())
        stall(leader if who == "leader" else newcomer, at_reading, pause_s)
        took_s = await job.until_works("abc", 300)
        assert took_s < pause_s + 2 * TTL_S + ROOM_S

    at_each_reading(scenario, slice_nodes=slice_nodes, min_nodes=2, max_nodes=3)


@pytest.mark.parametrize("pause_s", [4.0, 20.0, 60.0])
def test_who_is_stopped_while_all_come_back_is_in_a_world_when_it_goes_on(pause_s: float) -> None:
    async def scenario(job: SimJob, at_reading: int) -> None:
        await job.all_work("abc")
        await job.pass_time(30)
        leader, follower = job.leader, job.followers()[0]
        stall(leader, at_reading, pause_s)
        await job.join_again(follower.name)
        took_s = await job.until_works("abc", 300)
        assert took_s < pause_s + 2 * TTL_S + ROOM_S

    at_each_reading(scenario, min_nodes=2, max_nodes=3)

"""A node that is stopped in the midst of its work, between any two looks at its clock.

What it has seen is old when it goes on, and its decision may be wrong by then; and whatever it
measures contains the pause.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

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

Stop: TypeAlias = Callable[[SimNode], None]


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


async def a_member_is_lost(job: SimJob, stop: Stop) -> None:
    leader, lost = job.leader, job.followers()[0]
    once_gone(job, lost.node_id, lambda: stop(leader))
    await all_know_of_the_loss(job, lost)


async def the_leader_is_lost(job: SimJob, stop: Stop) -> None:
    lost, next_one = job.leader, job.followers()[0]
    once_gone(job, lost.node_id, lambda: stop(next_one))
    await all_know_of_the_loss(job, lost)


async def all_know_of_the_loss(job: SimJob, lost: SimNode) -> None:
    survivors = [node for node in job.nodes.values() if node is not lost]
    job.crash(lost.name)
    await job.until(lambda: all(node.joins > 1 for node in survivors), "the loss is known", 300)


async def one_joins_a_leader_that_is_stopped(job: SimJob, stop: Stop) -> None:
    job.start("c")
    stop(job.leader)
    await job.until_works("abc", 300)


async def one_is_stopped_while_it_joins(job: SimJob, stop: Stop) -> None:
    stop(job.start("c"))
    await job.until_works("abc", 300)


async def all_come_back(job: SimJob, stop: Stop) -> None:
    stop(job.leader)
    await job.join_again(job.followers()[0].name)
    await job.until_works("abc", 300)


PAUSES = ((1, 4.0), (512, 20.0), (1, 60.0))
MORE_PAUSES = ((512, 4.0), (1, 20.0), (512, 60.0))
"""Sizes of slices, and how long a node is stopped."""


@pytest.mark.parametrize(
    ("slice_nodes", "pause_s"),
    [*PAUSES, *(pytest.param(*each, marks=pytest.mark.release) for each in MORE_PAUSES)],
)
@pytest.mark.parametrize(
    ("names", "what", "limits"),
    [
        ("ab", a_member_is_lost, {}),
        ("abc", a_member_is_lost, {}),
        ("ab", the_leader_is_lost, {}),
        ("ab", one_joins_a_leader_that_is_stopped, {"min_nodes": 2, "max_nodes": 3}),
        ("ab", one_is_stopped_while_it_joins, {"min_nodes": 2, "max_nodes": 3}),
        ("abc", all_come_back, {"min_nodes": 2, "max_nodes": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_node_that_is_stopped_goes_on_with_what_has_happened_meanwhile(
    names: str,
    what: Callable[[SimJob, Stop], Coroutine[Any, Any, None]],
    limits: dict[str, int],
    slice_nodes: int,
    pause_s: float,
) -> None:
    """After the pause, a lease and one more TTL, if others may have been stopped as well."""

    async def scenario(job: SimJob, at_reading: int) -> None:
        await job.all_work(names)
        await job.pass_time(30)
        began_s = job.loop.time()
        await what(job, partial(stall, at_reading=at_reading, for_s=pause_s))
        assert job.loop.time() - began_s < TTL_S + pause_s + TTL_S + ROOM_S

    seeds = range(2 if world.SEEDS_AT_MOST is None else 1)
    for at_reading in READINGS:
        at_it = partial(scenario, at_reading=at_reading)
        simulate(at_it, seeds, slice_nodes=slice_nodes, **limits)

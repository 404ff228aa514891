"""Members whose work is done before the others': in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.sim.world import TIMING, SimJob, SimNode, simulated

PATIENT = replace(TIMING, rejoin_timeout_s=100_000.0)
"""Whoever waits for a finished member waits longer than a test."""
KNOWN_S = 2.0
"""After this time all know that a member has finished."""


def others(job: SimJob, *names: str) -> list[str]:
    return [name for name in job.nodes if name not in names]


async def nothing(_job: SimJob, _done: SimNode) -> None:
    pass


async def wiped(job: SimJob, _done: SimNode) -> None:
    """etcd loses all its data."""
    job.wipe()
    await job.pass_time(15.0)


async def revoked(job: SimJob, done: SimNode) -> None:
    """Its lease is gone, and its presence with it."""
    job.revoke([done.lease_id])
    await job.pass_time(15.0)


async def cut_off(job: SimJob, done: SimNode) -> None:
    """It cannot reach etcd for longer than a lease while it has something to tell."""
    done.connection.link.partition(silent=False)
    await job.pass_time(4.0)
    done.connection.link.heal()
    await job.pass_time(15.0)


async def restored(job: SimJob, done: SimNode) -> None:
    """etcd is restored from a snapshot, in which it had told nobody."""
    presence = job.keys.node(done.node_id)
    before = job.save()
    told = b'"finished":true'

    def has_told() -> bool:
        return any(kv.key == presence and told in kv.value for kv in job.server.snapshot())

    assert not has_told()
    await job.until(has_told, "it tells the others", 5.0)
    job.restore(before, bump_revision=1000)
    await job.pass_time(15.0)


@pytest.mark.parametrize("event", [nothing, wiped, revoked, cut_off, restored])
@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "another"])
@simulated(range(6), min_nodes=1, max_nodes=3, timing=PATIENT)
async def test_the_others_go_on_without_a_member_that_has_finished(
    job: SimJob, leads: bool, event: Callable[[SimJob, SimNode], Awaitable[None]]
) -> None:
    """Nobody restarts because it has finished; who restarts later does not wait for it, again and
    again; and it hears of the end."""
    await job.all_work("abc")
    done = job.leader if leads else job.followers()[0]
    await job.finish_early(done.name)
    await event(job, done)
    await job.pass_time(KNOWN_S)
    first, second = others(job, done.name)
    assert [node.joins for node in job.nodes.values()] == [1, 1, 1], job.tell()
    for turn in (1, 2):
        await job.join_again(first)

        def both_are_in_the_next(turn: int = turn) -> bool:
            joins = [job.nodes[name].joins for name in (first, second)]
            return joins == [1 + turn] * 2 and job.works([first, second])

        await job.until(both_are_in_the_next, "the two are in the next world", 5.0)
    assert job.leader is not done
    assert not done.finished
    closer = job.nodes[first]
    await job.close(closer)
    await job.until(lambda: done.finished, "it hears of the end", 5.0)


@simulated(range(3), min_nodes=1, max_nodes=3, timing=PATIENT)
async def test_one_that_is_lost_before_the_others_have_finished_is_a_loss(job: SimJob) -> None:
    """The store of their workers may have been with it."""
    await job.all_work("abc")
    await job.finish_early("a")
    await job.pass_time(KNOWN_S)
    job.crash("a")
    await job.until_works("bc", 30.0)


@simulated(range(3), min_nodes=3, max_nodes=3)
async def test_who_finish_together_write_nothing(job: SimJob) -> None:
    await job.all_work("abc")
    revision = job.server.revision
    for name in "abc":
        await job.finish_early(name)
    await job.pass_time(0.5)
    assert job.server.revision == revision

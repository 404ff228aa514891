"""Guards whose loss random lives seldom notice: for each the schedule in which it is what counts.

Every scenario goes well as the code is, and breaks the promise named without the guard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.etcd.port import Delete, Txn
from rdzv_etcd.node import recover, session
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import closing, requests
from rdzv_etcd.protocol import liveness as accusations
from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.testing.network import Match
from tests.node import test_scenarios
from tests.sim.commits import OPERATOR
from tests.sim.invariants import Invariant
from tests.sim.matching import puts, puts_presence
from tests.sim.mutants import broken_by, on, without_guard
from tests.sim.world import TIMING, TTL_S, SimJob, SimNode

# A life that fails is cut short, with coroutines under way.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


async def works_one_after_the_other(job: SimJob, names: str) -> list[SimNode]:
    """Start nodes so that the first leads; it is the first to write anything at all."""
    for name in names:
        job.start(name)
        await job.pass_time(0.1)
    await job.until_works(names)
    assert job.leader is job.nodes[names[0]]
    return [job.nodes[name] for name in names]


def restores(job: SimJob, member: SimNode) -> Match:
    """Match the transactions with which a member puts its presence back in its round."""
    return puts_presence(
        job.keys,
        member.node_id,
        lambda info: member.world is not None and info.arrived_for == member.world.round,
    )


@broken_by(
    requests,
    "restore_presence",
    without_guard(lambda guard: guard.key.endswith(b"ctl/change")),
    Invariant.EVICTED,
    min_nodes=3,
    max_nodes=3,
)
async def test_a_presence_put_back_after_its_node_was_declared_lost(job: SimJob) -> None:
    """A member's presence is deleted shortly before the lease of the crashed leader runs out; what
    the member puts back is under way for 4 s. Meanwhile a new leader declares both lost. The
    member's workers take their time to stop, so it has not arrived again by then."""
    leader, late, other = await works_one_after_the_other(job, "abc")
    late.stops_in_s = 30.0
    late.connection.link.hold_requests(4.0, 9, restores(job, late))  # and its copies
    job.crash(leader.name)
    await job.pass_time(0.8 * TTL_S)
    job.server.apply(Txn((), (Delete(job.keys.node(late.node_id)),)), OPERATOR)
    await job.until(lambda: bool(job.history.changes), "both are missed", 2 * TTL_S)
    await job.pass_time(30.0)
    job.history.check()
    job.start("d")
    await job.until_works("bcd")
    assert other.joins == 2


@broken_by(
    requests,
    "close_job",
    without_guard(on(b"ctl/round")),
    Invariant.SUCCESSION,
    min_nodes=2,
    max_nodes=3,
)
async def test_a_job_closed_over_another_record(job: SimJob) -> None:
    """A member is stopped before it can send that the job has failed; the others lose one, go on
    in a new round, and it knows nothing of that."""
    _, closer, victim = await works_one_after_the_other(job, "abc")
    closer.connection.link.stall_requests(20.0, 1, puts(job.keys.round))
    closing = job.on(closer, closer.node.close_job(succeeded=False, reason="late"))
    job.crash(victim.name)
    await job.until_works("ab")
    await closing
    job.history.check()
    assert job.works("ab")


def names_nobody(original: Any, *args: Any) -> Close:
    close: Close = original(*args)
    return Close(close.world, (), close.reason)


@broken_by(
    closing,
    "_close",
    names_nobody,
    Invariant.SEATS,
    min_nodes=1,
    max_nodes=3,
    timing=replace(TIMING, rejoin_timeout_s=30.0),
)
async def test_a_member_that_came_back_too_late_is_named(job: SimJob) -> None:
    """It is alive, and works on; its presence looks like that of a spare."""
    _, slow, victim = await works_one_after_the_other(job, "abc")
    slow.stops_in_s = 60.0
    job.crash(victim.name)
    await job.until(lambda: len(job.history.formed) == 2, "a round without it", 50.0)
    await job.pass_time(60.0)
    await job.until_works("ab")


def is_not_shaken(original: Any, self: session.Session, lease_id: int) -> None:
    """Go by what is seen at once after the loss of this node's own lease."""
    unstable_s = self._unstable_s
    original(self, lease_id)
    self._unstable_s = unstable_s


@broken_by(
    session.Session,
    "lost",
    is_not_shaken,
    AssertionError,
    seeds=range(20),
    min_nodes=2,
    max_nodes=3,
)
async def test_all_leases_are_taken_while_a_member_cannot_reach_etcd(job: SimJob) -> None:
    """Contact was there all the time, and half a TTL without any costs nobody its lease otherwise:
    only the loss of its own tells the next leader that the member may be about to come back."""
    nodes = job.start_all("abc")
    await job.until_works("abc")
    await job.pass_time(3 * TTL_S)
    away = job.followers()[0].connection.link
    away.partition(silent=job.loop.rng.random() < 0.5)
    await job.pass_time(0.5)
    job.revoke([node.node.context.session.lease_id for node in nodes])
    await job.pass_time(2.5)
    away.heal()
    await job.pass_time(3 * TTL_S)
    assert [node.joins for node in nodes] == [1, 1, 1], job.tell()


async def _looks_away(context: NodeContext, member: Member) -> None:
    """Never hear that one's own presence is gone."""


@pytest.mark.parametrize(
    ("place", "name", "by"),
    [(accusations, "ABSENCE_GRACE_S", 0.0), (recover, "watch_own_presence", _looks_away)],
    ids=["the grace", "the watch"],
)
def test_a_living_member_whose_lease_was_taken(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, by: object
) -> None:
    """It puts its presence back at once, and nobody calls it lost within that time."""
    monkeypatch.setattr(place, name, by)
    with pytest.raises(AssertionError):
        test_scenarios.test_leases_taken_from_living_members_restart_nothing("followers")

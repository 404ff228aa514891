"""Guards whose loss random lives seldom notice: for each the schedule in which it is what counts.

Every scenario goes well as the code is, and breaks the promise named without the guard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.etcd.port import Delete, Txn, prefix_end
from rdzv_etcd.node import job_leases, recover, session
from rdzv_etcd.node.context import NodeContext
from rdzv_etcd.protocol import closing, member, requests
from rdzv_etcd.protocol import liveness as accusations
from rdzv_etcd.protocol.closing import Close
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Control
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Revoke
from rdzv_etcd.testing.network import Match
from tests.node import test_scenarios
from tests.sim.commits import OPERATOR
from tests.sim.invariants import Invariant
from tests.sim.matching import deletes, noted, puts, puts_presence, txns
from tests.sim.mutants import broken_by, on, without_guard
from tests.sim.test_mutants import whole_families
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
    job.revoke([node.lease_id for node in nodes])
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


# --- of single writes -----------------------------------------------------------------------------


def claims(job: SimJob) -> Match:
    """Match what claims the lead and does nothing else."""
    return txns(lambda txn: any(g.key == job.keys.leader and g.operand == 0 for g in txn.guards))


def cut_off_with_its_round(job: SimJob, closer: SimNode) -> None:
    """Cut ``closer`` off, unnoticed, in the moment in which etcd commits the round it closes."""

    def cut(applied: Applied) -> None:
        if applied.source == closer.node_id and puts(job.keys.round)(applied.request):
            closer.connection.link.partition(silent=True)
            job.server.observers.remove(cut)

    job.server.observers.append(cut)


def admits_rank_0_anywhere(original: Any, self: Any, control: Control) -> Any:
    """Whatever socket the record names."""
    record = control.formed
    if record is not None and self.info is not None and self.rank_in(record) == 0:
        self.info = replace(self.info, address=record.master_address, port=record.master_port)
    return original(self, control)


@broken_by(
    member.Member, "seat_in", admits_rank_0_anywhere, Invariant.SEATS, min_nodes=2, max_nodes=2
)
async def test_a_round_whose_rank_0_has_given_up_its_socket(job: SimJob) -> None:
    """The leader closes a round, hears nothing of it, and its agent joins again at another port;
    its watch lags, so the refusal of its arrival is the first it hears of the round. (By its key it
    is rank 0 of the next one as well; without, that would be who was told of this one.)"""
    first = job.start("a", rank_key="0")
    await job.pass_time(0.1)
    cut_off_with_its_round(job, first)
    job.start("b", rank_key="1")
    await job.until(lambda: bool(job.history.formed), "a round of both", 60.0)
    first.connection.link.lag_watches(60.0)
    assert first.agent is not None
    first.agent.cancel()
    await job.pass_time(0.1)
    first.connection.link.heal()
    await job.pass_time(0.1)
    first.agent = job.on(first, first.run())
    await job.until_works("ab", 120.0)


@broken_by(
    requests,
    "close_round",
    without_guard(on(b"ctl/round")),
    Invariant.SUCCESSION,
    min_nodes=1,
    max_nodes=3,
)
async def test_a_round_closed_over_the_end_of_the_job(job: SimJob) -> None:
    """The leader waits for a slow member, and closes the round without it; that is under way while
    the slow one says that the job has failed."""
    leader, slow, victim = await works_one_after_the_other(job, "abc")
    slow.stops_in_s = 500.0
    closing, under_way = noted(puts(job.keys.round))
    leader.connection.link.hold_requests(10.0, 1, closing)
    job.crash(victim.name)
    await job.until(lambda: bool(under_way), "the leader closes the round", 300.0)
    leader.connection.link.lag_watches(60.0)  # it would withdraw if it heard of the end
    await job.on(slow, slow.node.close_job(succeeded=False, reason="the disk is full"))
    assert job.history.closures
    await job.pass_time(20.0)
    job.history.check()


@broken_by(
    requests, "say_goodbye", without_guard(lambda _: True), Invariant.KEPT, min_nodes=2, max_nodes=2
)
async def test_a_goodbye_that_comes_after_its_node_has_joined_again(job: SimJob) -> None:
    """Its session was to be revoked, but that was lost, so its lease lives on for a while."""
    node = job.start("a")
    await job.pass_time(1.0)
    link = node.connection.link
    goodbye = puts_presence(job.keys, node.node_id, lambda info: info.leaving is not None)
    link.repeat_requests(7.0, 1, goodbye)
    link.drop_requests(9, lambda request: isinstance(request, Revoke))
    await job.join_again("a")
    other = job.start("b")
    await job.until_works("ab")
    await job.pass_time(3 * TTL_S)
    assert (node.joins, other.joins) == (2, 1), job.tell()


@broken_by(
    requests,
    "restore_presence",
    without_guard(on(b"ctl/round")),
    Invariant.ENDED,
    min_nodes=2,
    max_nodes=3,
)
async def test_a_presence_put_back_into_a_job_that_has_ended(job: SimJob) -> None:
    """What a member puts back is under way while another closes the job. It works on, to finish;
    a new run of the job must not count on it."""
    _, late, _ = await works_one_after_the_other(job, "abc")
    restoring, under_way = noted(restores(job, late))
    late.connection.link.hold_requests(8.0, 9, restoring)
    job.server.expire(late.lease_id)
    await job.until(lambda: bool(under_way), "the member puts its presence back", TTL_S)
    leader = job.leader
    await job.close(leader)
    await job.leave("a")
    await job.leave("c")
    await job.pass_time(10.0)
    job.start_all("de")
    await job.until_works("de", 60.0)


@broken_by(
    requests, "arrive", without_guard(on(b"ctl/round")), Invariant.ENDED, min_nodes=2, max_nodes=3
)
async def test_an_arrival_after_the_end_of_its_run(job: SimJob) -> None:
    """A member that arrives again is still under way when its run has ended, and would be seated in
    the next one, which it is no part of."""
    leader, late, _ = await works_one_after_the_other(job, "abc")
    arriving, under_way = noted(puts(job.keys.node(late.node_id)))
    late.connection.link.hold_requests(8.0, 9, arriving)
    late.connection.link.lag_watches(60.0)  # it would give up if it heard
    late.connection.link.hold_requests(600.0, 9, claims(job))  # newcomers lead
    job.rejoin(late)
    await job.until(lambda: bool(under_way), "the member arrives again", 60.0)
    await job.close(leader)
    await job.leave("a")
    await job.leave("c")
    job.start_all("de")
    await job.until_works("de", 200.0)


@broken_by(
    requests,
    "restore_record",
    without_guard(on(b"ctl/ended")),
    Invariant.ENDED,
    min_nodes=2,
    max_nodes=2,
    timing=replace(TIMING, closed_ttl_s=5),
)
async def test_a_record_put_back_when_its_run_is_over_and_forgotten(job: SimJob) -> None:
    """An operator deletes the record. One member puts it back and ends the job; what the other puts
    back is under way until the marker has expired, so that there is no record again."""
    first, late = await works_one_after_the_other(job, "ab")
    restoring, under_way = noted(puts(job.keys.round))
    late.connection.link.hold_requests(15.0, 9, restoring)
    job.server.apply(Txn((), (Delete(job.keys.round),)), OPERATOR)
    await job.until(lambda: bool(under_way), "both put it back", TTL_S)
    await job.until(lambda: first.node.control.formed is not None, "it is there", TTL_S)
    await job.close(first)
    await job.leave("a")
    await job.pass_time(20.0)
    job.history.check()
    assert not job.server.snapshot(job.keys.round)


def forgets_the_doubt(original: Any, self: job_leases.PreparedLease) -> None:
    """Take a lease that a round may live on for one that nobody uses."""


@broken_by(
    job_leases.PreparedLease,
    "in_doubt",
    forgets_the_doubt,
    Invariant.KEPT,
    min_nodes=2,
    max_nodes=3,
)
async def test_a_job_lease_of_which_nobody_knows_whether_a_round_has_it(job: SimJob) -> None:
    """The leader closes a round and is cut off, until the others have called it lost. It has a
    lease that it granted for the round, and no answer."""
    first = job.start("a")
    await job.pass_time(0.1)
    cut_off_with_its_round(job, first)
    job.start_all("bc")
    await job.until_works("bc", 60.0)
    first.connection.link.heal()
    await job.pass_time(40.0)
    await job.until_works("abc", 60.0)
    job.history.check()


@broken_by(
    requests,
    "close_round",
    without_guard(lambda guard: b"/ranks/" in guard.key),
    Invariant.RANKS,
    min_nodes=2,
    max_nodes=2,
    slice_nodes=1,
)
async def test_a_large_world_whose_slices_etcd_has_forgotten(job: SimJob) -> None:
    """It goes back to before they were put, just before the record is."""
    leader = job.start("a")
    await job.pass_time(0.1)
    leader.connection.link.stall_requests(0.5, 1, puts(job.keys.ranks))
    leader.connection.link.stall_requests(2.0, 1, puts(job.keys.round))
    job.start("b")
    await job.pass_time(0.3)
    saved = job.save()
    await job.pass_time(0.7)
    assert any(kv.key in job.keys.ranks for kv in job.server.snapshot())
    job.restore(saved, bump_revision=job.loop.rng.choice([0, 1_000_000]))
    await job.until_works("ab", 120.0)


@broken_by(
    requests,
    "resign",
    without_guard(lambda guard: guard.key.endswith(b"ctl/leader")),
    Invariant.LEADER,
    min_nodes=2,
    max_nodes=2,
)
async def test_a_lead_that_is_given_up_twice(job: SimJob) -> None:
    """Who works on after the end of its job gives up the lead, so that a new run has its own. A
    late copy of that comes when the new run has a leader."""
    first, _ = await works_one_after_the_other(job, "ab")
    first.connection.link.repeat_requests(20.0, 1, deletes(job.keys.leader))
    await job.close(first)
    await job.leave("b")
    await job.pass_time(5.0)
    job.start_all("cd")
    await job.pass_time(30.0)
    await job.until_works("cd", 60.0)


@broken_by(
    requests,
    "remove_job",
    without_guard(on(b"ctl/round")),
    Invariant.KEPT,
    min_nodes=2,
    max_nodes=2,
)
async def test_the_last_one_out_who_has_not_heard_of_the_end(job: SimJob) -> None:
    """Its watch lags; the marker, which tells late nodes what became of the job, must stay."""
    leader, last = await works_one_after_the_other(job, "ab")
    last.connection.link.lag_watches(60.0)
    await job.close(leader)
    await job.leave("a")
    await job.leave("b")
    job.history.check()
    assert job.keys.round in {kv.key for kv in job.server.snapshot()}


def one_store_for_all_runs(original: Any, self: JobKeys, number: int, _run: str) -> KeyRange:
    store: KeyRange = original(self, number, "any")
    return store


@broken_by(
    JobKeys,
    "store",
    one_store_for_all_runs,
    Invariant.NEW_STORE,
    min_nodes=2,
    max_nodes=2,
    works=True,
    timing=replace(TIMING, closed_ttl_s=5),
)
async def test_a_new_run_while_the_keys_of_the_last_one_live(job: SimJob) -> None:
    """All nodes are killed when they have closed their job. The marker expires before the job lease
    does, so the new run counts its rounds from 1 again."""
    leader, _ = await works_one_after_the_other(job, "ab")
    await job.pass_time(10.0)
    await job.close(leader)
    job.crash("a", "b")
    await job.pass_time(2 * TTL_S)
    job.start_all("cd")
    await job.until_works("cd")
    assert job.history.formed[-1].record.number == 1


def deletes_all_that_begins_alike(original: Any, keys: JobKeys, *args: Any) -> Txn:
    txn: Txn = original(keys, *args)
    start = keys.root.rstrip(b"/")
    return replace(txn, success=(Delete(start, prefix_end(start)),))


@broken_by(JobKeys, "_rounds", whole_families, Invariant.OTHERS, max_nodes=1)
async def test_a_job_whose_prefix_is_below_another_job(job: SimJob) -> None:
    """A team's prefix is another job's path, and its job is called like a part of that."""
    prefix = job.keys.root.decode().rstrip("/")
    other = SimJob(job.loop, job.server, job_id="store", prefix=prefix, min_nodes=1, max_nodes=1)
    job.history.below.add(other.keys.root)
    other.start("x")
    await other.until_works("x")
    job.start("a")
    await job.until_works("a")
    await job.leave("a")
    await job.pass_time(1.0)
    other.history.check()
    assert other.works("x")
    assert other.nodes["x"].joins == 1


@broken_by(requests, "remove_job", deletes_all_that_begins_alike, Invariant.OTHERS, max_nodes=1)
async def test_a_job_whose_id_begins_like_another_one(job: SimJob) -> None:
    other = SimJob(job.loop, job.server, job_id="jobs", min_nodes=1, max_nodes=1)
    other.start("x")
    await other.until_works("x")
    job.start("a")
    await job.until_works("a")
    await job.leave("a")
    await job.pass_time(1.0)
    other.history.check()
    assert other.works("x")

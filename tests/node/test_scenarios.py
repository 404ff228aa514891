"""The real driver on the in-memory etcd in virtual time: what the nodes of a job go through.

Each scenario runs under many seeds, each of which is another schedule; a failure names its seed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rdzv_etcd.errors import (
    EtcdUnavailableError,
    JoinTimeoutError,
)
from rdzv_etcd.etcd.port import Delete, Txn
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import DEFAULT_SLICE_NODES
from rdzv_etcd.testing.model import Grant
from rdzv_etcd.testing.network import Match
from tests.sim.commits import OPERATOR
from tests.sim.matching import puts, renews
from tests.sim.world import TICK_S, TIMING, TTL_S, SimJob, SimNode, simulated

DETECTION_S = TTL_S + TICK_S
SOON_S = 1.0
"""Messages, settling and re-joining; no lease, no last call."""


# --- forming, growing, shrinking ------------------------------------------------------------------

LARGE_AND_SMALL = pytest.mark.parametrize("slice_nodes", [DEFAULT_SLICE_NODES, 1, 2])
"""Worlds named in their record, and worlds in slices."""


@simulated(min_nodes=2, max_nodes=2)
async def test_a_world_is_formed_at_once_however_long_its_first_node_waited(job: SimJob) -> None:
    job.start("a")
    # The lease that was granted ahead for the job is about to run out, or has done so.
    await job.pass_time(job.loop.rng.uniform(0.3, 3.0) * TIMING.job_ttl_s)
    job.start("b")
    assert await job.until_works("ab") < SOON_S / 2


@simulated(min_nodes=2, max_nodes=4)
async def test_an_elastic_world_is_formed_after_the_last_call_of_all_who_came_by_then(
    job: SimJob,
) -> None:
    job.start_all("ab")
    await job.pass_time(29.0)
    job.start("c")
    assert 0.9 <= await job.until_works("abc") < 1.0 + SOON_S
    assert len(job.history.formed) == 1


@simulated(min_nodes=2, max_nodes=4)
async def test_a_newcomer_is_taken_into_a_running_job_and_survivors_keep_their_ranks(
    job: SimJob,
) -> None:
    nodes = await job.all_work("ab")
    before = {node.name: node.rank for node in nodes}
    job.start("c")
    assert await job.until_works("abc") < SOON_S
    assert {node.name: node.rank for node in nodes} == before
    assert job.nodes["c"].rank == 2


# --- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["leader", "follower"])
@simulated(min_nodes=2, max_nodes=3)
async def test_a_crashed_member_is_noticed_within_the_ttl_and_a_tick(
    job: SimJob, which: str
) -> None:
    await job.all_work("abc")
    await job.pass_time(job.loop.rng.uniform(0, 30))
    lost = job.leader if which == "leader" else job.loop.rng.choice(job.followers())
    job.crash(lost.name)
    assert await job.until_works("abc".replace(lost.name, "")) <= DETECTION_S + SOON_S


@simulated(min_nodes=3, max_nodes=3)
async def test_a_leader_that_crashes_while_it_collects_the_first_round_is_replaced(
    job: SimJob,
) -> None:
    job.start_all("abc")
    await job.until(lambda: any(n.node.leads for n in job.nodes.values()), "a leader")
    await job.pass_time(job.loop.rng.uniform(0, 5))
    lost = job.leader.name
    job.crash(lost)
    await job.pass_time(1.0)
    job.start("d")
    rest = "abcd".replace(lost, "")
    assert await job.until_works(rest) <= DETECTION_S + SOON_S


@simulated(min_nodes=2, max_nodes=4)
async def test_a_leader_that_crashes_after_publishing_a_change_is_replaced(job: SimJob) -> None:
    await job.all_work("abcd")
    leader, other = job.leader.name, job.followers()[0].name
    await job.leave(other)
    await job.until(lambda: bool(job.history.changes), "a change")
    job.crash(leader)
    rest = "abcd".replace(leader, "").replace(other, "")
    # the dead leader is live until its lease ends; the new one may wait for it no longer
    await job.until_works(rest, DETECTION_S + SOON_S)


@simulated(min_nodes=2, max_nodes=3)
async def test_a_member_that_leaves_is_missed_at_once_and_the_reason_is_known(job: SimJob) -> None:
    await job.all_work("abc")
    await job.pass_time(job.loop.rng.choice([0.0, 1.0, 30.0]))
    name = job.loop.rng.choice("abc")
    node_id = job.nodes[name].node_id
    leaving = asyncio.ensure_future(job.leave(name))
    assert await job.until_works("abc".replace(name, "")) < SOON_S
    await leaving
    (change,) = [change for _, change in job.history.changes]
    assert change.lost == {node_id: "left: SIGTERM"}


@simulated(min_nodes=3, max_nodes=3)
async def test_a_job_that_waits_long_for_a_replacement_takes_it_in(job: SimJob) -> None:
    """Longer than the job lease lives without being renewed."""
    await job.all_work("abc")
    lost = job.loop.rng.choice("abc")
    job.crash(lost)
    await job.pass_time(300)
    job.start("d")
    await job.until_works("abcd".replace(lost, ""), 5)
    assert job.history.formed[-1].record.number == 2
    assert len({each.record.origin for each in job.history.formed}) == 1


# --- spares -------------------------------------------------------------------------------------


@simulated(min_nodes=2, max_nodes=2)
async def test_a_spare_leads_when_all_members_are_lost(job: SimJob) -> None:
    await job.all_work("ab")
    job.start_all("cd")
    await job.pass_time(30)
    job.crash("a", "b")
    await job.until_works("cd", DETECTION_S + TTL_S + SOON_S)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_nodes", [1, 128])
@simulated(range(3), options=["slice_nodes"], min_nodes=3, max_nodes=3)
async def test_a_join_timeout_does_not_count_who_is_still_at_work(job: SimJob) -> None:
    """It is there, and has not arrived; also where each node reads only its own rank."""
    nodes = await job.all_work("abc")
    for node in nodes:
        node.join_timeout_s, node.stops_in_s = 20.0, 100.0
    here, *others = nodes
    job.rejoin(here)
    await job.until(lambda: here.error is not None, "a timeout", 30.0)
    assert isinstance(here.error, JoinTimeoutError)
    assert here.error.arrived == (here.node_id,)
    text = str(here.error)
    assert "round 2 was not formed within 20 s: 1 of at least 3 nodes arrived (a); " in text
    assert "not back yet: " in text
    for other in others:
        assert f"{other.name} (10.0.0.{other.name})" in text


# --- etcd away ----------------------------------------------------------------------------------


@simulated(min_nodes=2, max_nodes=3)
async def test_a_join_begun_while_etcd_is_away_goes_on_when_it_is_back(job: SimJob) -> None:
    for name in "ab":  # started, not joined
        node = job.make(name)
        await job.on(node, node.node.start())
    job.server.stop()
    for node in job.nodes.values():
        node.agent = job.on(node, node.run())
    await job.pass_time(100)
    assert not any(node.error for node in job.nodes.values()), job.tell()
    job.server.start()
    await job.until_works("ab", 40)


@simulated(seeds=range(5), min_nodes=1, max_nodes=1)
async def test_a_join_without_etcd_ends_in_bounded_time(job: SimJob) -> None:
    node = job.make("a", join_timeout_s=90.0)
    await job.on(node, node.node.start())
    job.server.stop()
    node.agent = job.on(node, node.run())
    await job.until(lambda: node.error is not None, "an error", 91 + TTL_S)
    assert isinstance(node.error, EtcdUnavailableError | JoinTimeoutError)


@pytest.mark.parametrize("lasts_s", [2.0, 25.0, 300.0])
@pytest.mark.parametrize(
    "outage",
    ["etcd is away", "all are cut off", "all are cut off in silence", "etcd renews no lease"],
)
@simulated(min_nodes=2, max_nodes=3)
async def test_an_outage_restarts_nothing_and_a_later_loss_is_noticed_as_ever(
    job: SimJob, outage: str, lasts_s: float
) -> None:
    nodes = await job.all_work("abc")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    leases = {node.lease_id for node in nodes}
    if outage == "etcd is away":
        job.server.restart(lasts_s)
    elif outage == "etcd renews no lease":  # it grants others, which run out as well
        job.server.set_overloaded(True)
    else:
        job.cut(nodes, silent="silence" in outage)
    await job.pass_time(lasts_s)
    if outage != "etcd is away":
        assert lasts_s < 2 * TTL_S or not leases & set(job.server.leases()), job.tell()
        job.server.set_overloaded(False)
        job.heal(nodes)
    await job.pass_time(200)
    job.assert_undisturbed("abc")
    assert not job.history.changes
    lost = job.leader.name
    job.crash(lost)
    await job.until_works("abc".replace(lost, ""), DETECTION_S + SOON_S)


@pytest.mark.parametrize("which", ["leader", "follower"])
@simulated(min_nodes=2, max_nodes=3)
async def test_while_etcd_renews_no_lease_newcomers_are_taken_in_and_losses_are_noticed_afterwards(
    job: SimJob, which: str
) -> None:
    await job.all_work("ab")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    job.server.set_overloaded(True)
    await job.pass_time(3 * TTL_S)
    job.start("c")
    await job.until_works("abc", SOON_S)
    lost = (job.leader if which == "leader" else job.followers()[0]).name
    job.crash(lost)
    await job.pass_time(3 * TTL_S)
    assert len(job.history.changes) == 1, job.tell()  # that of the newcomer
    job.server.set_overloaded(False)
    await job.until_works("abc".replace(lost, ""), DETECTION_S + SOON_S)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("which", ["leader", "follower"])
@simulated(min_nodes=2, max_nodes=3)
async def test_one_node_that_is_cut_off_beyond_the_ttl_is_evicted_and_comes_back_as_a_newcomer(
    job: SimJob, which: str, silent: bool
) -> None:
    await job.all_work("abc")
    node = job.leader if which == "leader" else job.followers()[0]
    rest = "abc".replace(node.name, "")
    node.connection.link.partition(silent=silent)
    await job.until_works(rest, DETECTION_S + SOON_S)
    assert node.world is not None
    assert node.is_working  # it cannot know yet
    await job.pass_time(job.loop.rng.uniform(0, 100))
    node.connection.link.heal()
    await job.until_works("abc", 30)
    assert [world.round for world in node.worlds] == [1, 3], job.tell()


@simulated(min_nodes=1, max_nodes=1)
async def test_what_a_node_has_written_is_not_shown_after_what_became_of_it(job: SimJob) -> None:
    """A reply may come after the events of its own write, and of later ones."""
    (node,) = await job.all_work("a")
    context = node.node.context
    seen = context.control.view
    context.show_written(seen.revision, round=None, round_revision=0)
    assert context.control.view is seen
    context.show_written(seen.revision + 1, round_revision=seen.revision + 1)
    assert context.control.view.round_revision == seen.revision + 1


@pytest.mark.parametrize("whose", ["followers", "the leader's", "all"])
@simulated(min_nodes=2, max_nodes=3)
async def test_leases_taken_from_living_members_restart_nothing(job: SimJob, whose: str) -> None:
    """As a leader of etcd does that was paused and wakes up (etcd#15247)."""
    nodes = await job.all_work("abc")
    await job.pass_time(TTL_S)
    for _ in range(5):
        leader = job.leader
        for node in nodes:
            if whose == "all" or (node is leader) == (whose == "the leader's"):
                job.server.expire(node.lease_id)
        await job.pass_time(job.loop.rng.uniform(1.0, TTL_S))
    job.assert_undisturbed("abc")
    assert not job.history.changes, job.tell()


@LARGE_AND_SMALL
@simulated(options=["slice_nodes"], min_nodes=2, max_nodes=4)
async def test_a_wiped_etcd_restarts_nothing_and_epochs_go_on_growing(job: SimJob) -> None:
    await job.all_work("abc")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    job.wipe()
    await job.pass_time(100)
    job.assert_undisturbed("abc")
    job.start("d")
    await job.until_works("abcd", 60)
    lost = job.leader.name
    job.crash(lost)
    await job.until_works("abcd".replace(lost, ""), DETECTION_S + SOON_S)
    epochs = list(dict.fromkeys(each.epoch for each in job.history.formed))
    assert epochs == sorted(epochs)
    assert len(epochs) == 3


@LARGE_AND_SMALL
@simulated(options=["slice_nodes"], min_nodes=2, max_nodes=3)
async def test_a_newcomer_that_comes_right_after_a_wipe_restarts_nothing(job: SimJob) -> None:
    """It may become the leader before any member is back: it must not call them lost."""
    await job.all_work("abc")
    await job.pass_time(job.loop.rng.uniform(0, 20))
    job.wipe()
    job.start("d")
    await job.pass_time(100)
    job.assert_undisturbed("abc")


@LARGE_AND_SMALL
@simulated(options=["slice_nodes"], min_nodes=2, max_nodes=3)
async def test_the_record_is_put_back_when_only_the_job_lease_was_lost(job: SimJob) -> None:
    await job.all_work("abc")
    job.server.expire(job.history.formed[0].record.job_lease)
    await job.pass_time(60)
    job.assert_undisturbed("abc")
    await job.leave("a")
    await job.until_works("bc", SOON_S)


@simulated(min_nodes=1, max_nodes=1, timing=replace(TIMING, job_lease_ttl_s=TTL_S))
async def test_a_job_lease_as_short_as_a_nodes_outlives_renewals_that_are_lost(job: SimJob) -> None:
    """What is in the round's store would go with it, and nobody could put that back."""
    node = job.start("a")
    await job.until_works("a")
    lease_id = job.history.formed[0].record.job_lease
    for _ in range(5):
        node.connection.link.hold_requests(3600.0, 2, renews(lease_id))
        await job.pass_time(TTL_S)
    assert [each.record.number for each in job.history.formed] == [1], job.tell()


async def has_a_spare_that_leads(job: SimJob) -> SimNode:
    """Three members that work, slow to put the lead or the record, and a spare that leads."""
    members = await job.all_work("abc")
    spare = job.start("d")
    await job.pass_time(TTL_S)
    for node in members:
        for key in (job.keys.leader, job.keys.round):
            node.connection.link.hold_requests(1.0, 2, puts(key))
    job.server.apply(Txn((), (Delete(job.keys.leader),)), OPERATOR)
    await job.until(lambda: spare.node.leads, "the spare leads")
    return spare


@LARGE_AND_SMALL
@simulated(options=["slice_nodes"], min_nodes=2, max_nodes=3)
async def test_a_spare_that_leads_leaves_it_to_the_members_to_put_their_record_back(
    job: SimJob,
) -> None:
    spare = await has_a_spare_that_leads(job)
    job.server.expire(job.history.formed[0].record.job_lease)
    await job.pass_time(60)
    job.assert_undisturbed("abc")
    assert spare.joins == 1
    job.crash("a")
    await job.until(lambda: spare.is_working, "the spare works", DETECTION_S + SOON_S)


@simulated(min_nodes=1, max_nodes=3)
async def test_a_spare_that_leads_goes_on_when_nobody_puts_the_record_back(job: SimJob) -> None:
    await has_a_spare_that_leads(job)
    job.crash("a", "b", "c")
    job.server.expire(job.history.formed[0].record.job_lease)
    await job.until_works("d", TTL_S + TIMING.last_call_timeout_s + SOON_S)


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 59.5, 61.0])
@simulated(min_nodes=3, max_nodes=3)
async def test_the_same_id_works_again_at_once(job: SimJob, pause_s: float) -> None:
    nodes = await job.all_work("abc")
    for node in nodes:
        job.on(node, node.node.close_job(succeeded=True, reason="done"))
    await job.until(lambda: all(node.node.closure() for node in nodes), "closed")
    for name in "abc":
        await job.leave(name)
    await job.pass_time(pause_s)
    job.start_all("de")
    await job.pass_time(job.loop.rng.uniform(0, 3))
    job.start("f")
    await job.until_works("def", 5)
    assert len({each.record.origin for each in job.history.formed}) == 2


@simulated(min_nodes=3, max_nodes=3)
async def test_a_new_run_may_have_other_settings_while_the_old_one_is_on_its_way_out(
    job: SimJob,
) -> None:
    nodes = await job.all_work("abc")
    closer = job.loop.rng.choice(nodes)
    await job.close(closer)
    await job.leave(closer.name)
    for name in "de":
        job.start(name, job=JobSettings(2, 2))
    await job.until_works("de", 5)
    await job.pass_time(400)
    assert job.works("de"), job.tell()
    others = [node for node in nodes if node is not closer]
    assert all(node.joins == 1 for node in others), job.tell()
    assert all(node.node.waiting_count() == 0 for node in others), job.tell()


@simulated(min_nodes=3, max_nodes=3)
async def test_a_member_lingering_beyond_the_marker_is_no_part_of_a_new_run(job: SimJob) -> None:
    nodes = await job.all_work("abc")
    closer = job.loop.rng.choice(nodes)
    await job.close(closer)
    await job.leave(closer.name)
    await job.pass_time(job.loop.rng.uniform(50, 70))
    job.start_all("def")
    await job.until_works("def", 100)
    assert all(node.joins == 1 for node in nodes), job.tell()
    assert job.history.formed[-1].record.size == 3
    assert len(job.history.formed) == 2
    for node in nodes:
        if node is not closer:
            await job.leave(node.name)
    await job.pass_time(100)
    assert job.works("def"), job.tell()
    assert all(job.nodes[name].joins == 1 for name in "def"), job.tell()


@simulated(min_nodes=4, max_nodes=4)
async def test_all_members_close_together_once(job: SimJob) -> None:
    nodes = await job.all_work("abcd")
    ends = [
        job.on(node, node.node.close_job(succeeded=True, reason=f"by {node.name}"))
        for node in nodes
    ]
    await asyncio.wait(ends)
    (rank0,) = [node for node in nodes if node.rank == 0]
    assert [closure.by for closure in job.history.closures] == [rank0.node_id]


@pytest.mark.parametrize("closed", [False, True])
@simulated(min_nodes=3, max_nodes=3)
async def test_after_everyone_left_etcd_holds_nothing_but_what_tells_of_the_end(
    job: SimJob, closed: bool
) -> None:
    nodes = job.start_all("abcd")
    await job.until(lambda: len(job.members_now()) == 3, "a world", 5)
    job.start("e")
    await job.pass_time(5)
    if closed:
        members = job.members_now()
        ends = [
            job.on(node, node.node.close_job(succeeded=True, reason="done")) for node in members
        ]
        await asyncio.wait(ends)
    names = list(job.nodes)
    job.loop.rng.shuffle(names)
    if job.loop.rng.random() < 0.5:
        await asyncio.gather(*(job.leave(name) for name in names))
    else:
        for name in names:
            await job.leave(name)
    left = [kv.key for kv in job.server.snapshot() if kv.key not in job.keys.audits]
    memory = [job.keys.ended, job.keys.epoch] if closed else [job.keys.epoch]
    assert left == memory + ([job.keys.round] if closed else []), job.tell()
    leases = {kv.lease_id for kv in job.server.snapshot()}
    assert len(leases) == (2 if closed else 1), job.tell()
    assert set(job.server.leases()) == leases, (job.server.leases(), job.tell())
    assert nodes


@simulated(seeds=range(5), min_nodes=2, max_nodes=2)
async def test_a_member_that_outlives_the_marker_leaves_no_lease(job: SimJob) -> None:
    nodes = await job.all_work("ab")
    await job.close(nodes[0])
    await job.pass_time(100)
    for name in "ab":
        await job.leave(name)
    left = [kv.key for kv in job.server.snapshot()]
    (world,) = nodes[0].worlds
    assert left == [job.keys.audit(1, world.run), job.keys.ended, job.keys.epoch]
    assert len(job.server.leases()) == 1
    await job.pass_time(TIMING.ended_ttl_s)
    assert not job.server.snapshot()
    assert not job.server.leases()


@simulated(seeds=range(5), min_nodes=3, max_nodes=3)
async def test_a_job_that_dies_as_a_whole_leaves_nothing_after_a_while(job: SimJob) -> None:
    await job.all_work("abc")
    job.crash(*"abc")
    await job.pass_time(61)
    left = [kv.key for kv in job.server.snapshot()]
    assert [key for key in left if key not in job.keys.audits] == [job.keys.epoch]
    await job.pass_time(TIMING.ended_ttl_s)
    assert not job.server.snapshot()
    assert not job.server.leases()


@simulated(min_nodes=3, max_nodes=3)
async def test_a_job_that_died_as_a_whole_can_be_started_again_at_once(job: SimJob) -> None:
    await job.all_work("abc")
    job.crash(*"abc")
    await job.pass_time(job.loop.rng.choice([0.0, 2.0, 9.9, 10.1, 59.0, 61.0]))
    job.start_all("def")
    await job.until_works("def", DETECTION_S + TTL_S + 3 * SOON_S)


# --- outcomes unknown ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["arrive", "close", "publish", "grant", "leave"])
@pytest.mark.parametrize("lost", ["request", "reply"])
@simulated(min_nodes=2, max_nodes=3)
async def test_a_lost_message_costs_time_and_nothing_else(
    job: SimJob, what: str, lost: str
) -> None:
    nodes = [job.make(name) for name in "abc"]
    for node in nodes:
        keys = job.keys
        matching: dict[str, Match] = {
            "arrive": puts(keys.node(node.node_id)),
            "close": puts(keys.round),
            "publish": puts(keys.change),
            "grant": lambda request: isinstance(request, Grant),
            "leave": lambda request: False,
        }
        await job.on(node, node.node.start())  # the first contact is not tried twice
        link = node.connection.link
        plan = link.drop_requests if lost == "request" else link.drop_replies
        plan(job.loop.rng.choice([1, 2]), matching[what])
        node.agent = job.on(node, node.run())
    await job.until_works("abc", 300)
    name = job.loop.rng.choice("abc")
    if what == "leave":
        link = job.nodes[name].connection.link
        plan = link.drop_requests if lost == "request" else link.drop_replies
        plan(1, lambda request: isinstance(request, Txn))
    leaving = asyncio.ensure_future(job.leave(name))
    await job.until_works("abc".replace(name, ""), 300)
    await leaving


@pytest.mark.parametrize("fate", ["late", "reply lost"])
@simulated(min_nodes=3, max_nodes=3)
async def test_a_round_whose_closing_got_no_answer_leaves_no_second_lease(
    job: SimJob, fate: str
) -> None:
    nodes = [job.make(name) for name in "abc"]
    for node in nodes:
        await job.on(node, node.node.start())
        link, closings = node.connection.link, job.loop.rng.choice([1, 2])
        if fate == "late":  # perhaps when another attempt has been made
            delay_s = job.loop.rng.uniform(0.5, 2.5) * TTL_S
            link.hold_requests(delay_s, closings, puts(job.keys.round))
        else:
            link.drop_replies(closings, puts(job.keys.round))
        node.agent = job.on(node, node.run())
    await job.until_works("abc", 300)
    sessions = {node.lease_id for node in nodes}
    shared = {job.history.formed[-1].record.job_lease, nodes[0].node.control.epoch_lease}
    assert set(job.server.leases()) - sessions == shared


@simulated(min_nodes=2, max_nodes=3)
async def test_a_leader_that_stops_before_it_hears_that_it_formed_a_round_takes_nothing_from_it(
    job: SimJob,
) -> None:
    """The others may work on it: what it had granted for the round is the round's."""
    leader = job.start("a")
    await job.pass_time(0.1)
    job.start_all("bc")
    while not job.history.formed:
        leader.connection.link.lose(replies=1.0)
        await job.pass_time(0.01)
    job_lease = job.history.formed[0].record.job_lease
    leader.connection.link.lose()
    await job.leave("a")
    assert job_lease in job.server.leases()
    await job.until_works("bc", 300)
    assert job.history.formed[-1].record.job_lease == job_lease


@simulated(min_nodes=2, max_nodes=2)
async def test_a_session_that_expires_between_grant_and_arrival_is_replaced(job: SimJob) -> None:
    for name in "ab":
        node = job.make(name)
        await job.on(node, node.node.start())
        lease = node.lease_id
        if job.loop.rng.random() < 0.7:
            job.server.expire(lease)
        node.agent = job.on(node, node.run())
    await job.until_works("ab", 5)


# --- neighbours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("for_s", [0.5 * TTL_S, 0.7 * TTL_S, 0.95 * TTL_S, 2 * TTL_S])
@simulated(min_nodes=3, max_nodes=3)
async def test_machines_that_are_suspended_together_work_on(job: SimJob, for_s: float) -> None:
    """They wake up one after the other, the leader first. Whose lease has run out meanwhile gets
    another one, and nobody is declared lost."""
    for name in "abc":
        job.start(name)
        await job.pass_time(job.loop.rng.uniform(0.0, TTL_S / 3))
    await job.until_works("abc")
    await job.pass_time(job.loop.rng.uniform(0.0, TTL_S))
    joins = {name: job.nodes[name].joins for name in "abc"}
    for name in "abc":
        job.suspend(name)
    await job.pass_time(for_s)
    for name in sorted("abc", key=lambda name: not job.nodes[name].node.leads):
        job.wake(name)
        await job.pass_time(TTL_S / 10)
    await job.pass_time(3 * TTL_S)
    assert {name: job.nodes[name].joins for name in "abc"} == joins

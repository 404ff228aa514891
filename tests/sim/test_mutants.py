"""Every promise is broken on purpose, and that is noticed, as what was broken.

A mutant that survives would mean that the faults or the checks are too weak.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rdzv_etcd.errors import JobClosedError, LeaseNotFoundError
from rdzv_etcd.etcd import watch_check
from rdzv_etcd.etcd.port import Compare, Get, Put, Relation, Target, Txn, prefix_end
from rdzv_etcd.kv import writes
from rdzv_etcd.node import close_round, join_wait, node, session
from rdzv_etcd.node import join as joining
from rdzv_etcd.node import lead as leadership
from rdzv_etcd.node import leave as leaving
from rdzv_etcd.node import recover as repair
from rdzv_etcd.node import slices as roster
from rdzv_etcd.protocol import (
    closing,
    collective_requests,
    draft,
    member,
    ranks,
    requests,
    segments,
    steps,
)
from rdzv_etcd.protocol import lead as leading
from rdzv_etcd.protocol.keys import JobKeys, KeyRange
from rdzv_etcd.protocol.model import Change, Drain
from rdzv_etcd.protocol.steps import WorkingStep
from rdzv_etcd.runtime import lifecycle
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import WHOLE_DOMAIN
from rdzv_etcd.settings.options import AfterEnd
from rdzv_etcd.world import collectives
from rdzv_etcd.world_change import LEFT
from tests.node import test_epochs as epochs
from tests.node import test_restored_etcd as restored
from tests.sim import faults_operator, work
from tests.sim.invariants import Invariant, InvariantError
from tests.sim.mutants import (
    Mutant,
    broken_by,
    does_nothing,
    noticed,
    on,
    quietly,
    returns,
    swapped,
    without_guard,
)
from tests.sim.world import NotReachedError, SimJob, simulate
from tests.support.machines import MachineClock

# A life that fails is cut short, with coroutines under way.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def stands_still(_original: Callable[..., None], clock: MachineClock, slept_s: float) -> None:
    clock.counts_suspension = False
    _original(clock, slept_s)


NOBODY = Compare(b"nobody", Target.CREATE, Relation.EQUAL, 0)
"""A guard that always holds."""


def does_not_look_who_is_back(original: Callable[..., Txn], *args: Any) -> Txn:
    txn = original(*args)
    return replace(txn, guards=tuple(g for g in txn.guards if b"/nodes/" not in g.key))


def closes(change: Callable[[JobSettings], JobSettings]) -> Callable[..., Any]:
    """Decide as if everybody had asked for other settings."""

    def mutated(
        original: Any, control: Any, nodes: Any, settings: JobSettings, *rest: Any, **named: Any
    ) -> Any:
        present = {
            node_id: replace(
                presence, info=replace(presence.info, settings=change(presence.info.settings))
            )
            for node_id, presence in nodes.present.items()
        }
        nodes = replace(nodes, present=present)
        return original(control, nodes, change(settings), *rest, **named)

    return mutated


def double_rank(original: Any, *args: Any) -> Any:
    ranks = original(*args)
    return (*ranks[:-1], ranks[0]) if len(ranks) > 1 else ranks


def always_lost(original: Any, control: Any, nodes: Any, *rest: Any, **named: Any) -> Any:
    """Call the last rank lost, whoever is there."""
    formed = control.formed
    if formed is None or control.open_change is not None or formed.size < 2:
        return original(control, nodes, *rest, **named)
    return Change(formed.run, formed.number, (), {formed.members[-1]: LEFT})


def counts_nodes(original: Any, formed: Any, *rest: Any) -> Any:
    """Call a world that could be larger by a node over, whether or not it makes a segment whole."""
    return original(replace(formed, settings=replace(formed.settings, segment_size=1)), *rest)


def cuts_anew(original: Any, nodes: Any, size: int, previous: Any) -> Any:
    return original(nodes, size, {})


def forgets_the_whole(original: Any, *given: Any) -> Any:
    domains, *others, formed = given
    if formed is not None:
        here = {each: len(domains.get(each, ())) or size for each, size in formed.domains.items()}
        least = {each: min(size, here[each]) for each, size in formed.domains.items()}
        formed = replace(formed, domains=least)
    return original(domains, *others, formed)


def forgets_the_past(original: Any, *args: Any, **named: Any) -> Any:
    return replace(original(*args, **named), epoch_base=0)


def ignores_changes(original: Any, control: Any, record: Any, node_id: str) -> WorkingStep:
    if control.open_change is not None and record.same_world(control.round):
        return WorkingStep.PRESENCE
    decided: WorkingStep = original(control, record, node_id)
    return decided


def retries_blindly(original: Any, self: Any, body: Any, deadline: Any) -> Any:
    """Send the write without the marker's guard, again and again until there is a reply."""
    slot = self._take_slot()
    wrote, kept = Put(slot.key, b"1", self._lease_id), Put(slot.key, b"0", self._lease_id)

    async def mutated() -> Any:
        txn = Txn((), (body(wrote, kept),), (Get(slot.key),))
        timeout_s = deadline.request_s()
        return writes._read(await self._etcd.txn(txn, timeout_s=timeout_s, repeatable=True))

    return mutated()


def steals_the_lead(original: Any, keys: Any, leader: Any, lease: int) -> Txn:
    txn: Txn = original(keys, leader, lease)
    return replace(txn, guards=(), failure=())


def same_run(original: Any, self: Any, control: Any, highest_epoch: int) -> str:
    formed = control.formed
    return formed.run if formed is not None else str(original(self, control, highest_epoch))


def admits_late(original: Any, self: Any, control: Any) -> Any:
    self.epoch = 0
    return original(self, control)


def wrong_rank(original: Any, self: Any, control: Any) -> Any:
    world = original(self, control)
    return None if world is None else replace(world, rank=world.size - 1 - world.rank)


def wrong_master(original: Any, self: Any, control: Any) -> Any:
    world = original(self, control)
    return None if world is None else replace(world, master_port=self.info.port)


def never_over(original: Any, member: Any, control: Any) -> int:
    """Overlook changes and newer rounds."""
    return 1 if member.evicted else 0


def ignores_failure(original: Any, member: Any, control: Any) -> int:
    return 0 if member.closure is not None else int(original(member, control))


def seats_the_absent(original: Any, control: Any, nodes: Any, settings: Any) -> Any:
    """Take members that have not come back for waiters."""
    census = original(control, nodes, settings)
    busy = tuple(nodes.present[node_id] for node_id in census.expected)
    return replace(census, returning=census.returning + busy, expected=())


def leaves_some_out(original: Any, control: Any, nodes: Any, settings: Any) -> Any:
    census = original(control, nodes, settings)
    return replace(census, newcomers=census.newcomers[:1])


def last_may_be_late(original: Any, node: Any, world: Any) -> Any:
    return original(node, replace(world, size=max(1, world.size - 1)))


def open_for_ever(original: Any, done: Any) -> int:
    return 0 if done is None else 10**6


def forms_again(
    original: Any, keys: Any, control: Any, record: Any, *rest: Any, **options: Any
) -> Txn:
    """Put a record back without the epoch it had."""
    txn: Txn = original(keys, control, replace(record, epoch_fixed=None), *rest, **options)
    return txn


def wiped(what: Any) -> bool:
    return bool(what.wipes)


def sliced(what: Any) -> bool:
    return bool(what.slice_nodes < what.max_nodes)


def in_racks(what: Any) -> bool:
    return bool(what.segment_size > 1)


def in_whole_racks(what: Any) -> bool:
    return bool(what.segment_size == WHOLE_DOMAIN)


def two_or_more(what: Any) -> bool:
    return bool(what.max_nodes > 1)


def waits_for_the_finished(original: Any, control: Any, *rest: Any) -> Any:
    census = original(control, *rest)
    members = set(() if control.formed is None else control.formed.members)
    awaited = tuple(node_id for node_id in census.finished if node_id in members)
    return replace(census, expected=census.expected + awaited)


def seats_the_finished(original: Any, control: Any, nodes: Any, *rest: Any) -> Any:
    census = original(control, nodes, *rest)
    seated = tuple(nodes.present[node_id] for node_id in census.finished)
    return replace(census, newcomers=census.newcomers + seated)


async def finds_none(original: Any, *args: Any) -> list[Any]:
    return []


async def gives_up(original: Any, self: Any, error: Exception) -> None:
    raise error


def gives_anew(original: Any, self: Any, turn: int, data: bytes) -> Any:
    self._given.pop(turn, None)
    return original(self, turn, data)


def whole_families(
    original: Any, self: JobKeys, family: bytes, before: int | None = None
) -> KeyRange:
    start, part = self.root + family, original(self, family, before)
    return KeyRange(start, prefix_end(start) if before is None else part.end)


async def asks_its_session(
    original: Any, etcd: Any, keys: Any, clock: Any, node_id: str, reason: str
) -> bool:
    """Put what a node is asked onto its session, as if that were the node."""
    for kv in (await etcd.get(requests.read_presence(keys, node_id))).kvs:
        txn = requests.ask_to_drain(keys, node_id, Drain("an operator", reason), kv.lease_id)
        with contextlib.suppress(LeaseNotFoundError):
            return bool((await etcd.txn(txn)).succeeded)
    return False


I = Invariant  # noqa: E741 - the table below is hard to read otherwise
MUTANTS = [
    Mutant("published by who leads no more", requests, "publish_change",
           without_guard(on(b"ctl/leader")), (I.LEADER,), noticed_by=29),
    Mutant("a member that is back is declared lost", requests, "publish_change",
           does_not_look_who_is_back, (I.UNDISTURBED,), noticed_by=3),
    Mutant("a lead taken from another", requests, "claim", steals_the_lead, (I.LEADER,)),
    Mutant("a rank given twice", closing, "assign_ranks", double_rank, (I.RANKS,),
           two_or_more),
    Mutant("told another rank", member.Member, "enter", wrong_rank, (I.RANKS, I.SEATS),
           two_or_more),
    Mutant("told another master", member.Member, "enter", wrong_master, (I.AGREEMENT,)),
    Mutant("larger than max", leading, "decide_close",
           closes(lambda s: replace(s, max_nodes=s.max_nodes + s.node_unit)),
           (I.SIZE, I.CONVERGENCE)),  # such a record is refused when it is written
    Mutant("smaller than min", leading, "decide_close",
           closes(lambda s: replace(s, min_nodes=1)), (I.SIZE,), lambda p: p.min_nodes > 1),
    Mutant("no multiple of unit", leading, "decide_close",
           closes(lambda s: replace(s, node_unit=1)), (I.SIZE,), lambda p: p.node_unit > 1),
    Mutant("a record put back gets a new epoch", requests, "restore_record", forms_again,
           (I.ONE_WORLD, I.SUCCESSION, I.LEADER, I.RANKS), wiped),
    Mutant("an older round is entered again", member.Member, "seat_in", admits_late,
           (I.EPOCH,), wiped, noticed_by=200),
    Mutant("back in spite of a change", steps, "decide_recovery", ignores_changes, (I.EVICTED,),
           noticed_by=62),
    Mutant("changes and newer rounds overlooked", node, "waiting_count", never_over, (I.STALE,)),
    Mutant("a failed job overlooked", node, "waiting_count", ignores_failure, (I.STALE,),
           lambda p: p.closes_midway, noticed_by=110),
    Mutant("a living member is declared lost", leading, "decide_change", always_lost,
           (I.UNDISTURBED, I.CONVERGENCE, I.CALM), two_or_more),
    Mutant("a clock that stands still while its machine is suspended", MachineClock, "woke",
           stands_still, (I.UNDISTURBED,), two_or_more, noticed_by=910025,
           kinds=("suspend", "suspend_together")),
    Mutant("who works on is seated", closing, "take_census", seats_the_absent, (I.SEATS,)),
    Mutant("a member that has finished is waited for", closing, "take_census",
           waits_for_the_finished, (I.UNAWAITED,), kinds=("finish_early",), noticed_by=3),
    Mutant("a node that has finished is seated", closing, "take_census", seats_the_finished,
           (I.SEATS,), kinds=("finish_early",)),
    Mutant("nobody is told that a member has finished", member.Member, "finish",
           returns(None), (I.UNAWAITED,), kinds=("finish_early",), noticed_by=5),
    Mutant("free seats stay empty", closing, "take_census", leaves_some_out,
           (I.SEATS, I.CONVERGENCE)),
    Mutant("segments of several domains", segments, "_by_domain",
           lambda original, nodes: {"any": list(nodes)}, (I.SEGMENTS,), in_racks,
           kinds=("racks",)),
    Mutant("a domain of which one is missing counts", segments, "_whole_domains",
           forgets_the_whole, (I.SEGMENTS,), in_whole_racks, kinds=("racks",), noticed_by=5),
    Mutant("a whole segment stays outside", segments, "_cut",
           lambda original, *args: list(original(*args))[:1], (I.SEATS, I.CONVERGENCE),
           in_racks, kinds=("racks",), noticed_by=8),
    Mutant("a restart for what is no whole segment", leading, "_grows", counts_nodes,
           (I.UNDISTURBED,), in_racks, kinds=("racks",)),
    Mutant("a lost member's place goes to the next one", ranks, "_within",
           lambda original, segment, previous: list(segment.nodes), (I.IN_PLACE,),
           in_racks, kinds=("racks",), noticed_by=3),
    Mutant("whole segments are torn apart", segments, "_cut", cuts_anew,
           (I.IN_PLACE,), in_racks, kinds=("racks",), noticed_by=3),
    Mutant("what is written goes into a store that was lost", writes, "once",
           lambda original, *args: replace(original(*args), guards=original(*args).guards[:1]),
           (I.COUNTED_ONCE,), noticed_by=2),
    Mutant("an add is sent again blindly", writes.OnceWriter, "apply", retries_blindly,
           (I.COUNTED_ONCE,), noticed_by=1),
    Mutant("a barrier opens one early", work, "Collectives", last_may_be_late,
           (I.BARRIER,), two_or_more),
    Mutant("a barrier opens for all times", collective_requests, "turns", open_for_ever,
           (I.BARRIER,), two_or_more),
    Mutant("the job is removed under those who are there", requests, "remove_job",
           without_guard(lambda guard: guard.range_end is not None), (I.KEPT,)),
    Mutant("a background task ends", node, "keep_job_leases", does_nothing, (I.TASKS,)),
    Mutant("a newcomer becomes rank 0", closing, "assign_ranks",
           lambda original, chosen, *rest: tuple(reversed(original(chosen, *rest))),
           (I.SURVIVORS,), lambda p: p.min_nodes < p.max_nodes),
    Mutant("the job is not removed", leaving, "remove_job", does_nothing,
           (I.NOTHING_LEFT,)),
    Mutant("a large world without one of its slices", roster, "cut",
           lambda original, *args: [*original(*args)[:-1], {}], (I.RANKS,), sliced),
    Mutant("nobody claims a vacant lead", leadership.Leadership, "_claim",
           lambda original, self: self._context.wakeup.wait(), (I.CONVERGENCE,), noticed_by=44),
    Mutant("a spare gives up", join_wait.JoinWait, "is_spare", returns(False),
           (I.CONVERGENCE,), noticed_by=5, kinds=("join_timeout",)),
    Mutant("a join ends early", join_wait.JoinWait, "deadline_s",
           lambda original, self: original(self) - 60.0, (I.CONVERGENCE,),
           kinds=("join_timeout",), noticed_by=5),
    Mutant("a member gives up when it is refused", joining.Joining, "_wait_out",
           gives_up, (I.CONVERGENCE,), kinds=("refuse_a_return",)),
    Mutant("who gave up still counts as being there", collective_requests, "take_back",
           lambda original, *args: replace(original(*args), success=original(*args).success[:-1]),
           (I.BARRIER,), two_or_more, kinds=("interrupted_calls",)),
    Mutant("an arrival is taken back though all are there", collective_requests, "take_back",
           without_guard(lambda guard: guard.range_end is not None), (I.BARRIER, I.IN_STEP),
           two_or_more, kinds=("interrupted_calls",), noticed_by=1),
    Mutant("an interrupted call leaves its member in the world", node.Node, "leave_world",
           does_nothing, (I.IN_STEP,), two_or_more, kinds=("interrupted_calls",)),
    Mutant("what is given anew in an exchange counts", collectives.Collective, "_give_and_take",
           gives_anew, (I.IN_STEP,), two_or_more, kinds=("interrupted_calls",)),
    Mutant("what a node is asked goes with its session", faults_operator, "request_drain",
           asks_its_session, (I.ASKED,), kinds=("ask_to_leave",), noticed_by=23),
    Mutant("what is below a job's keys is taken for its own", JobKeys, "_rounds",
           whole_families, (I.OTHERS,), kinds=("neighbour",)),
    Mutant("what is withdrawn may be what its node has said since", requests,
           "withdraw_accusation", without_guard(lambda _: True), (I.KEPT,), two_or_more,
           kinds=("cut_links", "kill_processes"), noticed_by=9),
    Mutant("who was declared lost answers all the same", steps, "decide_recovery",
           returns(WorkingStep.PRESENCE), (I.EVICTED,), two_or_more,
           kinds=("evict", "stop_slowly"), noticed_by=43),
    Mutant("nobody compares watches with reads", watch_check.WatchCheck, "_silent", finds_none,
           (I.HEARS, I.CONVERGENCE), kinds=("stall_control", "stall_nodes", "stall_presence")),
    Mutant("a deletion that a watch lacks is overlooked", watch_check.Delivered, "count_from",
           returns(None), (I.HEARS, I.CONVERGENCE), kinds=("stall_nodes", "stall_presence"),
           noticed_by=140),
    Mutant("a leave ends with the call that began it", lifecycle.LastWork, "once",
           lambda original, self, work: work(), (I.NOTHING_LEFT,), kinds=("interrupted_calls",)),
    # Faults lie in wait for the moment in which these matter (tests/sim/aimed.py).
    Mutant("closed without looking who came", requests, "close_round",
           without_guard(lambda guard: guard.range_end is not None), (I.SEATS,), noticed_by=4),
    Mutant("closed by who leads no more", requests, "close_round",
           without_guard(on(b"ctl/leader")), (I.LEADER,), noticed_by=28),
    Mutant("epochs begin again after a loss of data", draft, "next_record",
           forgets_the_past, (I.EPOCH,), wiped),
    Mutant("back although it was declared lost meanwhile", requests, "restore_presence",
           without_guard(on(b"ctl/change")), (I.EVICTED,), noticed_by=32),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_protocol_is_noticed(mutant: Mutant) -> None:
    with quietly(), swapped(mutant.place, mutant.function, mutant.by):
        seed, found = noticed(mutant)
    assert found in mutant.broken, f"noticed with seed {seed}, but as {found}"


@broken_by(
    session.Session,
    "trust_absence_s",
    returns(0.0),
    AssertionError,
    seeds=range(20),
    min_nodes=2,
    max_nodes=3,
)
async def test_who_trusts_every_absence_restarts_a_job_that_was_cut_off(job: SimJob) -> None:
    """Being lost is an act: a leader that was cut off itself gives the others time."""
    nodes = job.start_all("abc")
    await job.until_works("abc")
    job.cut(nodes, silent=False)
    await job.pass_time(25.0)
    for each in nodes:
        job.heal([each])
        await job.pass_time(2.0)
    await job.pass_time(30.0)
    assert [node.joins for node in nodes] == [1, 1, 1], job.tell()


@broken_by(
    member.Member,
    "may_lack_slice",
    returns(False),
    AssertionError,
    seeds=range(20),
    min_nodes=2,
    max_nodes=4,
    slice_nodes=1,
)
async def test_slices_that_are_gone_are_put_back(job: SimJob) -> None:
    """The job lease ends and the slices with it; then another leads, who has to read them."""
    nodes = job.start_all("abcd")
    await job.until_works("abcd")
    leader = job.leader
    for each in job.followers()[1:]:
        each.connection.link.delay(1.0, 1.3)
    job.server.expire(job.history.formed[0].record.job_lease)
    job.server.expire(leader.lease_id)
    await job.pass_time(job.settings.timing.rejoin_timeout_s + 60.0)
    assert [node.joins for node in nodes] == [1, 1, 1, 1], job.tell()


def test_epochs_that_no_clock_and_no_memory_keeps_from_going_back_are_noticed() -> None:
    async def remembers_nothing(original: Any, *_: Any) -> int:
        return 0

    def has_no_clocks(original: Any, control: Any, world: Any, highest: int) -> int:
        return int(original(control, [replace(node, clock_us=0) for node in world], highest))

    leader = close_round.RoundCloser
    for scenario, place, function, by, size in (
        (epochs.crash_of_a_clock_ahead, leader, "_lease_for_epoch", remembers_nothing, 1),
        (epochs.all_is_lost_between_runs, draft, "epoch_base", has_no_clocks, 2),
    ):
        with swapped(place, function, by), pytest.raises(InvariantError) as caught:
            simulate(scenario, min_nodes=size, max_nodes=size)
        assert caught.value.invariant is Invariant.EPOCH


def test_a_run_that_keeps_its_name_although_etcd_went_back_is_noticed() -> None:
    """A number that had been given out is given out again."""
    scenario = partial(restored.two_worlds_of_one_name, bump_revision=0)
    with (
        swapped(close_round.RoundCloser, "_name_run", same_run),
        pytest.raises((InvariantError, AssertionError), match=r"formed twice|used twice"),
    ):
        simulate(scenario, min_nodes=1, max_nodes=3)


def test_a_waiter_that_does_not_compare_its_arrival_is_noticed() -> None:
    """Whatever stands in the place of its presence, as long as it is on its session."""

    def any_of_its_own(original: Any, place: Any, session: int, info: Any = None) -> bool:
        found: bool = original(place, session)
        return found

    scenario = partial(restored.waiters_of_an_older_round, bump_revision=10**9)
    with quietly(), swapped(repair, "is_own", any_of_its_own), pytest.raises(NotReachedError):
        simulate(scenario, min_nodes=3, max_nodes=3)


def test_rank_0_for_who_missed_the_latest_world_is_noticed() -> None:
    """The record that etcd went back to names it."""

    def believes_the_record(original: Any, chosen: Any, *rest: Any) -> Any:
        nodes = [tuple(replace(node, epoch_trained=0) for node in one.nodes) for one in chosen]
        known = [replace(one, nodes=each) for one, each in zip(chosen, nodes, strict=True)]
        return original(known, *rest)

    with (
        swapped(closing, "assign_ranks", believes_the_record),
        pytest.raises(InvariantError) as caught,
    ):
        simulate(restored.latest_beside_a_survivor, min_nodes=3, max_nodes=3)
    assert caught.value.invariant is Invariant.SURVIVORS


def begins_all_the_same(_original: Any, self: Any, closure: Any, **_: Any) -> None:
    self._member.met_end = closure


@broken_by(
    joining.Joining,
    "_meet_end",
    begins_all_the_same,
    Invariant.ENDED,
    seeds=range(3),
    min_nodes=2,
    max_nodes=2,
    after_end=AfterEnd.FINISH,
)
async def test_a_new_run_in_spite_of_after_end_is_noticed(job: SimJob) -> None:
    job.start_all("ab")
    await job.until_works("ab")
    await job.end("ab")
    job.start_all("cd")
    await job.pass_time(30.0)
    job.history.stop_if_broken()
    assert all(isinstance(job.nodes[name].error, JobClosedError) for name in "cd")


def test_every_promise_is_broken_by_some_mutant() -> None:
    broken = {invariant for mutant in MUTANTS for invariant in mutant.broken}
    elsewhere = {
        Invariant.EPOCH,
        Invariant.SEATS,
        Invariant.LEADER,
        Invariant.EVICTED,
        Invariant.ENDED,
        Invariant.NEW_STORE,
        Invariant.OTHERS,
    }
    assert broken | elsewhere == set(Invariant)

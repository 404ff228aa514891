"""The next step of a node: as the story of one node, and in tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.member import Member, Phase, Seat
from rdzv_etcd.protocol.model import (
    Change,
    Closure,
    Control,
    Drain,
    Ended,
    Leader,
    NodeInfo,
    Round,
    Slice,
    Slices,
)
from rdzv_etcd.protocol.steps import (
    Arrive,
    End,
    Enter,
    JoiningStep,
    LeadStep,
    MeetEnd,
    Outlast,
    ReadSlice,
    Wait,
    WorkingStep,
    claim_delay_s,
    decide_recovery,
    joining_step,
    kept_record,
    lead_step,
    working_step,
)
from rdzv_etcd.protocol.world_end import waiting_count, why_over
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import Expelled, Lost
from tests.protocol.scenes import names

SETTINGS = JobSettings(1, 4)
ADDRESS = ("10.0.0.9", 2900)
SESSION = 7
DONE = Closure("a", "done", True, 0.0)
WORK, FINISH = WorkingStep.WORK, WorkingStep.FINISH
PRESENCE, RECORD, REJOIN = WorkingStep.PRESENCE, WorkingStep.RECORD, WorkingStep.REJOIN
CLAIM, LEAVE, RESIGN = LeadStep.CLAIM, LeadStep.LEAVE, LeadStep.RESIGN
FAILED = Closure("a", "broken", False, 0.0)


class Story:
    """One node, ``me``, and what it sees.

    me = Story().joins().arrives()          # for the round that is next as it sees things
    me.sees("a me", at=1)                   # round 1 was formed with a and me as ranks 0 and 1
    assert me.next() == Enter()
    """

    seat: Seat

    def __init__(self) -> None:
        self.member = Member("me")
        self.member.note_start(1)
        self.session = SESSION
        self.control = Control(1)

    # -- what happens -----------------------------------------------------------------------------

    def joins(self) -> Story:
        self.member.begin_join(NodeInfo("me", *ADDRESS, 0, SETTINGS))
        return self

    def arrives(self) -> Story:
        self.member.plan_arrival(self.control, 0, 0.0)
        self.member.note_arrival(self.session, self.control)
        return self

    def enters(self) -> Story:
        self.seat = self.member.enter(self.control)
        return self

    def sees(
        self,
        members: str = "",
        *,
        at: int = 1,
        run: str = "run",
        expelled: str = "",
        settings: JobSettings = SETTINGS,
        master: tuple[str, int] = ADDRESS,
        put_back_as: int | None = None,
        closed: Closure | None = None,
        slices: Slices | None = None,
    ) -> Story:
        """Another round record; ``put_back_as`` is the epoch that it had before it was lost."""
        revision = self.control.revision + 1
        record = Round(
            at, run, names(members), settings, *master, 70,
            epoch_fixed=put_back_as, expelled=names(expelled), closure=closed, slices=slices,
        )  # fmt: skip
        return self._see(Control(revision, record, revision, self.control.leader))

    def sees_no_record(self) -> Story:
        return self._see(Control(self.control.revision + 1))

    def sees_a_change(self) -> Story:
        formed, revision = self.control.formed, self.control.revision + 1
        assert formed is not None
        change = Change(formed.run, formed.number, ("x",))
        return self._see(
            replace(self.control, revision=revision, change=change, change_revision=revision)
        )

    def sees_leader(self, node_id: str, settings: JobSettings = SETTINGS) -> Story:
        revision = self.control.revision + 1
        leader = Leader(node_id, settings)
        return self._see(
            replace(self.control, revision=revision, leader=leader, leader_revision=revision)
        )

    def _see(self, control: Control) -> Story:
        self.control = control
        self.member.notice(control, 0.0)
        return self

    # -- what follows -----------------------------------------------------------------------------

    def next(self) -> JoiningStep:
        return joining_step(self.member, self.control, self.session, SETTINGS)

    def beside(self, *, is_missed: bool = False) -> WorkingStep:
        return working_step(self.member, self.control, self.session, is_missed=is_missed)

    def leads(self) -> LeadStep:
        return lead_step(self.member, self.control, self.session)

    def waiting(self) -> int:
        return waiting_count(self.member, self.control)


def a_member(members: str = "a me") -> Story:
    """A node that works in round 1."""
    return Story().joins().arrives().sees(members).enters()


# --- the join under way ---------------------------------------------------------------------------

OTHER = JobSettings(2, 2)


def waiter(members: str = "") -> Story:
    """A node that has arrived: a newcomer, or a spare of round 1."""
    return (Story().sees(members) if members else Story()).joins().arrives()


def without_session(me: Story) -> Story:
    me.session = 0
    return me


def with_another_session(me: Story) -> Story:
    me.session += 1
    return me


JOINS: dict[str, tuple[Story, JoiningStep]] = {
    "a newcomer arrives": (Story().joins(), Arrive()),
    "then it waits": (waiter(), Wait()),
    "until a round names it": (waiter().sees("a me"), Enter()),
    "a waiting node that loses its session arrives again": (without_session(waiter()), Arrive()),
    "also if it has another one": (with_another_session(waiter()), Arrive()),
    "a node that comes while others work arrives": (Story().sees("a b").joins(), Arrive()),
    "and is a spare": (waiter("a b"), Wait()),
    "which is not asked again": (waiter("a b").sees("a c", at=2), Wait()),
    "and enters when it has a seat": (waiter("a b").sees("a c", at=2).sees("a me", at=3), Enter()),
    "an expelled node arrives again": (waiter("a b").sees("a", at=2, expelled="me"), Arrive()),
    "and then waits": (waiter("a b").sees("a", at=2, expelled="me").arrives(), Wait()),
    "a round that is put back is not entered twice": (
        a_member().joins().arrives().sees("a me", put_back_as=2), Arrive(),
    ),
    "waiting nodes arrive again when a record was put back": (
        waiter("a b").sees("a b", put_back_as=2), Arrive(),
    ),
    "and then they wait": (waiter("a b").sees("a b", put_back_as=2).arrives(), Wait()),
    "a node that arrived for a later run than there is arrives again": (
        Story().sees("a b", at=5).joins().arrives().sees_no_record(), Arrive(),
    ),
    "rank 0 enters only behind the socket that the record names": (
        waiter().sees("me a", master=("10.0.0.9", 2800)), Arrive(),
    ),
    "a failed job ends the join of a member": (
        a_member().joins().sees("a me", closed=FAILED), End(FAILED),
    ),
    "a finished one that of a spare": (waiter("a b").sees("a b", closed=DONE), End(DONE)),
    "a job of other settings is outlasted": (
        Story().sees("a b", settings=OTHER).joins(), Outlast(OTHER, "the job's"),
    ),
    "and a leader's": (Story().sees_leader("a~1~x", OTHER).joins(), Outlast(OTHER, "a's")),
    "but not one of the same": (Story().sees_leader("a~1~x").joins(), Arrive()),
}  # fmt: skip


@pytest.mark.parametrize("story", JOINS)
def test_the_next_step_of_a_join(story: str) -> None:
    me, step = JOINS[story]
    assert me.next() == step


def test_a_member_knows_its_seat() -> None:
    me = a_member()
    assert (me.seat.round, me.seat.rank, me.seat.size) == (1, 1, 2)
    assert me.member.phase is Phase.MEMBER
    with pytest.raises(ValueError, match="me has no seat"):
        waiter().sees("me a", master=("10.0.0.9", 2800)).enters()


def test_in_a_large_world_the_slice_holds_the_rank() -> None:
    me = waiter().sees(slices=Slices(2, 1, "run.1.1"))
    assert isinstance(me.next(), ReadSlice)
    me.member.slice = Slice("run", 1, 0, {"me": 1, "a": 0})
    me.member.slice_revision = me.control.round_revision
    assert me.next() == Enter()
    assert me.enters().seat.rank == 1


def test_a_node_that_was_started_after_an_end_meets_it_once() -> None:
    me = Story()
    me.member.note_start(5)
    me.sees("a b", closed=DONE).joins()
    assert me.next() == MeetEnd(DONE)
    me.member.met_end = DONE
    assert me.next() == Arrive()


def test_the_end_of_a_run_with_other_settings_is_told_apart() -> None:
    me = Story()
    me.member.note_start(5)
    me.sees("a b", closed=DONE, settings=JobSettings(3, 3)).joins()
    assert me.next() == MeetEnd(DONE, of_another_job=True)


# --- a member, beside its work --------------------------------------------------------------------


def evicted(me: Story) -> Story:
    me.member.evicted = True
    return me


def drained(me: Story) -> Story:
    me.member.be_drained(Drain("me", "SIGUSR1"))
    return me


def with_its_presence_back(me: Story) -> Story:
    me.member.note_presence(me.session)
    return me


later = Story().joins().arrives().sees("a me", at=4).enters()
BESIDE: dict[str, tuple[Story, WorkingStep, int]] = {
    "a member works": (a_member(), WORK, 0),
    "and puts back what etcd has lost": (a_member().sees_no_record(), RECORD, 0),
    "also its presence, without a session": (without_session(a_member()), PRESENCE, 0),
    "or on another one, which carries nothing": (with_another_session(a_member()), PRESENCE, 0),
    "until that is done": (with_its_presence_back(with_another_session(a_member())), WORK, 0),
    "it repairs a record older than its own": (later.sees("a me", at=3, put_back_as=1), RECORD, 0),
    "and announces that it is drained": (drained(a_member()), WorkingStep.ANNOUNCE, 0),
    "a member of a closed job finishes": (a_member().sees("a me", closed=DONE), FINISH, 0),
    "a node that waits repairs nothing": (waiter().sees_no_record(), WORK, 0),
    "nor does one that was evicted": (evicted(a_member().sees_no_record()), WORK, 1),
}


@pytest.mark.parametrize("story", BESIDE)
def test_what_a_node_does_beside_its_work_and_whether_it_stops(story: str) -> None:
    me, step, waiting = BESIDE[story]
    assert (me.beside(), me.waiting()) == (step, waiting)


def test_a_node_whose_presence_is_missed_repairs_it() -> None:
    assert a_member().beside(is_missed=True) is PRESENCE
    assert waiter().beside(is_missed=True) is WorkingStep.ARRIVE


def test_a_member_that_has_finished_shows_that_and_notices_that_it_is_left_behind() -> None:
    me = a_member()
    me.member.finish()
    assert me.beside() is PRESENCE  # its presence does not show it yet
    back = me.member.plan_return()
    assert back is not None
    assert back.finished
    assert with_its_presence_back(me).beside() is WORK
    assert me.sees("a", at=2).beside() is REJOIN
    assert evicted(me).beside() is WORK
    assert not me.joins().member.has_finished


@pytest.mark.parametrize(
    ("me", "keeps"),
    [
        (a_member(), True),
        (a_member().sees_a_change().joins(), True),
        (waiter("a b"), True),
        (Story().sees("a b").joins(), False),  # perhaps what a dead job left
        (Story().sees("a b"), False),
    ],
)
def test_the_job_lease_is_kept_by_members_and_by_nodes_that_have_arrived(
    me: Story, keeps: bool
) -> None:
    assert (kept_record(me.member, me.control) is not None) is keeps


# --- the lead -------------------------------------------------------------------------------------

LEADS: dict[str, tuple[Story, LeadStep]] = {
    "a newcomer claims with its arrival": (Story().joins(), LEAVE),
    "one that has arrived claims a vacant lead": (waiter(), CLAIM),
    "but not another's": (waiter().sees_leader("a"), LEAVE),
    "it leads": (waiter().sees_leader("me"), LeadStep.LEAD),
    "but not without a session": (without_session(waiter().sees_leader("me")), LEAVE),
    "a member claims": (a_member(), CLAIM),
    "and leads": (a_member().sees_leader("me"), LeadStep.LEAD),
    "until its run has ended": (a_member().sees_leader("me").sees("a me", closed=DONE), RESIGN),
    "a follower leaves that to it": (a_member().sees("a me", closed=DONE), LEAVE),
    "an evicted node claims nothing": (evicted(a_member()), LEAVE),
    "and resigns": (evicted(a_member().sees_leader("me")), RESIGN),
}


@pytest.mark.parametrize("story", LEADS)
def test_what_a_node_does_about_the_lead(story: str) -> None:
    me, step = LEADS[story]
    assert me.leads() is step


# --- tables ---------------------------------------------------------------------------------------

ME = "a"
WORLD = Round(3, "run", (ME, "b"), SETTINGS, "h", 1, 7)
MINE = replace(WORLD, epoch_fixed=9)
"""The same as its members know it."""


def mine(*, evicted: bool = False, closure: Closure | None = None) -> Member:
    return Member(ME, record=MINE, evicted=evicted, closure=closure)


def control(record: Round | None, change: Change | None = None, *, revision: int = 9) -> Control:
    return Control(revision + 1, record, revision, None, 0, change, 0 if change is None else 8)


GONE = Change("run", 3, ("x",), {"y": "gone"})
NOTHING = WORK


@pytest.mark.parametrize(
    ("view", "count", "recovery"),
    [
        (control(WORLD), 0, PRESENCE),
        (control(None), 0, RECORD),  # data lost
        (control(None, Change("run", 3, ("x",))), 1, RECORD),
        (control(WORLD, Change("run", 3)), 1, PRESENCE),
        (control(WORLD, Change("run", 3, ("x",))), 1, PRESENCE),  # its workers are stopping
        (control(WORLD, Change("run", 3, ("x", "y"), {"b": "left"})), 3, PRESENCE),
        (control(WORLD, replace(GONE, lost={ME: "gone"})), 2, REJOIN),
        (control(WORLD, replace(GONE, unnamed=1)), 3, REJOIN),
        (control(WORLD, Change("run", 2, ("x",))), 0, PRESENCE),  # an older round's
        (control(WORLD, Change("other", 3, ("x",))), 0, PRESENCE),
        (control(replace(WORLD, number=4), revision=12), 1, REJOIN),  # a newer round
        (control(replace(WORLD, number=2), revision=6), 0, RECORD),  # the view lags, or etcd
        (control(replace(WORLD, number=2), GONE, revision=6), 2, RECORD),  # ... went back
        (control(replace(WORLD, run="other", number=1), revision=12), 1, REJOIN),
        (control(replace(WORLD, run="other", number=1), revision=6), 0, RECORD),
        (control(replace(WORLD, epoch_fixed=9), revision=30), 0, PRESENCE),  # put back
        (control(WORLD, revision=12), 1, REJOIN),  # the same name, but another world
        (control(replace(WORLD, run="other", closure=FAILED), revision=6), 0, RECORD),  # earlier
        (control(replace(WORLD, run="other", closure=DONE), revision=12), 1, REJOIN),  # later
        (control(replace(WORLD, closure=DONE)), 0, NOTHING),
        (control(replace(WORLD, closure=FAILED)), 1, NOTHING),
    ],
)
def test_whether_a_member_stops_and_what_it_puts_back(
    view: Control, count: int, recovery: WorkingStep
) -> None:
    assert waiting_count(mine(), view) == count
    assert decide_recovery(view, MINE, ME) is recovery


def test_waiting_count_without_a_world_or_after_an_eviction() -> None:
    assert waiting_count(Member(ME), control(WORLD, Change("run", 3, ("x",)))) == 0
    assert waiting_count(mine(evicted=True), control(WORLD)) == 1


def test_a_closure_is_remembered_when_a_new_run_follows() -> None:
    other = control(replace(WORLD, run="other", number=9))
    assert waiting_count(mine(closure=DONE), other) == 0
    assert waiting_count(mine(closure=FAILED), other) == 1


def test_a_member_that_was_there_when_its_run_ended_puts_nothing_back() -> None:
    ended = (Ended("run", DONE, 9), Ended("later", DONE, 20))
    for record in (None, replace(WORLD, run="other", number=1)):
        view = replace(control(record, revision=30), ended=ended)
        assert decide_recovery(view, MINE, ME) is WorkingStep.WORK
        assert waiting_count(mine(), view) == 0


def test_members_claim_the_lead_in_rank_order_before_others() -> None:
    delays_s = [claim_delay_s(rank, 6, 0.0) for rank in range(6)]
    assert delays_s == sorted(set(delays_s))
    assert delays_s[0] == 0.0
    for size in (1, 6, 300, 5000):
        assert claim_delay_s(size - 1, size, 0.019) < claim_delay_s(None, size, 0.0)
    assert claim_delay_s(None, 0, 0.01) == 0.01


def test_a_member_that_was_itself_declared_lost_is_expelled_from_the_next_world() -> None:
    view = control(replace(WORLD, members=(ME, "b", "c")), Change("run", 3, (), {"c": "gone"}))
    changes = []
    for name in (ME, "c"):
        member = Member(name, Phase.MEMBER, record=MINE, epoch=9)
        changes.append(why_over(member, view, 9))
    assert changes == [Lost({"c": "gone"}), Expelled()]

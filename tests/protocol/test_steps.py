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
    Recovery,
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
FAILED = Closure("a", "broken", False, 0.0)


class Story:
    """One node, ``me``, and what it sees.

    me = Story().joins().arrives()          # for the round that is next as it sees things
    me.sees("a me", at=1)                   # round 1 was formed with a and me as ranks 0 and 1
    assert me.next() == Enter()
    """

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

    def enters(self) -> Seat:
        return self.member.enter(self.control)

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
    story = Story().joins().arrives().sees(members)
    story.enters()
    return story


# --- the join under way ---------------------------------------------------------------------------


def test_a_newcomer_arrives_waits_and_enters() -> None:
    me = Story().joins()
    assert me.next() == Arrive()
    assert me.arrives().next() == Wait()
    assert me.sees("a me").next() == Enter()
    world = me.enters()
    assert (world.round, world.rank, world.size) == (1, 1, 2)
    assert me.member.phase is Phase.MEMBER


def test_a_waiting_node_that_loses_its_session_arrives_again() -> None:
    me = Story().joins().arrives()
    me.session = 0
    assert me.next() == Arrive()
    me.session = SESSION + 1
    assert me.next() == Arrive()


def test_a_spare_waits_for_a_seat_and_is_not_asked_again() -> None:
    me = Story().sees("a b").joins()
    assert me.next() == Arrive()
    assert me.arrives().next() == Wait()
    assert me.sees("a c", at=2).next() == Wait()
    assert me.sees("a me", at=3).next() == Enter()


def test_an_expelled_node_arrives_again() -> None:
    me = Story().sees("a b").joins().arrives()
    assert me.sees("a", at=2, expelled="me").next() == Arrive()
    assert me.arrives().next() == Wait()


def test_a_round_is_not_entered_twice() -> None:
    """Its record is put back after a loss of data, while this node joins again."""
    me = a_member()
    epoch = me.member.epoch
    me.joins().arrives()
    assert me.sees("a me", put_back_as=epoch).next() == Arrive()


def test_all_waiting_nodes_arrive_again_when_a_record_was_put_back() -> None:
    me = Story().sees("a b").joins().arrives()
    assert me.sees("a b", put_back_as=2).next() == Arrive()
    assert me.arrives().next() == Wait()


def test_a_node_that_arrived_for_a_later_run_than_there_is_arrives_again() -> None:
    me = Story().sees("a b", at=5).joins().arrives()
    assert me.sees_no_record().next() == Arrive()


def test_rank_0_enters_only_behind_the_socket_that_the_record_names() -> None:
    me = Story().joins().arrives().sees("me a", master=("10.0.0.9", 2800))
    assert me.next() == Arrive()
    with pytest.raises(ValueError, match="me has no seat"):
        me.enters()


def test_in_a_large_world_the_slice_holds_the_rank() -> None:
    slices = Slices(2, 1, "run.1.1")
    me = Story().joins().arrives().sees(slices=slices)
    step = me.next()
    assert isinstance(step, ReadSlice)
    me.member.slice, me.member.slice_revision = (
        Slice("run", 1, 0, {"me": 1, "a": 0}),
        me.control.round_revision,
    )
    assert me.next() == Enter()
    assert me.enters().rank == 1


def test_the_end_of_its_run_ends_a_join() -> None:
    assert a_member().joins().sees("a me", closed=FAILED).next() == End(FAILED)
    assert Story().sees("a b").joins().arrives().sees("a b", closed=DONE).next() == End(DONE)


def test_a_node_that_was_started_after_an_end_meets_it_once() -> None:
    me = Story()
    me.member.note_start(5)
    me.sees("a b", closed=DONE).joins()
    assert me.next() == MeetEnd(DONE)
    me.member.met_end = DONE
    assert me.next() == Arrive()


def test_a_job_of_other_settings_is_outlasted() -> None:
    other = JobSettings(2, 2)
    assert Story().sees("a b", settings=other).joins().next() == Outlast(other, "the job's")
    assert Story().sees_leader("a~1~x", other).joins().next() == Outlast(other, "a's")
    assert Story().sees_leader("a~1~x").joins().next() == Arrive()


# --- a member, beside its work --------------------------------------------------------------------


def test_a_member_repairs_what_etcd_has_lost() -> None:
    assert a_member().beside() is WorkingStep.WORK
    assert a_member().sees_no_record().beside() is WorkingStep.REPAIR
    me = a_member()
    me.session = 0
    assert me.beside() is WorkingStep.REPAIR
    me.session = SESSION + 1  # granted, and then the presence was refused: it carries nothing
    assert me.beside() is WorkingStep.REPAIR
    me.member.note_presence(me.session)
    assert me.beside() is WorkingStep.WORK


def test_a_member_that_has_finished_shows_that_and_notices_that_it_is_left_behind() -> None:
    me = a_member()
    me.member.finish()
    assert me.beside() is WorkingStep.REPAIR  # its presence does not show it yet
    back = me.member.plan_return()
    assert back is not None
    assert back.finished
    me.member.note_presence(SESSION)
    assert me.beside() is WorkingStep.WORK
    me.sees("a", at=2)
    assert me.beside() is WorkingStep.REPAIR
    assert me.member.record is not None
    assert decide_recovery(me.control, me.member.record, "me") is Recovery.REJOIN
    me.member.evicted = True
    assert me.beside() is WorkingStep.WORK
    me.joins()
    assert not me.member.has_finished


def test_a_node_whose_presence_is_missed_repairs_it() -> None:
    assert a_member().beside(is_missed=True) is WorkingStep.REPAIR
    assert Story().joins().arrives().beside(is_missed=True) is WorkingStep.REPAIR


def test_a_drained_member_announces_that() -> None:
    me = a_member()
    me.member.be_drained(Drain("me", "SIGUSR1"))
    assert me.beside() is WorkingStep.ANNOUNCE


def test_a_member_repairs_a_record_older_than_its_own() -> None:
    me = Story().joins().arrives().sees("a me", at=4)
    me.enters()
    assert me.sees("a me", at=3, put_back_as=1).beside() is WorkingStep.REPAIR
    assert me.waiting() == 0


def test_a_node_that_waits_or_was_evicted_repairs_nothing() -> None:
    assert Story().joins().arrives().sees_no_record().beside() is WorkingStep.WORK
    me = a_member().sees_no_record()
    me.member.evicted = True
    assert me.beside() is WorkingStep.WORK
    assert me.waiting() == 1


def test_a_member_of_a_closed_job_finishes() -> None:
    me = a_member().sees("a me", closed=DONE)
    assert me.beside() is WorkingStep.FINISH
    assert me.waiting() == 0


def test_the_job_lease_is_kept_by_members_and_by_nodes_that_have_arrived() -> None:
    def keeps(story: Story) -> bool:
        return kept_record(story.member, story.control) is not None

    assert keeps(a_member())
    assert keeps(a_member().sees_a_change().joins())
    assert keeps(Story().sees("a b").joins().arrives())
    assert not keeps(Story().sees("a b").joins())  # perhaps what a dead job left
    assert not keeps(Story().sees("a b"))


# --- the lead -------------------------------------------------------------------------------------


def test_a_node_that_has_arrived_claims_a_vacant_lead_and_leads() -> None:
    me = Story().joins()
    assert me.leads() is LeadStep.LEAVE  # it claims with its arrival
    assert me.arrives().leads() is LeadStep.CLAIM
    assert me.sees_leader("a").leads() is LeadStep.LEAVE
    assert me.sees_leader("me").leads() is LeadStep.LEAD
    me.session = 0
    assert me.leads() is LeadStep.LEAVE


def test_a_leader_resigns_when_its_run_has_ended() -> None:
    me = a_member().sees_leader("me")
    assert me.leads() is LeadStep.LEAD
    assert me.sees("a me", closed=DONE).leads() is LeadStep.RESIGN
    assert a_member().sees("a me", closed=DONE).leads() is LeadStep.LEAVE


def test_an_evicted_node_does_not_lead() -> None:
    me = a_member()
    assert me.leads() is LeadStep.CLAIM
    me.member.evicted = True
    assert me.leads() is LeadStep.LEAVE
    assert me.sees_leader("me").leads() is LeadStep.RESIGN


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
NOTHING, PRESENCE, RECORD, REJOIN = Recovery


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
    view: Control, count: int, recovery: Recovery
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
        assert decide_recovery(view, MINE, ME) is Recovery.NOTHING
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

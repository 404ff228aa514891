"""Decides what a node does next, from what it is and what it sees. Pure.

A node does up to three things at a time. Each concerns one thing in etcd, has one driver in
``rdzv_etcd/node``, and is decided by one function here:

| driver | concerns | decided by |
| --- | --- | --- |
| the join under way | its arrival | :func:`joining_step` |
| a member, beside its work | its presence, the round record, its drain | :func:`working_step` |
| the lead | the leader key | :func:`lead_step` |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.names import display_name
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Closure, Control, Drain, Round
from rdzv_etcd.settings import JobSettings

# --- the join under way ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """Become a member: the round was formed with this node in it."""


@dataclass(frozen=True, slots=True)
class End:
    """End: the run that this node belongs to is over."""

    closure: Closure


@dataclass(frozen=True, slots=True)
class MeetEnd:
    """Apply the option ``after_end``: a run ended before this node was started."""

    closure: Closure
    of_another_job: bool = False
    """Whether that run had other settings than this node."""


@dataclass(frozen=True, slots=True)
class Outlast:
    """Wait until a job of other settings has gone, or end if it lives."""

    theirs: JobSettings
    whose: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave: this node is being drained, and is in no world."""

    drain: Drain


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """Read the slice of this large world that has this node's rank, if it has one."""

    record: Round


@dataclass(frozen=True, slots=True)
class Arrive:
    """Arrive for the next round, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for something to change: this node has arrived."""


JoiningStep = Enter | End | Leave | MeetEnd | Outlast | ReadSlice | Arrive | Wait


def joining_step(
    member: Member, control: Control, session: int, settings: JobSettings
) -> JoiningStep:
    """Decide what a join does next; ``session`` is the node's lease, 0 if it has none, and
    ``settings`` are those that the node was started with."""
    if member.seat_in(control) is not None:
        return Enter()
    end = _end(member, control, settings)
    if end is not None:
        return end
    other = _other_job(control, settings)
    if other is not None:
        return other
    large = member.unread(control)
    if large is not None:
        return ReadSlice(large)
    return Arrive() if _must_arrive(member, control, session) else Wait()


def _end(member: Member, control: Control, settings: JobSettings) -> End | Leave | MeetEnd | None:
    if member.closure is not None:
        return End(member.closure)
    if member.drain is not None:
        return Leave(member.drain)
    record = control.round
    if record is None or record.closure is None or member.origin is not None or member.met_end:
        return None
    return MeetEnd(record.closure, of_another_job=record.settings != settings)


def _other_job(control: Control, settings: JobSettings) -> Outlast | None:
    formed, leader = control.formed, control.leader
    if formed is not None:
        theirs, whose = formed.settings, "the job's"
    elif leader is not None and control.leader_revision > control.round_revision:
        theirs, whose = leader.settings, f"{display_name(leader.node_id)}'s"
    else:
        return None
    return None if theirs == settings else Outlast(theirs, whose)


def _must_arrive(member: Member, control: Control, session: int) -> bool:
    """Whether the node has not arrived, or only with a session or for a run that is over."""
    if not member.arrived_with or member.arrived_with != session:
        return True
    info = member.info
    if info is None:
        return False
    formed = control.formed
    put_back = formed is not None and formed.epoch_fixed is not None
    if put_back and member.arrived_under != control.round_revision:
        # There may be presences of nodes that have long gone, back with an older snapshot of etcd;
        # and of a large world the leader may not know all members. It can distinguish others from
        # them only if all nodes that wait arrive again, with the epoch of their last world.
        return True
    if formed is not None and info.arrived_for <= formed.number:
        # Named, but not admitted: see `Member.seat_in`. Expelled: named in a round that it never
        # saw, so the others think that it works there. Any other node waits for a seat.
        return member.rank_in(formed) is not None or info.node_id in formed.expelled
    return info.arrived_for > control.next_number


# --- a member, beside its work --------------------------------------------------------------------


class WorkingStep(Enum):
    """What a node does beside its work."""

    WORK = "nothing but its work"
    ARRIVE = "let its join arrive again"
    PRESENCE = "put the presence back"
    RECORD = "put the round record and the presence back"
    REJOIN = "it is a newcomer: the others left its world"
    ANNOUNCE = "announce to the others that it is being drained"
    FINISH = "finish: its job is closed"


def kept_record(member: Member, control: Control) -> Round | None:
    """Return the round whose job lease this node helps to keep alive."""
    if member.phase is Phase.WAITING:
        # A newcomer that has not arrived may be waiting until a dead job's keys expire.
        belongs = member.arrived_with != 0 or member.epoch > 0
        return member.record or (control.formed if belongs else None)
    if member.phase is not Phase.MEMBER or member.evicted:
        return None  # declared lost: a hung node would keep a dead job's keys forever
    return member.record


def working_step(
    member: Member, control: Control, session: int, *, is_missed: bool = False
) -> WorkingStep:
    """Compare what a node should have in etcd with ``control``, and decide what it does beside its
    work; ``is_missed``: the presence that it has put on ``session`` is not there.

    What it puts back it decides again on a fresh view.
    """
    if member.is_finishing:
        return WorkingStep.FINISH
    if member.phase is Phase.WAITING and is_missed:
        return WorkingStep.ARRIVE
    record = member.record
    if member.phase is not Phase.MEMBER or member.evicted or record is None:
        return WorkingStep.WORK
    is_there = session != 0 and member.arrived_with == session and not is_missed
    lacks = not is_there or control.round is None or member.may_lack_slice(control)
    # Any other member joins again anyway: a node that has finished must notice that it is out.
    is_out = member.has_finished and not control.holds(record)
    if lacks or is_out or control.is_behind(record):
        return decide_recovery(control, record, member.node_id)
    announces = drain_to_announce(member, control, session) is not None
    return WorkingStep.ANNOUNCE if announces else WorkingStep.WORK


def decide_recovery(control: Control, world: Round, node_id: str) -> WorkingStep:
    """Decide what a member of ``world`` puts back of which something is gone.

    Also when the round is over: as long as this member is not declared lost, the others wait for it
    while its workers stop.

    The later world wins: an older record in a fresh view means that etcd went back (it was restored
    from a snapshot, or lost its tail), and that the nodes that formed it knew of no later one.
    """
    if control.end_of(world.origin) is not None:
        return WorkingStep.WORK
    if control.round is None or control.is_behind(world):
        return WorkingStep.RECORD
    change = control.open_change
    if not control.holds(world) or (change is not None and change.may_name(node_id)):
        return WorkingStep.REJOIN
    return WorkingStep.PRESENCE


def drain_to_announce(member: Member, control: Control, session: int) -> Drain | None:
    """Return the drain that this member has yet to announce to the others, if any.

    An operator puts the same key as the node itself; the node adds the epoch of its world, so that
    no other world's members stop for it. A node that is in no world just leaves.
    """
    drain = member.drain
    if drain is None or not session or member.phase is not Phase.MEMBER:
        return None
    if member.evicted or member.closure is not None:
        return None
    wanted = replace(drain, epoch=member.epoch)
    return None if control.drains.get(member.node_id) == wanted else wanted


# --- the lead -------------------------------------------------------------------------------------


class LeadStep(Enum):
    """What a node does about the lead."""

    LEAD = "close rounds and publish changes"
    CLAIM = "claim the vacant lead, in its turn"
    RESIGN = "let others lead: its job is closed, or they formed a world without it"
    LEAVE = "leave the lead to others"


def lead_step(member: Member, control: Control, session: int) -> LeadStep:
    """Decide what a node does about the lead."""
    leader = control.leader
    if leader is None:
        return LeadStep.CLAIM if _may_claim(member, session) else LeadStep.LEAVE
    if not holds_lead(member, control, session):
        return LeadStep.LEAVE
    if member.is_active:
        return LeadStep.LEAD
    return LeadStep.RESIGN if member.is_finishing or member.evicted else LeadStep.LEAVE


def holds_lead(member: Member, control: Control, session: int) -> bool:
    """Whether the leader key is this node's and its session lives."""
    leader = control.leader
    return leader is not None and leader.node_id == member.node_id and session != 0


def _may_claim(member: Member, session: int) -> bool:
    if not member.is_active or not session:
        return False
    # A node that is arriving claims with its arrival.
    return member.phase is Phase.MEMBER or member.arrived_with != 0


def claim_delay_s(rank: int | None, size: int, jitter_s: float) -> float:
    """Return how long to wait before claiming a vacant lead: members first, in rank order.

    ``size`` is that of the formed round, 0 without one, and ``rank`` the node's in it; ``jitter_s``
    is a random number of seconds below 0.02, drawn by the caller. The first ranks are far apart, so
    that the others see the claim of the first in time; from rank 50 on closer, because a whole rack
    may be gone.
    """
    if size == 0:
        return jitter_s
    if rank is None:
        return max(0.3, _turn_s(size) + 0.02) + jitter_s
    return 0.0 if rank == 0 else _turn_s(rank) + jitter_s


def _turn_s(rank: int) -> float:
    """5 ms for each of the first 50 ranks, 1 ms to rank 1,000, then 0.25 ms."""
    middle, last = max(0, min(rank, 1000) - 50), max(0, rank - 1000)
    return 0.005 * min(rank, 50) + 0.001 * middle + 0.00025 * last

"""The state of one node: its phase, its arrival, its world. Mutable, in one place; no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from rdzv_etcd.errors import RendezvousFailedError, TaskFailedError
from rdzv_etcd.protocol.model import Closure, Control, Drain, NodeInfo, Round, Slice, Slices
from rdzv_etcd.settings import JobSettings


class Phase(Enum):
    """The phase of a node."""

    IDLE = "idle"
    WAITING = "waiting"
    MEMBER = "member"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a formed round, and the facts of that round that it needs."""

    round: int
    rank: int
    size: int
    master_address: str
    master_port: int
    epoch: int
    """Fencing token: grows from round to round, survives every restart of etcd."""
    members: tuple[str, ...]
    """Node ids by rank; empty in a large world (see ``slices``)."""
    job_lease: int
    """The lease on which everything that belongs to the job lives."""
    run: str = ""
    """With the round's number it names the round once and for all."""
    slices: Slices | None = None
    """Where the members of a large world are named."""


@dataclass(slots=True)
class Member:
    """The state of one node, and its transitions; :mod:`rdzv_etcd.protocol.steps` decides what
    follows from it. Used on one event loop only."""

    node_id: str
    phase: Phase = Phase.IDLE
    info: NodeInfo | None = None
    """The presence as last written or about to be."""
    arrived_with: int = 0
    """The session that carries its presence as :attr:`info` has it; if it has another one, or
    :attr:`info` is another: arrive again, or as a member put the presence back."""
    arrived_under: int = 0
    """The revision of the round record at the last arrival."""
    record: Round | None = None
    """The round that this node works in, with the epoch that it has for good."""
    epoch: int = 0
    """The epoch of the world that this node was in last; 0 before the first."""
    seat: Seat | None = None
    """Its seat in that world."""
    reason: str = ""
    """Why that world is over, if others want another one; logged when there is one."""
    epoch_seen: int = 0
    """The highest epoch of a formed round that this node has seen."""
    slice: Slice | None = None
    """The slice that this node has read of the last large world it arrived for."""
    slice_revision: int = 0
    """The revision of the record with which that slice was there. A record that was put back has
    another one."""
    origin: str | None = None
    """The run that this node was a member of, or has waited for a seat in (see Round.origin)."""
    evicted: bool = False
    """Whether the others formed a new world without this node."""
    known_since: int | None = None
    """The store's revision at this node's first session; a marker before it is another run's."""
    closure: Closure | None = None
    """How the job ended; remembered here, because the marker expires."""
    restored_revision: int = 0
    """The revision of the record that was there when etcd had gone back, 0 for none: the rounds
    that once followed it are not known, so its run's numbers must not be given out again."""
    gone_revision: int = 0
    """The revision at which this node has seen that the round record was gone; 0 if it is there, or
    if etcd may have forgotten it."""
    doubted_revision: int = 0
    """Up to which revision an accusation may be one that was answered, or overcome, before etcd
    went back."""
    regressions: int = 0
    """How often etcd has gone back: whatever else was seen of it before may be wrong by now."""
    _went_back: bool = False
    _had_record: bool = False
    was_member: bool = False
    """Whether this node belonged to the round that was closed."""
    opened_s: float = 0.0
    """Since when the next round has been open, as far as this node has seen (on its clock): since
    the change, or since it began to watch a job without a formed round."""
    arrivable_s: float = 0.0
    """Since when nodes could arrive for that round: etcd was not away, and refused nothing."""
    closes_by_s: float = math.inf
    """When this node, if it leads, closes every round that it can: its own join is about to end."""
    _open: tuple[object, ...] | None = None
    """Names the open round that those times belong to."""
    failure: tuple[str, BaseException] | None = None
    """The background task that failed unexpectedly, and how: this node cannot continue."""
    met_end: Closure | None = None
    """How the run ended after which this node was started, if its join continues nevertheless."""
    watches_early: bool = False
    """Whether this node watches its own presence from soon after its first world was formed: others
    look after it, and may be wrong about it."""
    drain: Drain | None = None
    """Why this node is being drained, if it is; that is never withdrawn."""
    settings: JobSettings | None = None
    """Those that this node was started with; ``None``: any."""
    other_run: str | None = None
    """A run with other settings, which it cannot join (see Round.origin)."""
    given_up: tuple[int, str] = (0, "")
    """The world that this node gave up last, and why."""

    def why_given_up(self, epoch: int) -> str:
        """Why this node gave up the world of that epoch, if that is known."""
        given_up, why = self.given_up
        return why if epoch == given_up else ""

    def check_not_gone(self) -> None:
        """Raise RendezvousFailedError once the node has left, TaskFailedError if one of its tasks
        has failed."""
        if self.phase is Phase.GONE:
            raise RendezvousFailedError("this node has left the job")
        if self.failure is not None:
            name, error = self.failure
            raise TaskFailedError(name, error) from error

    @property
    def is_active(self) -> bool:
        """Whether this node takes part, and so may lead. Not if it is evicted: a hung node would
        lead forever, and a job of other settings waits for a leader's end."""
        takes_part = self.phase in (Phase.WAITING, Phase.MEMBER) and not self.evicted
        return takes_part and self.closure is None

    @property
    def has_finished(self) -> bool:
        """Whether its work in its world is done; its presence shows that, or is about to."""
        return self.info is not None and self.info.finished

    @property
    def is_finishing(self) -> bool:
        """Whether this node still works although its job was closed."""
        return self.phase is Phase.MEMBER and self.closure is not None

    def works_in(self, epoch: int) -> bool:
        """Whether this node is a member of the world of that epoch: it has not joined again."""
        return self.phase is Phase.MEMBER and self.epoch == epoch

    def notice(self, control: Control, now_s: float) -> None:
        """Remember facts that must outlive their keys, and since when they hold."""
        if control.round is not None:
            self._had_record, self.gone_revision = True, 0
        elif self._had_record:
            self._had_record = False
            self.gone_revision = 0 if self._went_back else control.revision
        open_ = _open_round(control)
        if open_ != self._open:
            self._open = open_
            self.opened_s = self.arrivable_s = now_s
        if self._went_back:
            self._went_back, self.restored_revision = False, control.round_revision
            self.doubted_revision = control.revision
        if self.known_since is not None and control.revision < self.known_since:
            # Data wiped or restored: an end that is remembered now may be of any run. This does not
            # concern a node that knows its run; any other node waits rather than take another
            # run's end for its own.
            self.known_since = control.revision
        if control.formed is not None:
            self.epoch_seen = max(self.epoch_seen, control.epoch)
        if control.round is not None and not self._may_join(control.round):
            self.other_run = control.round.origin
        if self.closure is None:
            self._notice_end(control)
        if self.drain is None:
            self.drain = control.drains.get(self.node_id)
        if self.phase is not Phase.MEMBER:
            self._note_origin(control)

    def _note_origin(self, control: Control) -> None:
        formed = control.formed
        if formed is not None and self._may_join(formed):
            self.origin = formed.origin

    def _may_join(self, record: Round) -> bool:
        return self.settings is None or self.settings == record.settings

    def note_start(self, revision: int | None) -> None:
        """Note the store's revision at this node's first session. It does not know what was before:
        a node that was accused then may be about to return to an etcd that has just gone back."""
        self.known_since = revision
        self.doubt(revision or 0)

    def note_regress(self) -> None:
        """Note that etcd has lost data that this node had seen: it was wiped or restored. The next
        view shows what is left. A waiting node has to arrive again: an earlier arrival may be
        back."""
        self._went_back = True
        self.forget_arrival()
        self.regressions += 1
        self.slice_revision = 0  # the record that was put back again may have that very revision

    def doubt(self, revision: int) -> None:
        """Note that accusations up to that revision may be from before etcd went back."""
        self.doubted_revision = max(self.doubted_revision, revision)

    def _notice_end(self, control: Control) -> None:
        """Remember how this node's run ended, if it did.

        A record of another run may have taken the marker's place by now, if this node was cut off.
        """
        if self.origin is not None:
            self.closure = control.end_of(self.origin)
        elif control.ended_revision and not self.is_earlier_run(control):
            last = control.ended[-1]
            if last.origin != self.other_run:
                self.closure = last.closure  # it waited for that run's first round
        if self.closure is not None:
            marker = control.round if control.closure == self.closure else self.record
            self.was_member = marker is not None and self.rank_in(marker) is not None

    def slice_of(self, record: Round) -> Slice | None:
        """Return this node's slice of ``record``, if it has read one."""
        mine = self.slice
        if mine is None or (mine.run, mine.number) != (record.run, record.number):
            return None
        return mine

    def rank_in(self, record: Round) -> int | None:
        """Return this node's rank in ``record``, as far as it knows."""
        if record.slices is None:
            members = record.members
            return members.index(self.node_id) if self.node_id in members else None
        mine = self.slice_of(record)
        return None if mine is None else mine.ranks.get(self.node_id)

    def unread(self, control: Control) -> Round | None:
        """Return the large world that this node may be in, if it has yet to read its slice."""
        record, info = control.formed, self.info
        if record is None or record.slices is None or self.slice_of(record) is not None:
            return None
        if info is None or not 0 < info.arrived_for <= record.number:
            return None
        return record

    def slice_to_put_back(self, control: Control) -> Slice | None:
        """Return this node's slice of a large world whose record was put back, if it was in it."""
        formed = control.formed
        if formed is None or control.round_revision == self.slice_revision:
            return None
        return None if self.rank_in(formed) is None else self.slice_of(formed)

    def may_lack_slice(self, control: Control) -> bool:
        """Whether this member's record was put back, so that its slice may have to be as well."""
        record, formed = self.record, control.formed
        return (
            record is not None
            and record.slices is not None
            and record.same_world(formed)
            and control.open_change is None
            and control.round_revision != self.slice_revision
        )

    def is_earlier_run(self, control: Control) -> bool:
        """Whether the last end of a run is older than this node's first session."""
        return self.known_since is not None and control.ended_revision <= self.known_since

    def begin_join(self, info: NodeInfo) -> None:
        self.check_not_gone()
        self.phase = Phase.WAITING
        self.info = info
        self.forget_arrival()
        self.record = None
        self.evicted = False
        self.met_end = None

    def plan_arrival(self, control: Control, epoch_floor: int, wall_s: float) -> NodeInfo | None:
        """Return the presence to arrive with as things are; ``None`` if no join is under way."""
        if self.info is None:
            return None
        self.info = replace(
            self.info,
            arrived_for=control.next_number,
            epoch_seen=max(self.epoch_seen, epoch_floor),
            epoch_trained=self.epoch,
            clock_us=0 if self.epoch else int(wall_s * 1e6),
        )
        return self.info

    def plan_return(self) -> NodeInfo | None:
        """Return the presence to put back as a member; ``None`` if this node is in no world."""
        if self.info is None or self.record is None:
            return None
        return replace(
            self.info,
            arrived_for=self.record.number,
            epoch_seen=self.epoch_seen,
            epoch_trained=self.epoch,
        )

    def note_arrival(self, session: int, control: Control) -> None:
        """Note that this node has arrived, on that session and under the record of ``control``."""
        self.arrived_with = session
        self.arrived_under = control.round_revision
        self._note_origin(control)  # the record may be as old as its membership of another run

    def forget_arrival(self) -> None:
        """Note that this node, if it waits, has to arrive (again)."""
        self.arrived_with = 0

    def note_presence(self, session: int) -> None:
        """Note that the presence is there again on that session; a join that began meanwhile
        arrives by itself."""
        if self.phase is Phase.MEMBER:
            self.arrived_with = session

    def finish(self) -> None:
        """Note that this member's work is done; its presence is put again, to show the others."""
        if self.info is not None:
            self.info = replace(self.info, finished=True)
            self.forget_arrival()

    def give_up(self, why: str = "") -> NodeInfo | None:
        """Take no part until the next join; return the presence that this node had. ``why``: how
        its part in a world ended."""
        self.given_up = (self.epoch, why)
        info, self.info = self.info, None
        self.phase = Phase.IDLE
        self.record = None
        self.forget_arrival()
        return info

    def be_drained(self, drain: Drain) -> None:
        """Note that this node is being drained; the first reason stays."""
        self.drain = self.drain or drain

    def seat_in(self, control: Control) -> int | None:
        """This node's rank in a round that was formed for it: one for which it had arrived.

        A record numbered as the arrival (or later) that names this node can only have been formed
        from that arrival, even if the arrival's outcome is not known yet. (Or from one that was
        withdrawn just then; rank 0's socket shows that, and others are missed at once.)
        """
        record, info = control.formed, self.info
        if record is None or info is None or not 0 < info.arrived_for <= record.number:
            return None
        rank = self.rank_in(record)
        if rank is None or control.epoch <= self.epoch:
            return None  # not in it, or it is the round that was left, put back after a loss
        master = (record.master_address, record.master_port)
        if rank == 0 and master != (info.address, info.port):
            return None
        return rank

    def enter(self, control: Control) -> Seat:
        """Become a member of the formed round, in which this node has a seat."""
        record, rank = control.formed, self.seat_in(control)
        if record is None or rank is None:
            raise ValueError(f"{self.node_id} has no seat in {record}")
        self.phase = Phase.MEMBER
        self.closes_by_s = math.inf
        self.record = replace(record, epoch_fixed=control.epoch)
        self.epoch, self.origin = control.epoch, record.origin
        self.reason = ""
        self.seat = Seat(
            record.number,
            rank,
            record.size,
            record.master_address,
            record.master_port,
            control.epoch,
            record.members,
            record.job_lease,
            record.run,
            record.slices,
        )
        return self.seat


def _open_round(control: Control) -> tuple[object, ...]:
    """Name the round that is open for arrivals; a healthy round is named by its number alone."""
    formed = control.formed
    if formed is None:
        return ()
    return (formed.run, formed.number, control.open_change is not None)

"""The nouns of the protocol as frozen values; no behaviour beyond simple look-ups.

What is written to etcd is annotated with types that have bounds.

Words (one per idea, in code, keys, logs and docs): a *job* is one rendezvous id; a *node* one agent
taking part; a *round* one formed world; a *member* belongs to the formed round and has a rank; a
*waiter* has arrived for the next round; a *spare* is a waiter without a seat; the *leader* closes
rounds and publishes changes; a *change* says why the formed round is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from zlib import crc32

from rdzv_etcd.protocol.fields import (
    MAX_EPOCH,
    Address,
    Claim,
    Counts,
    Data,
    Epoch,
    LeaseId,
    Name,
    Names,
    NodeId,
    Port,
    PortOrNone,
    RoundNumber,
    RoundTrip,
    Shown,
    Text,
    Texts,
    Ttl,
    TtlOrNone,
    clamped,
    whole,
)
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.settings.fields import MAX_NODES, MAX_ROUND
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import LEASE_EXPIRED


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's presence: one key per node, on the node's session."""

    node_id: NodeId
    address: Address
    """Where other nodes reach this one."""
    port: Port
    """Its listening socket: the round's store if it becomes rank 0."""
    arrived_for: RoundNumber
    """The round it has arrived for; re-arriving raises it."""
    settings: JobSettings
    rank_key: Text | None = None
    domain: Name | None = None
    """What it shares with the nodes that it belongs together with."""
    leaving: Text | None = None
    """Set just before the session is revoked: why."""
    epoch_seen: Claim = 0
    """The highest epoch this node knows of, so that epochs grow even if the record is lost."""
    epoch_trained: Claim = 0
    """The epoch of the last world it was a member of: the node with the latest has the best claim
    to rank 0, whichever record etcd holds."""
    clock_us: Claim = 0
    """Its wall clock when it arrived, if it was in no world before. Epochs begin at the lower
    median of these clocks, which are used for nothing else."""
    data: Data = field(default_factory=dict)
    """The other members can read it; opaque here."""
    peer_port: PortOrNone = 0
    """The port on which its neighbor watches it; 0: it is not watched."""
    round_trip_ms: RoundTrip = 0
    """etcd's latency for this node: a node that is far from etcd needs longer to answer."""
    because: Shown = ""
    """Why it joined again, if the reason was its own: how its worker failed, for display."""
    lease_ttl_s: TtlOrNone = 0
    """The TTL of its lease; 0: unknown."""
    finished: bool = False
    """Whether its work in its world is done: it stays until the others have finished, and joins no
    other world."""


@dataclass(frozen=True, slots=True)
class Accusation:
    """Written in place of the presence of a node that another node has found gone, on the accuser's
    session. A node that lives puts its presence back."""

    by: Name
    """The accuser's node id."""
    how: Text
    """The evidence, for display."""
    is_certain: bool
    """Whether the host reports that the process is gone; otherwise the node is silent."""
    round_trip_ms: RoundTrip = 0
    """etcd's latency for the accused, from its presence."""
    after_ms: Annotated[int, clamped(3_600_000)] | None = None
    """How long after the end of its link this was seen, if known."""


@dataclass(frozen=True, slots=True)
class Closure:
    """How a job ended."""

    by: Name
    """Node id."""
    reason: Text
    succeeded: bool
    wall_s: float
    """The closing node's wall clock; for display, never compared."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: kept for much longer than the job counts as closed, for nodes that were
    cut off when it ended."""

    origin: Name
    """See :attr:`Round.origin`."""
    closure: Closure
    epoch: Claim = 0
    """The highest epoch that the closing node had seen."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Names the members of a large world in slices beside its record.

    Every node watches the record: with N names in it a round would cost N² names. Each node reads
    the one slice that its id falls into.
    """

    size: Annotated[int, whole(1, MAX_NODES)]
    """How many members the world has."""
    count: Annotated[int, whole(1)]
    """How many slices there are."""
    edition: Name
    """Names this attempt to form the round: a failed one may have left other slices."""

    def index_of(self, node_id: str) -> int:
        return crc32(node_id.encode()) % self.count


@dataclass(frozen=True, slots=True)
class Slice:
    """The slice of a large world that one node has read."""

    run: str
    number: int
    index: int
    ranks: Mapping[str, int]
    """The ranks of the members in it, by node id."""


@dataclass(frozen=True, slots=True)
class Ttls:
    """The shortest and the longest TTL of some leases, in seconds."""

    shortest: Ttl
    longest: Ttl


@dataclass(frozen=True, slots=True)
class Round:
    """The round record: the last formed round, or the closed job."""

    number: Annotated[int, whole(1, MAX_ROUND)]
    run: Name
    """One incarnation of the job; differs if the id is used again after everything was gone, and
    after a record was put back. Run and number together name a round uniquely."""
    members: Names
    """Node ids; the index is the rank. Empty if they are named in ``slices``."""
    settings: JobSettings
    master_address: Address
    master_port: Port
    job_lease: LeaseId
    epoch_base: Epoch = 0
    """The epoch is this plus the revision at which the record was written."""
    epoch_fixed: Epoch | None = None
    """The epoch, if the record was put back after a loss of data."""
    expelled: Names = ()
    """Live nodes that did not return in time and may still work in an older round."""
    heirs: Names = ()
    """Live members of an earlier round that were expelled, if none of its members is in this one.
    The first of them that returns gets rank 0, because the present members began again."""
    slices: Slices | None = None
    closure: Closure | None = None
    began_as: Name | None = None
    """The run's first name, if it has another one since a record was put back."""
    lease_ttls_s: Ttls | None = None
    """Those of the members' leases, if known."""
    domains: Counts = field(default_factory=dict)
    """If segments are whole domains: how many nodes each had in the last world that it was in;
    first those of this one, by rank."""

    @property
    def origin(self) -> str:
        """Names the run for all its life: :attr:`run` changes when a record is put back."""
        return self.run if self.began_as is None else self.began_as

    @property
    def size(self) -> int:
        return len(self.members) if self.slices is None else self.slices.size

    def same_world(self, other: Round | None) -> bool:
        """Whether ``other`` is a record of the same formed round."""
        return other is not None and (self.run, self.number) == (other.run, other.number)

    def epoch(self, revision: int) -> int:
        """The fencing token of the round; ``revision`` is the record's mod revision."""
        return self.epoch_fixed if self.epoch_fixed is not None else self.epoch_base + revision


@dataclass(frozen=True, slots=True)
class Change:
    """Why a formed round is over."""

    run: Name
    round: RoundNumber
    waiters: Names = ()
    """Nodes that wait for the next round: members that returned, and newcomers."""
    lost: Texts = field(default_factory=dict)
    """Lost members and why."""
    unnamed: Annotated[int, whole(0, 2 * MAX_NODES)] = 0
    """How many more waiters and lost members there are: every member reads this value, so it names
    only a few."""
    because: Texts = field(default_factory=dict)
    """Why members among the waiters returned, if they gave a reason."""

    @property
    def count(self) -> int:
        """How many nodes wait or were lost."""
        return len(self.waiters) + len(self.lost) + self.unnamed

    def concerns(self, record: Round | None) -> bool:
        return record is not None and (self.run, self.round) == (record.run, record.number)

    def may_name(self, node_id: str) -> bool:
        """Whether it declares this node lost, or may, since it does not name all."""
        return node_id in self.lost or self.unnamed > 0


@dataclass(frozen=True, slots=True)
class Leader:
    node_id: Name
    settings: JobSettings
    """Before the first round, arriving nodes must have the same."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A request that a node leave at the next point where this costs its world no work."""

    by: Name
    """The node's own id, or the name that the operator gave."""
    reason: Text
    epoch: Annotated[int, whole(0, 2 * MAX_EPOCH)] = 0
    """The epoch of the world whose members may stop for it; 0: the node has not seen the request,
    or is in no world."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A node that could not join."""

    node_id: Name
    settings: JobSettings
    wall_s: float
    """When, by its wall clock; for display, never compared."""
    how: Text = ""
    """How its gate failed; empty: its settings are not the job's."""

    @property
    def why(self) -> str:
        """Why it could not join, for display."""
        return self.how or f"it was started with {self.settings}"


@dataclass(frozen=True, slots=True)
class Control:
    """The keys that every node watches, as of ``revision``; one whose revision is 0 is absent."""

    revision: int
    round: Round | None = None
    round_revision: int = 0
    leader: Leader | None = None
    leader_revision: int = 0
    """The leader key's *create* revision, which fences the leader's writes."""
    change: Change | None = None
    change_revision: int = 0
    ended: tuple[Ended, ...] = ()
    """The last runs that ended, the latest last."""
    ended_revision: int = 0
    ended_lease: int = 0
    epoch_base: int = 0
    """The base of this job's epochs, kept for later runs."""
    epoch_lease: int = 0
    """The lease of that key."""
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """The nodes that should leave, and why."""
    refused: Refused | None = None
    """A node that recently could not join."""
    refused_lease: int = 0
    """The lease of that key."""

    def end_of(self, origin: str) -> Closure | None:
        """How that run ended, if it did."""
        record = self.round
        if record is not None and record.closure is not None and record.origin == origin:
            return record.closure
        return next((run.closure for run in self.ended if run.origin == origin), None)

    def holds(self, world: Round) -> bool:
        """Whether the record is that of this world, whose epoch is fixed.

        After a loss of data two rounds may have the same name, but never the same epoch.
        """
        formed = self.formed
        return formed is not None and formed.same_world(world) and self.epoch == world.epoch_fixed

    def is_behind(self, world: Round) -> bool:
        """Whether the record is older than this world, whose epoch is fixed: the view lags, or etcd
        lost data."""
        fixed = world.epoch_fixed
        return self.round is not None and fixed is not None and self.epoch < fixed

    @property
    def formed(self) -> Round | None:
        """The formed round, if the job is not closed."""
        return self.round if self.round is not None and self.round.closure is None else None

    @property
    def closure(self) -> Closure | None:
        return None if self.round is None else self.round.closure

    @property
    def open_change(self) -> Change | None:
        """The change published for the formed round, if any."""
        if self.change is not None and self.change.concerns(self.formed):
            return self.change
        return None

    @property
    def next_number(self) -> int:
        return 1 if self.round is None else self.round.number + 1

    @property
    def epoch(self) -> int:
        return 0 if self.round is None else self.round.epoch(self.round_revision)


@dataclass(frozen=True, slots=True)
class Presence:
    """A node's presence as the leader sees it."""

    info: NodeInfo
    create_revision: int
    mod_revision: int
    seen_s: float
    """When the leader saw it arrive, on the leader's clock."""
    lease_id: int = 0
    """Its node's session."""

    @property
    def order(self) -> tuple[int, str]:
        """Sorts presences by arrival."""
        return self.create_revision, self.info.node_id


@dataclass(frozen=True, slots=True)
class Accused:
    """An accusation as the leader sees it."""

    accusation: Accusation
    mod_revision: int
    seen_s: float
    """When the leader saw it, on the leader's clock."""

    def gone_for_s(self, now_s: float) -> float | None:
        """How long its process had been gone by then, if its accuser has seen it end."""
        after_ms = self.accusation.after_ms
        return None if after_ms is None else max(0.0, now_s - self.seen_s) + after_ms / 1000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A foreign key among the presences."""

    problem: str
    """For display: the key, what is wrong with it, and its writer's lease."""
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Nodes:
    """All presences as of ``revision``."""

    revision: int
    present: Mapping[str, Presence] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    """Nodes that announced that they leave, and why."""
    since_s: float = 0.0
    """When the view began, on the leader's clock."""
    gone: Mapping[str, float] = field(default_factory=dict)
    """When other nodes vanished, if that was recently."""
    unreadable: Mapping[str, Unreadable] = field(default_factory=dict)
    """Foreign values in place of the presences of these nodes, which count as gone."""

    accused: Mapping[str, Accused] = field(default_factory=dict)
    """Nodes without a presence that other nodes have found gone."""

    def place(self, node_id: str) -> int:
        """The revision of the value in a node's place: its presence or another one; 0: none."""
        presence = self.present.get(node_id)
        return self.in_place_of(node_id) if presence is None else presence.mod_revision

    def in_place_of(self, node_id: str) -> int:
        """The revision of the value in place of a node's presence; 0: none."""
        instead = self.accused.get(node_id) or self.unreadable.get(node_id)
        return 0 if instead is None else instead.mod_revision

    def how_absent(self, node_id: str) -> str:
        """How a node without a presence was lost."""
        accused = self.accused.get(node_id)
        return LEASE_EXPIRED if accused is None else shown(accused.accusation.how)

    def absent_since_s(self, node_id: str) -> float:
        """Since when a node has been seen without a presence."""
        return self.gone.get(node_id, self.since_s)

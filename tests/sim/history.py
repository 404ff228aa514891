"""What happened in a simulation, and whether it may happen.

Knows what etcd committed, in order, and what the nodes were told and did; knows nothing of how
either came about. Each ``_check_…`` is one promise of :mod:`tests.sim.invariants`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rdzv_etcd.core.model import (
    Change,
    Closure,
    Control,
    Leader,
    Loss,
    NodeInfo,
    Round,
    is_unknown,
)
from rdzv_etcd.core.slicing import assemble
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.api import Event, EventKind
from rdzv_etcd.group.standing import World
from rdzv_etcd.schema import values
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.schema.store import StoreKeys, number_of
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.requests import Revoke
from tests.sim.counting import Counting
from tests.sim.invariants import Invariant, InvariantError

COUNTER = "steps"
"""The store key that simulated agents count on."""

DECIDED_WITHIN_S = 120.0
"""A leader's view may be this old when its write arrives: it was paused, or the message was."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A round as it was committed."""

    record: Round
    epoch: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """A round as one node was told."""

    node_id: str
    world: World
    at_s: float


@dataclass(frozen=True, slots=True)
class Here:
    """A presence as etcd holds it."""

    info: NodeInfo
    mod_revision: int
    seated: bool = False
    """Whether a round was formed with it since this node arrived: then it works there."""


@dataclass(slots=True)
class Store:
    """The job's keys as etcd holds them."""

    round: Round | None = None
    round_revision: int = 0
    leader: Leader | None = None
    change: Change | None = None
    nodes: dict[str, Here] = field(default_factory=dict)
    slices: dict[bytes, dict[str, int]] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """Everything one job went through; :meth:`check` raises InvariantError."""

    keys: JobKeys
    formed: list[Formed] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    closures: list[Closure] = field(default_factory=list)
    changes: list[tuple[float, Change]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    wiped_s: float | None = None
    """When etcd first lost its data. Nodes that come afterwards, or were cut off, cannot know what
    was before, so epochs are compared per node only."""
    _store: Store = field(default_factory=Store)
    _revision: int = 0
    _went: dict[str, tuple[NodeInfo, float]] = field(default_factory=dict)
    """Presences that are no more: what they were, and until when."""
    _came: dict[str, float] = field(default_factory=dict)
    """When a node's presence appeared last."""
    _counters: dict[bytes, Counting] = field(default_factory=dict)
    _at_barrier: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    _slices: dict[bytes, dict[str, int]] = field(default_factory=dict)
    """Every slice that ever was; a key names one attempt to form one round."""
    _highest: dict[str, int] = field(default_factory=dict)
    """The highest epoch of a round that each node was told it is in."""
    _broken: list[InvariantError] = field(default_factory=list)

    def note(self, at_s: float, text: str) -> None:
        self.log.append(f"{at_s:9.3f}  {text}")

    def check(self) -> None:
        """Raise InvariantError with the log if any promise was broken."""
        if not self._broken:
            self._check_one_world()
            self._check_worlds()
            try:
                for counter in self._counters.values():
                    counter.check()
            except InvariantError as error:
                self._broken.append(error)
        self.stop_if_broken()

    def stop_if_broken(self) -> None:
        """Raise InvariantError with the log if a promise is known to be broken."""
        if self._broken:
            first = self._broken[0]
            raise InvariantError(first.invariant, "\n".join([str(first), *self.log]))

    def demand(self, holds: bool, invariant: Invariant, problem: str) -> None:
        """Remember a broken promise; the first one is raised by :meth:`check`."""
        if not holds:
            self._broken.append(InvariantError(invariant, problem))
            self.log.append(f"           BROKEN  {invariant.value}: {problem}")

    # -- what nodes were told and did ------------------------------------------------------------

    def tell(self, node_id: str, world: World, at_s: float) -> None:
        self.told.append(Told(node_id, world, at_s))
        self._highest[node_id] = max(world.epoch, self._highest.get(node_id, 0))
        self.note(at_s, f"{node_id} is told: round {world.round}, rank {world.rank}")

    def act(
        self,
        node_id: str,
        record: Round,
        seen: Control,
        evicted: bool,
        closure: Closure | None,
    ) -> None:
        """A node works a step on ``record`` although it has seen ``seen``."""
        formed, change = seen.formed, seen.change
        over = evicted or (closure is not None and not closure.succeeded)
        if closure is None and formed is not None:
            # an older record can only be a view that lags behind what this node was told
            over |= formed.run != record.run or formed.number > record.number
            over |= change is not None and change.concerns(record)
        self.demand(
            not over,
            Invariant.STALE,
            f"{node_id} works on round {record.number} of {record.run}, but knows {seen}",
        )

    def counter(self, round_number: int) -> Counting:
        key = StoreKeys(self.keys.store(round_number)).value(COUNTER)
        return self._counters.setdefault(key, Counting(f"{COUNTER!r} of round {round_number}"))

    def reach_barrier(self, world: World, name: str, node_id: str) -> None:
        self._at_barrier.setdefault((world.epoch, name), set()).add(node_id)

    def members_of(self, world: World) -> tuple[str, ...]:
        """Who is in that world, wherever they are named."""
        for formed in self.formed:
            if world.slices is not None and formed.record.slices == world.slices:
                return formed.record.members
        return world.members

    def pass_barrier(self, world: World, name: str, node_id: str) -> None:
        missing = set(self.members_of(world)) - self._at_barrier[world.epoch, name]
        self.demand(
            not missing,
            Invariant.BARRIER,
            f"{node_id} passed {name} of round {world.round} without {sorted(missing)}",
        )

    # -- what etcd committed ---------------------------------------------------------------------

    def observe(self, applied: Applied) -> None:
        """Take in one request that the server worked on; not what a test put there itself."""
        if not applied.source and not isinstance(applied.request, Revoke):
            return
        for revision in applied.changes:
            if revision.number <= self._revision:
                self._lose_all(applied.at_s)
            self._revision = revision.number
            for event in revision.events:
                try:
                    self._take(applied, event)
                except StateCorruptError as error:
                    self.demand(False, Invariant.RANKS, f"{applied.source} wrote nonsense: {error}")

    def _lose_all(self, at_s: float) -> None:
        """The revisions begin anew: etcd has lost its data."""
        for node_id, here in self._store.nodes.items():
            self._went[node_id] = (here.info, at_s)
        self._store = Store()
        for counter in self._counters.values():
            counter.end_life()

    def _take(self, applied: Applied, event: Event) -> None:
        keys, store, kv = self.keys, self._store, event.kv
        put = event.kind is EventKind.PUT
        if kv.key == keys.round:
            if put:
                self._take_record(
                    applied, values.decode_round(kv.key, kv.value), event.kv.mod_revision
                )
            else:
                self.note(applied.at_s, "the round record is gone")
                store.round, store.round_revision = None, 0
        elif kv.key == keys.change:
            store.change = (
                self._take_change(applied, values.decode_change(kv.key, kv.value)) if put else None
            )
        elif kv.key == keys.leader:
            store.leader = (
                self._take_leader(applied, values.decode_leader(kv.key, kv.value)) if put else None
            )
        elif kv.key in keys.nodes:
            self._take_presence(applied, event)
        elif kv.key in keys.ranks:
            self._take_slice(applied, event)
        elif kv.key in self._counters:
            counter, number = self._counters[kv.key], number_of(kv) if put else None
            if number is not None:
                counter.commit(applied.source, number)
            else:
                counter.end_life()

    def _take_presence(self, applied: Applied, event: Event) -> None:
        kv, store = event.kv, self._store
        node_id = self.keys.node_id(kv.key)
        if event.kind is not EventKind.PUT:
            here = store.nodes.pop(node_id, None)
            if here is not None:
                self._went[node_id] = (here.info, applied.at_s)
            return
        info = values.decode_node(kv.key, node_id, kv.value)
        self._check_evicted(info)
        before = store.nodes.get(node_id)
        if before is None:
            self._came[node_id] = applied.at_s
        else:
            self._went[node_id] = (before.info, applied.at_s)
        store.nodes[node_id] = Here(info, kv.mod_revision, self._is_seated(info, before))

    def _is_seated(self, info: NodeInfo, before: Here | None) -> bool:
        """Whether a presence that was just put is that of a node at work, not of one that arrives.

        A member that puts its presence back says that it arrived for the round it works in.
        """
        if before is not None and before.info.arrived_for == info.arrived_for:
            return before.seated
        record = self._store.round
        return (
            record is not None
            and record.closure is None
            and info.node_id in record.members
            and info.arrived_for <= record.number
        )

    def _take_slice(self, applied: Applied, event: Event) -> None:
        key = event.kv.key
        if event.kind is not EventKind.PUT:
            self._store.slices.pop(key, None)
            return
        ranks = values.decode_slice(key, event.kv.value)
        before = self._slices.setdefault(key, ranks)
        self.demand(
            before == ranks,
            Invariant.ONE_WORLD,
            f"{applied.source} put {ranks} into {key!r}, which held {before}",
        )
        self._store.slices[key] = ranks

    def _whole(self, record: Round) -> Round:
        """The record with all its members named, wherever they are."""
        if record.slices is None or record.closure is not None:
            return record
        back = record.epoch_fixed is not None  # the slices are put back one by one, later
        there = self._slices if back else self._store.slices
        edition = self.keys.edition(record.number, record.slices.edition)
        members, complete = assemble(
            [ranks for key, ranks in there.items() if key in edition], record.slices.size
        )
        self.demand(complete, Invariant.RANKS, f"{record} was published without all its slices")
        return replace(record, members=members)

    def _take_leader(self, applied: Applied, leader: Leader) -> Leader:
        before = self._store.leader
        self.demand(
            before is None or before.node_id == leader.node_id,
            Invariant.LEADER,
            f"{applied.source} took the lead from {before}",
        )
        return leader

    def _take_change(self, applied: Applied, change: Change) -> Change:
        self.changes.append((applied.at_s, change))
        self.note(applied.at_s, f"{applied.source} published {change}")
        self._check_leader(applied, f"published {change}")
        self._check_need(applied, change)
        return change

    def _take_record(self, applied: Applied, record: Round, revision: int) -> None:
        store = self._store
        before = store.round
        record = self._whole(record)
        epoch = record.epoch(revision)
        if record.closure is not None:
            self.closures.append(record.closure)
            self.note(applied.at_s, f"{applied.source} closed the job: {record.closure.reason}")
            self.demand(
                before is not None and before.closure is None and before.same_world(record),
                Invariant.SUCCESSION,
                f"{record} was closed, but etcd held {before}",
            )
        else:
            back = record.epoch_fixed is not None
            self.note(
                applied.at_s,
                f"{applied.source} {'put back' if back else 'formed'} round {record.number} of run "
                f"{record.run}: {', '.join(record.members)} (epoch {epoch})",
            )
            self._check_size(record)
            self._check_succession(record)
            if not back:
                self._check_leader(applied, f"formed {record}")
                self._check_seats(record)
                self._check_epoch(record, epoch)
            self.formed.append(Formed(record, epoch, applied.at_s))
            for node_id in record.members:
                if node_id in store.nodes:
                    store.nodes[node_id] = replace(store.nodes[node_id], seated=True)
        store.round, store.round_revision = record, revision

    # -- promises: checked at each commit ---------------------------------------------------------

    def _check_leader(self, applied: Applied, what: str) -> None:
        leader = self._store.leader
        self.demand(
            leader is not None and leader.node_id == applied.source,
            Invariant.LEADER,
            f"{applied.source} {what}, but the leader is {leader}",
        )

    def _check_size(self, record: Round) -> None:
        settings = record.settings
        self.demand(
            len(set(record.members)) == record.size, Invariant.RANKS, f"double member in {record}"
        )
        self.demand(
            settings.min_nodes <= record.size <= settings.max_nodes
            and record.size % settings.node_unit == 0,
            Invariant.SIZE,
            f"round {record.number} has {record.size} members, allowed: {settings}",
        )

    def _check_succession(self, record: Round) -> None:
        before = self._store.round
        if record.epoch_fixed is not None:  # put back
            follows = before is None
        elif before is None:
            follows = record.number == 1
        else:
            fresh = before.closure is not None or before.epoch_fixed is not None
            follows = record.number == before.number + 1 and (record.run != before.run) == fresh
        self.demand(follows, Invariant.SUCCESSION, f"{record} does not follow {before}")

    def _check_epoch(self, record: Round, epoch: int) -> None:
        """Above that of every round its members were in, even if etcd's revisions begin anew."""
        for node_id in record.members:
            highest = self._highest.get(node_id, 0)
            self.demand(
                highest < epoch,
                Invariant.EPOCH,
                f"round {record.number} has epoch {epoch}, but {node_id} was in one of {highest}",
            )

    def _check_seats(self, record: Round) -> None:
        """Members are there for this round, and nobody who is stands outside free seats."""
        nodes, settings = self._store.nodes, record.settings
        busy = [
            node_id for node_id in record.members if node_id in nodes and self._works_on(node_id)
        ]
        self.demand(not busy, Invariant.SEATS, f"{busy} had not arrived for {record}")
        first = nodes.get(record.members[0])
        self.demand(
            first is None
            or (first.info.address, first.info.port) == (record.master_address, record.master_port),
            Invariant.SEATS,
            f"rank 0 does not listen where {record} says: {first}",
        )
        outside = [
            node_id
            for node_id in nodes
            if node_id not in record.members
            and self._waits(node_id)
            and nodes[node_id].info.settings == settings
        ]
        possible = min(settings.max_nodes, record.size + len(outside))
        self.demand(
            possible // settings.node_unit * settings.node_unit <= record.size,
            Invariant.SEATS,
            f"{outside} had arrived, and {record} had free seats",
        )

    def _works_on(self, node_id: str) -> bool:
        """Whether a present node has not come back from a round of its own, the last or an earlier
        one; whatever the record says about it."""
        before = self._store.round
        if before is None or before.closure is not None:
            return False
        here = self._store.nodes[node_id]
        return here.seated and here.info.arrived_for <= before.number

    def _waits(self, node_id: str) -> bool:
        """Whether a present node waits for the next round."""
        here, before = self._store.nodes[node_id], self._store.round
        if here.info.leaving is not None or self._works_on(node_id):
            return False
        if before is None:
            return here.info.arrived_for <= 1
        return before.closure is None or here.mod_revision > self._store.round_revision

    def _check_evicted(self, info: NodeInfo) -> None:
        """Once a round is called over, no presence of it comes back."""
        record, change = self._store.round, self._store.change
        self.demand(
            record is None
            or record.closure is not None
            or change is None
            or not change.concerns(record)
            or info.leaving is not None
            or info.arrived_for > record.number,
            Invariant.EVICTED,
            f"{info.node_id} came back into round {info.arrived_for} after {change}",
        )

    def _check_need(self, applied: Applied, change: Change) -> None:
        """A change names the round there is, and has a reason that others can see."""
        record = self._store.round
        if record is None or not change.concerns(record):
            self.demand(False, Invariant.SUCCESSION, f"{change} was published, but not {record}")
            return
        at_s = applied.at_s
        for name, how in change.lost.items():
            node_id = record.members[int(name.partition("~")[2])] if is_unknown(name) else name
            here = self._store.nodes.get(node_id)
            self.demand(
                here is None
                or here.info.leaving is not None
                or node_id == applied.source  # it leaves
                or (
                    (how != Loss.EXPIRED.value or is_unknown(name))
                    and at_s - self._came[node_id] < DECIDED_WITHIN_S
                ),
                Invariant.UNDISTURBED,
                f"{node_id} was called lost, but was there from {self._came.get(node_id)} on",
            )
        if change.lost:
            return
        recently = {
            node_id: info
            for node_id, (info, until_s) in self._went.items()
            if at_s - until_s < DECIDED_WITHIN_S
        }
        nodes = self._store.nodes
        present = [nodes[node_id].info for node_id in nodes if not self._works_on(node_id)]
        seen = [*recently.values(), *present]
        back = any(
            info.arrived_for > record.number and info.node_id in record.members for info in seen
        )
        new = {info.node_id for info in seen} - set(record.members)
        settings = record.settings
        possible = min(settings.max_nodes, record.size + len(new))
        self.demand(
            back or possible // settings.node_unit * settings.node_unit > record.size,
            Invariant.UNDISTURBED,
            f"{change} ends {record}, which could not grow",
        )

    # -- promises: checked at the end -------------------------------------------------------------

    def _check_one_world(self) -> None:
        seen: dict[tuple[str, int], Formed] = {}
        last_epoch = 0
        for formed in self.formed:
            record = formed.record
            identity = (record.run, record.number)
            before = seen.get(identity)
            if before is not None:
                self.demand(
                    record.epoch_fixed == before.epoch and record.members == before.record.members,
                    Invariant.ONE_WORLD,
                    f"round {identity} was formed twice: {before} and {formed}",
                )
                continue
            self.demand(
                record.epoch_fixed is None,
                Invariant.ONE_WORLD,
                f"{identity} was put back, but never formed",
            )
            self.demand(
                formed.epoch > last_epoch
                or (self.wiped_s is not None and formed.at_s >= self.wiped_s),
                Invariant.EPOCH,
                f"the epoch of round {identity} is {formed.epoch}, not above {last_epoch}",
            )
            last_epoch = formed.epoch
            seen[identity] = formed

    def _check_worlds(self) -> None:
        by_epoch: dict[int, list[Round]] = {}
        for formed in self.formed:
            by_epoch.setdefault(formed.epoch, []).append(formed.record)
        last: dict[str, int] = {}
        for told in self.told:
            world, node_id = told.world, told.node_id
            records = [
                record
                for record in by_epoch.get(world.epoch, ())
                if record.slices == world.slices and record.members == self.members_of(world)
            ]
            if not records:
                self.demand(
                    False,
                    Invariant.AGREEMENT,
                    f"{node_id} was told {world}, which was never formed",
                )
                return
            record = records[0]
            self.demand(
                (world.round, world.size) == (record.number, record.size)
                and (world.master_address, world.master_port)
                == (record.master_address, record.master_port),
                Invariant.AGREEMENT,
                f"{node_id} was told {world}, but the record is {record}",
            )
            self.demand(
                0 <= world.rank < world.size and record.members[world.rank] == node_id,
                Invariant.RANKS,
                f"{node_id} was told rank {world.rank}, but the record is {record}",
            )
            self.demand(
                world.epoch > last.get(node_id, 0),
                Invariant.EPOCH,
                f"{node_id} was told an older round: {world}",
            )
            last[node_id] = world.epoch

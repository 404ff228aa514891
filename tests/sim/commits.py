"""Takes in what etcd committed, in order, and has each commit judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import (
    Compare,
    Event,
    EventKind,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
)
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Accusation, Change, Closure, Leader, Round
from rdzv_etcd.protocol.ranks import assemble
from rdzv_etcd.protocol.store import StoreKeys, number_of
from rdzv_etcd.settings import Settings
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Revoke
from tests.sim.counting import Counting
from tests.sim.invariants import Invariant, Verdicts
from tests.sim.promises import Promises
from tests.sim.state import Formed, State

_PARTS = {b"audit", b"barrier", b"ctl", b"nodes", b"ranks", b"store"}
"""What follows the root of a job in its keys' paths."""

COUNTER = "steps"
"""The store key that simulated agents count on."""

OPERATOR = "operator"
"""Who deletes keys and revokes leases by hand: no node, and allowed to."""

FOREIGN = "foreign"
"""Who writes what no node would: nobody counts on its values."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a snapshot of etcd holds of one job."""

    state: State
    totals: Mapping[bytes, int]


class Commits:
    """Everything etcd committed for one job."""

    def __init__(self, keys: JobKeys, state: State, verdicts: Verdicts, settings: Settings) -> None:
        self.formed: list[Formed] = []
        self.closures: list[Closure] = []
        self.changes: list[tuple[float, Change]] = []
        self.writers = {OPERATOR, FOREIGN}
        """Who may write under this job's keys."""
        self.below: set[bytes] = set()
        """The roots of other jobs, whose prefix is below this one's."""
        self.lost_s: float | None = None
        """When etcd lost data last."""
        self.unsure_s: float | None = None
        """When etcd last lost what tells of ends, be it only that."""
        self.forgot_s: float | None = None
        """Since when etcd may not know what epochs count from."""
        self._keys = keys
        self._state = state
        self._demand = verdicts.demand
        self._note = verdicts.note
        self._promises = Promises(keys, state, verdicts, settings)
        self._counters: dict[bytes, Counting] = {}
        self._slices: dict[bytes, dict[str, int]] = {}
        """Every slice that ever was; a key names one attempt to form one round."""

    def counter(self, world: Seat) -> Counting:
        """What was added up in the store of a round."""
        key = StoreKeys(self._keys.store(world.round, world.run)).value(COUNTER)
        return self._counters.setdefault(key, Counting(f"{COUNTER!r} of round {world.round}"))

    def check_stores(self) -> None:
        """Raise InvariantError if an add was lost or counted twice."""
        for counter in self._counters.values():
            counter.check()

    def observe(self, applied: Applied) -> None:
        """Take in one request that the server worked on; not what a test put there itself."""
        if not applied.source and not isinstance(applied.request, Revoke):
            self._take_overwritten(applied)
            return
        if self._removes_the_job(applied):
            self._state.removers.add(applied.source)
        for revision in applied.changes:
            for event in revision.events:
                if applied.source == FOREIGN:
                    self._take_foreign(event, applied.at_s)
                    continue
                try:
                    self._take(applied, event)
                except StateCorruptError as error:
                    self._demand(
                        False, Invariant.RANKS, f"{applied.source} wrote nonsense: {error}"
                    )
            self._state.note_health(applied.at_s)

    def _removes_the_job(self, applied: Applied) -> bool:
        """Whether it is the last one's transaction, which found nobody there; there need not be
        anything left that it deletes."""
        request, outcome = applied.request, applied.outcome
        if not isinstance(request, Txn) or not isinstance(outcome, TxnResult):
            return False
        nodes = self._keys.nodes
        nobody = Compare(nodes.start, Target.CREATE, Relation.EQUAL, 0, nodes.end)
        return outcome.succeeded and nobody in request.guards

    def _take_overwritten(self, applied: Applied) -> None:
        """A presence in whose place a test puts something without a lease is gone; so is a lead."""
        for revision in applied.changes:
            for event in revision.events:
                kv = event.kv
                if event.kind is EventKind.PUT and kv.key in self._keys.nodes and not kv.lease_id:
                    self._state.drop_node(self._keys.node_id(kv.key), applied.at_s)
                if kv.key == self._keys.leader:
                    self._state.leader = None

    def lose_all(self, at_s: float) -> None:
        """Etcd has lost its data."""
        self.lost_s = self.unsure_s = at_s
        self.forgot_s = self.forgot_s or at_s
        self._state.lose_all(at_s)
        for counter in self._counters.values():
            counter.end_life()

    def saved(self) -> Saved:
        """What a snapshot of etcd made now would hold of this job."""
        totals = {key: counter.total for key, counter in self._counters.items()}
        return Saved(self._state.saved(), totals)

    def go_back(self, saved: Saved, at_s: float) -> None:
        """Etcd went back to what it held when :meth:`saved` was called."""
        self.lost_s = self.unsure_s = at_s
        self.forgot_s = self.forgot_s or at_s
        self._state.go_back(saved.state, at_s)
        for key, counter in self._counters.items():
            counter.end_life(saved.totals.get(key, 0))
        self._note(at_s, "etcd went back to an older snapshot")

    def _accuses_leader(self, request: Txn) -> bool:
        """Whether it puts an accusation in the place of the presence of who leads."""
        leader = self._state.leader
        key = None if leader is None else self._keys.node(leader.node_id)
        puts = [op for op in request.success if isinstance(op, Put) and op.key == key]
        return any(
            isinstance(values.decode_place(op.key, leader.node_id, op.value), Accusation)
            for op in puts
            if leader is not None
        )

    def _take(self, applied: Applied, event: Event) -> None:
        keys, state, kv = self._keys, self._state, event.kv
        put = event.kind is EventKind.PUT
        if any(_is_under(root, kv.key) for root in self.below):
            return  # that job's own history has it
        if _is_under(keys.root, kv.key):
            self._demand(
                not applied.source or applied.source in self.writers,
                Invariant.OTHERS,
                f"{applied.source} wrote {kv.key!r}",
            )
        if not put and applied.source and applied.source != OPERATOR:
            self._promises.check_deleted(applied, kv.key, needed=self._is_needed(kv.key))
            accused = isinstance(applied.request, Txn) and self._accuses_leader(applied.request)
            if kv.key == keys.leader and not isinstance(applied.request, Revoke) and not accused:
                self._promises.check_leader(applied, "gave up the lead")
        if not put and applied.source == OPERATOR and self._tells_of_ends(applied, kv.key):
            self.unsure_s = applied.at_s  # perhaps nobody can know any more what has ended
        if not put and kv.key == keys.epoch:
            self.forgot_s = self.forgot_s or applied.at_s
        if kv.key in keys.stores:
            (state.store.add if put else state.store.discard)(kv.key)
        if kv.key == keys.round:
            if put:
                self._take_record(
                    applied, values.decode_round(kv.key, kv.value), event.kv.mod_revision
                )
            else:
                self._note(applied.at_s, "the round record is gone")
                state.round, state.round_revision = None, 0
        elif kv.key == keys.ended:
            state.ended_revision = kv.mod_revision if put else 0
        elif kv.key == keys.change:
            state.change = (
                self._take_change(applied, values.decode_change(kv.key, kv.value)) if put else None
            )
        elif kv.key == keys.leader:
            state.leader = (
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

    def _tells_of_ends(self, applied: Applied, key: bytes) -> bool:
        """Whether nobody may know what has ended when an operator has taken a key away. A marker
        that goes only with its lease is no loss: what tells of ends has a lease of its own."""
        is_marker = key == self._keys.round and not isinstance(applied.request, Revoke)
        return is_marker or key == self._keys.ended

    def _is_needed(self, key: bytes) -> bool:
        """Whether a round that was formed and not closed cannot do without a key."""
        record = self._state.round
        if record is None or record.closure is not None:
            return False
        slices, store = record.slices, self._keys.store(record.number, record.run)
        if key == StoreKeys(store).whole and self.lost_s is not None:
            return False  # whoever has written what etcd has lost since says so
        return (
            key == self._keys.round
            or key in store
            or (slices is not None and key in self._keys.edition(record.number, slices.edition))
        )

    def _take_presence(self, applied: Applied, event: Event) -> None:
        kv = event.kv
        node_id = self._keys.node_id(kv.key)
        if event.kind is EventKind.PUT:
            info = values.decode_place(kv.key, node_id, kv.value)
            if isinstance(info, Accusation):
                self._note(applied.at_s, f"{info.by} accuses {node_id}: {info.how}")
                self._state.drop_node(node_id, applied.at_s)
                return
            self._promises.check_evicted(info, self.lost_s)
            self._promises.check_session(node_id, kv.lease_id, self.lost_s)
            self._state.put_node(info, kv.mod_revision, applied.at_s)
        else:
            if not isinstance(applied.request, Revoke) and applied.source != OPERATOR:
                self._promises.check_presence_deleted(applied, node_id)
            self._state.drop_node(node_id, applied.at_s)

    def _take_foreign(self, event: Event, at_s: float) -> None:
        """A value that no node wrote takes the place of one that a node did, or of none."""
        key, state = event.kv.key, self._state
        if key in (self._keys.round, self._keys.ended):
            self.unsure_s = at_s  # perhaps nobody can know any more what has ended
        if key in self._keys.nodes:
            state.drop_node(self._keys.node_id(key), at_s)
        elif key == self._keys.round:
            self._note(at_s, "the round record is overwritten")
            state.round, state.round_revision = None, 0
        elif key == self._keys.leader:
            state.leader = None
        elif key == self._keys.change:
            state.change = None

    def _take_slice(self, applied: Applied, event: Event) -> None:
        key = event.kv.key
        if event.kind is not EventKind.PUT:
            self._state.slices.pop(key, None)
            return
        ranks = values.decode_slice(key, event.kv.value)
        before = self._slices.setdefault(key, ranks)
        self._demand(
            before == ranks,
            Invariant.ONE_WORLD,
            f"{applied.source} put {ranks} into {key!r}, which held {before}",
        )
        self._state.slices[key] = ranks

    def _whole(self, record: Round) -> Round:
        """The record with all its members named, wherever they are."""
        if record.slices is None or record.closure is not None:
            return record
        back = record.epoch_fixed is not None  # the slices are put back one by one, later
        there = self._slices if back else self._state.slices
        edition = self._keys.edition(record.number, record.slices.edition)
        members, complete = assemble(
            [ranks for key, ranks in there.items() if key in edition], record.slices.size
        )
        self._demand(complete, Invariant.RANKS, f"{record} was published without all its slices")
        return replace(record, members=members)

    def _take_leader(self, applied: Applied, leader: Leader) -> Leader:
        before = self._state.leader
        self._demand(
            before is None or before.node_id == leader.node_id,
            Invariant.LEADER,
            f"{applied.source} took the lead from {before}",
        )
        return leader

    def _take_change(self, applied: Applied, change: Change) -> Change:
        self.changes.append((applied.at_s, change))
        self._note(applied.at_s, f"{applied.source} published {change}")
        self._promises.check_leader(applied, f"published {change}")
        self._promises.check_need(applied, change)
        return change

    def _take_record(self, applied: Applied, record: Round, revision: int) -> None:
        state = self._state
        before = state.round
        record = self._whole(record)
        epoch = record.epoch(revision)
        if record.closure is not None:
            self.closures.append(record.closure)
            self._state.ended.setdefault(record.origin, applied.at_s)
            for node_id in before.members if before is not None else ():
                self._state.retired.setdefault(node_id, applied.at_s)
            self._note(applied.at_s, f"{applied.source} closed the job: {record.closure.reason}")
            self._demand(
                before is not None and before.closure is None and before.same_world(record),
                Invariant.SUCCESSION,
                f"{record} was closed, but etcd held {before}",
            )
        else:
            back = record.epoch_fixed is not None
            self._note(
                applied.at_s,
                f"{applied.source} {'put back' if back else 'formed'} round {record.number} of run "
                f"{record.run}: {', '.join(record.members)} (epoch {epoch})",
            )
            self._promises.check_size(record)
            self._promises.check_succession(applied, record)
            self._promises.check_not_ended(record, self.unsure_s, applied.at_s)
            if not back:
                self._promises.check_end_respected(record, self.unsure_s)
                self._promises.check_survivors(record, applied.at_s)
                self._promises.check_new_store(
                    record, self._keys.store(record.number, record.run).start
                )
                self._promises.check_leader(applied, f"formed {record}")
                self._promises.check_seats(record, applied.at_s)
                self._promises.check_epoch(record, epoch)
            self.formed.append(Formed(record, epoch, applied.at_s))
            for node_id in record.members:
                here = state.nodes.get(node_id)
                # Who had arrived for a later round stays outside one that is put back.
                if here is not None and not (back and here.info.arrived_for > record.number):
                    state.nodes[node_id] = replace(here, seated=True)
        state.round, state.round_revision = record, revision


def _is_under(root: bytes, key: bytes) -> bool:
    """Whether a key is one of the job with that root; a job may be called like a part of another,
    and be below it."""
    return key.startswith(root) and key[len(root) :].split(b"/")[0] in _PARTS

"""Promises about each commit: whether it may follow what etcd held. Judges; takes nothing in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from rdzv_etcd.names import is_unknown
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Change, NodeInfo, Round
from rdzv_etcd.settings import Settings
from rdzv_etcd.settings.options import AfterEnd
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.model import Revoke
from rdzv_etcd.world_change import LEASE_EXPIRED
from tests.sim import segments
from tests.sim.invariants import Invariant, Verdicts
from tests.sim.state import State

DECIDED_WITHIN_S = 120.0
"""A leader's view may be this old when its write arrives: it was paused, or the message was."""


class Promises:
    """Each check tells the verdicts what a commit broke; the state is that before it."""

    def __init__(self, keys: JobKeys, state: State, verdicts: Verdicts, settings: Settings) -> None:
        timing = settings.timing
        self._rejoin_timeout_s = timing.rejoin_timeout_s
        self._lease_ttl_s = timing.lease_ttl_s
        self._remembered_s = max(timing.closed_ttl_s, timing.ended_ttl_s)
        self._after_end = settings.after_end
        self._sessions: dict[tuple[str, float | None], list[int]] = {}
        """The leases on which each node's presence was put, in this order, since etcd lost data."""
        self._keys = keys
        self._state = state
        self._demand = verdicts.demand

    def check_leader(self, applied: Applied, what: str) -> None:
        leader = self._state.leader
        self._demand(
            leader is not None and leader.node_id == applied.source,
            Invariant.LEADER,
            f"{applied.source} {what}, but the leader is {leader}",
        )

    def check_size(self, record: Round) -> None:
        settings = record.settings
        self._demand(
            len(set(record.members)) == record.size, Invariant.RANKS, f"double member in {record}"
        )
        self._demand(
            settings.min_nodes <= record.size <= settings.max_nodes
            and record.size % settings.node_unit == 0,
            Invariant.SIZE,
            f"round {record.number} has {record.size} members, allowed: {settings}",
        )

    def check_succession(self, applied: Applied, record: Round) -> None:
        before = self._state.round
        if before is not None and record == replace(before, epoch_fixed=self._state.epoch):
            self.check_leader(applied, f"asked for the slices of {record}")
            self._demand(record.slices is not None, Invariant.SUCCESSION, f"{record} is small")
            return
        if record.epoch_fixed is not None:  # put back, perhaps for one that etcd had gone back to
            follows = before is None or self._state.epoch < record.epoch_fixed
        elif before is None:
            follows = record.number == 1
        else:
            is_new = record.origin != before.origin
            follows = record.number == before.number + 1 and is_new == (before.closure is not None)
        self._demand(follows, Invariant.SUCCESSION, f"{record} does not follow {before}")

    def check_epoch(self, record: Round, epoch: int) -> None:
        """Above that of every round its members were in, even if etcd's revisions begin again.

        A presence that came back with a snapshot says what its node knew when it was put. That the
        node itself is told of no older round is checked at the end.
        """
        for node_id in record.members:
            highest = self._state.told_according_to_etcd(node_id)
            self._demand(
                highest < epoch,
                Invariant.EPOCH,
                f"round {record.number} has epoch {epoch}, but {node_id} was in one of {highest}",
            )

    def check_seats(self, record: Round, at_s: float) -> None:
        """Members are there for this round, and nobody who is stands outside free seats.

        A leader may know of an arrival, or of a departure, that etcd has forgotten; both hold all
        the same. A presence that came back ends within a TTL, unless its node lives.
        """
        nodes, settings, forgotten = self._state.nodes, record.settings, self._state.forgotten
        busy = [
            node_id
            for node_id in record.members
            if node_id in nodes
            and self._state.works_on(node_id)
            and not (node_id in forgotten and forgotten[node_id].arrived_for == record.number)
        ]
        self._demand(not busy, Invariant.SEATS, f"{busy} had not arrived for {record}")
        first = record.members[0]
        said = [nodes[first].info] if first in nodes else []
        said += [forgotten[first]] if first in forgotten else []
        listens = [(info.address, info.port) for info in said]
        self._demand(
            not listens or (record.master_address, record.master_port) in listens,
            Invariant.SEATS,
            f"rank 0 does not listen where {record} says: {said}",
        )
        outside = [
            node_id
            for node_id in nodes
            if node_id not in record.members
            and self._state.waits(node_id)
            and nodes[node_id].info.settings == settings
            and not self._has_just_returned(node_id, at_s)
        ]
        seated, waiting = self._domains(record.members), self._domains(outside)
        self._demand(
            not segments.has_room(seated, waiting, settings, self._whole(record)),
            Invariant.SEATS,
            f"{outside} had arrived, and {record} had free seats",
        )
        if settings.has_segments:
            if self._state.round is None:  # and with it how many nodes each domain had
                self._state.whole.pop(record.origin, None)
            self._check_segments(record, waiting)
            self._check_in_place(record, outside)

    def _check_segments(self, record: Round, waiting: Counter[str | None]) -> None:
        """``waiting``: the domains of those that are there, but not in the world."""
        seated, whole = self._domains(record.members), self._whole(record)
        broken = segments.broken(record, self._state.domain, waiting, whole)
        self._demand(
            not broken,
            Invariant.SEGMENTS,
            f"{broken} are no whole segments: {record}, {dict(whole)}, waiting: {dict(waiting)}",
        )
        self._state.whole[record.origin] = whole | seated

    def _check_in_place(self, record: Round, outside: Collection[str]) -> None:
        """A loss of data may leave no one who knows the ranks, or give rank 0 to somebody who
        knows a later world."""
        state, before = self._state, self._state.round
        if before is None or before.origin != record.origin:
            fresh = not any(state.highest.get(node_id) for node_id in record.members)
            self._demand(
                not fresh or segments.in_order(record, state.domain),
                Invariant.IN_PLACE,
                f"the domains of {record} are not in order",
            )
            return
        if before.epoch_fixed is not None or before.heirs or record.heirs:
            return
        keyed = any(
            state.nodes[name].info.rank_key for name in record.members if name in state.nodes
        )
        moved = segments.moved(before, record, state.domain, outside, keyed=keyed)
        self._demand(
            not moved,
            Invariant.IN_PLACE,
            f"{moved} have not kept their places: {before} was followed by {record}",
        )

    def _domains(self, nodes: Iterable[str]) -> Counter[str | None]:
        return Counter(self._state.domain.get(node_id) for node_id in nodes)

    def _whole(self, record: Round) -> Counter[str | None]:
        """How many nodes of each domain have to be there; a record that was put back may know of
        more than etcd does since it went back."""
        known, before = self._state.whole.get(record.origin, Counter()), self._state.round
        if before is None or before.epoch_fixed is None or before.origin != record.origin:
            return known
        return known | Counter[str | None](before.domains)

    def _has_just_returned(self, node_id: str, at_s: float) -> bool:
        """Whether its presence, which had gone, is there again since etcd went back just now."""
        returned_s = self._state.nodes[node_id].returned_s
        return returned_s is not None and at_s < returned_s + self._lease_ttl_s

    def check_session(self, node_id: str, lease_id: int, lost_s: float | None) -> None:
        """What a node said on a session does not come back once it has said more on a later one."""
        sessions = self._sessions.setdefault((node_id, lost_s), [])
        self._demand(
            lease_id not in sessions[:-1],
            Invariant.KEPT,
            f"what {node_id} said on an earlier session, {lease_id:x}, took the place of the later",
        )
        if lease_id not in sessions:
            sessions.append(lease_id)

    def check_presence_deleted(self, applied: Applied, node_id: str) -> None:
        """A node's presence is its own; others may put an accusation there, and take that back."""
        self._demand(
            applied.source == node_id or node_id not in self._state.nodes,
            Invariant.KEPT,
            f"{applied.source} deleted the presence of {node_id}",
        )

    def check_evicted(self, info: NodeInfo, lost_s: float | None) -> None:
        """Once a member was declared lost, no presence of it comes back into that round.

        Unless its node was never told of the round, and etcd has lost data (at ``lost_s``): then a
        record that was put back may have the very revision of the one that it arrived behind. It
        hears of the round and of its end at once.
        """
        record, change = self._state.round, self._state.change
        if record is not None and lost_s is not None:
            epoch = record.epoch(self._state.round_revision)
            if self._state.highest.get(info.node_id, 0) < epoch:
                return
        self._demand(
            record is None
            or record.closure is not None
            or change is None
            or not change.concerns(record)
            or not change.may_name(info.node_id)
            or info.leaving is not None
            or info.arrived_for > record.number,
            Invariant.EVICTED,
            f"{info.node_id} came back into round {info.arrived_for} after {change}",
        )

    def check_need(self, applied: Applied, change: Change) -> None:
        """A change names the round there is, and has a reason that others can see."""
        record = self._state.round
        if record is None or not change.concerns(record):
            self._demand(False, Invariant.SUCCESSION, f"{change} was published, but not {record}")
            return
        at_s = applied.at_s
        for name, how in change.lost.items():
            node_id = record.members[int(name.partition("~")[2])] if is_unknown(name) else name
            here = self._state.nodes.get(node_id)
            self._demand(
                here is None
                or here.info.leaving is not None
                or node_id == applied.source  # it leaves
                # It had asked again: the world that it was named in, perhaps without having heard
                # of it, is no more. Its slice of the names is what was lost.
                or (is_unknown(name) and not self._state.works_on(node_id))
                or (
                    (how != LEASE_EXPIRED or is_unknown(name))
                    and at_s - self._state.came[node_id] < DECIDED_WITHIN_S
                ),
                Invariant.UNDISTURBED,
                f"{node_id} was declared lost, but was there since {self._state.came.get(node_id)}",
            )
            self._check_grace(applied, node_id, how)
        if change.lost:
            return
        recently = [
            info for info, until_s in self._state.went.values() if at_s - until_s < DECIDED_WITHIN_S
        ]
        nodes = self._state.nodes
        present = [nodes[node_id].info for node_id in nodes if not self._state.works_on(node_id)]
        seen = [*recently, *present]
        back = any(
            (info.arrived_for > record.number and info.node_id in record.members)
            or info.epoch_trained > self._state.epoch  # etcd went back, and this node has not
            for info in seen
        )
        new = {info.node_id for info in seen} - set(record.members)
        seated, perhaps = self._domains(record.members), self._domains(new)
        possible = segments.largest(seated, record.settings, self._whole(record), perhaps)
        self._demand(
            back or possible > record.size,
            Invariant.UNDISTURBED,
            f"{change} ends {record}, which could not grow",
        )

    def _check_grace(self, applied: Applied, node_id: str, how: str) -> None:
        """A leader whose machine was suspended leaves the others a lease to come back in: theirs
        may have been, too."""
        since_s, woke_s = self._state.woke.get(applied.source, (0.0, 0.0))
        leader = self._state.nodes.get(applied.source)
        ttl_s = 0 if leader is None else leader.info.lease_ttl_s or self._lease_ttl_s
        went = self._state.went.items()
        gone_s = [until_s for (name, _), (_, until_s) in went if name == node_id]
        self._demand(
            how != LEASE_EXPIRED
            or leader is None
            or woke_s - since_s <= ttl_s / 2
            or applied.at_s >= woke_s + ttl_s
            or any(until_s < since_s for until_s in gone_s),
            Invariant.UNDISTURBED,
            f"{node_id} was declared lost by {applied.source}, which was suspended from {since_s} "
            f"to {woke_s}",
        )

    def check_survivors(self, record: Round, at_s: float) -> None:
        """Rank 0 is an heir's, else a survivor's, if there is one. Without any of them none is
        there who could be, or they were waited for long enough and are named heirs of the round.

        If etcd went back, who survived what it holds now has perhaps missed rounds since: rank 0
        is then somebody's who was told of the latest one. An heir that was told of one is no more.
        A presence that came back with the snapshot tells only what was so when it was put.
        """
        state, before = self._state, self._state.round
        if before is None or before.closure is not None:
            return
        claim = self._claim(before, {name: state.highest.get(name, 0) for name in record.members})
        known = self._claim(
            before, {name: state.told_according_to_etcd(name) for name in record.members}
        )
        keyed = any(
            node_id in self._state.nodes and self._state.nodes[node_id].info.rank_key is not None
            for node_id in record.members
        )
        self._demand(
            not claim or not known or keyed or record.members[0] in claim | known,
            Invariant.SURVIVORS,
            f"rank 0 of {record} is new, though {sorted(claim)} are not",
        )
        expected = [
            node_id
            for node_id in before.members
            if node_id in self._state.nodes
            and _comes_back(self._state.nodes[node_id].info)
            # back, but with too few others of its domain
            and not (record.settings.has_segments and self._state.waits(node_id))
        ]
        opened_s = self._state.opened_s
        waited = opened_s is not None and at_s - opened_s >= self._rejoin_timeout_s
        # Heirs of an earlier round come before those who began again without them.
        older = bool(record.heirs) and set(record.heirs) <= set(before.heirs)
        named = older or set(expected) <= set(record.heirs)
        self._demand(
            bool(claim) or not expected or (waited and named),
            Invariant.SURVIVORS,
            f"nobody in {record} was in {before}, but {expected} are alive",
        )

    def _claim(self, before: Round, told: Mapping[str, int]) -> set[str]:
        """Whose rank 0 is. ``told``: the highest epoch that each member was told of."""
        survivors = set(before.members) & set(told)
        later = {node_id for node_id in told if told[node_id] > self._state.epoch}
        latest = {node_id for node_id in later if told[node_id] == max(told.values())}
        trained = {node_id for node_id in survivors if told[node_id] == self._state.epoch}
        if survivors and not trained:  # they were named in it, but somebody else has come further
            trained = survivors | {name for name in told if told[name] == max(told.values())}
        return (set(before.heirs) & set(told)) - later or latest or trained

    def check_end_respected(self, record: Round, unsure_s: float | None) -> None:
        """As long as the marker of an end stands, who was started after it begins no new run,
        unless the job's settings say so (or etcd may not hold what it held: from ``unsure_s``)."""
        before = self._state.round
        self._demand(
            self._after_end is AfterEnd.NEW_RUN
            or before is None
            or before.closure is None
            or unsure_s is not None,
            Invariant.ENDED,
            f"{record} begins a new run after {before}, with after_end={self._after_end}",
        )

    def check_not_ended(self, record: Round, unsure_s: float | None, at_s: float) -> None:
        """A run that was closed has no more rounds, and who was in it is in no other run, as long
        as that is to be remembered.

        Unless etcd has lost since what tells of ends (at ``unsure_s``, if ever), with its data, or
        because its lease was revoked: then nobody might know.
        """

        def is_known(ended_s: float | None) -> bool:
            return (
                ended_s is not None
                and at_s < ended_s + self._remembered_s
                and (unsure_s is None or unsure_s < ended_s)
            )

        ended_s = self._state.ended.get(record.origin)
        self._demand(
            not is_known(ended_s),
            Invariant.ENDED,
            f"{record} is of a run that was closed at {ended_s}",
        )
        old = [name for name in record.members if is_known(self._state.retired.get(name))]
        self._demand(
            not old, Invariant.ENDED, f"{old} in {record} were in a run that had been closed"
        )

    def check_new_store(self, record: Round, start: bytes) -> None:
        """Of a round that was just formed."""
        found = sorted(key for key in self._state.store if key.startswith(start))
        self._demand(not found, Invariant.NEW_STORE, f"the store of {record} begins with {found}")

    def check_deleted(self, applied: Applied, key: bytes, *, needed: bool) -> None:
        """Keys of a living round go only with their lease, by an operator, or with everything; the
        marker of a closed job with its lease.

        The last one out deletes everything, and then revokes the job lease. What somebody has put
        back between the two, it puts back again.
        """
        record, removers = self._state.round, self._state.removers
        self._demand(
            record is None or record.closure is None or key != self._keys.round,
            Invariant.KEPT,
            f"{applied.source} deleted the marker: {record}",
        )
        self._demand(
            not needed
            or not self._state.nodes
            or (isinstance(applied.request, Revoke) and applied.source in removers),
            Invariant.KEPT,
            f"{applied.source} deleted {key!r}, but {sorted(self._state.nodes)} are there",
        )


def _comes_back(info: NodeInfo) -> bool:
    return info.leaving is None and not info.finished

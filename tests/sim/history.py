"""What happened in a simulation, and whether it may happen.

Knows what nodes were told and did, and, by :mod:`tests.sim.commits`, what etcd committed, in order;
knows nothing of how either came about. Each check is a promise of :mod:`tests.sim.invariants`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Change, Closure, Control, Round
from rdzv_etcd.settings import Settings
from rdzv_etcd.testing.simloop import WALL_EPOCH_S
from tests.sim.commits import COUNTER, Commits, Saved
from tests.sim.invariants import Invariant, InvariantError, Verdicts
from tests.sim.state import Formed, State

__all__ = ["COUNTER", "Formed", "History", "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """A round as one node was told."""

    node_id: str
    world: Seat
    at_s: float


class AtBarrier:
    """The members of a world at one turn of a barrier."""

    def __init__(self, members: frozenset[str]) -> None:
        self._members = members
        self._here: set[str] = set()
        self._reached: set[str] = set()
        self.are_all_here = False
        """Whether all are there at this moment, or have been at one since which none gave up: then
        it may be passed."""
        self.is_passed = False

    @property
    def missing(self) -> frozenset[str]:
        return self._members - self._here

    def reach(self, node_id: str) -> None:
        self._here.add(node_id)
        self._reached.add(node_id)
        self.are_all_here = not self.missing

    def give_up(self, node_id: str) -> None:
        self._here.discard(node_id)
        self.are_all_here = False

    def may_be_forgotten(self) -> None:
        """If all were there, a member may know that, although etcd does not any more."""
        self.is_passed |= self.are_all_here

    def may_all_be_back(self) -> None:
        """A restored etcd may hold what was taken back since, until its node has looked."""
        self.may_be_forgotten()
        self._here |= self._reached
        self.are_all_here = not self.missing


class History(Verdicts):
    """Everything one job went through; :meth:`check` raises InvariantError."""

    def __init__(self, keys: JobKeys, settings: Settings) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.clocks_are_wrong = False
        self.interrupts = False
        """Whether workers meet in calls that are interrupted, and a leave is, too."""
        self.is_healed = False
        """Whether nothing new happens to the job."""
        self.clocks_s: set[float] = set()
        """How far the nodes' clocks are ahead of the simulation's."""
        self._state = State()
        self._commits = Commits(keys, self._state, self, settings)
        self._barriers: dict[tuple[int, str], AtBarrier] = {}
        self._given: dict[tuple[int, int], dict[str, set[bytes]]] = {}
        self._taken: dict[tuple[int, int], list[bytes]] = {}
        """What was given in each world's exchanges, and what was told of it."""
        self.observe = self._commits.observe
        self.counter = self._commits.counter
        self.saved = self._commits.saved
        self.lose_all = self._commits.lose_all
        self.writers = self._commits.writers
        self.below = self._commits.below
        self.note_jump = self._state.note_jump
        self.note_woke = self._state.note_woke

    @property
    def formed(self) -> list[Formed]:
        return self._commits.formed

    @property
    def closures(self) -> list[Closure]:
        return self._commits.closures

    @property
    def changes(self) -> list[tuple[float, Change]]:
        return self._commits.changes

    def whole(self) -> Mapping[str | None, int]:
        """How many nodes each domain needs before it is in a world again, by the record."""
        record = self._state.round
        return {} if record is None or record.closure is not None else dict(record.domains.items())

    def healthy_s(self) -> float | None:
        """Since when etcd has held a round that nobody called over, if it does."""
        return self._state.healthy_s

    def check(self) -> None:
        """Raise InvariantError with the log if any promise was broken."""
        if not self.broken:
            self._check_one_world()
            self._check_worlds()
            try:
                self._commits.check_stores()
            except InvariantError as error:
                self.broken.append(error)
        self.stop_if_broken()

    # -- what nodes were told and did ------------------------------------------------------------

    def tell(self, node_id: str, world: Seat, at_s: float, listens: tuple[str, int]) -> None:
        """``listens``: the socket that the node has for this world, should it be rank 0."""
        self.demand(
            world.rank != 0 or (world.master_address, world.master_port) == listens,
            Invariant.SEATS,
            f"{node_id} is rank 0 of {world}, but listens at {listens}",
        )
        self.told.append(Told(node_id, world, at_s))
        highest = self._state.highest
        highest[node_id] = max(world.epoch, highest.get(node_id, 0))
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
            # an older record is a view that lags behind what this node was told, or etcd went back
            over |= not seen.holds(record) and not seen.is_behind(record)
            over |= change is not None and change.concerns(record)
        self.demand(
            not over,
            Invariant.STALE,
            f"{node_id} works on round {record.number} of {record.run}, but knows {seen}",
        )

    def reach_barrier(self, world: Seat, name: str, node_id: str) -> None:
        members = frozenset(self.members_of(world))
        self._barriers.setdefault((world.epoch, name), AtBarrier(members)).reach(node_id)

    def give_up_barrier(self, world: Seat, name: str, node_id: str) -> None:
        """A node's call has ended, and etcd has heard that it is not there any more."""
        self._barriers[world.epoch, name].give_up(node_id)

    def go_back(self, saved: Saved, at_s: float) -> None:
        """Etcd went back to what it held when :meth:`saved` was called."""
        self._commits.go_back(saved, at_s)
        for barrier in self._barriers.values():
            barrier.may_all_be_back()

    def lose(self) -> None:
        """Etcd loses what the members of the world gave."""
        for barrier in self._barriers.values():
            barrier.may_be_forgotten()

    def members_of(self, world: Seat) -> tuple[str, ...]:
        """Who is in that world, wherever they are named."""
        for formed in self.formed:
            if world.slices is not None and formed.record.slices == world.slices:
                return formed.record.members
        return world.members

    def pass_barrier(self, world: Seat, name: str, node_id: str) -> None:
        barrier = self._barriers[world.epoch, name]
        self.demand(
            barrier.are_all_here or barrier.is_passed,
            Invariant.BARRIER,
            f"{node_id} passed {name} of round {world.round} without {sorted(barrier.missing)}",
        )
        barrier.is_passed = True

    def give(self, world: Seat, turn: int, node_id: str, data: bytes) -> None:
        """A node calls for an exchange, perhaps again."""
        self._given.setdefault((world.epoch, turn), {}).setdefault(node_id, set()).add(data)

    def take(self, world: Seat, turn: int, node_id: str, taken: list[bytes]) -> None:
        """It is told what all gave."""
        given, members = self._given[world.epoch, turn], self.members_of(world)
        self.demand(
            taken == self._taken.setdefault((world.epoch, turn), taken)
            and len(taken) == len(members)
            and all(data in given.get(who, ()) for who, data in zip(members, taken, strict=False)),
            Invariant.IN_STEP,
            f"{node_id} was told {taken} in exchange {turn} of round {world.round}: {given}",
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
                formed.epoch > last_epoch or self._may_not_know(formed, last_epoch),
                Invariant.EPOCH,
                f"the epoch of round {identity} is {formed.epoch}, not above {last_epoch}",
            )
            last_epoch = formed.epoch
            seen[identity] = formed

    def _may_not_know(self, formed: Formed, last_epoch: int) -> bool:
        """Whether etcd had lost data, and there was somebody who went on from an earlier round:
        then it may be that only others know of the latest one. (That for each node epochs grow all
        the same is another promise; and where all are new they do, as far as their clocks agree:
        theirs is not less than the time by their clocks, nor is the latest one much more than that
        by other nodes' clocks.)"""
        forgot_s = self._commits.forgot_s
        lost = forgot_s is not None and formed.at_s >= forgot_s
        trained = {told.node_id for told in self.told if told.at_s < formed.at_s}
        apart_us = 1e6 * (max(self.clocks_s, default=0.0) - min(self.clocks_s, default=0.0))
        by_clocks = formed.epoch >= 1e6 * WALL_EPOCH_S
        return lost and (
            self.clocks_are_wrong
            or not trained.isdisjoint(formed.record.members)
            or (by_clocks and last_epoch - formed.epoch < apart_us)
        )

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

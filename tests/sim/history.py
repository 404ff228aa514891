"""What happened in a simulation, and whether it may happen.

Knows the round records as etcd saw them committed and the worlds as the nodes were told; knows
nothing of how either came about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv_etcd.core.model import Closure, Round
from rdzv_etcd.etcd.api import EventKind
from rdzv_etcd.group.standing import World
from rdzv_etcd.schema import values
from rdzv_etcd.schema.keys import JobKeys
from rdzv_etcd.testing import Applied
from rdzv_etcd.testing.requests import Revoke


class InvariantError(AssertionError):
    """The protocol broke a promise."""


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


@dataclass(slots=True)
class History:
    """Everything one job formed; :meth:`check` raises InvariantError."""

    keys: JobKeys
    formed: list[Formed] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    closures: list[Closure] = field(default_factory=list)
    changes: list[tuple[float, object]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    wiped_s: float | None = None
    """When etcd first lost its data. Nodes that come afterwards, or were cut off, cannot know what
    was before, so epochs are compared per node only."""

    def observe(self, applied: Applied) -> None:
        """Take in one request that the server worked on; not what a test put there itself."""
        if not applied.source and not isinstance(applied.request, Revoke):
            return
        for revision in applied.changes:
            for event in revision.events:
                if event.kind is not EventKind.PUT:
                    if event.kv.key == self.keys.round:
                        self.note(applied.at_s, "the round record is gone")
                elif event.kv.key == self.keys.round:
                    self._take_record(
                        applied,
                        values.decode_round(event.kv.key, event.kv.value),
                        event.kv.mod_revision,
                    )
                elif event.kv.key == self.keys.change:
                    change = values.decode_change(event.kv.key, event.kv.value)
                    self.changes.append((applied.at_s, change))
                    self.note(applied.at_s, f"{applied.source} published {change}")

    def tell(self, node_id: str, world: World, at_s: float) -> None:
        """Take in what a node's join returned."""
        self.told.append(Told(node_id, world, at_s))
        self.note(at_s, f"{node_id} is rank {world.rank} of round {world.round}")

    def note(self, at_s: float, text: str) -> None:
        self.log.append(f"{at_s:9.3f} {text}")

    def _take_record(self, applied: Applied, record: Round, revision: int) -> None:
        if record.closure is not None:
            self.closures.append(record.closure)
            self.note(applied.at_s, f"{applied.source} closed the job: {record.closure.reason}")
            return
        self.formed.append(Formed(record, record.epoch(revision), applied.at_s))
        verb = "formed" if record.epoch_fixed is None else "put back"
        self.note(
            applied.at_s,
            f"{applied.source} {verb} round {record.number} of run {record.run}: "
            f"{', '.join(record.members)} (epoch {record.epoch(revision)})",
        )

    # -- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError with the log if any promise was broken."""
        self._check_records()
        self._check_worlds()

    def _check_records(self) -> None:
        seen: dict[tuple[str, int], Formed] = {}
        last_epoch = 0
        for formed in self.formed:
            record = formed.record
            identity = (record.run, record.number)
            settings = record.settings
            self._demand(len(set(record.members)) == record.size, f"double member in {record}")
            self._demand(
                settings.min_nodes <= record.size <= settings.max_nodes
                and record.size % settings.node_unit == 0,
                f"round {record.number} has {record.size} members, allowed: {settings}",
            )
            before = seen.get(identity)
            if before is not None:
                self._demand(
                    record.epoch_fixed == before.epoch and record.members == before.record.members,
                    f"round {identity} was formed twice: {before} and {formed}",
                )
                continue
            self._demand(record.epoch_fixed is None, f"{identity} was put back, but never formed")
            self._demand(
                formed.epoch > last_epoch
                or (self.wiped_s is not None and formed.at_s >= self.wiped_s),
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
            records = [r for r in by_epoch.get(world.epoch, ()) if r.members == world.members]
            if not records:
                raise self._broken(f"{node_id} was told {world}, which was never formed")
            record = records[0]
            self._demand(
                (world.round, world.members, world.size)
                == (record.number, record.members, record.size)
                and (world.master_address, world.master_port)
                == (record.master_address, record.master_port)
                and 0 <= world.rank < world.size
                and record.members[world.rank] == node_id,
                f"{node_id} was told {world}, but the record is {record}",
            )
            self._demand(
                world.epoch > last.get(node_id, 0), f"{node_id} was told an older round: {world}"
            )
            last[node_id] = world.epoch

    def _demand(self, holds: bool, problem: str) -> None:
        if not holds:
            raise self._broken(problem)

    def _broken(self, problem: str) -> InvariantError:
        return InvariantError(problem + "\n" + "\n".join(self.log))

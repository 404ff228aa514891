"""What may never happen, one name per promise; ``docs/reliability.md`` gives the reason for each.

Knows nothing of how a violation is found: see :mod:`tests.sim.history` and
:mod:`tests.sim.promises` (safety, from what nodes were told and etcd has committed),
:mod:`tests.sim.counting` (adds) and :mod:`tests.sim.waits` (what has to come true once everything
is healed).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Invariant(Enum):
    """The value is the heading in the docs."""

    ONE_WORLD = "one world per round"
    AGREEMENT = "members agree"
    RANKS = "ranks are 0 to n-1"
    SIZE = "sizes that were asked for"
    EPOCH = "epochs only grow"
    SUCCESSION = "a round follows the one it replaces"
    LEADER = "only the leader decides"
    SEATS = "seats for nodes that are there"
    SEGMENTS = "segments are whole"
    IN_PLACE = "the others keep their ranks"
    EVICTED = "lost is lost"
    STALE = "no node acts on a round that it knows to be over"
    UNDISTURBED = "no restart without need"
    SURVIVORS = "survivors come first"
    UNAWAITED = "no node waits for a member that has finished"
    ENDED = "what has ended stays ended"
    NEW_STORE = "a round's store begins empty"
    KEPT = "no node deletes what a living round needs"
    OTHERS = "no node touches another job's keys"
    ASKED = "a request to leave stands"
    HEARS = "a node that hears nothing finds out"
    TASKS = "no background task dies unseen"
    COUNTED_ONCE = "every add counts once"
    BARRIER = "a barrier holds until all are there"
    IN_STEP = "members stay in step"
    CONVERGENCE = "a node that keeps trying gets a seat, waits for one, or learns why not"
    CALM = "then nothing moves"
    NOTHING_LEFT = "nothing is left behind"


class InvariantError(AssertionError):
    """The protocol broke a promise; the message tells which, how, and what had happened."""

    def __init__(self, invariant: Invariant, problem: str) -> None:
        super().__init__(f"{invariant.value}: {problem}")
        self.invariant = invariant


@dataclass
class Verdicts:
    """The log of one job, and the promises that were broken in it."""

    log: list[str] = field(default_factory=list)
    broken: list[InvariantError] = field(default_factory=list)

    def note(self, at_s: float, text: str) -> None:
        self.log.append(f"{at_s:9.3f}  {text}")

    def stop_if_broken(self) -> None:
        """Raise InvariantError with the log if a promise is known to be broken."""
        if self.broken:
            first = self.broken[0]
            raise InvariantError(first.invariant, "\n".join([str(first), *self.log]))

    def demand(self, holds: bool, invariant: Invariant, problem: str) -> None:
        """Remember a broken promise; the first one is raised later."""
        if not holds:
            self.broken.append(InvariantError(invariant, problem))
            self.log.append(f"           BROKEN  {invariant.value}: {problem}")

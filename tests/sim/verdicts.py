"""The log of one job, and the promises that were broken in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.sim.invariants import Invariant, InvariantError


@dataclass(slots=True)
class Verdicts:
    """Knows no promise; those who judge tell it."""

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

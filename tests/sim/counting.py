"""Whether a store's counters count: every add once, by what etcd committed and callers were told.

Knows the puts on one counter key; knows nothing of how the store makes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.sim.invariants import Invariant, InvariantError


@dataclass(frozen=True, slots=True)
class Counted:
    """One put on a counter, as etcd committed it."""

    life: int
    """Which life of the key: a deletion, or a loss of data, begins another."""
    who: str
    amount: int
    total: int


@dataclass(slots=True)
class Counting:
    """All adds to one counter. Amounts must be above zero, so that no total comes twice."""

    name: str
    life: int = 0
    total: int = 0
    counted: list[Counted] = field(default_factory=list)
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    told: list[tuple[str, int, int]] = field(default_factory=list)
    """Who was told which total after adding how much."""
    forgotten: int = 0
    """What the total was when etcd forgot it. Nobody may count on from nothing then."""
    again: list[Counted] = field(default_factory=list)
    """What was added all the same."""

    def ask(self, who: str, amount: int) -> None:
        self.asked[who, amount] += 1

    def tell(self, who: str, amount: int, total: int) -> None:
        self.told.append((who, amount, total))

    def commit(self, who: str, total: int) -> None:
        self.counted.append(Counted(self.life, who, total - self.total, total))
        self.total = total
        if self.forgotten:
            self.again.append(self.counted[-1])

    def end_life(self, total: int | None = None) -> None:
        """The key is gone, or, with ``total``, holds what it held earlier (perhaps nothing)."""
        self.life += 1
        self.forgotten = (self.forgotten or self.total) if total is None else 0
        self.total = total or 0

    def check(self) -> None:
        """Raise InvariantError if an add was lost, counted twice, or told a total that is not its.

        An add whose caller was told of an error, or never heard, counts once or not at all. An add
        that was under way when etcd lost its data may count once in either life of the key.
        """
        if self.again:
            self._broken(f"the total of {self.forgotten} was forgotten: {self.again[0]}")
        per_life = Counter((one.life, one.who, one.amount) for one in self.counted)
        for (_, who, amount), times in per_life.items():
            if times > self.asked[who, amount]:
                self._broken(f"{who} added {amount} {self.asked[who, amount]} times, not {times}")
        available = Counter((one.who, one.amount, one.total) for one in self.counted)
        for told in self.told:
            available[told] -= 1
            if available[told] < 0:
                self._broken("{} was told that adding {} made {}, which it did not".format(*told))

    def _broken(self, problem: str) -> None:
        lines = [f"  {one}" for one in self.counted]
        raise InvariantError(
            Invariant.COUNTED_ONCE, "\n".join([f"{self.name}: {problem}; committed:", *lines])
        )

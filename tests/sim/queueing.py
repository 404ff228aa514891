"""Whether a store's queue hands out what was put into it: every item once, and none is lost, by
what etcd committed and callers were told.

Knows the items of one queue; knows nothing of how the store takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from rdzv_etcd.schema.keys import KeyRange
from tests.sim.invariants import Invariant, InvariantError


@dataclass(slots=True)
class Queueing:
    """One queue. No item is put twice."""

    name: str
    keys: KeyRange
    asked: set[bytes] = field(default_factory=set)
    """What somebody wanted to put."""
    acknowledged: set[bytes] = field(default_factory=set)
    """What somebody was told is there."""
    there: dict[bytes, bytes] = field(default_factory=dict)
    """The items in etcd, by their keys."""
    told: Counter[bytes] = field(default_factory=Counter)
    """How often each was handed out."""
    taken_by: dict[bytes, str] = field(default_factory=dict)
    """Who deleted an item last."""
    popping: Counter[str] = field(default_factory=Counter)
    """How many calls each has under way."""
    forgot: bool = False
    """Whether etcd has lost data, with which items come and go."""
    removed: bool = False
    """Whether somebody who saw nobody there removed the job, and with it what tells a late copy of
    a put from the first."""

    # -- what callers did ---------------------------------------------------------------------

    def ask(self, item: bytes) -> None:
        self.asked.add(item)

    def acknowledge(self, item: bytes) -> None:
        self.acknowledged.add(item)

    def begin(self, who: str) -> None:
        self.popping[who] += 1

    def end(self, who: str, item: bytes | None) -> None:
        """A call has ended, with an item or without."""
        self.popping[who] -= 1
        if item is not None:
            self.told[item] += 1

    # -- what etcd committed -----------------------------------------------------------------------

    def put(self, key: bytes, item: bytes) -> None:
        self.there[key] = item
        if self.removed:  # there are members all the same: they were cut off, and put it back
            self.forget()

    def take(self, who: str, key: bytes) -> None:
        """``who`` asked for just this key to be deleted."""
        item = self.there.pop(key, None)
        if item is not None:
            self.taken_by[item] = who

    def forget(self) -> None:
        self.forgot = True

    def remove(self) -> None:
        self.removed = True

    # -- what must be so ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError if something was handed out twice, or was never put."""
        for item, times in self.told.items():
            if item not in self.asked:
                self._broken(f"{item!r} was handed out, which nobody has put")
            if times > 1 and not self.forgot:
                self._broken(f"{item!r} was handed out {times} times")

    def check_nothing_lost(self, alive: Collection[str]) -> None:
        """Raise InvariantError if an item is neither there nor handed out, and nobody died with it.

        To be called while the round lasts, and when calls that ended have had time to put back what
        they had taken.
        """
        if self.forgot:
            return
        kept = set(self.there.values()) | set(self.told)
        for item in self.acknowledged - kept:
            who = self.taken_by.get(item)
            if who is None:
                self._broken(f"{item!r} is gone, and nobody has taken it")
            elif who in alive and not self.popping[who]:
                self._broken(f"{who} has taken {item!r}, and handed it to nobody")

    def _broken(self, problem: str) -> None:
        raise InvariantError(Invariant.HANDED_OUT, f"{self.name}: {problem}")

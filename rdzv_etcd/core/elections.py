"""Decides who leads among the members of a world that stand for a name. Pure.

Each has one key, which is put when it begins to stand and when it ceases to: so who stands for
longest is the one whose key was put at the lowest revision, and it leads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Fence(NamedTuple):
    """Grows from leader to leader of a name, over all worlds of a job; compares as a tuple."""

    epoch: int
    """That of the world."""
    term: int
    """Grows from leader to leader in it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member's key."""

    node_id: str
    place: int
    """The revision at which it began to stand, or ceased to."""
    stands: bool
    base: int = 0
    """What terms count from, as far as this member knows: see :func:`term_of`."""
    lease_id: int = 0


def leader_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """Who leads; ``None`` if nobody stands."""
    standing = (each for each in candidates if each.stands)
    return min(standing, key=lambda each: each.place, default=None)


def next_before(candidates: Iterable[Candidate], place: int) -> Candidate | None:
    """Whom the candidate at ``place`` waits for; ``None``: it leads."""
    before = (each for each in candidates if each.stands and each.place < place)
    return max(before, key=lambda each: each.place, default=None)


def term_of(candidates: Iterable[Candidate], place: int) -> int:
    """The term of who leads from ``place`` on: a base plus that revision, as an epoch.

    The base is above zero only if etcd has gone back in this very world: then one that had led
    before, and is therefore still there, has raised it above its own term.
    """
    return place + max((each.base for each in candidates), default=0)


def base_after(base: int, term: int, revision: int) -> int:
    """What terms count from once etcd is at ``revision``, for one that has led in ``term``: what
    comes must be above that."""
    return base if base + revision >= term else term

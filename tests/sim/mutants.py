"""How the protocol is broken on purpose, and how that is noticed.

A mutant replaces one function (here, and only here, by swapping an attribute). It is noticed in
random lives, or in a schedule made for it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rdzv_etcd.etcd.port import Compare, Txn
from rdzv_etcd.testing import SimulationError
from tests.sim.invariants import Invariant, InvariantError
from tests.sim.lives import live
from tests.sim.plan import Plan, plan
from tests.sim.world import Scenario, simulate

SEEDS = 300
"""Within so many lives a mutant must be noticed."""


@contextmanager
def swapped(place: object, name: str, by: Callable[..., Any]) -> Iterator[None]:
    original = getattr(place, name)
    setattr(place, name, lambda *args, **named: by(original, *args, **named))
    try:
        yield
    finally:
        setattr(place, name, original)


@dataclass(frozen=True)
class Mutant:
    name: str
    place: object
    function: str
    by: Callable[..., Any]
    broken: tuple[Invariant, ...]
    """What it may be noticed as: the first broken promise depends on the life."""
    lives: Callable[[Any], bool] = lambda _plan: True
    """Which lives can notice it at all, to save time."""
    noticed_by: int = 0
    """A life that was seen to notice it, lived first to save time."""
    kinds: tuple[str, ...] = ()
    """What these lives draw besides."""


def without_guard(which: Callable[[Compare], bool]) -> Callable[..., Txn]:
    def mutated(original: Callable[..., Txn], *args: Any, **named: Any) -> Txn:
        txn = original(*args, **named)
        kept = tuple(guard for guard in txn.guards if not which(guard))
        assert kept != txn.guards
        return replace(txn, guards=kept)

    return mutated


def on(suffix: bytes) -> Callable[[Compare], bool]:
    return lambda guard: guard.range_end is None and guard.key.endswith(suffix)


def returns(value: Any) -> Callable[..., Any]:
    return lambda original, *args, **named: value


async def does_nothing(*args: Any, **named: Any) -> None:
    return


def noticed(mutant: Mutant) -> tuple[int, Invariant]:
    for seed, what in itertools.islice(lives_of(mutant), SEEDS):
        try:
            live(seed, what)
        except InvariantError as error:
            return seed, error.invariant
        except SimulationError as error:
            pytest.fail(f"seed {seed} ended with {error}")
    raise AssertionError(f"survived {SEEDS} lives: {mutant.name}")


def lives_of(mutant: Mutant) -> Iterator[tuple[int, Plan]]:
    """The lives that can notice a mutant, that which was seen to do so first."""
    for seed in dict.fromkeys((mutant.noticed_by, *range(4 * SEEDS))):
        what = plan(seed, wide=False, kinds=mutant.kinds)
        if mutant.lives(what):
            yield seed, what


@contextmanager
def quietly() -> Iterator[None]:
    """What fails on purpose logs nothing."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def broken_by(
    place: object,
    function: str,
    by: Callable[..., Any],
    noticed_as: Invariant | type[AssertionError],
    *,
    seeds: range = range(5),
    **job: Any,
) -> Callable[[Scenario], Callable[[], None]]:
    """Make a scenario a test: it goes well as the code is, and with the mutant it breaks that
    promise, or fails."""

    def made(scenario: Scenario) -> Callable[[], None]:
        def test() -> None:
            simulate(scenario, seeds, **job)
            with quietly(), swapped(place, function, by), pytest.raises(AssertionError) as caught:
                simulate(scenario, seeds, **job)
            if isinstance(noticed_as, Invariant):
                assert isinstance(caught.value, InvariantError), caught.value
                assert caught.value.invariant is noticed_as

        test.__name__ = getattr(scenario, "__name__", "")
        test.__doc__, test.__module__ = scenario.__doc__, scenario.__module__
        return test

    return made

"""The decisions of an embedded cluster's seats, under what may happen to three and five hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rdzv_etcd.embedded import seat
from rdzv_etcd.embedded.seat import Decision, Do, Entry, Step, View
from tests.embedded.seats import Hosts, Rules, UnsafeError

_EVENTS = 100
_LULLS = 0.15


def live(count: int, seed: int, rules: Rules) -> Hosts:
    hosts = Hosts(count, seed, rules)
    for _ in range(_EVENTS):
        hosts.happen()
        if hosts.random.random() < _LULLS:  # without, hardly a host gets as far as to be a member
            hosts.calm_down(hosts.some(), hosts.random.choice((1.0, 3.0, 20.0)))
    return hosts


@pytest.mark.parametrize("count", [3, 5])
def test_two_clusters_never_have_a_majority(count: int) -> None:
    """Whatever is lost, late or repeated, and whatever any clock shows."""
    clusters, done = [], Counter[Step]()
    for seed in range(300):
        hosts = live(count, seed, Rules())
        clusters.append(len(hosts.clusters))
        done += hosts.done
    print(f"measured: {sum(clusters)} clusters, {dict(done)}")
    assert sorted(clusters)[len(clusters) // 2] > 1  # what a search does not reach it cannot judge
    assert min(done[it] for it in (Step.RETIRE, Step.ADD, Step.PROMOTE, Step.REMOVE)) > 300


@pytest.mark.parametrize("count", [3, 5])
def test_from_any_state_a_majority_of_hosts_comes_to_serve(count: int) -> None:
    for seed in range(150):
        hosts = live(count, seed, Rules())
        there = hosts.some()
        for number in set(range(count)) - there:
            if hosts.random.random() < 0.5:
                hosts.forget(number)  # the others run on, unreached
        assert hosts.calm_down(there, 200.0), f"seed {seed}: {there} do not serve"


def _removes_first(
    entries: Sequence[Entry], number: int, url: str, own_id: str
) -> tuple[Step, str] | None:
    for entry in entries:
        if entry.id != own_id and entry.url == url:
            return Step.REMOVE, entry.id
    return seat.next_step(entries, number, url, own_id)


def _removes_before_it_votes(
    entries: Sequence[Entry], number: int, url: str, own_id: str
) -> tuple[Step, str] | None:
    for entry in entries:
        if own_id and entry.id != own_id and seat.is_retired(entry.url, number):
            return Step.REMOVE, entry.id
    return seat.next_step(entries, number, url, own_id)


def _removes_what_looks_old(
    entries: Sequence[Entry], number: int, url: str, own_id: str
) -> tuple[Step, str] | None:
    prefix = seat.retired_url(number, 0).rpartition("0.0:")[0]
    mistaken = [
        replace(entry, url=seat.retired_url(number, 0))
        if entry.url.startswith(prefix) and entry.url != url
        else entry
        for entry in entries
    ]
    return seat.next_step(mistaken, number, url, own_id)


def _removes_a_learner_that_is_in_the_way(
    entries: Sequence[Entry], number: int, url: str, own_id: str
) -> tuple[Step, str] | None:
    step = seat.next_step(entries, number, url, own_id)
    if step is not None and step[0] is Step.ADD:
        for entry in entries:
            if entry.learner:
                return Step.REMOVE, entry.id
    return step


def _founds_with_whom_it_hears(view: View) -> Decision:
    decision = seat.decide(view)
    if decision.do is Do.WAIT and view.own.member is None and view.own.life:
        founders = tuple(
            view.own.life if number == view.own.seat else "" for number in range(view.seats)
        )
        return Decision(Do.FOUND, "alone", founders=founders)
    return decision


_MUTANTS: dict[str, tuple[int, Callable[[], Rules]]] = {
    "an identity is used twice": (3, lambda: Rules(draws_new_lives=False)),
    "the old voter is removed first": (3, lambda: Rules(next_step=_removes_first)),
    "… or before the new one votes": (3, lambda: Rules(next_step=_removes_before_it_votes)),
    "… or another seat's, by its address": (3, lambda: Rules(next_step=_removes_what_looks_old)),
    "another seat's learner is removed": (
        5,
        lambda: Rules(next_step=_removes_a_learner_that_is_in_the_way),
    ),
    "a founding lists only who is there": (5, lambda: Rules(lists_absent=False)),
    "a founding alone, of those who are there": (
        3,
        lambda: Rules(decide=_founds_with_whom_it_hears, lists_absent=False),
    ),
}


@pytest.mark.parametrize("mutant", _MUTANTS)
def test_the_search_notices_a_broken_rule(mutant: str) -> None:
    count, rules = _MUTANTS[mutant]
    for seed in range(600):
        try:
            live(count, seed, rules())
        except UnsafeError:
            return
    pytest.fail("not noticed")

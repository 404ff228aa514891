"""When a formed round is over, and what that means to a node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.core.changes import (
    ABSENCE_GRACE_S,
    Healthy,
    Recovery,
    claim_delay_s,
    decide_recovery,
    waiting_count,
)
from rdzv_etcd.core.model import Change, Closure, Control, Ended, Round
from rdzv_etcd.settings import JobSettings
from tests.core.scenes import NOW_S, Scene

EXPIRED = "lease expired"


def test_a_healthy_round_is_left_alone() -> None:
    assert Scene(2, 4, members="a b c").change() == Healthy()


def test_without_a_round_there_is_nothing_to_change() -> None:
    assert Scene(2, 4).new("a").change() == Healthy()
    assert Scene(2, 4, members="a b").gone("a").closed().change() == Healthy()


def test_a_change_is_published_once() -> None:
    assert Scene(2, 4, members="a b c").gone("c").changed("c").change() == Healthy()


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        (Scene(2, 4, members="a b c").gone("c"), ("", {"c": EXPIRED})),
        (Scene(2, 4, members="a b c").gone("b c"), ("", {"b": EXPIRED, "c": EXPIRED})),
        (Scene(2, 4, members="a b c").leaving("b"), ("", {"b": "left"})),
        (Scene(2, 4, members="a b c").left("b"), ("", {"b": "left"})),
        (Scene(2, 4, members="a b c").left("b").gone("c"), ("", {"b": "left", "c": EXPIRED})),
        (Scene(2, 4, members="a b c").back("b"), ("b", {})),
        (Scene(2, 4, members="a b c").new("d"), ("d", {})),
        (Scene(2, 3, members="a b c").new("d"), None),  # no seat
        (Scene(2, 3, members="a b c").spare("d"), None),
        (Scene(2, 3, members="a b c").spare("d").gone("c"), ("d", {"c": EXPIRED})),
        (Scene(2, 3, members="a b c").spare("d").back("c"), ("c", {})),
        (Scene(2, 6, 2, members="a b").new("d"), None),  # half a unit
        (Scene(2, 6, 2, members="a b").new("d e"), ("d e", {})),
        (Scene(2, 5, 2, members="a b c d").new("e"), None),
        (Scene(2, 4, members="a b", expelled="x").new("x", arrived_for=4), None),
        (Scene(2, 4, members="a b", expelled="x").new("x"), ("x", {})),
        (Scene(2, 4, members="a b").new("x", settings=JobSettings(1, 9)), None),
        (Scene(2, 4, members="a b").new("d").leaving("d"), None),
    ],
)
def test_losses_returns_and_growth_are_published(
    scene: Scene, expected: tuple[str, dict[str, str]] | None
) -> None:
    assert scene.published() == expected


def test_a_leader_that_was_cut_off_gives_the_others_time_to_come_back() -> None:
    scene = Scene(2, 4, members="a b c").gone("b c")
    assert scene.published(trusted=False) is None
    waiting = scene.change(trusted=False)
    assert isinstance(waiting, Healthy)
    assert waiting.until_s == NOW_S + 3.0
    assert "2 members are not back yet" in waiting.reason


def test_who_went_a_moment_ago_may_be_putting_its_presence_back() -> None:
    scene = Scene(2, 4, members="a b c").gone("b", ago_s=ABSENCE_GRACE_S / 2)
    waiting = scene.change()
    assert isinstance(waiting, Healthy)
    assert waiting.until_s == pytest.approx(NOW_S + ABSENCE_GRACE_S / 2)
    # It is not named with one that is gone for longer, and a goodbye is no reason to wait.
    assert scene.gone("c").published() == ("", {"c": EXPIRED})
    scene = Scene(2, 4, members="a b c").gone("b", ago_s=0.0)
    assert scene.left("c").published() == ("", {"c": "left"})


def test_absent_members_that_may_come_back_keep_their_seats() -> None:
    assert Scene(2, 3, members="a b c").gone("c").spare("d").published(trusted=False) is None
    assert Scene(2, 4, members="a b c").gone("c").new("d").published(trusted=False) == ("d", {})


def test_a_good_bye_needs_no_patience() -> None:
    assert Scene(2, 4, members="a b c").left("c").published(trusted=False) == ("", {"c": "left"})


# --- what a node is told --------------------------------------------------------------------------

SETTINGS = JobSettings(1, 4)
WORLD = Round(3, "run", ("a", "b"), SETTINGS, "h", 1, 7)
MINE = replace(WORLD, epoch_fixed=9)
"""The same as its members know it."""
DONE = Closure("a", "done", True, 0.0)
FAILED = Closure("a", "broken", False, 0.0)


def control(record: Round | None, change: Change | None = None, *, revision: int = 9) -> Control:
    return Control(revision + 1, record, revision, None, 0, change, 0 if change is None else 8)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (control(WORLD), 0),
        (control(None), 0),  # data lost: it will be put back
        (control(WORLD, Change("run", 3, ("x",))), 1),
        (control(WORLD, Change("run", 3, ("x", "y"), {"b": "left"})), 3),
        (control(WORLD, Change("run", 3)), 1),
        (control(WORLD, Change("run", 2, ("x",))), 0),  # an older round's
        (control(WORLD, Change("other", 3, ("x",))), 0),
        (control(None, Change("run", 3, ("x",))), 1),
        (control(replace(WORLD, number=4), revision=12), 1),  # the others went on
        (control(replace(WORLD, number=2), revision=6), 0),  # a view that lags, or etcd went back
        (control(replace(WORLD, run="other", number=1), revision=12), 1),
        (control(replace(WORLD, run="other", number=1), revision=6), 0),
        (control(replace(WORLD, epoch_fixed=9), revision=30), 0),  # put back
        (control(WORLD, revision=12), 1),  # the same name, but another world
        (control(replace(WORLD, run="other", closure=FAILED), revision=6), 0),  # an earlier run's
        (control(replace(WORLD, run="other", closure=DONE), revision=12), 1),  # a later one's
        (control(replace(WORLD, closure=DONE)), 0),
        (control(replace(WORLD, closure=FAILED)), 1),
    ],
)
def test_waiting_count(view: Control, expected: int) -> None:
    assert waiting_count(view, MINE, False) == expected


def test_waiting_count_without_a_world_or_after_an_eviction() -> None:
    assert waiting_count(control(WORLD, Change("run", 3, ("x",))), None, False) == 0
    assert waiting_count(control(WORLD), MINE, True) == 1


def test_a_closure_is_remembered_when_a_new_run_goes_on() -> None:
    other = control(replace(WORLD, run="other", number=9))
    assert waiting_count(other, MINE, False, DONE) == 0
    assert waiting_count(other, MINE, False, FAILED) == 1


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (control(None), Recovery.RECORD),
        (control(WORLD), Recovery.PRESENCE),
        (control(WORLD, Change("run", 2, ("x",))), Recovery.PRESENCE),
        (control(WORLD, Change("run", 3, ("x",))), Recovery.REJOIN),
        (control(replace(WORLD, number=4), revision=12), Recovery.REJOIN),
        (control(replace(WORLD, run="other"), revision=12), Recovery.REJOIN),
        (control(WORLD, revision=12), Recovery.REJOIN),
        (control(replace(WORLD, number=2), revision=6), Recovery.RECORD),  # etcd went back
        (control(replace(WORLD, run="other", closure=DONE), revision=6), Recovery.RECORD),
        (control(replace(WORLD, run="other", closure=DONE), revision=12), Recovery.REJOIN),
        (control(replace(WORLD, closure=DONE)), Recovery.NOTHING),
    ],
)
def test_recovery(view: Control, expected: Recovery) -> None:
    assert decide_recovery(view, MINE) is expected


def test_who_was_there_when_its_run_ended_puts_nothing_back() -> None:
    ended = (Ended("run", DONE, 9), Ended("later", DONE, 20))
    for record in (None, replace(WORLD, run="other", number=1)):
        view = replace(control(record, revision=30), ended=ended)
        assert decide_recovery(view, MINE) is Recovery.NOTHING
        assert waiting_count(view, MINE, False) == 0


def test_members_claim_the_lead_in_rank_order_before_others() -> None:
    delays_s = [claim_delay_s(rank, 6, 0.0) for rank in range(6)]
    assert delays_s == sorted(set(delays_s))
    assert delays_s[0] == 0.0
    for size in (1, 6, 300, 5000):
        assert claim_delay_s(size - 1, size, 0.019) < claim_delay_s(None, size, 0.0)
    assert claim_delay_s(None, 0, 0.01) == 0.01

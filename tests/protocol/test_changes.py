"""When a formed round is over, and which node is unfit to lead."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_etcd.protocol.closing import KeepWaiting
from rdzv_etcd.protocol.lead import NAMES_IN_CHANGE, is_unfit_to_lead
from rdzv_etcd.protocol.liveness import ABSENCE_GRACE_S
from rdzv_etcd.protocol.member import Member
from rdzv_etcd.protocol.model import Change, Control
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import NOW_S, Scene

EXPIRED = "lease expired"


def test_a_healthy_round_is_left_alone() -> None:
    assert Scene(2, 4, members="a b c").change() == KeepWaiting()


def test_without_a_round_there_is_nothing_to_change() -> None:
    assert Scene(2, 4).new("a").change() == KeepWaiting()
    assert Scene(2, 4, members="a b").gone("a").closed().change() == KeepWaiting()


def test_a_change_is_published_once() -> None:
    assert Scene(2, 4, members="a b c").gone("c").changed("c").change() == KeepWaiting()


@pytest.mark.parametrize(
    ("scene", "expected"),
    [
        (Scene(2, 4, members="a b c").gone("c"), ("", {"c": EXPIRED})),
        (Scene(2, 4, members="a b c").gone("b c"), ("", {"b": EXPIRED, "c": EXPIRED})),
        (Scene(2, 4, members="a b c").leaving("b"), ("", {"b": "left: SIGTERM"})),
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
        (Scene(1, 4, members="a b c").finished("a"), None),
        (Scene(1, 4, members="a b c").finished("a b c"), None),
        (Scene(1, 4, members="a b c").finished("a").back("b"), ("b", {})),
        (Scene(1, 4, members="a b c").finished("a").gone("b"), ("", {"b": EXPIRED})),
        (Scene(1, 4, members="a b c").finished("a").gone("a"), ("", {"a": EXPIRED})),
        (Scene(1, 4, members="a b c").finished("a").new("d"), None),  # no larger without a
        (Scene(1, 4, members="a b c").finished("a").new("d e"), ("d e", {})),
        (Scene(1, 4, members="b c", expelled="a").new("a", arrived_for=4).finished("a"), None),
        (Scene(1, 4, members="b c").new("a", arrived_for=4).finished("a"), None),
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
    assert isinstance(waiting, KeepWaiting)
    assert waiting.until_s == NOW_S + 3.0
    assert "2 members not back yet" in waiting.reason


def test_a_node_that_went_a_moment_ago_may_be_putting_its_presence_back() -> None:
    scene = Scene(2, 4, members="a b c").gone("b", ago_s=ABSENCE_GRACE_S / 2)
    waiting = scene.change()
    assert isinstance(waiting, KeepWaiting)
    assert waiting.until_s == pytest.approx(NOW_S + ABSENCE_GRACE_S / 2)
    # It is not named with one that is gone for longer, and a goodbye is no reason to wait.
    assert scene.gone("c").published() == ("", {"c": EXPIRED})
    scene = Scene(2, 4, members="a b c").gone("b", ago_s=0.0)
    assert scene.left("c").published() == ("", {"c": "left"})


def test_absent_members_that_may_come_back_keep_their_seats() -> None:
    assert Scene(2, 3, members="a b c").gone("c").spare("d").published(trusted=False) is None
    assert Scene(2, 4, members="a b c").gone("c").new("d").published(trusted=False) == ("d", {})


def test_after_a_goodbye_there_is_nothing_to_wait_for() -> None:
    assert Scene(2, 4, members="a b c").left("c").published(trusted=False) == ("", {"c": "left"})


def test_a_change_holds_the_reasons_that_members_gave_for_rejoining() -> None:
    """In characters that can be shown, and only of those that it names."""
    scene = Scene(2, 5, members="a b c d").back("a").back("b", because="exit\ncode 1" + "!" * 999)
    change = scene.new("x", because="no member").gone("c").change()
    assert isinstance(change, Change)
    assert change.waiters == ("a", "b", "x")
    ((node_id, reason),) = change.because.items()
    assert node_id == "b"
    assert reason.startswith("exit\\ncode 1!")
    assert len(reason) == 200
    names = " ".join(f"n{number:03}" for number in range(2 * NAMES_IN_CHANGE))
    change = Scene(2, 99, members=names).back(names, because="x").change()
    assert isinstance(change, Change)
    assert tuple(change.because) == change.waiters


HAD_A_ROUND = Scene(1, 4, members="x")


@pytest.mark.parametrize(
    ("case", "is_unfit"),
    [
        ({}, True),  # the lead came with its arrival
        # It was fit to arrive: that role may just be edited.
        ({"has_claimed": True}, False),
        ({"has_claimed": True, "lasts_s": 30.0}, False),
        ({"has_claimed": True, "lasts_s": 30.1}, True),
        *(
            ({**before, "has_claimed": has_claimed, "lasts_s": lasts_s}, False)
            for before in (
                {"has_worked": True},
                {"control": HAD_A_ROUND.control},
                {"member": Member("me", epoch=7)},
            )
            for has_claimed in (False, True)
            for lasts_s in (0.0, 3600.0)
        ),
        ({"control": Scene(1, 4, members="x").closed().control}, True),  # of the run before
    ],
)
def test_a_node_is_unfit_to_lead_unless_its_role_was_right_before(
    case: dict[str, Any], is_unfit: bool
) -> None:
    usual: dict[str, Any] = {"member": Member("me"), "control": Control(1)}
    usual |= {"has_worked": False, "has_claimed": False, "lasts_s": 0.0, "lease_ttl_s": 10.0}
    assert is_unfit_to_lead(**(usual | case)) is is_unfit

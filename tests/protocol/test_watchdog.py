"""When a thread that has not called in counts as hung."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdzv_etcd.node.watchdog import Silence, is_on_duty, look, period_s
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Change, Closure
from tests.protocol.scenes import Scene

LIMIT_S = 8.0
PERIOD_S = period_s(LIMIT_S)


def looks(*late_s: float, calls: tuple[int, ...] = (), excused: tuple[int, ...] = ()) -> Silence:
    """Look so often, each time so much later than meant; before the ``calls`` the thread calls."""
    silence, now_s, count = Silence(), 0.0, 0
    for number, late in enumerate(late_s):
        now_s += PERIOD_S + late
        count += number in calls
        silence = look(silence, count, now_s, LIMIT_S, is_excused=number in excused)
    return silence


def test_a_thread_that_does_not_call_in_is_hung_after_the_limit() -> None:
    assert looks(*[0.0] * 7).lasts_s < LIMIT_S
    assert looks(*[0.0] * 8).lasts_s >= LIMIT_S


def test_one_call_is_enough_and_the_time_begins_again() -> None:
    assert looks(*[0.0] * 14, calls=(6,)).lasts_s < LIMIT_S
    assert looks(*[0.0] * 15, calls=(6,)).lasts_s >= LIMIT_S


def test_a_thread_that_waits_inside_of_the_library_is_excused() -> None:
    assert looks(*[0.0] * 40, excused=tuple(range(40))).lasts_s < LIMIT_S


@pytest.mark.parametrize("stopped_s", [2.0, 3600.0])
def test_a_process_that_was_stopped_was_not_hung(stopped_s: float) -> None:
    """It was silent for a long time before; then it gets the time to call in."""
    assert looks(*[0.0] * 7, stopped_s).lasts_s < LIMIT_S
    assert looks(*[0.0] * 7, stopped_s, 0.0, calls=(8,)).lasts_s < LIMIT_S
    assert looks(*[0.0] * 7, stopped_s, 0.0).lasts_s >= LIMIT_S


def test_looks_that_come_a_little_late_on_a_busy_machine_count() -> None:
    assert looks(*[0.9 * PERIOD_S] * 5).lasts_s >= LIMIT_S


def test_long_limits_are_looked_at_once_a_second() -> None:
    assert period_s(600.0) == 1.0
    assert period_s(0.8) == pytest.approx(0.1)


# --- who has to call in ---------------------------------------------------------------------------

OVER = Change("run", 5, ("c",))


@pytest.mark.parametrize(
    ("state", "change", "has_to"),
    [
        ({}, None, True),
        *(({"phase": phase}, None, False) for phase in (Phase.IDLE, Phase.WAITING, Phase.GONE)),
        ({}, OVER, False),  # it may write a checkpoint
        ({"evicted": True}, None, False),
        ({"closure": Closure("b", "done", True, 0.0)}, None, False),
    ],
)
def test_only_a_member_of_a_healthy_world_has_to_call_in(
    state: dict[str, Any], change: Change | None, has_to: bool
) -> None:
    control = replace(Scene(members="a b").control, change=change)
    assert control.round is not None
    record = replace(control.round, epoch_fixed=control.epoch)
    known: dict[str, Any] = {"phase": Phase.MEMBER, "record": record}
    assert is_on_duty(Member("a", **(known | state)), control) is has_to

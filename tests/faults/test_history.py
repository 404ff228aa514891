"""The checker notices every broken promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.member import Seat
from tests.faults.history import InvariantError, Told, check_history

FIRST = Seat(1, 0, 2, "10.0.0.1", 4000, 10, ("a", "b"), 7)
SECOND = Seat(2, 0, 3, "10.0.0.1", 4001, 20, ("a", "c", "b"), 7)


def seen(world: Seat) -> list[Told]:
    """The world as each of its members sees it."""
    return [Told(member, replace(world, rank=rank)) for rank, member in enumerate(world.members)]


def check(told: list[Told]) -> None:
    check_history(told, min_nodes=2, max_nodes=3)


def test_a_sound_history_passes() -> None:
    check(seen(FIRST) + seen(SECOND))


def test_a_node_that_enters_late_breaks_nothing() -> None:
    a, b = seen(FIRST)
    check([a, Told("c", replace(SECOND, rank=1)), b])


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([Told("b", FIRST)], id="a rank that is another's"),
        pytest.param([Told("a", replace(FIRST, rank=2))], id="a rank beyond the size"),
        pytest.param([Told("a", replace(FIRST, size=3))], id="a size that is not its members'"),
        pytest.param([Told("a", replace(FIRST, members=("a", "a")))], id="a member twice"),
        pytest.param([Told("a", Seat(1, 0, 1, "h", 1, 1, ("a",), 7))], id="too few"),
        pytest.param([Told("a", Seat(1, 0, 4, "h", 1, 1, ("a", "b", "c", "d"), 7))], id="too many"),
        pytest.param(
            [Told("a", FIRST), Told("b", replace(FIRST, rank=1, master_port=1))],
            id="another master",
        ),
        pytest.param(
            [Told("b", replace(FIRST, rank=1)), Told("a", replace(FIRST, members=("a", "c")))],
            id="another member",
        ),
        pytest.param([*seen(FIRST), *seen(replace(FIRST, epoch=11))], id="the same round twice"),
        pytest.param([*seen(SECOND), *seen(FIRST)], id="an older round"),
        pytest.param([*seen(FIRST), *seen(replace(SECOND, epoch=9))], id="an epoch that goes down"),
        pytest.param([Told("a", FIRST), Told("a", FIRST)], id="the same world twice"),
        pytest.param(
            [Told("a", FIRST), Told("c", Seat(1, 0, 2, "h", 1, 30, ("c", "d"), 7))],
            id="a round by two leaders",
        ),
    ],
)
def test_a_broken_promise_is_noticed(told: list[Told]) -> None:
    with pytest.raises(InvariantError):
        check(told)

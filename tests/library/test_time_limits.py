"""The time limits of what waits: which there are, and what they mean at their ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from rdzv_etcd.errors import JoinTimeoutError, MisuseError
from rdzv_etcd.world.group import Group
from rdzv_etcd.world.world import World
from tests.library.nodes import Job, join_all

WAITS: dict[str, Callable[[Group, World, Any], object]] = {
    "join": lambda group, _, limit_s: group.join(limit_s),
    "barrier": lambda _, world, limit_s: world.barrier("saved", limit_s),
    "exchange": lambda _, world, limit_s: world.exchange(b"mine", limit_s),
    "wait_over": lambda _, world, limit_s: world.wait_over(limit_s),
    "get": lambda _, world, limit_s: world.store.get("key", limit_s),
}
NO_LIMITS = ["5", True, math.nan, [5]]


def test_a_limit_is_a_number(job: Job) -> None:
    with job.group() as group:
        world = group.join()
        for name, wait in reversed(WAITS.items()):  # a join ends the world
            for limit_s in [*NO_LIMITS, *([None] if name in ("barrier", "exchange") else [])]:
                with pytest.raises(MisuseError, match="must be a number of seconds"):
                    wait(group, world, limit_s)
        assert group.join().size == 1


def test_any_size_and_type_of_number(job: Job) -> None:
    with job.group() as group:
        limits: list[Any] = [60, Fraction(60), math.inf, 1e300]
        for limit_s in limits:
            world = group.join(limit_s)
            world.barrier("saved", limit_s)
            assert world.exchange(b"mine", limit_s) == [b"mine"]
        assert not world.wait_over(-1)
        assert not world.wait_over(0)


@pytest.mark.parametrize("limit_s", [0, -1])
def test_a_join_without_time_says_who_is_there(job: Job, limit_s: int) -> None:
    """It is not etcd that did not answer."""
    with job.groups(2) as nodes:
        with pytest.raises(JoinTimeoutError, match="not formed within 0 s") as caught:
            nodes[0].join(limit_s)
        assert caught.value.arrived == ()
        assert [world.size for world in join_all(nodes)] == [2, 2]

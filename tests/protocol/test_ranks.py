"""Which node gets which rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from rdzv_etcd.protocol.model import NodeInfo
from rdzv_etcd.protocol.ranks import assign_ranks
from rdzv_etcd.protocol.segments import Segment, natural_order
from rdzv_etcd.settings import JobSettings


def ranks(chosen: str, previous: str = "") -> str:
    """``chosen`` may carry rank keys (``a:node2``); ``previous`` is the old world by rank."""
    infos = []
    for word in chosen.split():
        name, _, key = word.partition(":")
        infos.append(NodeInfo(name, name, 1, 1, JobSettings(1, 99), key or None))
    before = {name: rank for rank, name in enumerate(previous.split())}
    return order(infos, before)


def order(infos: Iterable[NodeInfo], before: Mapping[str, int]) -> str:
    segment = Segment(tuple(infos), 0)  # as without the option
    return " ".join(info.node_id for info in assign_ranks([segment], before))


@pytest.mark.parametrize(
    ("chosen", "previous", "expected"),
    [
        ("b a c", "", "b a c"),  # the first round: as they arrived
        ("a b c", "a b c", "a b c"),
        ("c b a", "a b c", "a b c"),  # the order of coming back does not matter
        ("a b c d", "a b c", "a b c d"),  # newcomers behind
        ("a c d", "a b c", "a d c"),  # a newcomer fills the hole
        ("a c", "a b c", "a c"),  # a hole remains: the highest moves down
        ("a b d", "a b c d", "a b d"),
        ("a c d", "a b c d", "a d c"),  # only the highest moves
        ("b c", "a b c", "c b"),  # rank 0 is free: the highest takes it
        ("b c x", "a b c", "c b x"),  # a survivor, not the newcomer, becomes rank 0
        ("c x", "a b c", "c x"),
        ("x y", "a b c", "x y"),  # nobody survived
        ("d x", "a b c d", "d x"),
        ("b x y z", "a b", "b x y z"),
    ],
)
def test_ranks_stick_and_holes_are_filled(chosen: str, previous: str, expected: str) -> None:
    assert ranks(chosen, previous) == expected


@pytest.mark.parametrize(
    ("trained", "previous", "expected"),
    [
        ({"a": 5, "b": 5, "c": 0}, "a b", "a b c"),
        ({"a": 5, "b": 5, "c": 9}, "a b", "c b a"),  # etcd knows of an older world only
        ({"a": 5, "b": 9, "c": 9}, "a b", "c b a"),
        ({"a": 9, "b": 5, "c": 5}, "b c a", "a c b"),
        ({"a": 0, "b": 4, "c": 0}, "", "b a c"),
    ],
)
def test_rank_0_goes_to_a_node_that_trained_the_latest_world(
    trained: dict[str, int], previous: str, expected: str
) -> None:
    infos = [
        NodeInfo(name, name, 1, 1, JobSettings(1, 99), epoch_trained=epoch)
        for name, epoch in trained.items()
    ]
    before = {name: rank for rank, name in enumerate(previous.split())}
    assert order(infos, before) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("a:node10 b:node9 c:node1", "c b a"),
        ("a:2 b:10 c:1", "c a b"),
        ("a b:1 c:0", "c b a"),  # without a key: last
        ("a:x b:x", "a b"),  # the same key: as they arrived
        ("a:rack2-gpu1 b:rack1-gpu10 c:rack1-gpu2", "c b a"),
        ("a:007 b:7 c:08", "a b c"),
    ],
)
def test_rank_keys_order_naturally(chosen: str, expected: str) -> None:
    assert ranks(chosen) == expected


def test_equal_rank_keys_keep_the_previous_order() -> None:
    assert ranks("b:x a:x c:x", "a b") == "a b c"


@pytest.mark.parametrize(
    "ordered",
    [
        ["node2", "node10"],
        ["1", "2", "10", "a"],
        ["", "0", "a", "a0", "a1b", "a2", "b"],
        ["x9y", "x10", "x10y"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    backwards = ordered[::-1]
    assert sorted(backwards, key=natural_order) == ordered

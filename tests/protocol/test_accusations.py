"""From when on an accused node counts as lost, and which node watches which."""

from __future__ import annotations

import math

import pytest

from rdzv_etcd.protocol.closing import Close, KeepWaiting
from rdzv_etcd.protocol.liveness import (
    ABSENCE_GRACE_S,
    ANSWER_GRACE_S,
    FEW_AT_ONCE,
    MOST_MISTAKES,
    QUIET_S,
    LocalHealth,
    doubted,
    lost_from_s,
    may_answer_until_s,
    ring_after,
)
from rdzv_etcd.protocol.model import Accusation, Accused, Change, Nodes
from rdzv_etcd.world_change import how_gone, how_silent
from tests.protocol.scenes import NOW_S, Scene

GONE = Accusation("b~1~x", how_gone("b", "refused by its host", 0.0031), is_certain=True)
SILENT = Accusation("b~1~x", how_silent("b", "timed out"), is_certain=False)


def accused(seen_s: float, *accusations: Accusation) -> Nodes:
    return Nodes(
        9,
        accused={f"n{at}": Accused(each, 9, seen_s) for at, each in enumerate(accusations)},
        since_s=0.0,
    )


FROM_S: dict[str, tuple[Nodes, float, float]] = {
    "a process that is gone, almost at once, even if the leader was cut off": (
        accused(100.0, GONE), 500.0, 100.0 + ANSWER_GRACE_S,
    ),
    "a silent host has longer to answer": (accused(100.0, SILENT), 0.0, 100.0 + ABSENCE_GRACE_S),
    "and the leader must hear well": (accused(100.0, SILENT), 500.0, 500.0),
    "if few are accused at once": (
        accused(100.0, *[GONE] * FEW_AT_ONCE), 0.0, 100.0 + ANSWER_GRACE_S,
    ),
    "if many are, all have longer": (
        accused(100.0, *[GONE] * (FEW_AT_ONCE + 1)), 0.0, 100.0 + ABSENCE_GRACE_S,
    ),
    "an accusation from before etcd went back is not certain": (
        doubted(accused(100.0, GONE), 9), 0.0, 100.0 + ABSENCE_GRACE_S,
    ),
    "and counts for nothing if the leader does not hear well": (
        doubted(accused(100.0, GONE), 9), 500.0, 500.0,
    ),
    "one from after that is": (doubted(accused(100.0, GONE), 8), 0.0, 100.0 + ANSWER_GRACE_S),
    "a node that is just absent has no accuser": (
        Nodes(9, gone={"n0": 50.0}), 0.0, 50.0 + ABSENCE_GRACE_S,
    ),
}  # fmt: skip


@pytest.mark.parametrize("who", FROM_S)
def test_from_when_on_a_node_counts_as_lost(who: str) -> None:
    nodes, trust_s, lost_s = FROM_S[who]
    assert lost_from_s(nodes, "n0", trust_absence_s=trust_s) == lost_s


@pytest.mark.parametrize("accusation", [GONE, SILENT])
def test_the_further_etcd_is_away_the_longer_an_answer_may_take(accusation: Accusation) -> None:
    nodes = accused(100.0, accusation)
    more_s = lost_from_s(nodes, "n0", round_trip_s=0.3) - lost_from_s(nodes, "n0")
    assert more_s >= 3 * 0.3
    until_s = may_answer_until_s(nodes, nodes.accused, 100.0, round_trip_s=0.3)
    assert until_s == lost_from_s(nodes, "n0", round_trip_s=0.3)


def test_until_when_somebody_may_answer() -> None:
    nodes = accused(100.0, GONE, SILENT)
    assert may_answer_until_s(nodes, nodes.accused, 100.0) == 100.0 + ANSWER_GRACE_S
    assert may_answer_until_s(nodes, nodes.accused, 100.1) == 100.0 + ABSENCE_GRACE_S
    assert may_answer_until_s(nodes, nodes.accused, 101.0) == -math.inf


@pytest.mark.parametrize(("ago_s", "is_told"), [(0.0, False), (ANSWER_GRACE_S, True)])
def test_a_change_names_how_the_accused_was_lost(ago_s: float, is_told: bool) -> None:
    scene = Scene(2, 4, members="a b c").gone("b").accused("b", GONE, ago_s=ago_s)
    decision = scene.change()
    if is_told:
        assert isinstance(decision, Change)
        assert decision.lost == {"b": GONE.how}
    else:
        assert isinstance(decision, KeepWaiting)
        assert decision.until_s == NOW_S + ANSWER_GRACE_S


@pytest.mark.parametrize(("ago_s", "is_closed"), [(0.0, False), (ABSENCE_GRACE_S, True)])
def test_a_round_is_not_closed_while_one_may_answer(ago_s: float, is_closed: bool) -> None:
    scene = Scene(2, 4, members="a b c").back("a c", NOW_S - 10.0).gone("b")
    decision = scene.accused("b", SILENT, ago_s=ago_s).close()
    assert isinstance(decision, Close if is_closed else KeepWaiting)


# --- the ring -------------------------------------------------------------------------------------


def test_each_watches_the_next_ranks_first() -> None:
    assert ring_after("abcd", "c") == ("d", "a", "b")
    assert ring_after("a", "a") == ()
    assert ring_after("abc", "x") == ()


def test_a_node_that_has_answered_is_not_accused_for_a_while() -> None:
    health = LocalHealth()
    assert health.quiet_until_s("a", 0.0) <= 0.0
    health.note_refuted("a", 100.0)
    assert health.quiet_until_s("a", 101.0) == 100.0 + QUIET_S
    assert health.quiet_until_s("b", 101.0) < 101.0


def test_an_accuser_that_was_wrong_about_several_nodes_accuses_none_for_a_while() -> None:
    health = LocalHealth()
    for at in range(MOST_MISTAKES):
        health.note_refuted(f"n{at}", 100.0 + at)
    assert health.quiet_until_s("b", 110.0) == 100.0 + QUIET_S
    assert health.quiet_until_s("b", 100.0 + QUIET_S) < 100.0 + QUIET_S

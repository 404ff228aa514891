"""From when on an accused node counts as lost, and which node watches which."""

from __future__ import annotations

import math

import pytest

from rdzv_etcd.protocol.closing import Close, KeepWaiting
from rdzv_etcd.protocol.lead import Healthy
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


def test_a_process_that_is_gone_is_lost_almost_at_once_even_if_the_leader_was_cut_off() -> None:
    nodes = accused(100.0, GONE)
    assert lost_from_s(nodes, "n0", trust_absence_s=500.0) == 100.0 + ANSWER_GRACE_S


def test_an_accusation_from_before_etcd_went_back_is_not_certain() -> None:
    nodes = accused(100.0, GONE)
    assert lost_from_s(doubted(nodes, 9), "n0", trust_absence_s=500.0) == 500.0
    assert lost_from_s(doubted(nodes, 9), "n0") == 100.0 + ABSENCE_GRACE_S
    assert doubted(nodes, 8) == nodes  # it is later


def test_a_silent_host_has_longer_to_answer_and_the_leader_must_hear_well() -> None:
    nodes = accused(100.0, SILENT)
    assert lost_from_s(nodes, "n0") == 100.0 + ABSENCE_GRACE_S
    assert lost_from_s(nodes, "n0", trust_absence_s=500.0) == 500.0


def test_if_many_are_accused_at_once_all_have_longer() -> None:
    few, many = accused(100.0, *[GONE] * FEW_AT_ONCE), accused(100.0, *[GONE] * (FEW_AT_ONCE + 1))
    assert lost_from_s(few, "n0") == 100.0 + ANSWER_GRACE_S
    assert lost_from_s(many, "n0") == 100.0 + ABSENCE_GRACE_S


@pytest.mark.parametrize("accusation", [GONE, SILENT])
def test_the_further_etcd_is_away_the_longer_an_answer_may_take(accusation: Accusation) -> None:
    nodes = accused(100.0, accusation)
    more_s = lost_from_s(nodes, "n0", round_trip_s=0.3) - lost_from_s(nodes, "n0")
    assert more_s >= 3 * 0.3
    until_s = may_answer_until_s(nodes, 100.0, round_trip_s=0.3)
    assert until_s == lost_from_s(nodes, "n0", round_trip_s=0.3)


def test_a_node_that_is_just_absent_has_no_accuser() -> None:
    nodes = Nodes(9, gone={"a": 50.0})
    assert lost_from_s(nodes, "a") == 50.0 + ABSENCE_GRACE_S


def test_until_when_somebody_may_answer() -> None:
    nodes = accused(100.0, GONE, SILENT)
    assert may_answer_until_s(nodes, 100.0) == 100.0 + ANSWER_GRACE_S
    assert may_answer_until_s(nodes, 100.1) == 100.0 + ABSENCE_GRACE_S
    assert may_answer_until_s(nodes, 101.0) == -math.inf


@pytest.mark.parametrize(("ago_s", "is_told"), [(0.0, False), (ANSWER_GRACE_S, True)])
def test_a_change_names_how_the_accused_was_lost(ago_s: float, is_told: bool) -> None:
    scene = Scene(2, 4, members="a b c").gone("b").accused("b", GONE, ago_s=ago_s)
    decision = scene.change()
    if is_told:
        assert isinstance(decision, Change)
        assert decision.lost == {"b": GONE.how}
    else:
        assert isinstance(decision, Healthy)
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

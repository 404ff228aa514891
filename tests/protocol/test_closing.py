"""When a round is closed, and with whom."""

from __future__ import annotations

import pytest

from rdzv_etcd.protocol.closing import Close, KeepWaiting
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import left, lost
from tests.protocol.scenes import LAST_CALL_S, NOW_S, REJOIN_S, SETTLE_S, Scene

# --- the first round ------------------------------------------------------------------------------


def test_a_full_first_round_is_closed_at_once() -> None:
    assert Scene(2, 3).new("b a c").closed_world() == "b a c"


def test_a_first_round_with_enough_nodes_waits_for_the_last_call() -> None:
    scene = Scene(2, 4).new("a", NOW_S - 4).new("b", NOW_S - 3).new("c", NOW_S - 1)
    until_s = NOW_S - 3 + LAST_CALL_S  # from when there were enough
    assert scene.waits_until() == until_s
    assert scene.waits_until(until_s - 0.001) == until_s
    assert scene.closed_world(until_s) == "a b c"


def test_a_new_leader_gives_the_whole_last_call() -> None:
    scene = Scene(2, 4).new("a b", NOW_S - 500)
    assert scene.waits_until() == scene.opened_s + LAST_CALL_S


@pytest.mark.parametrize("here", ["", "a", "a b"])
def test_fewer_than_min_wait_without_a_limit(here: str) -> None:
    scene = Scene(3, 4).new(here, NOW_S - 900)
    assert scene.waits_until(NOW_S + 1e6) is None


def test_more_than_max_leave_the_latest_out() -> None:
    assert Scene(2, 3).new("a b c d e").closed_world() == "a b c"


def test_strangers_are_not_counted_and_named() -> None:
    decision = Scene(2, 2).new("a").new("x", settings=JobSettings(3, 3)).close()
    assert isinstance(decision, KeepWaiting)
    assert "not counting x, started with other settings" in decision.reason


def test_leaving_nodes_are_not_counted() -> None:
    assert Scene(2, 2).new("a b").leaving("b").waits_until() is None


def test_presences_of_an_older_run_do_not_count_for_the_first_round() -> None:
    scene = Scene(2, 2).new("a").new("old", arrived_for=7)
    assert scene.waits_until() is None
    decision = scene.new("b").close()
    assert isinstance(decision, Close)
    assert decision.expelled == ("old",)


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "here", "expected"),
    [
        ((2, 6, 2), "a b c d e f", "a b c d e f"),
        ((2, 7, 2), "a b c d e f", "a b c d e f"),  # 6 is full: 7 cannot be
        ((1, 4, 4), "a b c d", "a b c d"),
    ],
)
def test_the_largest_multiple_of_the_unit_is_full(
    limits: tuple[int, int, int], here: str, expected: str
) -> None:
    assert Scene(*limits).new(here).closed_world() == expected


def test_the_rest_of_a_unit_waits_as_spares() -> None:
    scene = Scene(2, 6, 2).new("a b c d e", NOW_S - 2)
    assert scene.waits_until() == NOW_S - 2 + LAST_CALL_S
    assert scene.closed_world(NOW_S + LAST_CALL_S) == "a b c d"


def test_less_than_a_unit_is_not_enough() -> None:
    assert Scene(1, 4, 2).new("a").waits_until(NOW_S + 1e6) is None
    assert Scene(3, 8, 4).new("a b c").waits_until(NOW_S + 1e6) is None


def test_the_last_call_begins_when_a_whole_unit_is_there() -> None:
    scene = Scene(1, 8, 4).new("a b c", NOW_S - 4).new("d", NOW_S - 1)
    assert scene.waits_until() == NOW_S - 1 + LAST_CALL_S


# --- forming again -------------------------------------------------------------------------------


def test_when_every_live_member_is_back_only_the_settle_time_is_waited() -> None:
    scene = Scene(2, 4, members="a b c").changed("c").gone("c").back("a b", NOW_S - 0.1)
    assert scene.waits_until() == NOW_S - 0.1 + SETTLE_S
    assert scene.closed_world(NOW_S + 0.1) == "a b"


def test_a_member_that_has_finished_is_not_waited_for() -> None:
    """Nor does it get a seat, then or later; what the others wait for says so."""
    scene = Scene(1, 4, members="a b c").changed(waiters="b").finished("a").back("b")
    decision = scene.close()
    assert isinstance(decision, KeepWaiting)
    assert decision.until_s == scene.opened_s + REJOIN_S
    assert "not back yet: c (host-c); a has finished and will not rejoin" in decision.reason
    decision = scene.back("c", NOW_S - 1).close()
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["c", "b"]
    assert (decision.expelled, decision.finished) == ((), ("a",))

    later = Scene(1, 4, members="c b", at=6, expelled="a").new("a", arrived_for=5).finished("a")
    assert later.changed(waiters="b").back("b c").closed_world() == "c b"


def test_those_that_have_finished_make_no_world_large_enough() -> None:
    scene = Scene(2, 4, members="a b").changed(waiters="b").finished("a").back("b")
    assert scene.waits_until(NOW_S + 1e6) is None
    assert scene.new("c").closed_world() == "b c"  # rank 0 is a survivor's that still works


def test_a_newcomer_begins_where_all_survivors_have_finished() -> None:
    """As nobody will come who has more; nor are those that have finished heirs to rank 0."""
    decision = Scene(1, 4, members="a b").changed("b").gone("b").finished("a").new("c").close()
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["c"]
    assert decision.heirs == ()


def test_the_settle_time_begins_again_with_each_arrival() -> None:
    scene = Scene(2, 4, members="a b c").changed("c").gone("c").back("a b", NOW_S - 0.1)
    assert scene.new("d", NOW_S).waits_until() == NOW_S + SETTLE_S


def test_a_stream_of_newcomers_cannot_put_the_round_off_beyond_the_last_call() -> None:
    scene = Scene(2, 9, members="a b c").changed("c").gone("c")
    scene.opened_s = NOW_S - LAST_CALL_S
    scene.back("a b", NOW_S - LAST_CALL_S).new("d", NOW_S)
    assert scene.closed_world() == "a b d"


def test_a_live_member_that_is_not_back_is_waited_for_until_the_rejoin_timeout() -> None:
    """It counts from when the round was opened; the last call is for newcomers only."""
    scene = Scene(2, 4, members="a b c d").changed("d").gone("d").back("a b", NOW_S - 1)
    decision = scene.close()
    assert isinstance(decision, KeepWaiting)
    assert decision.until_s == scene.opened_s + REJOIN_S
    assert "not back yet: c (host-c)" in decision.reason
    assert lost("d", "lease expired") in decision.reason
    closed = scene.close(scene.opened_s + REJOIN_S)
    assert isinstance(closed, Close)
    assert closed.expelled == ("c",)


def test_a_full_round_still_waits_for_live_members() -> None:
    scene = Scene(2, 3, members="a b c").changed("", "x").back("a b").new("x")
    assert scene.waits_until() == scene.opened_s + REJOIN_S
    assert scene.back("c").closed_world() == "a b c"


def test_newcomers_alone_form_no_world_while_a_survivor_is_on_its_way_back() -> None:
    scene = Scene(1, 3, members="a").changed("", "x y").new("x y", NOW_S - 60)
    scene.opened_s = NOW_S - 60
    assert scene.waits_until() == NOW_S + 60
    assert scene.back("a").closed_world() == "a x y"


def test_live_members_of_a_large_world_whose_names_are_not_known_are_waited_for() -> None:
    scene = Scene(1, 4, members="nobody~0 b").gone("nobody~0").slices()
    scene.new("a", NOW_S - 1, arrived_for=5).changed("b").gone("b").new("x")
    assert scene.waits_until() == scene.opened_s + REJOIN_S


def test_what_can_be_closed_is_closed_before_the_leader_gives_up() -> None:
    for scene in (
        Scene(2, 4).new("a b"),
        Scene(2, 4, members="a b c").changed("c").back("a b"),
    ):
        scene.give_up_s = NOW_S + 3
        assert scene.waits_until() == NOW_S + 3
        assert scene.closed_world(NOW_S + 3) == "a b"


def test_a_world_too_small_is_not_closed_when_the_leader_gives_up() -> None:
    scene = Scene(2, 4).new("a")
    scene.give_up_s = NOW_S + 3
    assert scene.waits_until(NOW_S + 4) is None


# --- who has a claim to rank 0 --------------------------------------------------------------------


def test_members_left_out_of_a_world_of_newcomers_are_remembered_as_its_heirs() -> None:
    scene = Scene(1, 3, members="a b").changed("", "x").new("x")
    closed = scene.close(NOW_S + REJOIN_S)
    assert isinstance(closed, Close)
    assert closed.expelled == closed.heirs == ("a", "b")


def test_a_world_with_a_survivor_has_no_heirs() -> None:
    scene = Scene(1, 3, members="a b").changed("", "x").new("x").back("b")
    closed = scene.close(NOW_S + REJOIN_S)
    assert isinstance(closed, Close)
    assert (closed.expelled, closed.heirs) == (("a",), ())


def test_an_heir_that_is_back_gets_rank_0() -> None:
    """What the members have got they began without it, perhaps from an empty disk."""
    scene = Scene(1, 3, members="x y", expelled="a b", heirs="a b").changed("", "b")
    scene.back("x y").new("a", arrived_for=4).new("b")
    closed = scene.close()
    assert isinstance(closed, Close)
    assert [node.node_id for node in closed.world] == ["b", "y", "x"]
    assert (closed.expelled, closed.heirs) == (("a",), ())


def test_the_claim_of_heirs_lasts_while_they_live() -> None:
    scene = Scene(1, 2, members="x", expelled="a b", heirs="a b").changed("", "z")
    scene.back("x").new("a", arrived_for=4).new("z")
    closed = scene.close()
    assert isinstance(closed, Close)
    assert [node.node_id for node in closed.world] == ["x", "z"]
    assert closed.heirs == ("a",)


def test_when_all_heirs_are_gone_the_members_have_the_claim() -> None:
    scene = Scene(1, 2, members="x", expelled="a", heirs="a").changed("", "z").new("z")
    closed = scene.close(NOW_S + REJOIN_S)
    assert isinstance(closed, Close)
    assert closed.heirs == ("x",)


def test_who_trained_a_later_world_than_the_record_tells_of_does_not_begin_again() -> None:
    """etcd went back to a world of which only others are there: they are no heirs of the next."""
    scene = Scene(1, 3, members="a b").changed("", "x y").new("x").new("y", trained=70)
    closed = scene.close(NOW_S + REJOIN_S)
    assert isinstance(closed, Close)
    assert [node.node_id for node in closed.world] == ["y", "x"]
    assert (closed.expelled, closed.heirs) == (("a", "b"), ())


def test_an_heir_that_came_back_before_etcd_went_back_has_no_claim_any_more() -> None:
    scene = Scene(1, 3, members="x", expelled="a", heirs="a").changed("", "a b")
    scene.new("x", trained=80).new("a", trained=70)
    closed = scene.close()
    assert isinstance(closed, Close)
    assert closed.world[0].node_id == "x"


def test_a_member_declared_lost_that_came_back_in_the_same_moment_is_expected() -> None:
    """It hears of the change and arrives again; if it is too slow it is expelled, not a spare."""
    scene = Scene(2, 3, members="a b c").changed("c").back("a b")
    decision = scene.close(NOW_S + REJOIN_S)
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["a", "b"]
    assert decision.expelled == ("c",)


def test_members_that_are_back_are_preferred_to_spares_and_newcomers() -> None:
    scene = Scene(1, 2, members="a b").spare("s").new("n").changed("", "n")
    assert scene.back("a b").closed_world() == "a b"


def test_a_spare_that_waited_longer_is_preferred_to_a_newcomer() -> None:
    scene = Scene(1, 2, members="a b").spare("s").new("n").changed("b").gone("b").back("a")
    assert scene.closed_world() == "a s"


def test_an_expelled_node_is_no_spare_until_it_arrives_again() -> None:
    scene = Scene(2, 3, members="a b", expelled="x").changed("b").gone("b").back("a")
    scene.new("x", arrived_for=4)
    assert scene.waits_until(NOW_S + 1e6) is None
    assert scene.new("x").closed_world(NOW_S + LAST_CALL_S) == "a x"


def test_an_expelled_node_stays_expelled_in_the_next_round() -> None:
    scene = Scene(1, 3, members="a b", expelled="x").changed("b").gone("b").back("a")
    decision = scene.new("x", arrived_for=4).close()
    assert isinstance(decision, Close)
    assert decision.expelled == ("x",)


def test_a_member_that_leaves_is_not_waited_for() -> None:
    for scene, how in (
        (Scene(2, 3, members="a b c").leaving("c"), left("c", "SIGTERM")),
        (Scene(2, 3, members="a b c").left("c"), left("c", "")),
    ):
        decision = scene.changed("c").back("a b", NOW_S - 0.1).close()
        assert isinstance(decision, KeepWaiting)
        assert decision.until_s == NOW_S - 0.1 + SETTLE_S
        assert how in decision.reason


# --- closed jobs ----------------------------------------------------------------------------------


def test_a_closed_job_is_nobodys_next_round() -> None:
    scene = Scene(2, 2, members="a b").spare("s").closed()
    decision = scene.close(NOW_S + 1e6)
    assert decision == KeepWaiting(None, "")


def test_a_new_run_begins_while_the_marker_of_the_old_one_stands() -> None:
    scene = Scene(2, 2, members="a b").spare("s").closed().new("c d")
    decision = scene.close()
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["c", "d"]
    assert set(decision.expelled) == {"a", "b", "s"}


def test_who_is_still_there_when_the_marker_has_gone_waits_for_no_new_run() -> None:
    scene = Scene(2, 2, members="a b", at=1).spare("s").closed().marker_gone()
    assert isinstance(scene.close(NOW_S + 1e6), KeepWaiting)
    decision = scene.new("c d").close()
    assert isinstance(decision, Close)
    assert [node.node_id for node in decision.world] == ["c", "d"]
    assert set(decision.expelled) == {"a", "b", "s"}


def test_a_new_run_does_not_skip_the_last_call() -> None:
    scene = Scene(2, 4, members="a b").gone("a b").closed().new("c d", NOW_S - 1)
    assert scene.waits_until() == NOW_S - 1 + LAST_CALL_S

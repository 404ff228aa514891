"""What a waiting node says that it waits for."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.wait_text import (
    LineTimes,
    is_news,
    tell_arrived,
    tell_round,
    tell_seat,
    tell_world,
)
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import NOW_S, Scene


def round_line(scene: Scene) -> str:
    return tell_round(scene.control, scene.nodes, len(scene.nodes.present), scene.settings)


def test_a_spare_is_told_that_all_seats_are_taken() -> None:
    assert tell_seat("default", Scene(4, 4, members="a b c d").control) == (
        "for a seat: job 'default' runs with all 4 of 4 nodes; is another job using this id?"
    )
    assert (
        "4 of 2 to 5 (in units of 2) nodes; a world with this one would be no larger"
        in tell_seat("j", Scene(2, 5, 2, members="a b c d").control)
    )


def test_the_nodes_of_a_first_round_are_named() -> None:
    assert round_line(Scene(3, 3).new("a b")) == "for round 1: 2 of 3 nodes (a, b)"
    assert round_line(Scene(3, 3)) == "for round 1: 0 of 3 nodes"


def test_a_last_call_is_explained() -> None:
    line = round_line(Scene(1, 3).new("a"))
    assert line == "for round 1: 1 of 1 to 3 nodes (a); more may come until the last call is over"


def test_who_is_missing_since_the_last_round_is_named() -> None:
    scene = Scene(4, 4, members="a b c d").changed("d").gone("d").back("a b", NOW_S)
    assert round_line(scene) == (
        "for round 6: 2 of 4 nodes (a, b); missing since round 5: c (host-c, not back yet), "
        "d (lease expired)"
    )


def test_who_has_finished_is_named_but_not_as_missing() -> None:
    scene = Scene(3, 4, members="a b c").changed().finished("a").back("b", NOW_S)
    assert round_line(scene) == (
        "for round 6: 1 of 3 to 4 nodes (b); missing since round 5: c (host-c, not back yet); "
        "a has finished and will not rejoin"
    )


def test_a_peers_long_reason_leaves_room_for_the_others() -> None:
    scene = Scene(4, 4, members="a b c d").changed("c d").gone("c d").back("a b", NOW_S)
    control = scene.control
    assert control.change is not None
    said = replace(control.change, lost={"c": "x" * 5_000, "d": "killed"})
    line = tell_round(
        replace(control, change=said), scene.nodes, len(scene.nodes.present), scene.settings
    )
    assert line.endswith("d (killed)")
    assert len(line) < 500


def test_nodes_with_other_settings_are_named() -> None:
    scene = Scene(2, 2).new("a").new("x", settings=JobSettings(3, 3))
    assert round_line(scene) == (
        "for round 1: 1 of 2 nodes (a); not counting x, started with other settings"
    )


def test_many_missing_nodes_are_counted() -> None:
    many = " ".join(f"n{i}" for i in range(20))
    line = round_line(Scene(20, 20, members=many).changed().gone(many))
    assert line.endswith("n7 (gone) and 12 more")


def test_of_a_large_world_only_the_number_is_told() -> None:
    assert tell_round(Scene(300, 400).control, None, 299, JobSettings(300, 400)) == (
        "for round 1: 299 of 300 to 400 nodes are there"
    )


def arrived(scene: Scene) -> tuple[tuple[str, ...], str]:
    return tell_arrived(scene.control, scene.nodes, scene.settings)


def test_who_is_still_at_work_has_not_arrived() -> None:
    scene = Scene(3, 4, members="a b c d").changed("d").gone("d").back("b a", NOW_S).new("e")
    assert arrived(scene) == (
        ("a", "b", "e"),
        "3 of at least 3 nodes arrived (a, b, e); missing since round 5: c (host-c, not back yet), "
        "d (lease expired)",
    )


def test_who_arrived_for_a_first_round_is_told_with_who_does_not_count() -> None:
    assert arrived(Scene(2, 2)) == ((), "0 of at least 2 nodes arrived (none)")
    assert arrived(Scene(2, 2).new("a").new("x", settings=JobSettings(3, 3))) == (
        ("a",),
        "1 of at least 2 nodes arrived (a); not counting x, started with other settings",
    )


def test_members_of_a_large_world_that_are_not_known_have_not_arrived() -> None:
    """A part of their names is gone from etcd: whoever is there may be one of them, at work."""
    scene = Scene(3, 3, members="a nobody~1 nobody~2").slices().gone("nobody~1 nobody~2")
    scene = scene.new("b", arrived_for=5).back("a")
    assert arrived(scene) == (("a",), "1 of at least 3 nodes arrived (a)")


def test_who_has_met_nobody_yet_says_where_it_looks() -> None:
    """The others may have been given another etcd, prefix or id: two logs show which."""
    where = "http://etcd-1:2379, /rdzv_etcd"
    asks = f"; are the others started, with the same --rdzv-id, etcd and prefix ({where})?"
    first, short = Scene(2, 2).new("a"), Scene(2, 2, members="a b").changed("b").gone("b")
    told = [
        tell_round(scene.control, scene.nodes, 1, scene.settings, where) for scene in (first, short)
    ]
    assert told[0] == f"for round 1: 1 of 2 nodes (a){asks}"
    assert asks not in told[1]
    assert tell_round(first.control, None, 299, JobSettings(300, 400), where).endswith(asks)
    assert not tell_round(first.control, None, 300, JobSettings(300, 400), where).endswith(asks)


def test_a_world_is_told_with_what_has_changed() -> None:
    first = Seat(1, 2, 4, "gpu-0", 29500, 7, ("a", "b", "c", "d"), 1)
    second = replace(first, round=2, rank=1, size=3, epoch=9)
    assert tell_world(first, None, 0.5) == (
        "round 1: rank 2 of 4 after 0.50 s, master gpu-0:29500, epoch 7"
    )
    assert tell_world(second, first, 0.131, "d left: SIGTERM").startswith(
        "round 2: rank 1 of 3 (was 2 of 4; d left: SIGTERM) after 0.13 s, master"
    )
    assert [is_news(first, None, "d waiting"), is_news(second, first, "")] == [False, True]
    assert [is_news(first, first, ""), is_news(first, first, "d waiting")] == [False, True]


def test_waits_are_told_soon_and_then_rarely() -> None:
    lines, told = LineTimes(), []
    for waited_s in range(700):
        if lines.is_due(waited_s):
            told.append(waited_s)
    assert told == [10, 30, 60, 360, 660]


def test_a_node_that_was_stopped_tells_one_line_instead_of_several() -> None:
    lines = LineTimes()
    assert [lines.is_due(waited_s) for waited_s in (9.9, 400.0, 401.0, 660.0)] == [
        False, True, False, True,
    ]  # fmt: skip

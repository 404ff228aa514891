"""What a waiting node says that it waits for."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.core.wait_text import tell_round, tell_seat
from rdzv_etcd.settings import JobSettings
from tests.core.scenes import NOW_S, Scene


def round_line(scene: Scene) -> str:
    return tell_round(scene.control, scene.nodes, len(scene.nodes.present), scene.settings)


def test_a_spare_is_told_that_all_seats_are_taken() -> None:
    assert tell_seat("default", Scene(4, 4, members="a b c d").control) == (
        "for a seat: job 'default' runs with all 4 of 4 nodes; is another job using this id?"
    )
    assert "runs with 4 of 2 to 5 (in units of 2) nodes" in tell_seat(
        "j", Scene(2, 5, 2, members="a b c d").control
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

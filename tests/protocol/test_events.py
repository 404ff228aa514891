"""The events between two views of a job: each once, whatever lies between the views."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from rdzv_etcd.protocol.events import (
    JobEnded,
    JobEvent,
    JobView,
    Joined,
    NodeLeft,
    NodeLost,
    NodeMissing,
    WorldFormed,
    WorldOver,
    happened,
    view_after,
)
from rdzv_etcd.protocol.model import Accusation, Change, Closure, Control, Ended, Nodes
from rdzv_etcd.world_change import Finished, Left, Lost
from tests.protocol.scenes import NOW_S, Scene

GONE = Accusation("b", "its process exited", is_certain=True, after_ms=4)


class Story:
    """Views one after the other, a second apart, and the events of each."""

    def __init__(self, scene: Scene | None = None) -> None:
        self.view: JobView | None = None
        self.at_s = NOW_S
        if scene is not None:
            assert self.then(scene) == []

    def then(self, scene: Scene, touched: Iterable[str] | None = None) -> list[JobEvent]:
        return self.sees(scene.control, scene.nodes, touched)

    def sees(
        self, control: Control, nodes: Nodes, touched: Iterable[str] | None = None
    ) -> list[JobEvent]:
        before, self.at_s = self.view, self.at_s + 1.0
        self.view = view_after(before, control, nodes, at_s=self.at_s, wall_s=0.0, touched=touched)
        return [] if before is None else happened(before, self.view)


def world(members: str = "a b c", at: int = 5) -> Scene:
    return Scene(1, 4, members=members, at=at)


def next_world(members: str, at: int = 6) -> Scene:
    scene = world(members, at)
    scene.control = replace(scene.control, round_revision=90)
    return scene


def test_an_end_that_a_restored_etcd_shows_again_is_no_event() -> None:
    def ended(*epochs: int) -> tuple[Ended, ...]:
        closure = Closure("a", "done", True, 0.0)
        return tuple(Ended(f"run {epoch}", closure, epoch) for epoch in epochs)

    def seen(at: Scene, *epochs: int) -> tuple[Control, Nodes]:
        return replace(at.control, ended=ended(*epochs), ended_revision=7), at.nodes

    nobody = Scene()
    story = Story()
    story.sees(*seen(nobody, 20, 30))
    assert story.sees(*seen(nobody)) == []  # wiped, or forgotten
    assert story.sees(*seen(nobody, 10, 20)) == []  # restored
    assert story.sees(*seen(nobody, 20, 30)) == []
    assert [type(event) for event in story.sees(*seen(nobody, 20, 30, 40))] == [JobEnded]
    story = Story(next_world("a b"))  # its epoch is 90
    assert story.sees(*seen(next_world("a b"), 50)) == []
    events = story.sees(*seen(next_world("a b").closed(), 50, 90))
    assert [type(event) for event in events].count(JobEnded) == 1


def test_nothing_has_happened() -> None:
    assert Story(world()).then(world()) == []


@pytest.mark.parametrize("touched", [None, "abc"])
def test_nodes_join_and_form_the_first_world(touched: str | None) -> None:
    story = Story(Scene(1, 4))
    arrived = Scene(1, 4).new("a b")
    assert story.then(arrived, touched) == [Joined("a"), Joined("b")]
    assert story.then(world("a b", 1), touched) == [WorldFormed(1, 50, 2, ("a", "b"), 1.0)]


def test_an_observer_that_began_later_does_not_know_how_long_the_world_took() -> None:
    story = Story(Scene(1, 4).new("a"))
    (formed,) = story.then(world("a", 1))
    assert formed == WorldFormed(1, 50, 1, ("a",), None)


@pytest.mark.parametrize("touched", [None, "c"])
def test_a_member_is_missing_before_it_is_lost(touched: str | None) -> None:
    story = Story(world())
    scene = world().gone("c")
    assert story.then(scene, touched) == [NodeMissing("c", "lease expired")]
    lost = Lost({"c": "lease expired"})
    assert story.then(scene.changed(lost="c"), [] if touched else None) == [
        NodeLost("c", "lease expired", None),
        WorldOver(5, 50, lost),
    ]
    assert story.then(next_world("a b"), [] if touched else None) == [
        WorldFormed(6, 90, 2, ("a", "b"), 1.0)
    ]


def test_a_member_that_was_only_missing_is_back() -> None:
    story = Story(world())
    assert story.then(world().gone("c")) == [NodeMissing("c", "lease expired")]
    assert story.then(world()) == [Joined("c")]


def test_how_long_a_process_had_been_gone_when_it_was_declared_lost() -> None:
    story = Story(world())
    scene = world().gone("c").accused("c", GONE, -2.0)
    assert story.then(scene) == [NodeMissing("c", "its process exited")]
    lost, _ = story.then(scene.changed(lost="c"))
    assert isinstance(lost, NodeLost)
    assert lost.after_s == pytest.approx(1.004)


def test_changes_seen_at_once_are_events_in_their_order() -> None:
    """Nothing was seen between the world and the next one but one."""
    story = Story(world())
    assert story.then(next_world("a b d", 7).gone("b")) == [
        NodeMissing("b", "lease expired"),
        NodeLost("c", "lease expired", None),
        Joined("d"),
        WorldOver(5, 50, None),
        WorldFormed(7, 90, 3, ("a", "b", "d"), None),
    ]


@pytest.mark.parametrize("touched", [None, "c"])
def test_a_member_that_leaves_is_one_event(touched: str | None) -> None:
    story = Story(world())
    scene = world().leaving("c")
    assert story.then(scene, touched) == [NodeLeft("c", "SIGTERM")]
    assert story.then(world().left("c"), touched) == []
    left = world().left("c")
    left.control = replace(
        left.control, change=Change("run", 5, (), {"c": "left: SIGTERM"}), change_revision=60
    )
    assert story.then(left, touched and []) == [WorldOver(5, 50, Left({"c": "SIGTERM"}))]
    assert story.then(next_world("a b"), touched and []) == [WorldFormed(6, 90, 2, ("a", "b"), 1.0)]


def test_a_spare_that_vanishes_is_lost_at_once() -> None:
    story = Story(world().new("d"))
    assert story.then(world()) == [NodeLost("d", "lease expired", None)]


def test_members_beyond_those_that_a_change_names() -> None:
    story = Story(world())
    scene = world().gone("b c").changed(lost="b")
    assert scene.control.change is not None
    more = replace(scene.control.change, unnamed=1)
    events = story.sees(replace(scene.control, change=more), scene.nodes, [])
    assert events[:2] == [
        NodeLost("b", "lease expired", None),
        NodeLost("c", "lease expired", None),
    ]


def test_the_end_of_a_run_ends_its_world_and_its_nodes_leave() -> None:
    story = Story(world("a b"))
    over = WorldOver(5, 50, Finished("a", "done"))
    assert story.then(world("a b").closed()) == [over, JobEnded(True, "a", "done")]
    assert story.then(world("a b").closed().gone("a b")) == [
        NodeLeft("a", "its run is over"),
        NodeLeft("b", "its run is over"),
    ]
    assert story.then(world("a b").closed().gone("a b").marker_gone()) == []


def test_an_end_that_was_missed_comes_before_the_world_of_the_next_run() -> None:
    story = Story(world("a b"))
    ended = world("a b").closed().control
    scene = next_world("a b", 1)
    assert scene.control.round is not None
    record = replace(scene.control.round, run="another")
    control = replace(scene.control, round=record, ended=ended.ended, ended_revision=80)
    assert story.sees(control, scene.nodes) == [
        WorldOver(5, 50, Finished("a", "done")),
        JobEnded(True, "a", "done"),
        WorldFormed(1, 90, 2, ("a", "b"), None),
    ]


def test_an_older_record_and_the_same_one_put_back_are_no_new_world() -> None:
    story = Story(world())
    gone, older = world(), world("a b", 4)
    gone.control = replace(gone.control, round=None, round_revision=0)
    older.control = replace(older.control, round_revision=40)
    assert [event for event in story.then(gone) if not isinstance(event, NodeMissing)] == []
    assert story.then(older.new("c")) == []
    back = world()
    assert back.control.round is not None
    record = replace(back.control.round, epoch_fixed=50, run="renamed")
    assert story.sees(replace(back.control, round=record, round_revision=99), back.nodes) == []


def test_the_names_in_a_large_world_may_not_be_known() -> None:
    story = Story(Scene(1, 4))
    (formed,) = [
        event for event in story.then(world("a nobody~1")) if isinstance(event, WorldFormed)
    ]
    assert (formed.size, formed.members) == (2, ())


def test_events_carry_when_they_were_observed() -> None:
    story = Story(Scene(1, 4))
    (joined,) = story.then(Scene(1, 4).new("a"))
    assert joined.at_s == story.at_s

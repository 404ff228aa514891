"""What a job is from moment to moment, and what has happened in between, all in one golden file:
the state as ``observe`` gives it, and each event with the words of ``rdzv-etcd watch``.

.venv/bin/python -m tests.protocol.test_job      writes it
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rdzv_etcd.cli.watch import lines_of
from rdzv_etcd.names import Names
from rdzv_etcd.protocol.events import JobEvent, JobView, WorldOver, happened, view_after
from rdzv_etcd.protocol.job_state import JobState, NodeState, is_gone, job_state
from rdzv_etcd.protocol.model import (
    Accusation,
    Closure,
    Control,
    Ended,
    Leader,
    Nodes,
    Unreadable,
)
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import NOW_S, Scene

GOLDEN = Path(__file__).parent / "job.txt"
GONE = Accusation("b", "its process exited", is_certain=True, after_ms=400)
OTHER = JobSettings(7, 7)
DONE = Closure("a", "done", True, 0.0)

Moment: TypeAlias = "tuple[str, Scene]"


def world(members: str = "a b c", at: int = 5) -> Scene:
    return Scene(1, 4, members=members, at=at)


def next_world(members: str, at: int = 6) -> Scene:
    return seen(world(members, at), round_revision=90)


def seen(scene: Scene, **control: Any) -> Scene:
    """With other control keys."""
    scene.control = replace(scene.control, **control)
    return scene


def of_run(run: str, scene: Scene, epoch_fixed: int | None = None) -> Scene:
    assert scene.control.round is not None
    return seen(scene, round=replace(scene.control.round, run=run, epoch_fixed=epoch_fixed))


def ended(scene: Scene, *epochs: int) -> Scene:
    """etcd remembers runs that ended at these epochs."""
    runs = tuple(Ended(f"run {epoch}", DONE, epoch) for epoch in epochs)
    return seen(scene, ended=runs, ended_revision=7)


STORIES: dict[str, list[Moment]] = {
    "a job begins": [
        ("nobody is there", Scene(2, 4)),
        ("a and b arrive", Scene(2, 4).new("a b")),
        ("their world is formed", world("a b", 1)),
        ("nothing happens", world("a b", 1)),
    ],
    "an observer that begins later does not know how long a world took": [
        ("a has arrived", Scene(1, 4).new("a")),
        ("its world is formed", world("a", 1)),
    ],
    "a member is missing before it is lost": [
        ("all work", world()),
        ("c is gone", world().gone("c")),
        ("it is declared lost", world().gone("c").changed(lost="c")),
        ("the others form a world", next_world("a b")),
    ],
    "a member that was only missing is back": [
        ("all work", world()),
        ("c is gone", world().gone("c")),
        ("c has put its presence back", world()),
    ],
    "how long a process had been gone when it was declared lost": [
        ("all work", world()),
        ("c is accused", world().gone("c").accused("c", GONE, -2.0)),
        ("and declared lost", world().gone("c").accused("c", GONE, -2.0).changed(lost="c")),
    ],
    "the accusation may be gone by then": [
        ("c is accused", world().gone("c").accused("c", GONE, -2.0)),
        ("it is declared lost", world().gone("c").changed(lost="c")),
    ],
    "a loss whose publication was not seen": [
        ("c is gone", world().gone("c")),
        ("the others form a world", next_world("a b")),
    ],
    "a member that was declared lost while it was there": [
        ("all work", world()),
        ("c is declared lost", seen(world().changed(lost="c"), change_revision=200)),
        ("it arrives again", world().changed(lost="c").back("c")),
    ],
    "a loss is worded as the leader has published it": [
        ("b is accused", world("a b").gone("b").accused("b", GONE, 0.1)),
        (
            "and published as expired; a is back, d leaves",
            world("a b c d").gone("b").accused("b", GONE, 0.1).back("a").changed(lost="b")
            .leaving("d"),
        ),
    ],
    "changes seen at once are events in their order": [
        ("all work", world()),
        ("the next world but one, without b already", next_world("a b d", 7).gone("b")),
    ],
    "a member that leaves is one event": [
        ("all work", world()),
        ("c announces that it leaves", world().leaving("c")),
        ("it goes", world().left("c")),
        ("the world is over", world().left("c").changed(left="c")),
        ("the others form a world", next_world("a b")),
    ],
    "it may die before it has gone": [
        ("c has announced that it leaves", world().leaving("c")),
        ("its presence is gone", world().gone("c")),
    ],
    "a spare that vanishes is lost at once": [
        ("d waits", world().new("d")),
        ("it is gone", world()),
    ],
    "members beyond those that a change names": [
        ("all work", world()),
        ("two are gone", world().gone("b c")),
        ("the change names one of them", world().gone("b c").changed(lost="b", unnamed=1)),
    ],
    "the end of a run ends its world, and its nodes leave": [
        ("all work", world("a b")),
        ("a has finished the job", world("a b").closed()),
        ("the nodes go", world("a b").closed().gone("a b")),
        ("the marker goes", world("a b").closed().gone("a b").marker_gone()),
    ],
    "nodes of a run that is over were there before those of the next one": [
        ("nobody is there", Scene(1, 4)),
        ("a arrives", Scene(1, 4).new("a")),
        ("it works", world("a")),
        ("its run ends", world("a").closed()),
        ("a world of the next run", of_run("another", next_world("a b", 1))),
    ],
    "a job fails": [
        ("it is closed", world("a b").closed(succeeded=False)),
        ("all of it goes", world("a b").closed(succeeded=False).gone("a b").marker_gone()),
    ],
    "an end that was missed comes before the world of the next run": [
        ("all work", world("a b")),
        (
            "another run works",
            seen(
                of_run("another", next_world("a b", 1)),
                ended=world("a b").closed().control.ended,
                ended_revision=80,
            ),
        ),
    ],
    "an end that a restored etcd shows again is no event": [
        ("two runs have ended", ended(Scene(), 20, 30)),
        ("etcd is wiped, or has forgotten them", Scene()),
        ("it is restored", ended(Scene(), 10, 20)),
        ("the members have put the rest back", ended(Scene(), 20, 30)),
        ("another run has ended", ended(Scene(), 20, 30, 40)),
    ],
    "an older end, which shows when a run ends": [
        ("all work at epoch 90", next_world("a b")),
        ("an end at 50 shows", ended(next_world("a b"), 50)),
        ("the run ends", ended(next_world("a b").closed(), 50, 90)),
    ],
    "an older record and the same one put back are no new world": [
        ("all work", world()),
        ("etcd has lost the record", seen(world(), round=None, round_revision=0)),
        ("it shows an older one", seen(world("a b", 4), round_revision=40).new("c")),
        ("the record is put back", seen(of_run("renamed", world(), 50), round_revision=99)),
    ],
    "members of a large world whose names are not known are not missing": [
        ("nobody is there", Scene(1, 4)),
        ("a world of two", world("a nobody~1").gone("nobody~1").slices()),
    ],
    "members that are missing, and spares": [
        ("max is 2", Scene(1, 2, members="b a").gone("a").spare("x y")),
        ("units of 1", Scene(1, 4, 1, members="a b").new("x y z")),
        ("units of 2", Scene(1, 4, 2, members="a b").new("x y z")),
        ("units of 3", Scene(1, 4, 3, members="a b").new("x y z")),
        ("before the first world others may come to fill a unit", Scene(2, 4, 2).new("a")),
    ],
    "spares where segments are whole": [
        ("segments of 2", Scene(2, 6, segment=2, members="a1 a2").new("b1 c1 c2 b2 d1 d2")),
        ("one of each has come", Scene(2, 2, segment=2).new("a1 b1 c1")),
    ],
    "a member that has finished is neither at work nor waiting": [
        ("a has finished, c waits", Scene(1, 2, members="a b").finished("a").new("c")),
        ("b is back", Scene(1, 2, members="a b").finished("a").changed(waiters="b").back("b")),
        (
            "b works on alone",
            Scene(1, 2, members="b", at=6, expelled="a").new("a", arrived_for=5).finished("a"),
        ),
    ],
    "strangers and foreign keys": [
        ("x has other settings", world("a").new("x", settings=OTHER)),
    ],
    "after the end a new run may have other settings": [
        ("a is gone, x waits", world("a").closed().gone("a").new("x", settings=OTHER)),
        (
            "x leads",
            seen(
                world("a").closed().gone("a").new("x", settings=OTHER),
                leader=Leader("x", OTHER),
                leader_revision=102,
            ),
        ),
    ],
}  # fmt: skip


def node_text(node: NodeState) -> str:
    return f"{node.node_id} {node.role.value}" + ("" if node.rank is None else f" {node.rank}")


def state_text(state: JobState) -> str:
    parts = [state.stage.value]
    if state.round:
        parts.append(f"round {state.round} at epoch {state.epoch} of {' '.join(state.members)}")
    if state.settings is not None:
        wanted = state.settings
        parts.append(f"{wanted.min_nodes} to {wanted.max_nodes} by {wanted.node_unit}")
    parts += map(node_text, state.nodes)
    parts += [f"{node_id} missing ({how})" for node_id, how in state.missing.items()]
    for name in ("waiting", "spares"):
        if node_ids := getattr(state, name):
            parts.append(f"{name}: {' '.join(node_ids)}")
    if state.change is not None:
        parts.append(f"over: {state.change}")
    for name, end in (("closed", state.closure), ("ended", state.last_end)):
        if end is not None:
            parts.append(f"{name} by {end.by}: {end.reason}")
    return "; ".join(parts)


def event_text(event: JobEvent) -> str:
    text = f"{type(event).__name__}: {'; '.join(lines_of(event, Names()))}"
    return f"{text} (epoch {event.epoch})" if isinstance(event, WorldOver) else text


def differ(before: Nodes, after: Nodes) -> set[str]:
    """The nodes in whose places there is another value."""
    kinds = ("present", "left", "accused", "unreadable")
    return {
        node_id
        for kind in kinds
        for node_id in {**getattr(before, kind), **getattr(after, kind)}
        if getattr(before, kind).get(node_id) != getattr(after, kind).get(node_id)
    }


def events_of(moments: Iterable[Moment], *, touched: bool) -> Iterator[list[JobEvent]]:
    """The events of each moment, a second after the one before; with ``touched`` it is known which
    nodes may have changed."""
    before: JobView | None = None
    for number, (_, scene) in enumerate(moments):
        nodes = scene.nodes
        which = differ(before.nodes, nodes) if touched and before is not None else None
        at_s = NOW_S + 1.0 + number
        after = view_after(before, scene.control, nodes, at_s=at_s, wall_s=0.0, touched=which)
        yield [] if before is None else happened(before, after)
        before = after


def lines() -> Iterator[str]:
    for name, moments in STORIES.items():
        yield f"# {name}"
        for (what, scene), events in zip(moments, events_of(moments, touched=False), strict=True):
            yield f"{what}:"
            yield f"    {state_text(job_state('job', scene.control, scene.nodes))}"
            yield from (f"    {event_text(event)}" for event in events)


def test_states_and_events_are_those_of_the_golden_file() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize("story", STORIES)
def test_where_only_some_nodes_may_have_changed_the_events_are_the_same(story: str) -> None:
    moments = STORIES[story]
    assert [*events_of(moments, touched=True)] == [*events_of(moments, touched=False)]


def test_events_carry_when_they_were_observed() -> None:
    _, (joined, *_), *_ = events_of(STORIES["a job begins"], touched=False)
    assert joined.at_s == NOW_S + 2.0


def test_a_job_of_which_etcd_knows_nothing_has_no_settings() -> None:
    state = job_state("job", Control(7), Nodes(7))
    assert (state_text(state), state.settings) == ("absent", None)


def test_a_foreign_key_in_the_place_of_a_node() -> None:
    scene = world("a")
    nodes = replace(scene.nodes, unreadable={"odd": Unreadable("it is not JSON", 3)})
    assert job_state("job", scene.control, nodes).unreadable == {"odd": "it is not JSON"}


@pytest.mark.parametrize(
    ("formed_at", "remembers", "ended_at", "gone"),
    [
        (0, False, 0, False),  # nothing is known of it
        (7, False, 0, True),
        (0, True, 0, True),  # its epochs are remembered, if its rounds are not
        (7, True, 9, False),  # it was closed
        (9, True, 7, True),  # a later run was not
    ],
)
def test_a_run_that_was_not_closed(
    formed_at: int, remembers: bool, ended_at: int, gone: bool
) -> None:
    runs = (Ended("run", DONE, 5),) if ended_at else ()
    control = Control(20, ended=runs, ended_revision=ended_at, epoch_lease=3 if remembers else 0)
    assert is_gone(control, Nodes(20), formed_at) is gone
    scene = world("a").gone("a")
    assert not is_gone(scene.control, scene.nodes, 99)  # its record will expire
    assert not is_gone(control, Scene(1, 4).new("b").nodes, formed_at)


def test_a_state_is_read_only_and_can_be_pickled() -> None:
    scene = world("a b").gone("b")
    state = job_state("job", scene.control, scene.nodes)
    assert pickle.loads(pickle.dumps(state)) == state
    with pytest.raises(TypeError):
        state.missing["a"] = "no"  # type: ignore[index]
    with pytest.raises(TypeError):
        state.nodes[0].data["a"] = 1  # type: ignore[index]


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")

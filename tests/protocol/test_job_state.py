"""What a job is at one moment."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from rdzv_etcd.protocol.job_state import JobState, Role, Stage, is_gone, job_state
from rdzv_etcd.protocol.model import Accusation, Closure, Control, Ended, Leader, Nodes, Unreadable
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import Lost
from tests.protocol.scenes import Scene


def state_of(scene: Scene) -> JobState:
    return job_state("job", scene.control, scene.nodes)


def roles(state: JobState) -> dict[str, Role]:
    return {node.node_id: node.role for node in state.nodes}


def test_a_job_that_is_not_there() -> None:
    state = job_state("job", Control(7), Nodes(7))
    assert (state.stage, state.round, state.members, state.nodes) == (Stage.ABSENT, 0, (), ())
    assert state.settings is None


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
    ended = (Ended("run", Closure("a", "done", True, 0.0), 5),) if ended_at else ()
    control = Control(20, ended=ended, ended_revision=ended_at, epoch_lease=3 if remembers else 0)
    assert is_gone(control, Nodes(20), formed_at) is gone
    scene = Scene(1, 4, members="a").gone("a")
    assert not is_gone(scene.control, scene.nodes, 99)  # its record will expire
    assert not is_gone(control, Scene(1, 4).new("b").nodes, formed_at)


def test_a_first_world_is_being_formed() -> None:
    state = state_of(Scene(3, 4).new("a b"))
    assert state.stage is Stage.FORMING
    assert roles(state) == {"a": Role.WAITER, "b": Role.WAITER}
    assert state.settings == JobSettings(3, 4, 1)
    assert state.waiting == ("a", "b")


def test_a_world_with_a_member_that_is_missing_and_a_spare() -> None:
    state = state_of(Scene(1, 2, members="b a").gone("a").spare("x y"))
    assert state.stage is Stage.WORKING
    assert state.members == ("b", "a")
    assert [(node.node_id, node.rank) for node in state.nodes] == [
        ("b", 0),
        ("x", None),
        ("y", None),
    ]
    assert roles(state) == {"b": Role.MEMBER, "x": Role.WAITER, "y": Role.SPARE}
    assert state.missing == {"a": "lease expired"}


@pytest.mark.parametrize(("unit", "spares"), [(1, ("z",)), (2, ("z",)), (3, ("y", "z"))], ids=str)
def test_a_node_that_waits_without_a_seat_is_a_spare(unit: int, spares: tuple[str, ...]) -> None:
    state = state_of(Scene(1, 4, unit, members="a b").new("x y z"))
    assert state.spares == spares
    assert state.waiting == ("x", "y", "z")


def test_before_the_first_world_others_will_come_to_fill_a_unit() -> None:
    assert state_of(Scene(2, 4, 2).new("a")).spares == ()


def test_a_member_that_has_finished_is_neither_at_work_nor_waiting() -> None:
    healthy = state_of(Scene(1, 2, members="a b").finished("a").new("c"))
    assert healthy.stage is Stage.WORKING
    assert roles(healthy) == {"a": Role.FINISHED, "b": Role.MEMBER, "c": Role.WAITER}
    over = state_of(Scene(1, 2, members="a b").finished("a").changed(waiters="b").back("b"))
    assert roles(over) == {"a": Role.FINISHED, "b": Role.RETURNING}
    assert over.waiting == ("b",)
    later = Scene(1, 2, members="b", at=6, expelled="a").new("a", arrived_for=5).finished("a")
    assert roles(state_of(later)) == {"a": Role.FINISHED, "b": Role.MEMBER}


def test_a_world_that_is_over() -> None:
    gone = Accusation("a", "its process exited", is_certain=True)
    scene = Scene(1, 4, members="a b c d").gone("b").accused("b", gone, 0.1).back("a")
    state = state_of(scene.changed(lost="b").leaving("d"))
    assert state.stage is Stage.CHANGING
    assert state.change == Lost({"b": "lease expired"})
    assert roles(state) == {"a": Role.RETURNING, "c": Role.MEMBER, "d": Role.LEAVING}
    assert state.missing == {"b": "lease expired"}  # as the leader has published it
    assert state_of(Scene(1, 4, members="a b").gone("b").accused("b", gone, 0.1)).missing == {
        "b": "its process exited"
    }


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_closed_job(succeeded: bool) -> None:
    scene = Scene(1, 4, members="a b").closed(succeeded=succeeded)
    state = state_of(scene)
    assert state.stage is (Stage.FINISHED if succeeded else Stage.FAILED)
    assert state.closure is not None
    assert state.closure == state.last_end
    assert (state.round, state.epoch) == (5, 50)  # the world's, not the marker's
    assert state_of(scene.marker_gone().gone("a b")).stage is Stage.ABSENT


def test_after_the_end_a_new_run_may_have_other_settings() -> None:
    others = JobSettings(7, 7, 1)
    scene = Scene(1, 4, members="a").closed(succeeded=True).gone("a").new("x", settings=others)
    assert state_of(scene).settings == JobSettings(1, 4, 1)
    control = replace(scene.control, leader=Leader("x", others), leader_revision=102)
    state = job_state("job", control, scene.nodes)
    assert (state.settings, roles(state)) == (others, {"x": Role.WAITER})


def test_strangers_and_foreign_keys() -> None:
    scene = Scene(1, 4, members="a").new("x", settings=JobSettings(7, 7, 1))
    assert roles(state_of(scene)) == {"a": Role.MEMBER, "x": Role.STRANGER}
    nodes = replace(scene.nodes, unreadable={"odd": Unreadable("it is not JSON", 3)})
    assert job_state("job", scene.control, nodes).unreadable == {"odd": "it is not JSON"}


def test_a_member_whose_name_is_not_known_is_not_called_missing() -> None:
    state = state_of(Scene(1, 4, members="a nobody~1").gone("nobody~1").slices())
    assert state.members == ("a", "nobody~1")
    assert state.missing == {}


def test_a_state_is_read_only_and_can_be_pickled() -> None:
    state = state_of(Scene(1, 4, members="a b").gone("b"))
    assert pickle.loads(pickle.dumps(state)) == state
    with pytest.raises(TypeError):
        state.missing["a"] = "no"  # type: ignore[index]
    with pytest.raises(TypeError):
        state.nodes[0].data["a"] = 1  # type: ignore[index]

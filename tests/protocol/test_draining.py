"""Which members stop for a drain, and what the drained node announces and does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.describe import why_drained
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Closure, Control, Drain, NodeInfo
from rdzv_etcd.protocol.steps import Arrive, End, Enter, Leave, drain_to_announce, joining_step
from rdzv_etcd.protocol.world_end import should_yield
from tests.protocol.scenes import Scene

EPOCH = 50
WISH = Drain("an operator", "maintenance")
ANNOUNCED = replace(WISH, epoch=EPOCH)
DONE = Closure("b", "done", True, 0.0)
SCENE = Scene(members="a b")


def member(**state: object) -> Member:
    """Node ``a`` of the world of the scene."""
    record = SCENE.control.round
    assert record is not None
    made = Member("a", Phase.MEMBER, record=replace(record, epoch_fixed=EPOCH), epoch=EPOCH)
    for name, value in state.items():
        setattr(made, name, value)
    return made


def seeing(**drains: Drain) -> Control:
    return replace(SCENE.control, drains=drains)


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH, EPOCH + 1])
def test_members_stop_only_for_a_member_of_their_own_world(epoch: int) -> None:
    """A spare is in none, nor has a node announced one before it knows of the wish."""
    stops = should_yield(member(), seeing(b=replace(WISH, epoch=epoch)), EPOCH)
    assert stops is (epoch == EPOCH)
    assert not should_yield(member(), seeing(), EPOCH)


def test_the_node_itself_knows_before_the_others() -> None:
    drained = member(drain=WISH)
    assert should_yield(drained, seeing(), EPOCH)
    assert not should_yield(drained, seeing(), EPOCH - 1)  # it works there no more


def test_a_member_announces_once_in_which_world_it_is_drained() -> None:
    drained = member(drain=WISH)
    for seen in (seeing(), seeing(a=WISH)):
        assert drain_to_announce(drained, seen, session=7) == ANNOUNCED
    assert drain_to_announce(drained, seeing(a=ANNOUNCED), session=7) is None
    assert drain_to_announce(drained, seeing(), session=0) is None
    assert drain_to_announce(member(), seeing(), session=7) is None


@pytest.mark.parametrize(
    "state", [{"phase": Phase.WAITING}, {"closure": DONE}, {"evicted": True}], ids=str
)
def test_a_node_that_is_in_no_world_announces_nothing(state: dict[str, object]) -> None:
    assert drain_to_announce(member(drain=WISH, **state), seeing(), session=7) is None


def test_a_node_obeys_a_request_of_others_and_the_first_reason_stays() -> None:
    node = member()
    node.notice(seeing(b=WISH), 0.0)
    assert node.drain is None
    node.notice(seeing(a=WISH), 0.0)
    node.notice(seeing(), 0.0)  # its session, and the keys on it, were lost
    node.be_drained(Drain("a", "SIGUSR1"))
    assert node.drain == WISH


def test_a_drained_node_that_waits_leaves_unless_it_has_a_seat_or_the_job_ended() -> None:
    seated = Scene(members="a b c", at=6)
    for scene, state, step in (
        (SCENE, {"drain": WISH}, Leave(WISH)),
        (SCENE, {"drain": WISH, "closure": DONE}, End(DONE)),
        (seated, {"drain": WISH}, Enter()),
        (SCENE, {}, Arrive()),
    ):
        node = Member("c", Phase.WAITING, NodeInfo("c", "10.0.0.3", 3000, 6, scene.settings))
        for name, value in state.items():
            setattr(node, name, value)
        assert joining_step(node, scene.control, 7, scene.settings) == step


def test_why_names_the_operator_and_forges_no_line() -> None:
    assert why_drained(Drain("a~1~x", "SIGUSR1"), "a~1~x") == "drained: SIGUSR1"
    assert why_drained(WISH, "a~1~x") == "drained by an operator: maintenance"
    hostile = Drain("an operator", "x\n[job y] z: \x1b[2J" + 1000 * "y")
    text = why_drained(hostile, "a~1~x")
    assert text.isprintable()
    assert len(text) < 600

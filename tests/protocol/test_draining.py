"""Who stops for a drain, and what the node that is drained says and does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.draining import drain_to_announce, should_yield, why_drained
from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Closure, Control, Drain, NodeInfo
from rdzv_etcd.protocol.steps import Arrive, End, Enter, Leave, joining_step
from tests.protocol.scenes import Scene

EPOCH = 50
WISH = Drain("an operator", "maintenance")


def member_of(scene: Scene, name: str = "a") -> Member:
    record = scene.control.round
    assert record is not None
    member = Member(name, Phase.MEMBER)
    member.record, member.epoch = replace(record, epoch_fixed=EPOCH), EPOCH
    return member


def seeing(scene: Scene, **drains: Drain) -> Control:
    return replace(scene.control, drains=drains)


def test_members_stop_for_one_of_their_own_world() -> None:
    scene = Scene(members="a b")
    member = member_of(scene)
    assert not should_yield(member, seeing(scene), EPOCH)
    assert should_yield(member, seeing(scene, b=replace(WISH, epoch=EPOCH)), EPOCH)


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
def test_members_do_not_stop_for_a_spare_or_for_another_world(epoch: int) -> None:
    """Nor for a wish that its node has not heard of."""
    scene = Scene(members="a b")
    drain = replace(WISH, epoch=epoch)
    assert not should_yield(member_of(scene), seeing(scene, b=drain), EPOCH)


def test_the_node_itself_knows_before_the_others() -> None:
    scene = Scene(members="a b")
    member = member_of(scene)
    member.be_drained(WISH)
    assert should_yield(member, seeing(scene), EPOCH)
    assert not should_yield(member, seeing(scene), EPOCH - 1)  # it works there no more


def test_a_member_tells_the_others_in_which_world_once() -> None:
    scene = Scene(members="a b")
    member = member_of(scene)
    assert drain_to_announce(member, seeing(scene), session=7) is None
    member.be_drained(WISH)
    told = replace(WISH, epoch=EPOCH)
    assert drain_to_announce(member, seeing(scene), session=7) == told
    assert drain_to_announce(member, seeing(scene, a=WISH), session=7) == told
    assert drain_to_announce(member, seeing(scene, a=told), session=7) is None
    assert drain_to_announce(member, seeing(scene), session=0) is None


def test_who_has_nobody_to_tell_says_nothing() -> None:
    scene = Scene(members="a b")
    member = member_of(scene)
    member.be_drained(WISH)
    member.phase = Phase.WAITING
    assert drain_to_announce(member, seeing(scene), session=7) is None
    member = member_of(scene)
    member.be_drained(WISH)
    member.closure = Closure("b", "done", True, 0.0)
    assert drain_to_announce(member, seeing(scene), session=7) is None


def test_a_node_obeys_what_others_ask_of_it_and_the_first_reason_stays() -> None:
    scene = Scene(members="a b")
    member = member_of(scene)
    member.notice(seeing(scene, b=WISH), 0.0)
    assert member.drain is None
    member.notice(seeing(scene, a=WISH), 0.0)
    member.notice(seeing(scene), 0.0)  # its session, and what was on it, were lost
    member.be_drained(Drain("a", "SIGUSR1"))
    assert member.drain == WISH


def waiting(scene: Scene) -> Member:
    member = Member("c", Phase.WAITING)
    member.info = NodeInfo("c", "10.0.0.3", 3000, 6, scene.settings)
    member.drain = WISH
    return member


def test_a_drained_node_that_waits_leaves_unless_it_has_a_seat_or_the_job_ended() -> None:
    scene = Scene(members="a b")
    member = waiting(scene)
    assert joining_step(member, scene.control, 7, scene.settings) == Leave(WISH)
    member.closure = Closure("b", "done", True, 0.0)
    assert joining_step(member, scene.control, 7, scene.settings) == End(member.closure)
    seated = Scene(members="a b c", at=6)
    assert joining_step(waiting(seated), seated.control, 7, seated.settings) == Enter()
    member = waiting(scene)
    member.drain = None
    assert joining_step(member, scene.control, 7, scene.settings) == Arrive()


def test_why_names_who_asked_unless_that_was_the_node_itself() -> None:
    assert why_drained(Drain("a~1~x", "SIGUSR1"), "a~1~x") == "drained: SIGUSR1"
    assert why_drained(WISH, "a~1~x") == "drained by an operator: maintenance"


def test_a_reason_that_others_wrote_forges_no_line() -> None:
    hostile = Drain("an operator", "x\n[job y] z: \x1b[2J" + 1000 * "y")
    told = why_drained(hostile, "a~1~x")
    assert told.isprintable()
    assert len(told) < 600

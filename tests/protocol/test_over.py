"""Why a world is over, as its member is told."""

from __future__ import annotations

from dataclasses import replace

from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.world_end import why_over
from rdzv_etcd.world_change import Expelled, Lost
from tests.protocol.scenes import Scene


def test_a_member_that_was_itself_declared_lost_is_told_that_the_others_went_on() -> None:
    scene = Scene(members="a b c").gone("c").changed("c")
    record = scene.control.round
    assert record is not None
    changes = []
    for name in "ac":
        member = Member(name, Phase.MEMBER)
        member.record, member.epoch = replace(record, epoch_fixed=50), 50
        changes.append(why_over(member, scene.control, 50))
    assert changes == [Lost({"c": "lease expired"}), Expelled()]

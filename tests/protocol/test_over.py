"""Why a world is over, as its member is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv_etcd.protocol.member import Member, Phase
from rdzv_etcd.protocol.model import Change
from rdzv_etcd.protocol.world_end import change_text, lost_and_left, why_over
from rdzv_etcd.world_change import (
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
)
from tests.protocol.scenes import Scene


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Lost({"a~1~x": "lease expired", "b~2~y": "?"}), "a lost (lease expired), b lost (?)"),
        (
            Lost(dict.fromkeys(map(str, range(10)), "x\n")),
            ", ".join(f"{one} lost (x\\n)" for one in range(8)) + " and 2 more",
        ),
        (Left({"a~1~x": "SIGTERM", "b~2~y": "left"}), "a left: SIGTERM, b left"),
        (Waiting(("a~1~x", "b~2~y")), "a, b waiting"),
        (
            Waiting(("a~1~x", "b~2~y", "c"), {"b~2~y": "worker\n1 died", "z": "?"}),
            "b came back (worker\\n1 died), a, c waiting",
        ),
        (
            Waiting(tuple("abcde"), dict.fromkeys("abcde", "x")),
            "a came back (x), b came back (x), c came back (x), d, e waiting",
        ),
        (Expelled(), "the others went on without this node"),
        (MovedOn(), "this node has joined again, or has left"),
        (Finished("a~1~x", "done"), "a finished the job: done"),
        (Failed("a~1~x", "no data"), "a gave the job up: no data"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_reads_as_a_sentence(change: WorldChange, sentence: str) -> None:
    assert str(change) == sentence


def test_who_left_is_not_called_lost() -> None:
    gone = {"a~1~x": "lease expired", "b~2~y": "left: drained by me: its fan", "c~3~z": "left"}
    assert lost_and_left(gone) == (
        {"a~1~x": "lease expired"},
        {"b~2~y": "drained by me: its fan", "c~3~z": "left"},
    )
    change = Change("run", 5, ("d~4~w",), gone, 2, {"d~4~w": "worker 1 died"})
    assert change_text(change) == (
        "a lost (lease expired), b left: drained by me: its fan, c left, "
        "d came back (worker 1 died), 2 more"
    )


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

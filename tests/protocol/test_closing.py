"""When a round is closed, and with which nodes, as tables of scenes.

Each has its outcome at some moments (seconds from now): the members by rank, or until when it
waits. Limits: 30 s last call, 0.2 s settling, 120 s for survivors; the round has been open for 5 s.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest

from rdzv_etcd.protocol.closing import KeepWaiting
from rdzv_etcd.settings import JobSettings
from tests.protocol.scenes import NOW_S, Scene

OTHER = JobSettings(3, 3)
LONG = 1e6
Table: TypeAlias = dict[str, tuple[Scene, dict[float, str]]]


def outcome(scene: Scene, at_s: float) -> str:
    decision = scene.close(NOW_S + at_s)
    if isinstance(decision, KeepWaiting):
        until_s = decision.until_s
        return "waits" if until_s is None else f"waits until {until_s - NOW_S:.6g}"
    parts = [" ".join(node.node_id for node in decision.world)]
    for kind in ("expelled", "heirs", "finished"):
        if node_ids := getattr(decision, kind):
            parts.append(f"{kind} {' '.join(node_ids)}")
    return "; ".join(parts)


def forming(scene: Scene, opened_ago_s: float = 5.0, give_up_in_s: float = math.inf) -> Scene:
    scene.opened_s, scene.give_up_s = NOW_S - opened_ago_s, NOW_S + give_up_in_s
    return scene


def ago(seconds: float) -> float:
    return NOW_S - seconds


FIRST: Table = {
    "a full round is closed at once": (Scene(2, 3).new("b a c"), {0: "b a c"}),
    "one with enough nodes waits for the last call, from when there were enough": (
        Scene(2, 4).new("a", ago(4)).new("b", ago(3)).new("c", ago(1)),
        {0: "waits until 27", 26.999: "waits until 27", 27: "a b c"},
    ),
    "a new leader gives the whole last call": (
        Scene(2, 4).new("a b", ago(500)),
        {0: "waits until 25"},
    ),
    "nobody": (Scene(3, 4), {LONG: "waits"}),
    "fewer than min": (Scene(3, 4).new("a", ago(900)), {LONG: "waits"}),
    "still fewer than min": (Scene(3, 4).new("a b", ago(900)), {LONG: "waits"}),
    "more than max leave the latest out": (Scene(2, 3).new("a b c d e"), {0: "a b c"}),
    "a node that leaves is not counted": (Scene(2, 2).new("a b").leaving("b"), {0: "waits"}),
    "presences of an older run are not counted": (
        Scene(2, 2).new("a").new("old", arrived_for=7),
        {0: "waits"},
    ),
    "presences of an older run are expelled": (
        Scene(2, 2).new("a").new("old", arrived_for=7).new("b"),
        {0: "a b; expelled old"},
    ),
    "units that fill max": (Scene(2, 6, 2).new("a b c d e f"), {0: "a b c d e f"}),
    "the largest multiple of the unit is full": (
        Scene(2, 7, 2).new("a b c d e f"),
        {0: "a b c d e f"},
    ),
    "one unit": (Scene(1, 4, 4).new("a b c d"), {0: "a b c d"}),
    "the rest of a unit waits as a spare": (
        Scene(2, 6, 2).new("a b c d e", ago(2)),
        {0: "waits until 28", 30: "a b c d"},
    ),
    "half a unit is not enough": (Scene(1, 4, 2).new("a"), {LONG: "waits"}),
    "min in less than a unit is not enough": (Scene(3, 8, 4).new("a b c"), {LONG: "waits"}),
    "the last call begins when a whole unit is there": (
        Scene(1, 8, 4).new("a b c", ago(4)).new("d", ago(1)),
        {0: "waits until 29"},
    ),
    "a round that can be closed is closed before the leader gives up": (
        forming(Scene(2, 4).new("a b"), give_up_in_s=3),
        {0: "waits until 3", 3: "a b"},
    ),
    "a world too small is not": (forming(Scene(2, 4).new("a"), give_up_in_s=3), {4: "waits"}),
}


def survivors(least: int = 2, most: int = 4, *, back: str = "a b", seen_s: float = 1.0) -> Scene:
    """Of the members a, b and c the last is lost."""
    return Scene(least, most, members="a b c").changed("c").gone("c").back(back, ago(seen_s))


def left_for_newcomers() -> Scene:
    """The members a and b are alive; the newcomer x made the round end."""
    return Scene(1, 3, members="a b").changed("", "x").new("x")


AGAIN: Table = {
    "all survivors back: only the settle time": (
        survivors(seen_s=0.1),
        {0: "waits until 0.1", 0.1: "a b"},
    ),
    "it begins again with each arrival": (
        survivors(seen_s=0.1).new("d", NOW_S),
        {0: "waits until 0.2"},
    ),
    "a stream of newcomers delays it at most by the last call": (
        forming(survivors(2, 9, seen_s=30).new("d", NOW_S), opened_ago_s=30),
        {0: "a b d"},
    ),
    "a live member is waited for until the rejoin timeout": (
        Scene(2, 4, members="a b c d").changed("d").gone("d").back("a b"),
        {0: "waits until 115", 115: "a b; expelled c"},
    ),
    "before the leader gives up it is not": (
        forming(Scene(2, 4, members="a b c").changed("c").back("a b"), give_up_in_s=3),
        {0: "waits until 3", 3: "a b; expelled c"},
    ),
    "a full round waits for live members": (
        Scene(2, 3, members="a b c").changed("", "x").back("a b").new("x"),
        {0: "waits until 115"},
    ),
    "members that are back are preferred": (
        Scene(2, 3, members="a b c").changed("", "x").back("a b").new("x").back("c"),
        {0: "a b c"},
    ),
    "newcomers alone form no world while a survivor is about to return": (
        forming(Scene(1, 3, members="a").changed("", "x y").new("x y", ago(60)), 60),
        {0: "waits until 60"},
    ),
    "it returns": (Scene(1, 3, members="a").changed("", "x y").new("x y").back("a"), {0: "a x y"}),
    "so is a live member of a large world whose name is unknown": (
        Scene(1, 4, members="nobody~0 b").gone("nobody~0").slices().new("a", arrived_for=5)
        .changed("b").gone("b").new("x"),
        {0: "waits until 115"},
    ),
    "a member that was declared lost and returned in the same moment is expected": (
        Scene(2, 3, members="a b c").changed("c").back("a b"),
        {120: "a b; expelled c"},
    ),
    "spares and newcomers get the seats that members leave": (
        Scene(1, 2, members="a b").spare("s").new("n").changed("", "n").back("a b"),
        {0: "a b"},
    ),
    "a spare is preferred to a newcomer": (
        Scene(1, 2, members="a b").spare("s").new("n").changed("b").gone("b").back("a"),
        {0: "a s"},
    ),
    "an expelled node is no spare until it arrives again": (
        Scene(2, 3, members="a b", expelled="x").changed("b").gone("b").back("a")
        .new("x", arrived_for=4),
        {LONG: "waits"},
    ),
    "it arrives again": (
        Scene(2, 3, members="a b", expelled="x").changed("b").gone("b").back("a").new("x"),
        {30: "a x"},
    ),
    "it stays expelled in the next round": (
        Scene(1, 3, members="a b", expelled="x").changed("b").gone("b").back("a")
        .new("x", arrived_for=4),
        {0: "a; expelled x"},
    ),
}  # fmt: skip

FINISHED: Table = {
    "a member that has finished gets no seat": (
        Scene(1, 4, members="a b c").changed(waiters="b").finished("a").back("b c"),
        {0: "c b; finished a"},
    ),
    "nor later": (
        Scene(1, 4, members="c b", at=6, expelled="a").new("a", arrived_for=5).finished("a")
        .changed(waiters="b").back("b c"),
        {0: "c b; finished a"},
    ),
    "it makes no world large enough": (
        Scene(2, 4, members="a b").changed(waiters="b").finished("a").back("b"),
        {LONG: "waits"},
    ),
    "rank 0 is a survivor's that still works": (
        Scene(2, 4, members="a b").changed(waiters="b").finished("a").back("b").new("c"),
        {0: "b c; finished a"},
    ),
    "a newcomer begins where all survivors have finished, and none is its heir": (
        Scene(1, 4, members="a b").changed("b").gone("b").finished("a").new("c"),
        {0: "c; finished a"},
    ),
}  # fmt: skip

RANK_0: Table = {
    "members left out of a world of newcomers are its heirs": (
        left_for_newcomers(),
        {120: "x; expelled a b; heirs a b"},
    ),
    "a world with a survivor has no heirs": (
        left_for_newcomers().back("b"),
        {120: "b x; expelled a"},
    ),
    "an heir that is back gets rank 0: the members began without it": (
        Scene(1, 3, members="x y", expelled="a b", heirs="a b").changed("", "b")
        .back("x y").new("a", arrived_for=4).new("b"),
        {0: "b y x; expelled a"},
    ),
    "the claim of heirs lasts while they live": (
        Scene(1, 2, members="x", expelled="a b", heirs="a b").changed("", "z")
        .back("x").new("a", arrived_for=4).new("z"),
        {0: "x z; expelled a; heirs a"},
    ),
    "when all heirs are gone the members have it": (
        Scene(1, 2, members="x", expelled="a", heirs="a").changed("", "z").new("z"),
        {120: "z; expelled x; heirs x"},
    ),
    "a node that trained a later world than etcd's record does not begin again": (
        Scene(1, 3, members="a b").changed("", "x y").new("x").new("y", trained=70),
        {120: "y x; expelled a b"},
    ),
    "an heir that had returned before etcd went back has no claim any more": (
        Scene(1, 3, members="x", expelled="a", heirs="a").changed("", "a b")
        .new("x", trained=80).new("a", trained=70),
        {0.2: "x a"},
    ),
}  # fmt: skip

CLOSED: Table = {
    "a closed job forms no next round": (
        Scene(2, 2, members="a b").spare("s").closed(),
        {LONG: "waits"},
    ),
    "a new run begins while the marker of the old one is there": (
        Scene(2, 2, members="a b").spare("s").closed().new("c d"),
        {0: "c d; expelled a b s"},
    ),
    "nodes that are left when the marker has gone do not wait for a new run": (
        Scene(2, 2, members="a b", at=1).spare("s").closed().marker_gone(),
        {LONG: "waits"},
    ),
    "they are expelled from it": (
        Scene(2, 2, members="a b", at=1).spare("s").closed().marker_gone().new("c d"),
        {0: "c d; expelled a b s"},
    ),
    "a new run does not skip the last call": (
        Scene(2, 4, members="a b").gone("a b").closed().new("c d"),
        {0: "waits until 29"},
    ),
}

SCENES = FIRST | AGAIN | FINISHED | RANK_0 | CLOSED


@pytest.mark.parametrize("name", SCENES)
def test_when_a_round_is_closed_and_with_which_nodes(name: str) -> None:
    scene, expected = SCENES[name]
    assert {at_s: outcome(scene, at_s) for at_s in expected} == expected


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (Scene(2, 2).new("a").new("x", settings=OTHER), "not counting x, started with other set"),
        (
            Scene(1, 4, members="a b c").changed(waiters="b").finished("a").back("b"),
            "not back yet: c (host-c); a has finished and will not rejoin",
        ),
        (
            Scene(2, 4, members="a b c d").changed("d").gone("d").back("a b"),
            "not back yet: c (host-c); lost d: lease expired",
        ),
        (Scene(2, 3, members="a b c").leaving("c").changed("c").back("a b"), "c left (SIGTERM)"),
        (Scene(2, 3, members="a b c").left("c").changed("c").back("a b"), "; c left;"),
    ],
)
def test_a_wait_has_its_reason(scene: Scene, reason: str) -> None:
    decision = scene.close(NOW_S - 0.9)
    assert isinstance(decision, KeepWaiting)
    assert reason in f"{decision.reason};"


@pytest.mark.parametrize("gone", ["leaving", "left"])
def test_a_member_that_leaves_is_not_waited_for(gone: str) -> None:
    scene = getattr(Scene(2, 3, members="a b c"), gone)("c").changed("c").back("a b", ago(0.1))
    assert outcome(scene, 0) == "waits until 0.1"

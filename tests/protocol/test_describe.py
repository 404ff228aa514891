"""The words for what happens in a job, all of them in one golden file.

.venv/bin/python -m tests.protocol.test_describe      writes it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rdzv_etcd.names import Names
from rdzv_etcd.protocol.describe import (
    arrived_text,
    closed_text,
    is_news,
    lost_and_left,
    names_in,
    round_text,
    seat_text,
    text_of_change,
    why_drained,
    world_text,
)
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.protocol.model import Change, Closure, Drain, Refused
from rdzv_etcd.settings import JobSettings
from rdzv_etcd.world_change import (
    LEASE_EXPIRED,
    Expelled,
    Failed,
    Finished,
    Left,
    Lost,
    MovedOn,
    Waiting,
    WorldChange,
    change_text,
    how_evicted,
    how_gone,
    how_silent,
    lost,
    may_be_gone,
)
from tests.protocol.scenes import NOW_S, Scene

GOLDEN = Path(__file__).parent / "describe.txt"
NODES = ("vm~9198~a", "vm~9199~b", "gpu-05~7~c")
LOSSES = [
    LEASE_EXPIRED,
    how_gone("vm~9200", "its host refuses the connection", 0.003),
    how_gone("vm~9200", "another node answers there"),
    how_silent("vm~9200", "not reached"),
    how_evicted("root@vm", ""),
    how_evicted("root@vm", "no power"),
    "whatever a stranger wrote\n",
]
REASONS = ["left", "SIGTERM", why_drained(Drain("root@vm", "its fan is loud"), "vm~1~a")]
SEAT = Seat(1, 2, 4, "gpu-0", 29500, 7, ("a", "b", "c", "d"), 1)
ENDS: list[WorldChange] = [
    Lost({NODES[2]: LOSSES[0]}),
    Lost(dict(zip(NODES, LOSSES, strict=False))),
    Lost(dict.fromkeys(map(str, range(10)), "x")),
    Left({NODES[0]: "SIGTERM", NODES[1]: "left"}),
    Waiting(NODES),
    Waiting(NODES, {NODES[1]: "worker of rank 1 was killed\n"}),
    Waiting(tuple("abcde"), dict.fromkeys("abcde", "x")),
    Expelled(),
    MovedOn(),
    MovedOn("was interrupted in a barrier"),
    Finished(NODES[0], "done"),
    Failed(NODES[0], "no data"),
]


def round_line(scene: Scene, where: str = "") -> str:
    return round_text(scene.control, scene.nodes, 0, scene.settings, where)


def lines() -> Iterator[str]:
    yield "# how a member was lost, or left"
    yield from (lost("vm~9199", how) for how in LOSSES)
    yield from (change_text(Names(), {}, {"vm~9199~b": reason}) for reason in REASONS)
    yield may_be_gone("vm~9199", LOSSES[1])
    yield "# why a world is over"
    yield from map(str, ENDS)
    gone = {NODES[0]: "lease expired", NODES[1]: "left: SIGTERM"}
    change = Change("run", 5, NODES[2:], gone, 2, {NODES[2]: "worker 1 died"})
    yield text_of_change(change, Names())
    for succeeded in (True, False):
        yield closed_text(Closure("root@vm", "seen enough", succeeded, 0.0), "3 s ago", Names())
    yield "# what the next round waits for"
    many = " ".join(f"n{i}" for i in range(20))
    other = Scene(2, 2).new("a").new("x", settings=JobSettings(3, 3))
    back = Scene(4, 4, members="a b c d").changed("d").gone("d").back("a b", NOW_S)
    for scene in (
        Scene(3, 3),
        Scene(3, 3).new("a b"),
        Scene(1, 3).new("a"),
        Scene(2, 8, 2).new("a"),
        Scene(3, 4, 2).new("a b c"),
        Scene(8, 8, segment=0).new("a1 a2 a3 a4 a5 a6 b1 b2 b3 b4 b5 b6"),
        other,
        back,
        Scene(3, 4, members="a b c").changed().finished("a").back("b", NOW_S),
        Scene(2, 3, members="a b c").changed().leaving("c"),
        Scene(20, 20, members=many).changed().gone(many),
    ):
        yield round_line(scene)
    yield round_text(Scene(300, 400).control, None, 299, JobSettings(300, 400))
    yield round_line(Scene(2, 2).new("a"), "http://etcd-1:2379, /rdzv_etcd")
    for how in ("", "its gate ended with exit code 3"):
        refused = Refused("x~1~a", JobSettings(3, 3), 0.0, how)
        control = replace(Scene(2, 2).new("a").control, refused=refused)
        yield round_text(control, Scene(2, 2).new("a").nodes, 0, JobSettings(2, 2), "here")
    yield seat_text("default", Scene(4, 4, members="a b c d").control)
    yield seat_text("j", Scene(2, 5, 2, members="a b c d").control)
    for scene in (Scene(2, 2), other, back.new("e")):
        yield arrived_text(scene.control, scene.nodes, scene.settings)[1]
    yield "# what came of it"
    yield world_text(SEAT, None, 0.5)
    yield world_text(replace(SEAT, round=2, rank=1, size=3), SEAT, 0.131, str(ENDS[3]))


def test_the_words_are_those_of_the_golden_file() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text()


def test_each_line_can_be_shown() -> None:
    assert all(line.isprintable() and len(line) < 800 for line in lines())


def test_a_node_that_left_is_not_called_lost() -> None:
    gone = {"a~1~x": "lease expired", "b~2~y": "left: drained by me: its fan", "c~3~z": "left"}
    assert lost_and_left(gone) == (
        {"a~1~x": "lease expired"},
        {"b~2~y": "drained by me: its fan", "c~3~z": "left"},
    )


def test_a_peers_long_reason_leaves_room_for_the_others() -> None:
    scene = Scene(4, 4, members="a b c d").changed("c d").gone("c d").back("a b", NOW_S)
    control = scene.control
    assert control.change is not None
    change = replace(control.change, lost={"c": "x" * 5_000, "d": "killed"})
    line = round_text(replace(control, change=change), scene.nodes, 0, scene.settings)
    assert line.endswith("lost d: killed")
    assert len(line) < 500


def test_a_member_that_still_works_has_not_arrived() -> None:
    scene = Scene(3, 4, members="a b c d").changed("d").gone("d").back("b a", NOW_S).new("e")
    assert arrived_text(scene.control, scene.nodes, scene.settings)[0] == ("a", "b", "e")


def test_members_of_a_large_world_that_are_not_known_have_not_arrived() -> None:
    """Some of the names are gone from etcd: any node there may be one of them, at work."""
    scene = Scene(3, 3, members="a nobody~1 nobody~2").slices().gone("nobody~1 nobody~2")
    scene = scene.new("b", arrived_for=5).back("a")
    arrived, text = arrived_text(scene.control, scene.nodes, scene.settings)
    assert (arrived, text) == (("a",), "1 of at least 3 nodes arrived (a)")


def test_a_node_that_has_met_no_other_names_where_it_looks() -> None:
    """The others may have been given another etcd, prefix or id: two logs show which."""
    where = "http://etcd-1:2379, /rdzv_etcd"
    asks = f"; are the others started, with the same --rdzv-id, etcd and prefix ({where})?"
    assert round_line(Scene(2, 2).new("a"), where).endswith(asks)
    assert asks not in round_line(Scene(2, 2, members="a b").changed("b").gone("b"), where)
    first, settings = Scene(2, 2).control, JobSettings(300, 400)
    assert round_text(first, None, 299, settings, where).endswith(asks)
    assert not round_text(first, None, 300, settings, where).endswith(asks)


def test_which_worlds_are_news() -> None:
    second = replace(SEAT, round=2, rank=1, size=3, epoch=9)
    assert [is_news(SEAT, None, "d joined"), is_news(second, SEAT, "")] == [False, True]
    assert [is_news(SEAT, SEAT, ""), is_news(SEAT, SEAT, "d joined")] == [False, True]


def test_names_have_their_pids_once_two_known_nodes_share_a_host() -> None:
    names = Names()
    assert [names("a~1~x"), names("b~2~x"), names("a~1~x")] == ["a", "b", "a"]
    assert names("a~3~y") == "a~3"
    assert [names("a~1~x"), names("b~2~x"), names("me@vm")] == ["a~1", "b~2", "me@vm"]
    assert [names("a~1~z"), names("a~1~x")] == ["a~1~z", "a~1~x"]
    assert Names(with_pids=True)("a~1~x") == "a~1"
    assert Names().all(["a~1~x", "a~2~x", "b~1~x"], 2) == "a~1, a~2 and 1 more"


def test_a_list_of_all_nodes_names_them_by_all_of_them() -> None:
    """``status`` shows hundreds; two of one host may be the last."""
    ids = [f"host-{number}~7~x" for number in range(90)] + ["host-3~8~x"]
    scene = Scene(91, 91)
    scene.new(" ".join(ids))
    assert names_in(scene.control, scene.nodes)("host-5~7~x") == "host-5~7"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")

"""``history --plot``: what the picture of a job shows, and that it can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")

from matplotlib.artist import Artist
from matplotlib.text import Text

from rdzv_etcd.cli import history_plot
from rdzv_etcd.cli.history import Note
from rdzv_etcd.cli.history_plot import draw, finding, save, stretches
from rdzv_etcd.protocol.model import Closure
from tests.cli.tools import Run, run_alone
from tests.library.nodes import groups, join_all, node_settings
from tests.support.pictures import check_layout
from tests.support.servers import EtcdServer

BEGAN_S = 1_790_000_000.0
EVIL = "[bold]$\\frac{x$ 漢字 \x1b[2J\u202e" * 20


def note(number: int, after_s: float, size: int = 4, open_s: float = 0.0, **more: Any) -> Note:
    plain = Note(number, "run", number, size, open_s=open_s, wall_s=BEGAN_S + after_s)
    return replace(plain, **more)


def test_a_job_s_rounds_are_drawn(
    etcd_server: EtcdServer, job_id: str, cli: Run, tmp_path: Path
) -> None:
    words = ("history", job_id, "--endpoint", etcd_server.endpoint)
    with groups(node_settings(etcd_server, job_id, "1:2", ended_ttl=600), 2) as (one, two):
        join_all([one, two])
        two.leave("needed elsewhere")
        one.join()
        standing = cli(*words, "--plot", tmp_path / "standing.png")
        one.finish("done")
    drawn = cli(*words, "--json", "--plot", tmp_path / "job.svg")
    assert (standing.code, standing.err, drawn.code, drawn.err) == (0, "", 0, "")
    assert len(drawn.json["history"]["rounds"]) == 2
    assert (tmp_path / "standing.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "job.svg").read_text().startswith("<?xml")


def test_where_nothing_is_known_no_picture_is_made(
    etcd_server: EtcdServer, job_id: str, cli: Run, tmp_path: Path
) -> None:
    path = tmp_path / "job.svg"
    done = cli("history", job_id, "--endpoint", etcd_server.endpoint, "--plot", path)
    assert done.code == 2
    assert done.err == f"rdzv-etcd: {path} is not written: no round of job {job_id!r} is known\n"
    assert not path.exists()


def test_the_rounds_are_told_before_the_picture_is_made(
    etcd_server: EtcdServer, job_id: str, tmp_path: Path
) -> None:
    """Drawing may take long, or fail."""
    with groups(node_settings(etcd_server, job_id, "1", ended_ttl=600), 1) as (node,):
        node.join()
    words = ("history", job_id, "--endpoint", etcd_server.endpoint)
    done = run_alone(*words, "--plot", str(tmp_path / "missing" / "job.svg"))
    assert (done.code, "ROUND" in done.out, "missing" in done.err) == (74, True, True)


def test_many_rounds_are_few_artists() -> None:
    """With one for each, six hundred of them took half a minute."""
    notes = [note(number, 60 * number, open_s=number % 3) for number in range(1, 601)]
    with history_plot.styled():
        figure = draw("job", notes, {}, BEGAN_S + 40_000, goes_on=True)
    assert len(figure.findobj(Artist)) < 500


def test_an_open_time_that_cannot_be_is_left_out_and_told() -> None:
    notes = [note(1, 0), note(2, 60, open_s=1e14), note(3, 90, open_s=-5)]
    assert "without a world" not in finding("job", stretches(notes, {}), 0.0)
    with history_plot.styled():
        figure = draw("job", notes, {}, BEGAN_S + 120, goes_on=True)
    texts = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]
    assert "left out: an open_s that cannot be (2 rounds, the first of them 2)" in texts


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "job.svg"
    with pytest.raises(FileNotFoundError, match="missing"):
        save(path, "job", [note(1, 0)], {}, BEGAN_S, goes_on=False)


def test_a_world_lasts_until_the_next_round_was_open() -> None:
    lost = {"a~1~x": "lease expired"}
    notes = [note(1, 0), note(2, 60, 3, 1.5, lost=lost), note(3, 90, 4, 0.5, back=("b~1~x",))]
    found = stretches(notes, {"run": Closure("a", "done", True, BEGAN_S + 120)})
    assert [(one.begin_s - BEGAN_S, (one.end_s or 0) - BEGAN_S) for one in found] == [
        (0, 58.5),
        (60, 89.5),
        (90, 120),
    ]
    assert finding("job", found, 0.0) == (
        "job: 3 worlds in 2 min; ended 1 by losses, 1 by nodes that came; 2.0 s without a world"
    )


def test_worlds_follow_each_other_whatever_the_clocks_said() -> None:
    notes = [note(1, 50), note(2, 10, open_s=20), note(3, 70, open_s=1e9)]
    found = stretches(notes, {})
    assert [one.begin_s - BEGAN_S for one in found] == [50, 50, 70]
    assert [one.open_s for one in found] == [0, 0, 0]
    assert [one.is_told_wrong for one in found] == [False, False, True]
    assert found[-1].end_s is None
    for wrong in (None, -1.0, 1e12, float("nan")):
        assert stretches([note(1, 0, wall_s=wrong)], {}) == []


def test_time_without_a_world_is_drawn_though_the_next_leader_s_clock_is_behind() -> None:
    notes = [note(1, 0), note(2, 18, open_s=20), note(3, 60, open_s=10)]
    found = stretches(notes, {})
    assert [one.open_s for one in found] == [0, 18, 10]
    assert not any(one.is_told_wrong for one in found)


def test_a_run_that_ended_is_not_followed_by_an_open_round() -> None:
    notes = [note(1, 0), note(1, 500, open_s=300, run="again", revision=2)]
    ended = {"run": Closure("a", "no more data", False, BEGAN_S + 100)}
    first, second = stretches(notes, ended)
    assert (first.end_s, second.open_s) == (BEGAN_S + 100, 0)


def many_rounds() -> list[Note]:
    """A hundred of them in three days, some of a few seconds."""
    notes, after_s = [], 0.0
    for number in range(1, 101):
        after_s += 20 if number % 9 == 0 else 900 * (1 + number % 5)
        lost = {f"gpu-{number:03d}.cluster~7~x": "lease expired"} if number % 3 else {}
        size = 512 - number % 7 * 20
        notes.append(note(number, after_s, size, (0.1, 40.0, 2.0)[number % 3], lost=lost))
    return notes


@pytest.mark.parametrize(
    ("notes", "job"),
    [
        pytest.param([note(1, 0, 1)], "small", id="one round"),
        pytest.param(many_rounds(), "large", id="a hundred rounds"),
        pytest.param([note(1, 0), note(2, 9, 10**14, 3, lost={EVIL: EVIL})], EVIL, id="hostile"),
        pytest.param([note(1, 0, wall_s=None)], "W" * 500, id="none with a time"),
    ],
)
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_picture_can_be_read(notes: list[Note], job: str, goes_on: bool, tmp_path: Path) -> None:
    save(tmp_path / "job.svg", job, notes, {}, BEGAN_S + 400_000, goes_on=goes_on)
    with history_plot.styled():
        figure = draw(job, notes, {}, BEGAN_S + 400_000, goes_on=goes_on)
        check_layout(figure, least=2)
    texts = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)
    assert ("this world goes on" in texts) == (goes_on and notes[0].wall_s is not None)

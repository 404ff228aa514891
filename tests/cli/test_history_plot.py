"""``history --plot``: a picture is made of whatever the leaders have noted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")

from rdzv_etcd.cli import history
from rdzv_etcd.cli.history import Note, worlds_of
from rdzv_etcd.cli.jobs import Job
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.model import Closure, Control, Ended, Nodes
from tests.cli.tools import PREFIX, Run, run_alone
from tests.library.nodes import groups, join_all, node_settings
from tests.support.servers import EtcdServer

BEGAN_S = 1_790_000_000.0
EVIL = "[bold]$\\frac{x$ 漢字 \x1b[2J\u202e" * 20


def note(number: int, after_s: float, size: int = 4, open_s: float = 0.0, **more: Any) -> Note:
    plain = Note(number, "run", number, size, open_s=open_s, wall_s=BEGAN_S + after_s)
    return replace(plain, **more)


def times(notes: list[Note], *ended: Ended) -> list[tuple[float, float]]:
    found = worlds_of(Control(9, ended=ended), notes, BEGAN_S + 1000)
    return [(one.begin_s - BEGAN_S, one.end_s - BEGAN_S) for one in found]


def test_a_job_s_rounds_are_drawn(
    etcd_server: EtcdServer, job_id: str, act: Run, tmp_path: Path
) -> None:
    with groups(node_settings(etcd_server, job_id, "1:2", ended_ttl=600), 2) as (one, two):
        join_all([one, two])
        two.leave("needed elsewhere")
        one.join()
        standing = act("history", job_id, "--plot", tmp_path / "standing.png")
        one.finish("done")
    drawn = act("history", job_id, "--json", "--plot", tmp_path / "job.svg")
    assert (standing.code, standing.err, drawn.code, drawn.err) == (0, "", 0, "")
    assert len(drawn.json["history"]["rounds"]) == 2
    assert (tmp_path / "standing.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "job.svg").read_text().startswith("<?xml")


def test_where_nothing_is_known_no_picture_is_made(job_id: str, act: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.svg"
    done = act("history", job_id, "--plot", path)
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


def test_a_world_lasts_until_the_next_round_was_open() -> None:
    notes = [note(1, 0), note(2, 60, 3, 1.5), note(3, 90, 4, 0.5)]
    ended = Ended("run", Closure("a", "done", True, BEGAN_S + 120), 3)
    assert times(notes, ended) == [(0, 58.5), (60, 89.5), (90, 120)]
    assert times(notes)[-1] == (90, 90)  # nobody knows how long it lasted


def test_worlds_follow_each_other_whatever_the_clocks_said() -> None:
    assert times([note(1, 50), note(2, 10, open_s=20), note(3, 70, open_s=1e9)]) == [
        (50, 50),
        (50, 50),
        (70, 70),
    ]
    for wrong in (None, -1.0, 1e12, float("nan")):
        assert worlds_of(Control(9), [note(1, 0, wall_s=wrong)], BEGAN_S) == []


@pytest.mark.parametrize(
    ("job", "notes"),
    [
        ("small", [note(1, 0, 1)]),
        ("large", [note(number, 60 * number, 512 - number % 7) for number in range(1, 601)]),
        (EVIL, [note(1, 0), note(2, 9, 10**14, 3, lost={EVIL: EVIL})]),
    ],
    ids=["one round", "many rounds", "hostile"],
)
def test_any_rounds_can_be_drawn(job: str, notes: list[Note], tmp_path: Path) -> None:
    view = Job(JobKeys(PREFIX, job), Control(9), Nodes(9), 0)
    history._plot(tmp_path / "job.svg", view, notes)
    assert (tmp_path / "job.svg").read_text().startswith("<?xml")

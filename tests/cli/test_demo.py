"""The whole demo: on a real terminal, and as JSON; nothing of it is left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import psutil
import pytest

from tests.cli.terminal import Terminal
from tests.cli.tools import run_alone
from tests.support.gloo_threads import none_left_behind
from tests.support.processes import marked
from tests.support.servers import find_binaries

LIMIT_S = 600.0
_MARK = "RDZV_ETCD_TEST_DEMO"

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]


@pytest.fixture(autouse=True)
def _surroundings(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    monkeypatch.setenv("RDZV_ETCD_BINARY", str(find_binaries()[0].path))
    monkeypatch.setenv("PET_NNODES", "7")  # as where the shell is a launcher's: it is ignored
    with none_left_behind(tmp_path_factory.mktemp("exits")):
        yield


def test_the_demo_on_a_terminal(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_MARK, job_id)
    with Terminal("demo") as terminal:
        monkeypatch.delenv(_MARK)
        for shown in (
            r"started torchrun agent c, pid \d+",
            "round 1: 3 nodes",
            r"WORKS  round 1, 3 nodes \(2 to 3 wanted\)",
            r"step \d+  loss [0-9.]+  accuracy",
            "killing agent c",
            "agent c killed: the world of 2 trains after",
            "started torchrun agent d",
            "agent d added: the world of 3 trains after",
            r"finished the job",
            r"agent c killed +2 +[0-9.]+ m?s",
        ):
            terminal.wait_for(shown, LIMIT_S)
        assert terminal.end(LIMIT_S) == 0
        assert "Traceback" not in terminal.text
        (percent,) = re.findall(r"accuracy ([0-9.]+)% after \d+ steps", terminal.text)
        assert float(percent) > 90
    left = marked(_MARK, job_id)
    _, alive = psutil.wait_procs(left, timeout=60)  # the etcd is told to end last
    assert not alive


def test_ctrl_c_ends_all_of_it(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_MARK, job_id)
    with Terminal("demo") as terminal:
        monkeypatch.delenv(_MARK)
        terminal.wait_for("round 1: 3 nodes", LIMIT_S)
        terminal.press(b"\x03")
        assert terminal.end(LIMIT_S) == 130
    _, alive = psutil.wait_procs(marked(_MARK, job_id), timeout=60)
    assert not alive


@pytest.mark.release
def test_the_demo_as_json() -> None:
    """With a secret around that is another etcd's."""
    environ = {**os.environ, "RDZV_ETCD_EMBED_SECRET": "staple-battery-horse"}
    done = run_alone("demo", "--json", environ=environ, limit_s=LIMIT_S)
    assert done.code == 0, done
    told = done.json["demo"]
    assert told["accuracy"] > 0.9
    killed, added = told["recoveries"]
    assert (killed["size"], added["size"]) == (2, 3)
    assert 0 < killed["formed_s"] < killed["took_s"]
    assert killed["steps_again"] >= 0

"""docs/tutorial.md: a shell that runs its commands, block by block, prints what it shows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rdzv_etcd
from rdzv_etcd.errors import EtcdUnavailableError
from tests.support.gloo_threads import none_left_behind
from tests.support.markdown import ROOT, Document
from tests.support.processes import free_port
from tests.support.python_path import python_path
from tests.support.servers import find_binaries
from tests.torchrun.agents import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]

TUTORIAL = Document(ROOT / "docs" / "tutorial.md")
INSTALL, *BLOCKS = TUTORIAL.code("bash")
DONE = "the block is done, with code"


class Shell:
    """A bash that is given one block after the other, as a reader's terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.seen = ""
        self._process = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, block: str) -> str:
        """What it prints; its last command has to end well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f'{block}echo "{DONE} $?"\n')
        self._process.stdin.flush()
        shown = ""
        for line in self._process.stdout:
            self.seen += line
            if line.startswith(DONE):
                assert line == f"{DONE} 0\n", self.seen
                return shown
            shown += line
        raise AssertionError(f"the shell has ended: {self.seen}")

    def end(self) -> None:
        """End it and whatever it has started."""
        shell = psutil.Process(self._process.pid)
        for process in [*shell.children(recursive=True), shell]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def shell(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    binary = str(find_binaries()[0].path)
    with none_left_behind(tmp_path_factory.mktemp("exits")):
        environment = {
            "PATH": path,
            "COLUMNS": "200",
            "PYTHONPATH": python_path(ROOT),
            "RDZV_ETCD_BINARY": binary,
        }
        shell = Shell(tmp_path, {**os.environ, **environment})
        yield shell
        shell.end()


def test_each_step_of_the_tutorial_shows_what_it_says(shell: Shell, tmp_path: Path) -> None:
    port = free_port()
    blocks = [block.replace("localhost:2379", f"localhost:{port}") for block in BLOCKS]
    # Where others load the machine, two agents may come seconds apart.
    blocks = [block.replace("last_call_timeout=5", "last_call_timeout=20") for block in blocks]
    start, nodes, two, steps, kill, killed, log, add, status, drain, drained, end = blocks

    shell.run(start)
    logs = tmp_path.glob  # the shell makes them when the program in the background begins
    wait_until("etcd", lambda: any("serves" in log.read_text() for log in logs("etcd.log")))
    shown = iter(TUTORIAL.code("text"))
    shell.run(nodes)
    trains(tmp_path, port, round_number=1, size=2)
    assert missing(next(shown), shell.run(two)) == []
    assert missing(next(shown), shell.run(steps)) == []

    shell.run(kill)
    trains(tmp_path, port, round_number=2, size=1)
    assert missing(next(shown), shell.run(killed)) == []
    assert missing(next(shown), shell.run(log)) == []
    assert next(shown, None) is None

    shell.run(add)
    trains(tmp_path, port, round_number=3, size=2)
    assert "WORKS  round 3, 2 nodes (1 to 3 wanted)" in shell.run(status)

    shell.run(drain)
    trains(tmp_path, port, round_number=4, size=1)
    assert "left (drained: SIGUSR1)" in shell.run(drained)

    assert "seen enough" in shell.run(end)
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


def missing(shown: str, printed: str) -> list[str]:
    """Return the lines that the tutorial shows and the command did not print.

    Numbers, addresses and the space between columns are this run's own.
    """
    return [line for line in _alike(shown) if line not in _alike(printed)]


def _alike(text: str) -> list[str]:
    text = text.replace(socket.gethostname(), "vm")
    text = re.sub(r"\d+(\.\d+){3}", "ADDRESS", text)
    text = re.sub(r"\d+:\d\d:\d\d", "TIME", text)
    text = re.sub(r"\d+(\.\d+)?", "N", text)
    text = re.sub(r"^(.*\] |… )", "", text, flags=re.MULTILINE)  # what torch puts before a line
    return [" ".join(line.split()) for line in text.splitlines()]


def trains(folder: Path, port: int, *, round_number: int, size: int) -> None:
    """Wait until the world of that round has printed a step; the one with rank 0 prints it."""

    def formed() -> int:
        try:
            with rdzv_etcd.observe(f"localhost:{port}", job="tutorial") as observer:
                state = observer.state()
        except EtcdUnavailableError:
            return 0
        return state.epoch if (state.round, len(state.members)) == (round_number, size) else 0

    epoch = wait_until(f"round {round_number} with {size} nodes", formed)
    step = re.compile(rf"world of {size}, epoch {epoch}, .*^step", re.DOTALL | re.MULTILINE)
    wait_until(
        f"a step in round {round_number}",
        lambda: any(step.search(path.read_text()) for path in folder.glob("?.log")),
    )

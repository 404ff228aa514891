"""Runs of a gate's command: real programs, and those that take too long."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rdzv_etcd.clock import SystemClock
from rdzv_etcd.node.gate import Command, Failure
from tests.library.nodes import wait_until

LIMIT_S = 60.0


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def answer_of(words: list[str]) -> Failure | None:
    return Command(words, os.environ).run(SystemClock(), LIMIT_S, lambda _: None)


def test_a_command_that_ends_well_lets_the_node_pass() -> None:
    assert answer_of(python("print('all is well')")) is None


def test_a_command_that_fails_is_told_with_its_code_and_its_last_lines() -> None:
    program = "import sys\nprint('x' * 100000)\nprint('one')\nsys.stderr.write('two')\nsys.exit(4)"
    failure = answer_of(python(program))
    assert failure is not None
    assert failure.exit_code == 4
    assert failure.how.endswith(" ended with exit code 4: two")
    assert failure.output.splitlines()[-2:] == ["one", "two"]
    assert len(failure.output) < 5000


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("import os; os.abort()", " was killed by SIGABRT"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x1b[2J'); sys.exit(1)", "\\x1b[2J"),
    ],
)
def test_a_command_that_crashes_or_writes_nonsense(program: str, how: str) -> None:
    failure = answer_of(python(program))
    assert failure is not None
    assert how in failure.how
    assert failure.how.isprintable()


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    failure = answer_of([str(tmp_path / "no")])
    assert failure is not None
    assert failure.exit_code is None
    assert "cannot be started" in failure.how


class _Clock(SystemClock):
    """No time passes before that file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def now_s(self) -> float:
        return 1.0 if self._file.exists() else 0.0


@pytest.mark.parametrize("how", ["abandoned", "too late"])
def test_a_command_that_does_not_end_is_ended_with_all_it_has_started(
    tmp_path: Path, how: str
) -> None:
    said = tmp_path / "pids"
    program = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"path = pathlib.Path({str(said)!r})\n"
        "path.with_suffix('.new').write_text(f'{os.getpid()} {child.pid}')\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(600)\n"
    )
    command = Command(python(program), os.environ)
    limit_s = LIMIT_S if how == "abandoned" else 0.5
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(command.run, _Clock(said), limit_s, lambda _: None)
        wait_until("it runs", said.exists)
        processes = [psutil.Process(int(pid)) for pid in said.read_text().split()]
        if how == "abandoned":
            command.abandon()
        failure = running.result(LIMIT_S)
    assert (failure is None) is (how == "abandoned")
    assert failure is None or failure.how.endswith(" was not done within 0.5 s")
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_a_child_that_keeps_the_output_open_holds_nobody_up(tmp_path: Path) -> None:
    """As a daemon does that was started without care; this one ends when the test says so."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    failure = answer_of(["sh", "-c", f"cat {fifo} & exit 3"])
    assert failure is not None
    assert failure.exit_code == 3
    fifo.write_text("")


def test_of_endless_output_the_end_is_kept() -> None:
    command = Command(["yes", "no GPU"], os.environ)
    failure = command.run(SystemClock(), 0.5, lambda _: None)
    assert failure is not None
    assert "was not done within 0.5 s: no" in failure.how
    assert failure.output.splitlines()[:-1] == ["no GPU"] * 9

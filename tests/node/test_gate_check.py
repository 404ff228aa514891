"""Questions to a gate: real commands and functions, and those that take too long."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import rdzv_etcd
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.node.gate import (
    Arrival,
    CommandCheck,
    Failure,
    FunctionCheck,
    GateFunction,
)
from rdzv_etcd.world_change import Left, left

LIMIT_S = 60.0
ARRIVAL = Arrival("a job", "host~7~x", 3, Left({"b~1~y": "SIGTERM"}))


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def answer_of(check: CommandCheck | FunctionCheck) -> Failure | None:
    assert check.wait(LIMIT_S)
    return check.answer()


def test_a_command_that_ends_well_lets_the_node_pass() -> None:
    assert answer_of(CommandCheck(python("print('all is well')"), ARRIVAL)) is None


def test_a_command_that_fails_is_told_with_its_code_and_its_last_lines() -> None:
    program = "import sys\nprint('x' * 100000)\nprint('one')\nsys.stderr.write('two')\nsys.exit(4)"
    failure = answer_of(CommandCheck(python(program), ARRIVAL))
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
    failure = answer_of(CommandCheck(python(program), ARRIVAL))
    assert failure is not None
    assert how in failure.how
    assert failure.how.isprintable()


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    failure = answer_of(CommandCheck([str(tmp_path / "no")], ARRIVAL))
    assert failure is not None
    assert failure.exit_code is None
    assert "cannot be started" in failure.how


def test_a_command_is_told_where_it_is_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "secret")
    monkeypatch.setenv("RDZV_ETCD_EMBED_SECRET", "secret")
    program = (
        "import os, sys\n"
        "names = 'JOB_ID', 'NODE_ID', 'ROUND', 'LAST_CHANGE', 'PASSWORD', 'EMBED_SECRET'\n"
        "print(*[os.environ.get('RDZV_ETCD_' + name) for name in names], sep='|')\n"
        "sys.exit(sys.stdin.read() == '')"
    )
    failure = answer_of(CommandCheck(python(program), ARRIVAL))
    assert failure is not None
    assert failure.output == f"a job|host~7~x|3|{left('b', 'SIGTERM')}|None|None"


def test_a_command_that_is_abandoned_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    program = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"path = pathlib.Path({str(said)!r})\n"
        "path.with_suffix('.new').write_text(f'{os.getpid()} {child.pid}')\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(600)\n"
    )
    check = CommandCheck(python(program), ARRIVAL)
    deadline_s = time.monotonic() + LIMIT_S
    while not said.exists():
        assert time.monotonic() < deadline_s
        assert not check.wait(0.05)
    processes = [psutil.Process(int(pid)) for pid in said.read_text().split()]
    failure = check.late(0.5)
    check.abandon()
    assert check.wait(0)
    assert failure.how.endswith(" was not done within 0.5 s")
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_a_child_that_keeps_the_output_open_holds_nobody_up(tmp_path: Path) -> None:
    """As a daemon does that was started without care; this one ends when the test says so."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check = CommandCheck(["sh", "-c", f"cat {fifo} & exit 3"], ARRIVAL)
    failure = answer_of(check)
    assert failure is not None
    assert failure.exit_code == 3
    fifo.write_text("")


def _say(answer: object, _: Arrival) -> object:
    return answer


def test_a_function_lets_pass_unless_it_raises_or_says_no() -> None:
    told: list[Arrival] = []
    assert answer_of(FunctionCheck(told.append, ARRIVAL)) is None
    assert told == [ARRIVAL]
    for yes in (True, "all is well", _Answer(True)):
        assert answer_of(FunctionCheck(partial(_say, yes), ARRIVAL)) is None

    def break_() -> None:
        raise OSError("no GPU")

    failure = answer_of(FunctionCheck(lambda _: break_(), ARRIVAL))
    assert failure is not None
    assert failure.how == "raised OSError: no GPU"
    assert isinstance(failure.cause, OSError)


class _Answer:
    """As NumPy's are: neither ``False`` itself, nor always true or false."""

    def __init__(self, *truths: bool) -> None:
        self._truths = truths

    def __bool__(self) -> bool:
        if len(self._truths) != 1:
            raise ValueError("the truth value is ambiguous")
        return self._truths[0]


@pytest.mark.parametrize("no", [False, _Answer(False), 0, "", []])
def test_every_false_answer_but_none_is_no(no: object) -> None:
    assert answer_of(FunctionCheck(partial(_say, no), ARRIVAL)) == Failure("said no")


def test_an_answer_that_is_neither_true_nor_false_is_no() -> None:
    failure = answer_of(FunctionCheck(lambda _: _Answer(True, False), ARRIVAL))
    assert failure is not None
    assert failure.how.startswith("raised ValueError: ")


async def _later(_: Arrival) -> None:
    raise RuntimeError("no GPU")


def _piecemeal(_: Arrival) -> Iterator[None]:
    yield


async def _both(_: Arrival) -> AsyncIterator[None]:
    yield


class _Later:
    async def __call__(self, _: Arrival) -> None:
        """Do nothing."""


NOT_RUN_BY_A_CALL = (_later, partial(_later), _Later(), _piecemeal, _both)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gate", NOT_RUN_BY_A_CALL, ids=["async", "partial", "object", "gen", "a"])
def test_an_answer_that_has_checked_nothing_yet_is_no(gate: GateFunction) -> None:
    failure = answer_of(FunctionCheck(gate, ARRIVAL))
    assert failure is not None
    assert "has checked nothing yet" in failure.how
    gc.collect()  # a coroutine that nobody has closed would warn now


@pytest.mark.parametrize("gate", [5, "nvidia-smi", *NOT_RUN_BY_A_CALL])
def test_what_cannot_be_a_gate_is_refused_before_anything_begins(gate: Any) -> None:
    """Nothing listens there."""
    with pytest.raises(SettingsError, match="gate is "):
        rdzv_etcd.connect("127.0.0.1:1", job="j", nodes=1, gate=gate)
    with pytest.raises(SettingsError, match="gate is "):
        asyncio.run(rdzv_etcd.aio.connect("127.0.0.1:1", job="j", nodes=1, gate=gate))


def test_a_function_that_takes_too_long_is_let_go() -> None:
    go_on = threading.Event()
    check = FunctionCheck(lambda _: go_on.wait(LIMIT_S), ARRIVAL)
    assert not check.wait(0.1)
    check.abandon()
    assert check.wait(0)
    go_on.set()

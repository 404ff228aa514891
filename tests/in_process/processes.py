"""Members of a job, each a process that is forked with torch in it, so that many can be had.

Knows examples/in_process.py, whose step log says what each has done; knows nothing of what should.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 180.0
"""For anything that is waited for; only a failing test takes so long."""

_LINE = 1000
"""No line of a log is longer."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.in_process.preload"])


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _work(argv: list[str], output: Path) -> None:
    die_with_parent()
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("in_process")
    example.work(example.parse_arguments(argv))


@dataclass
class Member:
    """One process that takes part."""

    process: ForkServerProcess
    folder: Path
    name: str
    killed: bool = False

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What it has logged, a line per step."""
        return self._logged(0)

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest line."""
        lines = self._logged(-2 * _LINE)
        return lines[-1] if lines else None

    def _logged(self, begin: int) -> list[dict[str, Any]]:
        file = self.folder / f"{self.name}.steps"
        text = file.read_bytes()[begin:] if file.exists() else b""
        lines = text.split(b"\n")[:-1]
        return [json.loads(line) for line in lines[1 if len(text) == -begin else 0 :]]

    @property
    def output(self) -> str:
        file = self.folder / f"{self.name}.output"
        return file.read_text(errors="replace") if file.exists() else ""

    def send(self, number: signal.Signals) -> float:
        """Send a signal; returns the moment."""
        assert self.process.pid is not None
        moment_s = time.monotonic()
        os.kill(self.process.pid, number)
        return moment_s

    def kill(self) -> float:
        self.killed = True
        moment_s = self.send(signal.SIGKILL)
        self.process.join(LIMIT_S)
        return moment_s


@dataclass
class Job:
    """All members there were."""

    folder: Path
    argv: list[str]
    members: list[Member] = field(default_factory=list)

    def add(self) -> Member:
        name = f"member-{len(self.members)}"
        argv = [*self.argv, f"--step-log={self.folder / name}.steps"]
        process = context.Process(target=_work, args=(argv, self.folder / f"{name}.output"))
        process.start()
        member = Member(process, self.folder, name)
        self.members.append(member)
        return member

    @property
    def alive(self) -> list[Member]:
        """Those that were not killed; fails if one of them has ended all the same."""
        alive = [member for member in self.members if not member.killed]
        for member in alive:
            code = member.process.exitcode
            assert code in (None, 0), f"{member.name} ended with {code}:\n{member.output[-3000:]}"
        return alive

    def await_(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until the members' logs show what is waited for."""
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until_s, f"not within {LIMIT_S:g} s: {what}\n{self._tails()}"
            time.sleep(0.02)  # files send no event

    def await_steps(self, after_s: float, *, size: int | None = None) -> None:
        """Wait until all alive have made a step after a moment, in a world of all of them."""
        wanted = len(self.alive) if size is None else size

        def made() -> bool:
            last = [member.last for member in self.alive]
            return all(
                line is not None and line["time"] > after_s and line["world_size"] == wanted
                for line in last
            )

        self.await_(f"a step of {wanted} members", made)

    def _tails(self) -> str:
        return "\n".join(f"{m.name}: {m.last}\n{m.output[-2500:]}" for m in self.alive)

    def close(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.join()
            member.process.close()


@contextlib.contextmanager
def running_job(folder: Path, *argv: str) -> Iterator[Job]:
    job = Job(folder, list(argv))
    try:
        yield job
    finally:
        job.close()

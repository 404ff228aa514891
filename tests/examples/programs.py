"""The examples as processes: started, read line by line, killed with all that they have started.

Knows nothing of what the examples do, nor of etcd.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes import kill_marked
from tests.support.python_path import python_path

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"

PATIENCE_S = 300.0
"""How long the programs of a test may run. It only ends a failing test: a busy two-core machine
takes half a minute to import torch."""

_MARK = "RDZV_ETCD_TEST_MARK"


class Program:
    """One process and what it prints; standard error is among it."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        self.name = " ".join(map(str, command[1:]))
        self.lines: list[str] = []
        """What was read so far."""
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches; fail if the program ends before."""
        for line in self._read():
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{self.name} ended without {pattern!r}:\n" + "\n".join(self.lines))

    def end(self) -> int:
        """Read all that is left; return the exit status."""
        for _ in self._read():
            pass
        return self.process.wait()

    def _read(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            yield self.lines[-1]


class Programs:
    """All programs of one test. ``close`` leaves none of their processes behind."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._started: list[Program] = []
        self._limit = threading.Timer(PATIENCE_S, kill_marked, (_MARK, self._mark))
        self._limit.start()

    def start(
        self,
        example: str | Path,
        *arguments: str | Path,
        python: str | Path = sys.executable,
        launcher: Sequence[str] = (),
        **environment: str,
    ) -> Program:
        """Start an example, by the name of its file, through ``launcher`` if there is one."""
        program = Program(
            [python, *launcher, LAUNCHERS / example, *arguments], self._environment(environment)
        )
        self._started.append(program)
        return program

    def run(self, *command: str | Path, **environment: str) -> Program:
        """Start any other program."""
        program = Program(command, self._environment(environment))
        self._started.append(program)
        return program

    def kill(self, program: Program) -> None:
        """End the program by SIGKILL, and nothing of what it has started."""
        program.process.kill()
        program.process.wait()

    def close(self) -> None:
        self._limit.cancel()
        kill_marked(_MARK, self._mark)
        for program in self._started:
            program.end()
            assert program.process.stdout is not None
            program.process.stdout.close()
            print(f"\n===== {program.name} ({program.process.returncode}) =====")
            print("\n".join(program.lines))

    def _environment(self, added: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": python_path(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            _MARK: self._mark,
            **added,
        }

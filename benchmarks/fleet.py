"""A process per participant, all of them ready and parked before the clock starts.

Processes, not threads: threads of one process share an interpreter lock, which slows every backend
(c10d with 128 threads takes minutes, with 128 processes seconds). They are forked from a server
process that has imported everything, so that 128 of them start in seconds and fit into memory; with
``spawn`` each one imports for itself. ``time.monotonic()`` is one clock for all processes of a
machine (CLOCK_MONOTONIC), so their readings are compared.

Knows processes and clocks; what a participant does is its own affair.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

PRELOAD = "benchmarks.preload"


class Participant(Protocol):
    """What runs in one process. An exception ends the process, and with it the measurement.

    It may have more methods without arguments, for :meth:`Fleet.call`.
    """

    def prepare(self) -> None:
        """Do all that precedes the clock: imports, connections, handlers."""

    def run(self) -> dict[str, Any]:
        """Do what is measured."""

    def finish(self) -> None:
        """Tidy up, unmeasured."""


Make = Callable[[int], Participant]
"""Makes participant ``i``; must be picklable."""


@dataclass(frozen=True)
class Run:
    """One participant's run, on the machine's monotonic clock."""

    called_s: float
    returned_s: float
    said: dict[str, Any]


class FleetError(Exception):
    """A participant failed, or took too long."""


class Fleet:
    """``size`` processes; a context manager that leaves none behind."""

    def __init__(self, make: Make, size: int, *, start: str = "forkserver") -> None:
        # OpenBLAS would start threads at import, and a process with threads should not fork
        os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
        context: Any = multiprocessing.get_context(start)
        self._context = context
        if start == "forkserver":
            self._context.set_forkserver_preload([PRELOAD])
        self._folder = tempfile.TemporaryDirectory(prefix="rdzv-bench-logs-")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for index in range(size):
            ours, theirs = self._context.Pipe()
            log = str(Path(self._folder.name) / f"{index}.log")
            process = self._context.Process(
                target=_serve, args=(theirs, make, index, log), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def prepare(self, timeout_s: float) -> None:
        """Make everybody ready: the first alone (it may host what the others connect to)."""
        everybody = range(len(self._connections))
        self._tell(everybody[:1], "prepare", timeout_s)
        self._tell(everybody[1:], "prepare", timeout_s)

    def call(self, method: str, timeout_s: float) -> list[Any]:
        """Call a method of every participant at about the same time; return the answers."""
        return self._tell(range(len(self._connections)), method, timeout_s)

    def run(self, timeout_s: float, *, parked: Callable[[], None] = lambda: None) -> list[Run]:
        """Let all run at one moment; ``parked`` is called just before, while all are idle."""
        parked()
        begin_s = time.monotonic() + 0.2 + 0.002 * len(self._connections)
        answers = self._tell(range(len(self._connections)), "run", timeout_s, begin_s)
        return [Run(*answer) for answer in answers]

    def finish(self, timeout_s: float) -> None:
        self.call("finish", timeout_s)

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # it has ended already
                connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _tell(
        self, whom: Iterable[int], command: str, timeout_s: float, argument: object = None
    ) -> list[Any]:
        waiting: dict[Any, int] = {}
        for index in whom:
            connection = self._connections[index]
            try:
                connection.send((command, argument))
            except OSError as error:
                raise self._ended(index, command) from error
            waiting[connection] = index
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                asked = len(waiting) + len(answers)
                raise FleetError(
                    f"{command}: {len(waiting)} of {asked} are not done within {timeout_s:g} s"
                )
            answered: Any
            for answered in ready:
                index = waiting.pop(answered)
                try:
                    answers[index] = answered.recv()
                except (EOFError, ConnectionError) as error:
                    raise self._ended(index, command) from error
        return [answers[index] for index in sorted(answers)]

    def _ended(self, index: int, command: str) -> FleetError:
        log = Path(self._folder.name) / f"{index}.log"
        text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        return FleetError(f"{command}: process {index} ended\n{text}")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _serve(connection: Connection, make: Make, index: int, log: str) -> None:
    """A participant's process: obeys until the other end is closed."""
    with Path(log).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # In a thread, because torch's dynamic rendezvous looks for the source of every frame of the
    # stack whenever it records something. The forkserver's first frame has none, and each look for
    # it goes through all modules: c10d and etcd-v2 would take a multiple of the CPU they take in
    # torchrun (c10d with 32 nodes: 4.5 s instead of 1.6 s).
    served = threading.Thread(target=_obey, args=(connection, make(index)))
    served.start()
    served.join()


def _obey(connection: Connection, participant: Participant) -> None:
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            return
        if command == "run":
            time.sleep(max(0.0, argument - time.monotonic()))
            called_s = time.monotonic()
            said = participant.run()
            returned_s = time.monotonic()
            connection.send((called_s, returned_s, said))
        else:
            connection.send(getattr(participant, command)())

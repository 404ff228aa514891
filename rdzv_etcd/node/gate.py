"""A gate in front of each arrival: a node on which its command fails does not join.

The command runs on a thread, bounded in time, and never on the event loop.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import GateError
from rdzv_etcd.log import LineTimes
from rdzv_etcd.node.node import Node
from rdzv_etcd.process import how_ended
from rdzv_etcd.settings.fields import MAX_ID, gate_words
from rdzv_etcd.settings.parse import NODE_ID_VARIABLE, WITHHELD
from rdzv_etcd.text import shown

JOB_ID_VARIABLE = "RDZV_ETCD_JOB_ID"
ROUND_VARIABLE = "RDZV_ETCD_ROUND"
LAST_CHANGE_VARIABLE = "RDZV_ETCD_LAST_CHANGE"
"""Empty before a node's first world."""

_KEPT = 4096
"""Bytes of a command's output that are kept, the last ones: it may write without end."""
_LAST_OUTPUT_S = 0.5
"""How long its output is waited for when it has failed: what it leaves behind may hold that open.
"""
_LINES = 10
"""Lines of these that are shown."""
_SHOWN = 400
"""Characters of why a node did not pass."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a node does not pass its gate."""

    how: str
    """For people; follows "its gate"."""
    exit_code: int | None = None
    output: str = ""
    cause: BaseException | None = None


class Command:
    """One run of a gate's command, in a session of its own; may be abandoned from any thread."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._words = words
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._is_abandoned = False
        self._tail = b""
        self._starting = threading.RLock()  # a signal's handler may also abandon it

    def run(self, clock: Clock, limit_s: float, report: Callable[[float], None]) -> Failure | None:
        """Run it to its end, and return why the node does not pass, if so; ``None`` also if it was
        abandoned. After ``limit_s``, all of its session is killed. ``report`` is called now and
        then meanwhile, with the seconds waited."""
        name = repr(shown(shlex.join(self._words)))
        try:
            exit_code = self._run(clock, limit_s, report)
        except (OSError, ValueError, RuntimeError) as error:
            self._kill()
            return Failure(f"{name} cannot be started: {error}", cause=error)
        if exit_code == 0 or self._is_abandoned:
            return None
        ended = f"was not done within {limit_s:g} s" if exit_code is None else how_ended(exit_code)
        lines = [shown(line) for line in self._tail.decode(errors="replace").splitlines()]
        how = f"{name} {ended}{f': {lines[-1]}' if lines else ''}"
        return Failure(how, exit_code, "\n".join(lines[-_LINES:]))

    def _run(self, clock: Clock, limit_s: float, report: Callable[[float], None]) -> int | None:
        """Return its exit code, ``None`` if it took too long."""
        with self._starting:
            if self._is_abandoned:
                return None
            self._process = process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        reading = threading.Thread(
            target=self._read, args=(process.stdout,), name="rdzv-etcd gate", daemon=True
        )
        reading.start()
        exit_code = self._wait(process, clock, limit_s, report)
        if exit_code != 0:
            reading.join(_LAST_OUTPUT_S)
        return exit_code

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        clock: Clock,
        limit_s: float,
        report: Callable[[float], None],
    ) -> int | None:
        began_s, lines = clock.now_s(), LineTimes()
        while (waited_s := clock.now_s() - began_s) < limit_s:
            if lines.is_due(waited_s):
                report(waited_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(limit_s, lines.next_s) - waited_s)
        self._kill()
        process.wait()
        return None

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while some := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + some)[-_KEPT:]

    def abandon(self) -> None:
        """Stop waiting for it, and kill all of its session."""
        self._is_abandoned = True
        with self._starting:  # it has a number by then, or will not get one
            self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Gate:
    """The gate of one node; for one join at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._words = gate_words(node.context.settings.gate_command)
        self._command: Command | None = None

    def begin(self) -> bool:
        """Begin an arrival: whether the gate has to be asked first."""
        is_asked = bool(self._words) and not self._node.must_stop
        self._command = Command(self._words, self._environ()) if is_asked else None
        return is_asked

    def _environ(self) -> Mapping[str, str]:
        node, context = self._node, self._node.context
        last = "" if node.last_change is None else str(node.last_change)
        environ = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        return environ | {
            JOB_ID_VARIABLE: shown(context.settings.job_id, MAX_ID),
            NODE_ID_VARIABLE: context.identity.node_id,
            ROUND_VARIABLE: str(node.control.next_number),
            LAST_CHANGE_VARIABLE: shown(last, 1000),
        }

    def ask(self) -> Failure | None:
        """Run the command on the caller's thread; blocks for at most ``gate_timeout_s``."""
        context, command = self._node.context, self._command
        if command is None:
            return None

        def report(waited_s: float) -> None:
            context.log.warn(f"waiting {waited_s:.0f} s for its gate")

        return command.run(context.clock, context.settings.gate_timeout_s, report)

    def abandon(self) -> None:
        """End a question that is under way on another thread. May be called on any thread."""
        command = self._command
        if command is not None:
            command.abandon()

    async def settle(self, failure: Failure | None) -> None:
        """Act on the answer, on the event loop: a failure is shown to the others, and raised as
        GateError."""
        node, context = self._node, self._node.context
        if failure is None:
            await context.forget_refused()
            return
        how = shown(f"its gate {failure.how}", _SHOWN)
        context.log.warn(f"this node does not join: {how}")
        await node.give_up_seat(-1, how)
        await context.note_refused(how)
        name = context.log.names(context.identity.node_id)
        raise GateError(
            f"{name} does not join job {context.settings.job_id!r}: {how}. Fix what the gate "
            "checks, or keep this host out of the job",
            node=context.identity.node_id,
            exit_code=failure.exit_code,
            output=failure.output,
        ) from failure.cause

"""A gate in front of each arrival: a node that does not pass it does not join.

Runs a command or calls a function, bounded in time: on threads of its own, while the caller's
waits, and never on the event loop.
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
from typing import IO, TypeAlias

from rdzv_etcd.arguments import has_run, runs_later
from rdzv_etcd.errors import GateError, SettingsError
from rdzv_etcd.log import LineTimes
from rdzv_etcd.node.node import Node
from rdzv_etcd.process import Latch, how_ended
from rdzv_etcd.settings.fields import MAX_ID, gate_words
from rdzv_etcd.settings.parse import NODE_ID_VARIABLE, WITHHELD
from rdzv_etcd.text import shown
from rdzv_etcd.world_change import WorldChange

JOB_ID_VARIABLE = "RDZV_ETCD_JOB_ID"
ROUND_VARIABLE = "RDZV_ETCD_ROUND"
LAST_CHANGE_VARIABLE = "RDZV_ETCD_LAST_CHANGE"
"""Empty before a node's first world."""

_KEPT = 4096
"""Bytes of a command's output that are kept, the last ones."""
_LINES = 10
"""Lines of these that are shown."""
_LAST_OUTPUT_S = 1.0
"""How long output is read after a command has ended: what it has started may hold the pipe open."""
_SHOWN = 400
"""Characters of why a node did not pass."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival that a gate lets through, or does not."""

    job: str
    """The job's id."""
    node_id: str
    """This node's id."""
    round: int
    """The round that the node will arrive for, as far as it is known."""
    last_change: WorldChange | None
    """Why this node's last world is over; ``None`` before its first."""


GateFunction: TypeAlias = "Callable[[Arrival], object]"
"""Lets the node join if it returns ``None`` or something true; not if it raises an exception, or
returns anything else. Called on a new thread each time."""


def check_gate(gate: object) -> None:
    """Raise :class:`SettingsError` for what cannot be a gate: no function, or one whose call runs
    nothing of it."""
    what = f"gate is {shown(repr(gate), 100)}"
    if not callable(gate):
        raise SettingsError(
            f"{what}; it must be a function that takes an Arrival (a program is given as "
            "gate_command)"
        )
    if runs_later(gate):
        raise SettingsError(
            f"{what}, an async function or a generator, of which a call runs nothing; write it "
            "with def and without yield: it has a thread of its own, and may block there"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a node does not pass its gate."""

    how: str
    """For people; follows "its gate"."""
    exit_code: int | None = None
    output: str = ""
    cause: BaseException | None = None


class Check:
    """One question to the gate; may be abandoned from any thread."""

    def __init__(self) -> None:
        self._done = Latch()
        self._failure: Failure | None = None
        self._is_abandoned = False

    def wait(self, timeout_s: float) -> bool:
        """Block until there is an answer, and return whether there is; handles signals."""
        return self._done.wait(timeout_s)

    def answer(self) -> Failure | None:
        """The answer, once there is one."""
        return self._failure

    def late(self, limit_s: float) -> Failure:
        """The failure that there is no answer."""
        return Failure(f"was not done within {limit_s:g} s")

    def abandon(self) -> None:
        """Stop waiting for it, and end what can be ended."""
        self._is_abandoned = True
        self._done.open()

    def _begin(self, work: Callable[[], Failure | None]) -> None:
        def do_it() -> None:
            self._failure = work()
            self._done.open()

        try:
            threading.Thread(target=do_it, name="rdzv-etcd gate", daemon=True).start()
        except RuntimeError as error:
            self._failure = Failure(f"cannot be asked: {error}", cause=error)
            self._done.open()


class FunctionCheck(Check):
    """Calls a function. One that takes too long continues: a thread cannot be ended."""

    def __init__(self, gate: GateFunction, arrival: Arrival) -> None:
        super().__init__()
        self._begin(lambda: _call(gate, arrival))


def _call(gate: GateFunction, arrival: Arrival) -> Failure | None:
    try:
        answer = gate(arrival)
        if not has_run(answer):
            kind = type(answer).__name__
            return Failure(f"returned an object of type {kind}, which has checked nothing yet")
        return None if answer is None or answer else Failure("said no")
    except BaseException as error:  # noqa: BLE001 - it is the user's, and handed to the caller
        return Failure(f"raised {type(error).__name__}: {shown(error)}", cause=error)


class CommandCheck(Check):
    """Runs a command in a session of its own, and ends all of that session if it takes too long."""

    def __init__(self, words: Sequence[str], arrival: Arrival) -> None:
        super().__init__()
        self._words = words
        self._environ = _environ(arrival)
        self._tail = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.RLock()  # a signal's handler may also abandon it
        self._begin(self._run)

    def late(self, limit_s: float) -> Failure:
        output = self._output()
        how = f"{self._named} was not done within {limit_s:g} s{_last_line(output)}"
        return Failure(how, output=output)

    def abandon(self) -> None:
        super().abandon()
        with self._starting:  # it has a number by then, or will not get one
            self._kill()

    @property
    def _named(self) -> str:
        return repr(shown(shlex.join(self._words)))

    def _run(self) -> Failure | None:
        try:
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
            reading = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            reading.start()
        except (OSError, ValueError, RuntimeError) as error:
            self._kill()
            return Failure(f"{self._named} cannot be started: {error}", cause=error)
        exit_code = process.wait()
        reading.join(_LAST_OUTPUT_S)
        if exit_code == 0:
            return None
        output = self._output()
        how = f"{self._named} {how_ended(exit_code)}{_last_line(output)}"
        return Failure(how, exit_code, output)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while some := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + some)[-_KEPT:]

    def _output(self) -> str:
        lines = self._tail.decode(errors="replace").splitlines()
        return "\n".join(shown(line) for line in lines[-_LINES:])

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _environ(arrival: Arrival) -> Mapping[str, str]:
    last = "" if arrival.last_change is None else str(arrival.last_change)
    environ = {name: value for name, value in os.environ.items() if name not in WITHHELD}
    return environ | {
        JOB_ID_VARIABLE: shown(arrival.job, MAX_ID),
        NODE_ID_VARIABLE: arrival.node_id,
        ROUND_VARIABLE: str(arrival.round),
        LAST_CHANGE_VARIABLE: shown(last, 1000),
    }


def _last_line(output: str) -> str:
    last = output.rpartition("\n")[2]
    return f": {last}" if last else ""


class Gate:
    """The gate of one node; for one join at a time."""

    def __init__(self, node: Node, function: GateFunction | None) -> None:
        """``function`` is called after the settings' ``gate_command``."""
        self._node = node
        self._words = gate_words(node.context.settings.gate_command)
        self._function = function
        self._check: Check | None = None
        self._is_abandoned = False

    def begin(self) -> bool:
        """Begin an arrival: whether the gate has to be asked first."""
        self._is_abandoned = False
        is_there = bool(self._words) or self._function is not None
        return is_there and not self._node.must_stop

    def ask(self) -> Failure | None:
        """Ask the gate, on the caller's thread; blocks for at most ``gate_timeout_s`` for each of
        command and function."""
        node, context = self._node, self._node.context
        arrival = Arrival(
            context.settings.job_id,
            context.identity.node_id,
            node.control.next_number,
            node.last_change,
        )
        failure = None
        if self._words:
            failure = self._wait_for(CommandCheck(self._words, arrival))
        if failure is None and self._function is not None and not self._is_abandoned:
            failure = self._wait_for(FunctionCheck(self._function, arrival))
        return failure

    def _wait_for(self, check: Check) -> Failure | None:
        context = self._node.context
        clock, limit_s = context.clock, context.settings.gate_timeout_s
        self._check = check
        began_s, lines = clock.now_s(), LineTimes()
        try:
            if self._is_abandoned:
                return None  # its caller was interrupted, or the node has left
            while True:
                waited_s = clock.now_s() - began_s
                if waited_s >= limit_s:
                    return check.late(limit_s)
                if check.wait(min(limit_s, lines.next_s) - waited_s):
                    return check.answer()
                if lines.is_due(waited_s):
                    context.log.warn(f"waiting {waited_s:.0f} s for its gate")
        finally:
            check.abandon()
            self._check = None

    def abandon(self) -> None:
        """End a question that is under way on another thread. May be called on any thread."""
        self._is_abandoned = True
        check = self._check
        if check is not None:
            check.abandon()

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

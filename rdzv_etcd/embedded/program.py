"""What a supervisor needs of the system: a program with all that it starts, signals, and a lock.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
UNBLOCKED = _STOP | {signal.SIGCHLD}
"""Blocked in the supervisor, which waits for them; not so in its child."""
_LOCK_BACKLOG = 1024
"""How many nodes may ask between two calls of :func:`dismiss`; more only hear that it is taken."""


# --- a program ------------------------------------------------------------------------------------


class Program:
    """A running program, without input, until :meth:`end`. An etcd may be a script with children.

    It has a session of its own: its group can be ended as a whole, and Ctrl-C at a terminal is for
    the process that started it, which then ends it.
    """

    def __init__(self, command: Sequence[str | os.PathLike[str]], output: int, **how: Any) -> None:
        """Start it; ``how``: as for :class:`subprocess.Popen`. Raises OSError."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **how,
        )

    @property
    def running(self) -> bool:
        """Tell it without reaping: while its id is in use, no other group can have it."""
        if self.process.returncode is not None:
            return False
        try:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, how) is None
        except ChildProcessError:  # this process lets the system reap
            return False

    def end(self, patience_s: float = 0.0) -> None:
        """End it and all that is left of its group; with patience, by SIGTERM first."""
        if patience_s and self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def answer(command: Sequence[str | os.PathLike[str]], limit_s: float) -> tuple[int, str]:
    """Run it to its end; return its exit code and what it wrote.

    Raises OSError, and TimeoutError if it does not end within ``limit_s``.
    """
    program = Program(command, subprocess.PIPE)
    with program.process:
        try:
            written, _ = program.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            program.end()
    return program.process.returncode, written.decode(errors="replace")


# --- signals --------------------------------------------------------------------------------------


def wait_for_signal(timeout_s: float) -> int | None:
    """Sleep until a signal of ours (the child's end among them) or the timeout."""
    received = signal.sigtimedwait(UNBLOCKED, timeout_s)
    return None if received is None else received.si_signo


def is_told_to_stop(signal_number: int | None) -> bool:
    """Tell whether a received signal means to stop. An ignored one does not: a hang-up under
    ``nohup``, Ctrl-C in what a shell has started in the background. It is received all the same, as
    it is blocked here."""
    return signal_number in _STOP and signal.getsignal(signal_number) is not signal.SIG_IGN


# --- one supervisor per port ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock; ``None`` where the kernel does not say."""

    pid: int | None = None
    uid: int | None = None


def take_lock(port: int) -> socket.socket:
    """Return the lock of ``port``, held until it is closed; raises OSError if it is taken.

    It is an abstract Unix socket: in the same network namespace as the port, and dropped by the
    kernel with its process. It listens only so that the kernel can say whose it is.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_lock_name(port))
        lock.listen(_LOCK_BACKLOG)
        lock.setblocking(False)
    except OSError:
        lock.close()
        raise
    return lock


def dismiss(lock: socket.socket) -> None:
    """Close the connections of the nodes that have asked: the kernel has told them."""
    with contextlib.suppress(BlockingIOError):
        while True:
            lock.accept()[0].close()


def lock_holder(port: int) -> Holder | None:
    """Return who holds the lock of ``port`` on this machine, ``None`` if it is free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(_lock_name(port))
        except BlockingIOError:
            return Holder()  # too many ask at once
        except OSError:
            return None
        form = struct.Struct("3i")  # struct ucred: pid, uid and gid of the process that listens
        pid, uid, _ = form.unpack(
            question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        )
        return Holder(pid, uid)


def _lock_name(port: int) -> str:
    return f"\0rdzv-etcd-embedded-{port}"

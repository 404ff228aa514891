"""What a supervisor needs of the system: a program with all that it starts, signals, and a lock.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rdzv_etcd.settings.parse import LOGIN, NODE_ID_VARIABLE

_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
UNBLOCKED = _STOP | {signal.SIGCHLD}
"""Blocked in the supervisor, which waits for them; not so in its child."""
_LOCK = "rdzv-etcd-embedded-"
_NOT_FOR_ETCD = (*LOGIN, NODE_ID_VARIABLE)
"""Secrets, and what a guard knows an agent's workers by: etcd is none of them."""


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a supervisor and its etcd have of an agent's environment."""
    return {name: value for name, value in environ.items() if name not in _NOT_FOR_ETCD}


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
        """Whether it runs. It is not reaped: while its id is in use, no other group can have it."""
        if self.process.returncode is not None:
            return False
        try:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, how) is None
        except ChildProcessError:  # this process lets the system reap
            return False

    def end(self) -> None:
        """End it and all that is left of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def answer(command: Sequence[str | os.PathLike[str]], limit_s: float) -> tuple[int, str]:
    """Run it to its end; return its exit code and what it wrote.

    Raises OSError, and TimeoutError if it does not end within ``limit_s``.
    """
    program = Program(command, subprocess.PIPE, env=without_secrets(os.environ))
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


def asks_to_stop(signal_number: int | None) -> bool:
    """Return whether a received signal means to stop. An ignored one does not, such as a hang-up
    under ``nohup``, or Ctrl-C in what a shell has started in the background; it is received all the
    same, because it is blocked here."""
    return signal_number in _STOP and signal.getsignal(signal_number) is not signal.SIG_IGN


# --- one supervisor per port ----------------------------------------------------------------------


def take_lock(port: int | str) -> socket.socket:
    """Return the lock of ``port``, held until it is closed; raises OSError if it is taken.

    The supervisors of a cluster's seats have one for each address (``"host:port"``) instead.
    It is an abstract Unix socket: in the same network namespace as the port, and dropped by the
    kernel with its process.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0{_LOCK}{port}")
    except OSError:
        lock.close()
        raise
    return lock


def is_locked(port: int | str) -> bool:
    """Return whether a supervisor of this machine holds the lock of ``port``."""
    try:
        sockets = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return False  # unknown: an attempt to take it will show
    return any(line.endswith(f" @{_LOCK}{port}") for line in sockets)

"""Child processes that cannot outlive the test run, and claims on what a machine has only once.

Knows Linux's parent-death signal; knows nothing of etcd.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

# Sets PR_SET_PDEATHSIG (1) to SIGKILL, then becomes the program: the setting survives exec.
# A preexec_fn would do the same, but forks a process that has threads (a warning from 3.12 on).
_GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


SPAWNER = "test-spawner"
# The signal comes when the *thread* that forked ends, so one thread that stays does it for all.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix=SPAWNER)


def spawn(
    argv: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program whose output is appended to ``log``; may be called from any thread."""
    return _SPAWNER.submit(_spawn, argv, log, env).result()


def _spawn(
    argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*guard, *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
        )


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program without input to its end; ``env`` is added to this process's environment."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


def output(command: Sequence[str | Path], **how: Any) -> str:
    """Run a program that must end well, as :func:`run` does; return what it printed."""
    done = run(command, **how)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def end(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> int:
    """Terminate, then kill after ``grace_s``; returns the exit status. Idempotent."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return every process that has this variable in its environment.

    Workers are in sessions of their own and outlive a killed agent, so neither process groups nor
    parents find them all.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended, or not ours
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def kill_marked(variable: str, value: str) -> None:
    for process in marked(variable, value):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def claim(name: str) -> int | None:
    """Return a descriptor that holds ``name`` until it is closed, ``None`` if it is held already,
    by this or another test process.

    A claim is an abstract Unix socket: it ends with the process that holds it, leaves no file, and
    like ports and addresses it counts within one network namespace.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        try:
            holder.bind(f"\0rdzv-etcd-tests-{name}")
        except OSError:
            return None
        return holder.detach()


_PORTS_HELD = 150
"""How many of its latest ports a process keeps for itself: far more than one test uses."""
_held: deque[int] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that no process listens on and no other test process gets for a while.

    Below the kernel's ephemeral range (32768 up on Linux), so that no outgoing connection can take
    it while a server is being restarted. A stranger may still take it first: callers retry.
    """
    chooser = random.SystemRandom()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(200):
        port = chooser.randrange(20000, 32000)
        held = claim(f"port-{port}")
        if held is None:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                os.close(held)
                continue
        _held.append(held)
        if len(_held) > _PORTS_HELD:
            os.close(_held.popleft())
        return port
    raise OSError(f"no free port found on {host} between 20000 and 32000")

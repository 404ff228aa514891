"""The guard: a small process that ends a node's workers if the node's process dies without leaving.

:class:`Guard` starts it. It runs this file as a program, with the standard library only: it costs
some megabytes, and no time of the node. Knows processes and one environment variable; knows nothing
of jobs or of etcd.

    orphans.py PID START_TIME VARIABLE NODE_ID < pipe

PID and START_TIME (of /proc/PID/stat) name the node's process. Its workers are the processes that
were started with VARIABLE=NODE_ID in their environment, which their children inherit. The node
writes to the pipe before it ends in order.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

TERM_GRACE_S = 10.0
"""How long workers may take to end after SIGTERM."""
_KILL_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A signal to the whole group of processes ends the agent, and the guard has work to do."""
_START_LIMIT_S = 60.0


class Guard:
    """A guard of this process, for what was started with one node's id in its environment."""

    def __init__(self, node_id: str) -> None:
        """Start it; blocks for some 20 ms. Raises SettingsError where that is impossible."""
        # The program has none of these, and starts without them.
        import subprocess  # noqa: PLC0415

        from rdzv_etcd.errors import SettingsError  # noqa: PLC0415
        from rdzv_etcd.settings.parse import NODE_ID_VARIABLE  # noqa: PLC0415

        me = os.getpid()
        reading, self._writing = os.pipe()  # closed in whatever is executed
        command = [sys.executable, "-I", "-S", __file__, str(me)]
        command += [str(start_time_of(me)), NODE_ID_VARIABLE, node_id]
        try:
            if not start_time_of(me):
                raise SettingsError("orphans=kill needs Linux's /proc; use orphans=leave")
            subprocess.run(
                command,
                check=True,
                stdin=reading,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath},  # none of what workers are known by
                timeout=_START_LIMIT_S,
            )
        except BaseException as error:
            os.close(self._writing)
            if isinstance(error, OSError | subprocess.SubprocessError):
                raise SettingsError(f"orphans=kill: the guard did not start: {error}") from error
            raise
        finally:
            os.close(reading)

    def end(self) -> None:
        """Let the guard end without ending any process. Idempotent, does not block."""
        writing, self._writing = self._writing, -1
        if writing >= 0:
            with contextlib.suppress(OSError):  # the guard was ended
                os.write(writing, b"bye")
            os.close(writing)


def main(agent: int, start_time: int, variable: str, node_id: str) -> None:
    if os.fork() > 0:  # the agent waits for this parent only: it gets no child to look after
        os._exit(0)
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if not _leaves_first(agent, start_time):
        ended, killed, left = end_workers(f"{variable}={node_id}".encode())
        if ended or left:
            with contextlib.suppress(OSError):  # stderr may be closed
                print(_report(node_id, ended, killed, left), file=sys.stderr, flush=True)


def _report(node_id: str, ended: int, killed: int, left: list[int]) -> str:
    how = f", {killed} of them with SIGKILL" if killed else ""
    if left:
        pids = " ".join(map(str, left[:10]))
        how += f"; {len(left)} survived SIGKILL (in the kernel, or another user's): {pids}"
    return (
        f"rdzv_etcd: agent {node_id} died without leaving the job; terminated {ended} "
        f"process{'' if ended == 1 else 'es'} it had started{how} (orphans=kill)"
    )


# --- the agent ------------------------------------------------------------------------------------


def _leaves_first(agent: int, start_time: int) -> bool:
    """Wait for the agent's end; return whether it has left before."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    try:
        handle = os.pidfd_open(agent)
    except OSError:  # it is gone, or the kernel is older than 5.3
        handle = -1
    if handle >= 0:
        poll.register(handle, select.POLLIN)
    if start_time_of(agent) != start_time:
        return _has_left()
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if 0 in ready:
            if os.read(0, 100):
                return True
            if handle < 0:  # no process holds the other end any more
                return False
            poll.unregister(0)
        if handle in ready:
            return _has_left()


def _has_left() -> bool:
    """Read the pipe without waiting; a forked child of the agent may hold it open."""
    return bool(select.select([0], [], [], 0)[0]) and bool(os.read(0, 100))


def start_time_of(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123
            return int(stat.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


# --- its workers ----------------------------------------------------------------------------------


def end_workers(mark: bytes) -> tuple[int, int, list[int]]:
    """End all processes with ``mark`` in their environment, and those that they start meanwhile.

    Returns how many were ended, how many of them with SIGKILL, and which are still running.
    """
    asked: set[tuple[int, int]] = set()
    killed: set[tuple[int, int]] = set()
    began_s = time.monotonic()
    while True:
        there = [pid for pid in _pids() if _has(pid, mark)]
        past_s = time.monotonic() - began_s
        if not there or past_s > TERM_GRACE_S + _KILL_LIMIT_S:
            last = {(pid, start_time_of(pid)) for pid in there}
            return len(asked - last), len(killed - last), there
        for pid in there:
            who = (pid, start_time_of(pid))
            if past_s > TERM_GRACE_S:
                if _signal(pid, mark, signal.SIGKILL):
                    asked.add(who)
                    killed.add(who)
            elif who not in asked and _signal(pid, mark, signal.SIGTERM):
                asked.add(who)
        time.sleep(_LOOK_EVERY_S)


def _pids() -> list[int]:
    mine = os.getpid()
    names = os.listdir("/proc")  # noqa: PTH208 - pathlib takes as long to import as all the rest
    return [int(name) for name in names if name.isdecimal() and int(name) != mine]


def _has(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:  # noqa: PTH123
            return mark in environ.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def _signal(pid: int, mark: bytes, number: signal.Signals) -> bool:
    """Send a signal to exactly that process; ``False`` if it has ended, or is not a worker."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # an older kernel: the process id may, very rarely, be another's by now
        with contextlib.suppress(OSError):
            os.kill(pid, number)
        return True
    try:
        if not _has(pid, mark):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

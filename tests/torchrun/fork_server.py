"""Python processes that are forked from one which has imported torch, for torchrun agents.

Importing torch takes longer than anything else that most agents do in a test. A forked one starts
where ``python -m torch.distributed.run`` is after its imports, and ends as any interpreter does; it
has a session, an environment, a folder and arguments of its own.

Run as a program, this is the server: its argument is a socket, from which it reads requests. Each
comes with a socket of its own, at which a process that waits for the forked one reports its id and
then its exit code. Imported, it is the client. Knows nothing of rendezvous.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_READ_BY_IMPORTS = ("LOGLEVEL", "OMP_NUM_THREADS")
_LONGEST = 1 << 20
"""No message has more bytes."""


class ForkServers:
    """One server for each host and for each of the variables that torch reads when it is imported.

    What they start does not end with them, but they end with this process. A context manager; those
    of other hosts have to be closed before their hosts. For many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, ...], tuple[socket.socket, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        enter: Sequence[str],
        arguments: Sequence[str],
        output: Path,
        *,
        environ: Mapping[str, str],
        cwd: Path,
    ) -> Forked:
        """Run torchrun with these arguments where the command line ``enter`` leads to. Blocks until
        it has been forked."""
        read = {name: environ[name] for name in _READ_BY_IMPORTS if name in environ}
        key = (*enter, "", *read.values())
        with self._lock:
            if key not in self._servers:
                others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                self._servers[key] = _start_server([*enter, sys.executable], {**others, **read})
        asked = {"arguments": [*arguments], "output": str(output), "cwd": str(cwd)}
        message = json.dumps({**asked, "environ": dict(environ)}).encode()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._servers[key][0], [message], [theirs.fileno()])
        return Forked(mine)

    def close(self) -> None:
        while self._servers:
            _, (requests, process) = self._servers.popitem()
            requests.close()
            process.wait()


def _start_server(
    command: Sequence[str], environ: Mapping[str, str]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*command, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environ,
            pass_fds=[theirs.fileno()],
        )
    return mine, process


class Forked:
    """What there is of :class:`subprocess.Popen` for a process that a server has forked."""

    def __init__(self, reports: socket.socket) -> None:
        self._reports = reports
        self._code: int | None = None
        self.pid = self._next()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
            self._code = self._next()
            self._reports.close()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _next(self) -> int:
        if report := self._reports.recv(_LONGEST):
            return int(report)
        raise ChildProcessError("the fork server, or what it has forked to wait, has ended")


HERE = ForkServers()
"""Those of this host, for all tests of this process."""
atexit.register(HERE.close)


# --- the server -----------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork for every request. Returns in the requested processes; ends this one with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 1)
        if not message:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as reports:
            if os.fork():
                continue
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                _report_end(pid, reports)
        become(**json.loads(message))
        return


def _report_end(pid: int, reports: socket.socket) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        reports.send(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        reports.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(arguments: list[str], output: str, environ: dict[str, str], cwd: str) -> None:
    """Become the requested process in everything but its code."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND)
    for fd, source in enumerate((nothing, written, written)):
        os.dup2(source, fd)
    os.close(nothing)
    os.close(written)
    sys.argv = [torchrun.__file__, *arguments]
    folders = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[0:1] = [cwd, *folders]
    for folder in folders:
        custom = Path(folder, "sitecustomize.py")
        if custom.is_file():
            runpy.run_path(str(custom))
            break


if __name__ == "__main__":
    from torch.distributed import run as torchrun

    serve(socket.socket(fileno=int(sys.argv[1])))
    torchrun.main()

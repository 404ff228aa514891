"""Python processes that are forked from one which has imported torch, for torchrun agents.

Importing torch takes longer than anything else that most agents do in a test. A forked one starts
where ``python -m torch.distributed.run`` is after its imports, and ends as any interpreter does; it
has a session, an environment, a folder and arguments of its own.

Run as a program, this is the server: its argument is a socket, from which it reads requests and to
which it reports exit codes. Imported, it is the client. Knows nothing of rendezvous.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_READ_BY_IMPORTS = ("LOGLEVEL", "OMP_NUM_THREADS")
_LONGEST = 1 << 20
"""No message has more bytes."""


class ForkServer:
    """Starts processes, for one caller at a time. They do not end with it, but it ends with this
    process. ``command`` is how Python is called."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.codes: dict[int, int] = {}
        """The exit codes of those that have ended."""
        with theirs:
            self._process = subprocess.Popen(
                [*command, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self, arguments: Sequence[str], output: Path, *, environ: Mapping[str, str], cwd: Path
    ) -> Forked:
        """Run torchrun with these arguments. Blocks until the server has forked it."""
        asked = {"arguments": [*arguments], "output": str(output), "cwd": str(cwd)}
        self._socket.sendall(json.dumps({**asked, "environ": dict(environ)}).encode())
        while (pid := self._receive(None)) is None:
            pass
        return Forked(self, pid)

    def wait(self, pid: int, timeout_s: float | None) -> bool:
        """Wait for the end of one process; return whether it has ended."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self.codes:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            with contextlib.suppress(TimeoutError):
                self._receive(left_s)
                continue
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _receive(self, timeout_s: float | None) -> int | None:
        """Read one message: return the process id of a start, or record an exit code."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError
        message = self._socket.recv(_LONGEST)
        if not message:
            raise ChildProcessError(f"the fork server ended with {self._process.wait()}")
        pid, code = json.loads(message)
        if code is None:
            return int(pid)
        self.codes[pid] = code
        return None


class ForkServers:
    """One server for each host and for each of the variables that torch reads when it is imported.

    A context manager; those of other hosts have to be closed before their hosts.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], ForkServer] = {}

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
        """Run torchrun with these arguments where the command line ``enter`` leads to."""
        read = {name: environ[name] for name in _READ_BY_IMPORTS if name in environ}
        key = (*enter, "", *read.values())
        if key not in self._servers:
            others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self._servers[key] = ForkServer([*enter, sys.executable], {**others, **read})
        return self._servers[key].start(arguments, output, environ=environ, cwd=cwd)

    def close(self) -> None:
        while self._servers:
            _, server = self._servers.popitem()
            server.close()


class Forked:
    """What there is of :class:`subprocess.Popen` for a process that a server has forked."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        self._server.wait(self.pid, 0.0)
        return self._server.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if not self._server.wait(self.pid, timeout):
            raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
        return self._server.codes[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


HERE = ForkServers()
"""Those of this host, for all tests of this process."""
atexit.register(HERE.close)


# --- the server -----------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork for every request. Returns in the forked processes; ends this one with its client."""
    running: dict[int, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                _report(requests, pid, os.waitstatus_to_exitcode(status))
            elif not (message := requests.recv(_LONGEST)):
                os._exit(0)
            elif pid := os.fork():
                handle = os.pidfd_open(pid)
                running[handle] = pid
                selector.register(handle, selectors.EVENT_READ)
                _report(requests, pid, None)
            else:
                requests.close()
                selector.close()
                for handle in running:
                    os.close(handle)
                become(**json.loads(message))
                return


def _report(requests: socket.socket, pid: int, code: int | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # then its end is what is read next
        requests.sendall(json.dumps([pid, code]).encode())


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

"""Keeps one etcd running while somebody uses it, and ends it afterwards. A program of its own.

Started as a file, with nothing but the standard library, so that it stays small and needs nothing
of the agent that started it: it has its own session, no terminal and none of the agent's pipes.
It knows etcd's command line and one question, "does any lease exist?"; it knows nothing of jobs.
Every node holds a lease, and so does the marker of a closed job while late nodes may ask for it.

Only one supervisor per port: an abstract Unix socket is the lock. It belongs to the same network
namespace as the port, and the kernel drops it with the process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import http.client
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

PR_SET_PDEATHSIG = 1
START_LIMIT_S = 120.0
MOST_RESTARTS = 5
HEALTHY_AFTER_S = 60.0
"""A crash after this long is a new incident: restarts are counted from zero again."""
BLIND_LIMIT_S = 600.0
"""An etcd that has not answered for this much longer than the grace time is given up."""
FOLDER_PREFIX = "rdzv-etcd-embedded-"
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}


class StartError(Exception):
    """etcd did not come up; the message says why."""


def lock_name(port: int) -> str:
    """The abstract socket that stands for "an embedded etcd is kept on this port"."""
    return f"\0rdzv-etcd-embedded-{port}"


def lock_folder(folder: Path) -> int:
    """Mark a data directory as in use by this process; returns the descriptor that holds it."""
    unfinished = folder / "lock.new"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unfinished.rename(folder / "lock")  # it never exists unlocked while its owner lives
    return descriptor


def sweep(place: Path) -> None:
    """Delete what killed supervisors left: batch systems end a job by killing all its processes."""
    for lock in place.glob(f"{FOLDER_PREFIX}*/lock"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just being removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(descriptor)


class Etcd:
    """One etcd child process with a temporary data directory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._folder_lock = lock_folder(self._folder)
        self._log = self._folder / "etcd.log"
        self._token = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._libc = ctypes.CDLL(None)

    def start(self) -> None:
        """Start and wait until it serves requests; raises :class:`StartError`."""
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=_environment(),
                    preexec_fn=self._tie_to_parent,  # noqa: PLW1509 - one thread only here
                )
            except OSError as error:
                raise StartError(f"{self._options.binary} cannot be run: {error}") from error
        deadline = time.monotonic() + START_LIMIT_S
        while self._ask("GET", "/health", '"health":"true"') is None:
            if not self.running:
                raise StartError(f"{self._options.binary} ended at once: {self._last_words()}")
            if time.monotonic() > deadline:
                raise StartError(f"{self._options.binary} is not ready: {self._last_words()}")
            wait_for_signal(0.05)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def leases(self) -> int | None:
        """Return how many leases exist, ``None`` if etcd does not answer."""
        body = self._ask("POST", "/v3/lease/leases", '"header"')
        return None if body is None else len(json.loads(body).get("leases", ()))

    def remove(self) -> None:
        """End it and delete everything it wrote."""
        if self._process is not None:
            self._process.kill()  # an orderly end would only save data that is deleted here
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._folder_lock)

    def _command(self) -> list[str]:
        options = self._options
        command = [options.binary, "--name", "embedded", "--data-dir", str(self._folder / "data")]
        command += ["--listen-client-urls", ",".join(options.listen)]
        command += ["--advertise-client-urls", options.advertise]
        # A single member has no peers: any free port, and a name nobody ever calls.
        command += ["--listen-peer-urls", "http://127.0.0.1:0"]
        command += ["--initial-advertise-peer-urls", "http://127.0.0.1:2380"]
        command += ["--initial-cluster", "embedded=http://127.0.0.1:2380"]
        command += ["--initial-cluster-token", self._token]
        command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
        command += ["--snapshot-count", "10000"]  # the default of 100,000 before 3.6 costs memory
        command += ["--logger", "zap", "--log-level", "warn"]
        if "--unsafe-no-fsync" in _help(options.binary):  # the data is temporary anyway
            command += ["--unsafe-no-fsync"]
        return command

    def _tie_to_parent(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _ask(self, verb: str, path: str, expected: str) -> str | None:
        host, port = self._options.ask
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request(verb, path, "{}" if verb == "POST" else None)
            with connection.getresponse() as response:
                body = response.read().decode()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return body if expected in body else None

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
        told = [line for line in lines if re.search(r"error|fatal|panic|in use", line)] or lines
        return told[-1][-500:]


def keep(etcd: Etcd, grace_s: float, start_grace_s: float) -> str:
    """Return, with the reason, when nobody has used etcd for the grace time.

    At the start nobody is there yet: the first user has at least ``start_grace_s``.
    """
    interval_s = min(2.0, max(0.1, grace_s / 4))
    quiet_since, patience_s = time.monotonic(), max(grace_s, start_grace_s)
    started, restarts = time.monotonic(), 0
    while True:
        if wait_for_signal(interval_s) in (signal.SIGTERM, signal.SIGINT):
            return "told to stop"
        now = time.monotonic()
        if not etcd.running:
            restarts = 1 if now - started > HEALTHY_AFTER_S else restarts + 1
            if restarts > MOST_RESTARTS:
                return "etcd keeps crashing"
            try:
                etcd.start()  # on the same data: leases and keys are still there
            except StartError:
                return "etcd cannot be restarted"
            started = now
        leases = etcd.leases()
        if leases:
            quiet_since, patience_s = now, grace_s
        elif now - quiet_since > patience_s + (BLIND_LIMIT_S if leases is None else 0):
            return "nobody uses it"


def wait_for_signal(timeout_s: float) -> int | None:
    """Sleep until a signal of ours (the child's end among them) or the timeout."""
    received = signal.sigtimedwait(_SIGNALS, timeout_s)
    return None if received is None else received.si_signo


def main() -> int:
    """Detach, take the lock, run etcd, tell the starter through the status pipe, and keep it."""
    options = _arguments()
    if os.fork() > 0:  # the agent waits for this parent only: no zombie is left to it
        return 0
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind(lock_name(options.port))
        except OSError:
            _tell(options.status_fd, "taken", "another node of this machine is starting it")
            return 0
        try:
            sweep(Path(tempfile.gettempdir()))
            etcd = Etcd(options)
        except OSError as error:
            _tell(options.status_fd, "failed", f"there is no place for its data: {error}")
            return 1
        try:
            etcd.start()
        except StartError as error:
            etcd.remove()
            _tell(options.status_fd, "failed", str(error))
            return 1
        try:
            _tell(options.status_fd, "started", str(os.getpid()))
            keep(etcd, options.grace, options.start_grace)
        finally:
            etcd.remove()
    return 0


def _tell(status_fd: int, outcome: str, detail: str) -> None:
    """Write one line for the starter and close the pipe."""
    # The starter may have been killed meanwhile; others will use this etcd.
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, json.dumps({"outcome": outcome, "detail": detail}).encode() + b"\n")
    os.close(status_fd)


def _help(binary: str) -> str:
    done = subprocess.run([binary, "--help"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    """The agent's environment without ``ETCD_*``: each such variable would be a flag of etcd."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    if platform.machine() not in ("x86_64", "AMD64"):
        kept["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # etcd 3.4 refuses to start there without it
    return kept


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--host", required=True, help="an address etcd can be asked at")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--listen", action="append", required=True)
    parser.add_argument("--advertise", required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--start-grace", type=float, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    options = parser.parse_args()
    options.ask = (options.host, options.port)
    return options


if __name__ == "__main__":
    sys.exit(main())

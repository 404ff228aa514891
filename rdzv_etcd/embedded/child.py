"""One etcd child process: its command line, its certificates, and what the supervisor asks it.

Knows etcd's flags and its JSON gateway; knows nothing of jobs. Standard library only.

The supervisor talks to it over a Unix socket in a folder of its own. etcd's peer address is
such a socket, too: a single member has no peers, and a port would be open to every user of the
machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rdzv_etcd.embedded.program import (
    UNBLOCKED,
    Program,
    asks_to_stop,
    wait_for_signal,
    without_secrets,
)
from rdzv_etcd.embedded.request import ask
from rdzv_etcd.text import shown
from rdzv_etcd.trust import Certificates

PR_SET_PDEATHSIG = 1
START_LIMIT_S = 120.0
_ASK_LIMIT_S = 5.0
_LARGEST_LOG = 1 << 20
_TOUCH_EVERY_S = 3600.0
# etcd 3.4 wants host:port here, and makes it the socket's file name in its working directory.
_CLIENT_SOCKET = "client:0"
_PEER_SOCKET = "peer:0"
_PEERS = f"unix://{_PEER_SOCKET}"
_AUTHORITY, _OWN = "authority.pem", "own.pem"


class StartError(Exception):
    """etcd did not come up; the message says why."""


class StopRequestedError(StartError):
    """A signal asked this process to end before etcd was up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    binary: str
    listen: tuple[str, ...]
    """URLs for clients."""
    advertise: str
    certificates: Certificates | None = None
    """With them, only clients and peers that have such ones get in; the URLs are of https then."""


class EtcdProcess:
    """One etcd child process with a temporary data directory."""

    def __init__(self, plan: Plan) -> None:
        """Make its folder; raises OSError if there is no place for one."""
        self._plan = plan
        self._folder, self._folder_lock = make_folder()
        self._entrance = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)
        # Not a file in the folder: on a full disk nothing could be written to it.
        self._log = os.memfd_create("etcd.log")
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
        self._touched_s = time.monotonic()
        self._cluster_token = uuid.uuid4().hex
        self._program: Program | None = None
        self._prctl = ctypes.CDLL(None).prctl

    def start(self) -> None:
        """Start and wait until it serves requests; raises :class:`StartError`.

        May block for minutes. A signal to stop ends the wait with :class:`StopRequestedError`.
        """
        alone = ["--name", "embedded", "--listen-peer-urls", _PEERS]
        alone += ["--initial-advertise-peer-urls", _PEERS]
        alone += ["--initial-cluster", f"embedded={_PEERS}"]
        self.begin((*alone, "--initial-cluster-token", self._cluster_token))
        deadline = time.monotonic() + START_LIMIT_S
        while not self._healthy():
            if not self.running:
                raise StartError(f"{self._plan.binary} ended at once: {self.cause()}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"{self._plan.binary} does not answer after {START_LIMIT_S:g} s: {self.cause()}"
                )
            if asks_to_stop(wait_for_signal(0.05)):
                raise StopRequestedError("a signal asked for its end before it was up")

    def begin(self, cluster: tuple[str, ...]) -> None:
        """Start it with these flags on its peers; raises :class:`StartError`.

        Does not wait until it serves.
        """
        self._end()  # of one that crashed, children may be left
        for name in (_CLIENT_SOCKET, _PEER_SOCKET):  # 3.4 does not take the place of an old one
            (self._folder / name).unlink(missing_ok=True)
        try:
            self._write_certificates()
            self._program = Program(
                [*self._command(), *cluster],
                self._log,
                cwd=self._folder,
                env=_environment(),
                # Takes no lock that a look-up's thread may hold.
                preexec_fn=partial(tie_to_parent, self._prctl, os.getpid()),
            )
        except OSError as error:
            raise StartError(f"{self._plan.binary} cannot be run: {error}") from error

    def _write_certificates(self) -> None:
        if (made := self._plan.certificates) is not None:
            for name, text in ((_AUTHORITY, made.authority), (_OWN, made.own)):
                file = self._folder / name
                file.touch(0o600)
                file.write_text(text)

    @property
    def running(self) -> bool:
        return self._program is not None and self._program.running

    def is_used(self, stale_after_s: float) -> bool | None:
        """Return whether a node has renewed a lease lately; ``None`` if etcd does not answer.

        A lease that is not renewed does not count forever, however long it was granted for.
        """
        found = self._ask("/v3/lease/leases", {})
        if found is None:
            return None
        for lease in found.get("leases", ()):
            reply = self._ask("/v3/lease/timetolive", {"ID": lease["ID"]})
            if reply is None:  # the others would not be answered either: each costs a time limit
                return None
            age_s = lease_age_s(reply)
            if age_s is not None and age_s <= stale_after_s:
                return True
        return False

    @property
    def socket(self) -> str:
        """The path of a Unix socket for clients. A socket's path has at most 107 characters."""
        return f"/proc/self/fd/{self._entrance}/{_CLIENT_SOCKET}"

    def cause(self) -> str:
        """Return the line of its log that explains best why it ended."""
        return cause_in_log(os.pread(self._log, _LARGEST_LOG, 0).decode(errors="replace"))

    def tidy(self) -> None:
        """Empty its log if that has grown long, and keep its folder from the system's cleaners of
        temporary files: they delete what nobody has written for days, sockets in use as well."""
        if os.fstat(self._log).st_size > _LARGEST_LOG:
            os.ftruncate(self._log, 0)
        if time.monotonic() - self._touched_s > _TOUCH_EVERY_S:
            self._touched_s = time.monotonic()
            for path in (self._folder, *self._folder.rglob("*")):
                with contextlib.suppress(OSError):  # etcd has just deleted it
                    os.utime(path)

    def remove(self) -> None:
        """End it with all that it has started, and delete everything it wrote."""
        self._end()  # an orderly end would only save data that is deleted here
        os.close(self._entrance)
        os.close(self._log)
        remove_folder(self._folder, self._folder_lock)

    # -- the process ------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None

    def _command(self) -> list[str]:
        plan = self._plan
        command = [plan.binary, "--data-dir", str(self._folder / "data")]
        command += ["--listen-client-urls", ",".join((f"unix://{_CLIENT_SOCKET}", *plan.listen))]
        command += ["--advertise-client-urls", plan.advertise]
        command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
        # Half the default: nothing is written without a leader. Its disk cannot delay a heartbeat
        # here, as members do not sync, and without a majority nobody takes the lead (--pre-vote).
        command += ["--election-timeout", "500"]
        command += ["--snapshot-count", "10000"]  # the default of 100,000 before 3.6 costs memory
        if plan.certificates is not None:
            for peer in ("", "peer-"):
                command += [f"--{peer}trusted-ca-file", _AUTHORITY, f"--{peer}client-cert-auth"]
                command += [f"--{peer}cert-file", _OWN, f"--{peer}key-file", _OWN]
        return [*command, "--logger", "zap", "--log-level", "warn"]

    # -- requests ---------------------------------------------------------------------------------

    def _healthy(self) -> bool:
        return (self._ask("/health") or {}).get("health") == "true"

    def _ask(self, path: str, body: object = None) -> dict[str, Any] | None:
        """Return ``None`` if etcd does not answer, or refuses."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ASK_LIMIT_S)
            connection.connect(self.socket)
            status, content = ask(connection, path, _ASK_LIMIT_S, body)
            reply = json.loads(content) if status == 200 else None
        except (OSError, ValueError):
            return None
        finally:
            connection.close()
        return reply if isinstance(reply, dict) else None


def tie_to_parent(prctl: Callable[..., object], parent: int) -> None:
    """Let this process, which that one has just forked, end with it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed between the two
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNBLOCKED)


def lease_age_s(reply: Mapping[str, Any]) -> int | None:
    """Read from etcd's reply on a lease how long ago it was granted or renewed; ``None``: gone."""
    left_s = int(reply.get("TTL", 0))
    return None if left_s < 0 else int(reply.get("grantedTTL", 0)) - left_s


_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def _environment() -> dict[str, str]:
    """The agent's environment without ``ETCD_*``, as each such variable would be a flag of etcd,
    and without proxies: its members would look for each other there."""
    inherited = without_secrets(os.environ)
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("ETCD_") and name.lower() not in _PROXIES
    }
    # A member is trusted for its certificate, wherever its connections seem to come from. The first
    # is the name before etcd 3.6; one that etcd does not know does nothing.
    kept["ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION"] = "true"
    kept["ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION"] = "true"
    kept["ETCD_UNSAFE_NO_FSYNC"] = "true"  # the data is temporary; 3.4 has no such flag
    if platform.machine() not in ("x86_64", "AMD64"):
        kept["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # etcd 3.4 refuses to start there without it
    return kept


# --- the data folder ------------------------------------------------------------------------------

FOLDER_PREFIX = "rdzv-etcd-embedded-"


def make_folder() -> tuple[Path, int]:
    """Make a folder that no other user may read; return it and the descriptor that holds it.

    Deletes what killed supervisors left beside it. Raises OSError if there is no place for it.
    """
    place = _temporary()
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=place))
    try:
        return folder, _lock(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_folder(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def _temporary() -> Path:
    """The system's folder for temporary files. Never the working directory, Python's last resort:
    that is ``/`` here."""
    try:
        found = Path(tempfile.gettempdir())
    except FileNotFoundError:
        found = Path("/")
    if found == Path("/"):
        named = os.environ.get("TMPDIR")
        tried = "/tmp, /var/tmp" if named is None else f"TMPDIR={named}, /tmp, /var/tmp"
        raise OSError(
            f"none of {tried} and /usr/tmp can be written; set TMPDIR to a folder that can, with "
            "200 MB free"
        )
    return found


def _lock(folder: Path) -> int:
    """Mark a data directory as in use by this process; returns the descriptor that holds it."""
    unfinished = folder / "lock.new"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unfinished.rename(folder / "lock")  # it never exists unlocked while its owner lives
    return descriptor


def _sweep(place: Path) -> None:
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


# --- its log --------------------------------------------------------------------------------------

MOST = 400
_DULL = frozenset({"level", "ts", "caller", "msg", "stacktrace"})
_TROUBLE = re.compile(r"error|fatal|panic|in use|denied|no space|too many", re.IGNORECASE)


def cause_in_log(log: str) -> str:
    """Return the line that explains the end best: printable, at most some 400 characters.

    A log's last lines are Go's stack trace; the cause stands some lines before.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    entries = [entry for entry in map(_entry, lines) if entry is not None]
    for levels in (("fatal", "panic"), ("error",), ("warn",)):
        found = [_sentence(entry) for entry in entries if entry.get("level") in levels]
        if found:
            return shown(found[-1], MOST)
    plain = [line for line in lines if _TROUBLE.search(line)] or lines
    return shown(plain[-1], MOST) if plain else "it logged nothing"


def _entry(line: str) -> dict[str, object] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "msg" in entry else None


def _sentence(entry: dict[str, object]) -> str:
    details = [
        str(value) if name == "error" else f"{name}={value}"
        for name, value in entry.items()
        if name not in _DULL
    ]
    return f"{entry['msg']}: {', '.join(details)}" if details else str(entry["msg"])

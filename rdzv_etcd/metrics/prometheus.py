"""Records the metrics of one node with prometheus_client, in a registry of its own.

So several nodes of one process, and one that comes back, do not meet. Written to on the library's
event loop, read by any thread: prometheus_client locks each value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rdzv_etcd.metrics import Recorder
from rdzv_etcd.metrics import definitions as of
from rdzv_etcd.metrics.definitions import METRICS, Metric, Type
from rdzv_etcd.text import shown

_JOB_SHOWN = 200
"""Characters of a job's id in a label."""


class PrometheusRecorder(Recorder):
    """Keeps what a node tells."""

    def __init__(self, job_id: str) -> None:
        self.registry = CollectorRegistry()
        self._job_id = shown(job_id, _JOB_SHOWN)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            self._define(metric)
        self._began_s: float | None = None
        """Since when this node waits, if it does."""
        self._world_since_s: float | None = None
        """Since when it is in a world that is not over, if it is."""
        self._over_s: float | None = None
        """Since when the last one is over, until the next one is there."""
        self._tell: Callable[[], None] | None = None

    def _define(self, metric: Metric) -> None:
        name, labels = metric.name, [of.JOB, *([metric.label] if metric.label else [])]
        made: Counter | Gauge | Histogram
        if metric.type is Type.COUNTER:
            made = self._counters[name] = Counter(name, metric.help, labels, registry=self.registry)
        elif metric.type is Type.GAUGE:
            made = self._gauges[name] = Gauge(name, metric.help, labels, registry=self.registry)
        else:
            made = self._histograms[name] = Histogram(
                name, metric.help, labels, registry=self.registry, buckets=metric.buckets
            )
        if metric.label is None:
            made.labels(self._job_id)
        for value in metric.values:
            made.labels(self._job_id, value)

    def follow(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, on the event loop, after every change. It must not block."""
        self._tell = tell

    # -- what the node tells ----------------------------------------------------------------------

    def join_began(self, at_s: float) -> None:
        self._began_s = at_s
        self._set(of.WAITING, 1)
        self._changed()

    def joined(self, number: int, epoch: int, size: int, at_s: float) -> None:
        self._count(of.ROUNDS)
        if self._began_s is not None:
            self._observe(of.JOIN, at_s - self._began_s)
        if self._over_s is not None:
            self._observe(of.REFORM, at_s - self._over_s)
        self._began_s = self._over_s = None
        self._world_since_s = at_s
        self._set(of.WAITING, 0)
        self._set(of.WORLD_SIZE, size)
        self._set(of.ROUND, number)
        self._set(of.EPOCH, epoch)
        self._changed()

    def join_failed(self, error: str) -> None:
        if self._began_s is None:
            return
        self._began_s = None
        self._count(of.FAILED_JOINS, error)
        self._set(of.WAITING, 0)
        self._changed()

    def world_over(self, cause: str, at_s: float) -> None:
        since_s, self._world_since_s = self._world_since_s, None
        if since_s is None:
            return
        self._over_s = at_s
        self._observe(of.WORLD, at_s - since_s)
        self._count(of.WORLDS_OVER, cause)
        self._set(of.WORLD_SIZE, 0)
        self._changed()

    def declared_lost(self, cause: str, after_s: float | None) -> None:
        self._count(of.LOST, cause)
        if after_s is not None:
            self._observe(of.LOSS_DETECTION, after_s, cause)
        self._changed()

    def etcd_answered(self, took_s: float, wall_s: float) -> None:
        self._observe(of.KEEP_ALIVE, took_s)
        self._set(of.LAST_CONTACT, wall_s)
        self._changed()

    def etcd_silent(self) -> None:
        self._count(of.KEEP_ALIVE_FAILURES)
        self._changed()

    def left(self, at_s: float) -> None:
        self.world_over("moved_on", at_s)
        self._set(of.WAITING, 0)
        self._changed()

    def _changed(self) -> None:
        if self._tell is not None:
            self._tell()

    def _count(self, metric: Metric, *labels: str) -> None:
        self._counters[metric.name].labels(self._job_id, *labels).inc()

    def _set(self, metric: Metric, value: float) -> None:
        self._gauges[metric.name].labels(self._job_id).set(value)

    def _observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        histogram = self._histograms[metric.name]
        histogram.labels(self._job_id, *labels).observe(max(0.0, seconds))


class Page(Collector):
    """What is shown of a recorder: with more labels, and without the times at which each series
    was made, which are as many series again."""

    def __init__(self, recorder: PrometheusRecorder, labels: dict[str, str]) -> None:
        self._registry = recorder.registry
        self._labels = labels

    def registry(self) -> CollectorRegistry:
        """A registry that has this page only."""
        registry = CollectorRegistry(auto_describe=True)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family

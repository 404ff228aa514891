"""Every metric, once: name, type, labels, meaning. docs/metrics.md shows this table.

Knows no package that records or shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

JOB = "job_id"
"""A label of every metric. Not ``job``: that one is Prometheus's own, for what it scrapes."""


class Type(Enum):
    """As Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    type: Type
    help: str
    label: str | None = None
    """The label that it has besides :data:`JOB` …"""
    values: tuple[str, ...] = ()
    """… and the values of that, which are there from the beginning, with zero."""
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds."""


CHANGES = ("lost", "left", "waiting", "expelled", "finished", "failed", "moved_on")
"""Why a world is over: the names of what :attr:`rdzv_etcd.World.change` may be."""
LOSSES = ("lease_expired", "process_gone", "host_silent", "reported", "wedged", "other")
"""How a member was lost."""

_WAITS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)
_WORLDS_S = (1, 10, 60, 300, 1800, 3600, 4 * 3600, 12 * 3600, 86400, 7 * 86400)
_ETCD_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LOSSES_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)

WAITING = Metric(
    "rdzv_etcd_waiting",
    Type.GAUGE,
    "1 while this node waits for a world, else 0.",
)
WORLD_SIZE = Metric(
    "rdzv_etcd_world_size",
    Type.GAUGE,
    "Nodes in the world that this node is in; 0 while it is in none.",
)
ROUND = Metric(
    "rdzv_etcd_round",
    Type.GAUGE,
    "Number of the round that this node's last world was.",
)
EPOCH = Metric(
    "rdzv_etcd_epoch",
    Type.GAUGE,
    "Epoch of this node's last world; grows from world to world of the job.",
)
ROUNDS = Metric(
    "rdzv_etcd_rounds_total",
    Type.COUNTER,
    "Worlds of which this node has become a member.",
)
JOIN = Metric(
    "rdzv_etcd_join_seconds",
    Type.HISTOGRAM,
    "From this node's arrival to the world that was formed with it.",
    buckets=_WAITS_S,
)
REFORM = Metric(
    "rdzv_etcd_reform_seconds",
    Type.HISTOGRAM,
    "From the end of this node's world to its next one, with the time that its workers took to "
    "stop.",
    buckets=_WAITS_S,
)
FAILED_JOINS = Metric(
    "rdzv_etcd_failed_joins_total",
    Type.COUNTER,
    "Waits for a world that ended with an error, by its class.",
    label="error",
)
WORLD = Metric(
    "rdzv_etcd_world_seconds",
    Type.HISTOGRAM,
    "How long this node's worlds lasted.",
    buckets=_WORLDS_S,
)
WORLDS_OVER = Metric(
    "rdzv_etcd_worlds_over_total",
    Type.COUNTER,
    "Worlds of this node that are over, by why; moved_on: it joined again, or left, by itself.",
    label="cause",
    values=CHANGES,
)
LOST = Metric(
    "rdzv_etcd_lost_members_total",
    Type.COUNTER,
    "Members that this node, as the job's leader, has declared lost, by how. Summed over the "
    "nodes, each loss is counted once.",
    label="cause",
    values=LOSSES,
)
LOSS_DETECTION = Metric(
    "rdzv_etcd_loss_detection_seconds",
    Type.HISTOGRAM,
    "From the end of a lost member's process to its being declared lost, by the leader, where "
    "another node has seen that end.",
    label="cause",
    buckets=_LOSSES_S,
)
KEEP_ALIVE = Metric(
    "rdzv_etcd_keep_alive_seconds",
    Type.HISTOGRAM,
    "How long etcd took to answer a keep-alive.",
    buckets=_ETCD_S,
)
KEEP_ALIVE_FAILURES = Metric(
    "rdzv_etcd_keep_alive_failures_total",
    Type.COUNTER,
    "Keep-alives that etcd did not answer in time, or refused.",
)
LAST_CONTACT = Metric(
    "rdzv_etcd_last_contact_timestamp_seconds",
    Type.GAUGE,
    "When etcd last answered a keep-alive, in seconds since 1970; 0 before the first.",
)

METRICS: tuple[Metric, ...] = (
    WAITING,
    WORLD_SIZE,
    ROUND,
    EPOCH,
    ROUNDS,
    JOIN,
    REFORM,
    FAILED_JOINS,
    WORLD,
    WORLDS_OVER,
    LOST,
    LOSS_DETECTION,
    KEEP_ALIVE,
    KEEP_ALIVE_FAILURES,
    LAST_CONTACT,
)


def metrics_table() -> str:
    """Render the metrics as the markdown table that docs/metrics.md shows."""
    lines = ["| metric | type | labels besides `job_id` | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        label = "" if metric.label is None else f"`{metric.label}`"
        lines.append(f"| `{metric.name}` | {metric.type.value} | {label} | {metric.help} |")
    return "\n".join(lines) + "\n"

"""What a job and a node are set to; frozen, validated whole when made. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import Connection, Credentials, Tls
from rdzv_etcd.settings.fields import (
    DEFAULT_PREFIX,
    DEFAULT_SLICE_NODES,
    MAX_EPOCH_CLAIM,
    MAX_HISTORY,
    MAX_HOST,
    MAX_ID,
    MAX_NODES,
    MAX_RANK_KEY,
    MAX_SLICE_NODES,
    Kind,
    Option,
    check_metrics_file,
    check_numbers,
    check_short,
    checked_data,
    gate_words,
    option,
    options_of,
    whole,
)
from rdzv_etcd.text import shown

_COUNTS = {
    "min_nodes": "min_nodes (--nnodes)",
    "max_nodes": "max_nodes (--nnodes)",
    "node_unit": "node_unit",
}
"""The numbers of nodes, and how messages name them."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What all nodes of a job must agree on."""

    min_nodes: int
    max_nodes: int
    node_unit: int = option(
        "node_unit",
        Kind.COUNT,
        "Only worlds whose size is a multiple of this are formed.",
        default=1,
    )

    def __post_init__(self) -> None:
        for name, shown_as in _COUNTS.items():  # what the others read is a plain int
            object.__setattr__(self, name, whole(shown_as, getattr(self, name)))
        if self.max_nodes > MAX_NODES or self.min_nodes > MAX_NODES:
            name = "max_nodes" if self.max_nodes > MAX_NODES else "min_nodes"
            raise SettingsError(
                f"{name} (--nnodes) is {shown(getattr(self, name), 50)}; it must be at most "
                f"{MAX_NODES}"
            )
        if self.node_unit > MAX_NODES:
            raise SettingsError(
                f"node_unit is {shown(self.node_unit, 50)}; it must be at most {MAX_NODES}"
            )
        if self.min_nodes < 1:
            raise SettingsError(f"min_nodes is {shown(self.min_nodes)}; it must be at least 1")
        if self.max_nodes < self.min_nodes:
            raise SettingsError(
                f"max_nodes ({shown(self.max_nodes)}) is less than min_nodes ({self.min_nodes})"
            )
        if self.node_unit < 1:
            raise SettingsError(f"node_unit is {shown(self.node_unit)}; it must be at least 1")
        largest = self.max_nodes // self.node_unit * self.node_unit
        if largest < self.min_nodes:
            raise SettingsError(
                f"no multiple of node_unit ({self.node_unit}) lies between min_nodes "
                f"({self.min_nodes}) and max_nodes ({self.max_nodes})"
            )

    @property
    def is_elastic(self) -> bool:
        """Whether worlds of more than one size may be formed."""
        smallest = -(-self.min_nodes // self.node_unit) * self.node_unit
        return smallest + self.node_unit <= self.max_nodes

    def __str__(self) -> str:
        unit = f", node_unit={self.node_unit}" if self.node_unit != 1 else ""
        return f"min_nodes={self.min_nodes}, max_nodes={self.max_nodes}{unit}"


class Orphans(Enum):
    """What becomes of a node's workers when its own process is gone without a good-bye."""

    LEAVE = "leave"
    """They go on until they notice it themselves, or whoever started all of them ends them."""
    KILL = "kill"
    """A guard ends them."""


class Log(str, Enum):
    """How this library's log lines are shown."""

    LOGLEVEL = "loglevel"
    """As the program has configured logging; under torchrun as torch's own lines."""
    WARNING = "warning"
    INFO = "info"
    JSON = "json"
    """All from INFO on, as JSON."""


class AfterEnd(Enum):
    """What a node does that is started after a run of its job has ended."""

    NEW_RUN = "new-run"
    """It is part of a new run, and waits for the others."""
    REFUSE = "refuse"
    """It fails, as with torch's etcd-v2, for ``closed_ttl_s``."""
    FINISH = "finish"
    """It ends as the run did, within ``closed_ttl_s``: well if that finished."""


@dataclass(frozen=True, slots=True)
class Timing:
    """All waits."""

    lease_ttl_s: int = option(
        "lease_ttl",
        Kind.WHOLE_SECONDS,
        "A node that is silent this long is lost; at least 2.",
        default=10,
    )
    keep_alive_timeout_s: float | None = option(
        "heartbeat_timeout",
        Kind.SECONDS,
        "How long one keep-alive waits for etcd's reply before it tries another way; at most "
        "`lease_ttl` / 3 is used.",
        default=None,
        shown="`lease_ttl` / 5",
    )
    join_timeout_s: float = option(
        "join_timeout",
        Kind.SECONDS,
        "How long a node waits for `min_nodes`; a spare waits for as long as there is no seat. "
        "torchrun always sets `timeout`; an explicit `join_timeout` beats it.",
        default=600.0,
        shown="600 (torchrun: 900)",
        aliases=("timeout",),
    )
    last_call_timeout_s: float = option(
        "last_call_timeout",
        Kind.SECONDS,
        "How long a first round with `min_nodes` stays open when more nodes may come; at most "
        "`join_timeout`.",
        default=30.0,
    )
    rejoin_timeout_s: float = option(
        "rejoin_timeout",
        Kind.SECONDS,
        "How long a later round stays open for live members of the one before. Longer than workers "
        "take to stop (torch gives them 30 s after `SIGTERM`), a checkpoint included.",
        default=120.0,
    )
    settle_s: float = option(
        "settle",
        Kind.SECONDS,
        "How long a round stays open when every live node is back already.",
        default=0.1,
        zero=True,
    )
    closed_ttl_s: int = option(
        "closed_ttl",
        Kind.WHOLE_SECONDS,
        "How long a closed job counts as closed to nodes that are started afterwards; see "
        "`after_end`.",
        default=60,
    )
    ended_ttl_s: int = option(
        "ended_ttl",
        Kind.WHOLE_SECONDS,
        "How long etcd remembers that a run ended, for nodes of it that were cut off meanwhile, "
        "and what the job's epochs count from, for its next run; at least `closed_ttl` is used.",
        default=86400,
        shown="86400 (`embed`: `closed_ttl`)",
    )
    job_lease_ttl_s: int | None = option(
        "job_lease_ttl",
        Kind.WHOLE_SECONDS,
        "What a job left in etcd vanishes this long after its last node died.",
        default=None,
        shown="6 × `lease_ttl`, at least 60",
    )
    close_timeout_s: float = option(
        "close_timeout",
        Kind.SECONDS,
        "Bounds closing the job and leaving it.",
        default=30.0,
    )

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def job_ttl_s(self) -> int:
        """The job lease's TTL, with its default applied."""
        if self.job_lease_ttl_s is not None:
            return self.job_lease_ttl_s
        return max(60, 6 * self.lease_ttl_s)

    @property
    def keep_alive_deadline_s(self) -> float:
        """The deadline of one keep-alive reply, with its default and limit applied."""
        if self.keep_alive_timeout_s is None:
            return self.lease_ttl_s / 5  # so that three in a row fit into a TTL
        return min(self.lease_ttl_s / 3, self.keep_alive_timeout_s)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one node is told."""

    job_id: str
    job: JobSettings
    connection: Connection = field(default_factory=Connection)
    timing: Timing = field(default_factory=Timing)
    prefix: str = option(
        "etcd_prefix",
        Kind.TEXT,
        "All keys are placed under it.",
        default=DEFAULT_PREFIX,
        shown=f"`{DEFAULT_PREFIX}`",
        aliases=("prefix",),
    )
    rank_key: str | None = option(
        "rank_key",
        Kind.TEXT,
        "Ranks follow this value in natural order (`node2` before `node10`). `env:NAME`, or a "
        "bare name in capitals such as `SLURM_PROCID`, is an environment variable, which must be "
        "set; anything else, or `value:TEXT`, is the value itself.",
        default=None,
        shown="none",
    )
    """Resolved already."""
    local_addr: str | None = None
    """The address other nodes reach this one at; ``None``: found out."""
    slice_nodes: int = option(
        "slice_nodes",
        Kind.COUNT,
        "The ranks of a world with more nodes than this are published in slices of a quarter of "
        "it, so that what a node reads does not grow with the job.",
        default=DEFAULT_SLICE_NODES,
        most=MAX_SLICE_NODES,
    )
    after_end: AfterEnd = option(
        "after_end",
        Kind.TEXT,
        "What a node does that is started after a run of the job has ended. `new-run`: it begins a "
        "new one, and says so. `refuse`: it fails, as with etcd-v2, for `closed_ttl` seconds. "
        "`finish`: within that time it ends as the run did, with code 0 if that finished.",
        default=AfterEnd.NEW_RUN,
        shown="`new-run`",
    )
    orphans: Orphans = option(
        "orphans",
        Kind.TEXT,
        "What becomes of the workers when their agent is killed, and of one that it leaves at a "
        "signal. `leave`: they go on until they notice. `kill`: a guard, a process of its own, "
        "ends them: SIGTERM, after 10 s SIGKILL.",
        default=Orphans.LEAVE,
        shown="`leave`",
    )
    log: Log = option(
        "log",
        Kind.TEXT,
        "How this library's log lines are shown. `loglevel`: as torch's own (`LOGLEVEL`, or "
        "warnings). `warning`, `info`: from that level on, to standard error. `json`: the same "
        "from info on, one JSON object a line.",
        default=Log.LOGLEVEL,
        shown="`loglevel`",
    )
    data: Mapping[str, object] = field(default_factory=dict)
    """What the node tells the other members of itself: a JSON object of at most 4 KiB."""
    epoch_floor: int = 0
    """An epoch that the job has reached before: its next ones are higher."""
    peer_links: bool = option(
        "peer_links",
        Kind.FLAG,
        "Members watch each other over connections of their own, so that a death is noticed in "
        "milliseconds instead of after `lease_ttl`. Where they cannot connect it is as without.",
        default=True,
    )
    peer_silence_s: float | None = option(
        "peer_silence",
        Kind.SECONDS,
        "A host that answers nothing for so long is asked, over etcd, whether it lives. 0: only "
        "deaths of processes are noticed early.",
        default=None,
        shown="0.3 × `lease_ttl`",
        zero=True,
    )
    gate_command: str | None = option(
        "gate_command",
        Kind.TEXT,
        "A program with its arguments, split at blanks as a shell does, that is run before each "
        "arrival; a node on which it fails does not join. See "
        "[guide.md](guide.md#a-gate-in-front-of-the-job).",
        default=None,
        shown="none",
    )
    gate_timeout_s: float = option(
        "gate_timeout",
        Kind.SECONDS,
        "How long a gate may take; after that it counts as failed.",
        default=60.0,
    )
    watchdog_s: float = option(
        "watchdog",
        Kind.SECONDS,
        "A node whose own thread has not called in for so long is lost to the others, though its "
        "process lives. 0: it never is. With torchrun longer than starting and stopping workers "
        "takes.",
        default=0.0,
        zero=True,
    )
    metrics_file: Path | None = option(
        "metrics_file",
        Kind.NEW_FILE,
        "Write this node's [metrics](metrics.md) into that file, for the text-file collector of "
        "Prometheus' node exporter; `.prom` at its end. Each agent of a host needs its own.",
        default=None,
        shown="none",
    )
    metrics_port: int | None = option(
        "metrics_port",
        Kind.COUNT,
        "Serve this node's [metrics](metrics.md) at that port, for Prometheus. 0: any free port, "
        "which is told in the log.",
        default=None,
        shown="none",
        zero=True,
        most=65535,
    )
    history: int = option(
        "history",
        Kind.COUNT,
        "Of how many rounds etcd remembers how they came about, for `rdzv-etcd history`; the "
        "leader's counts, so give all nodes the same. They outlive the job by `ended_ttl`, each "
        "has at most 8 KiB. 0: of none.",
        default=100,
        zero=True,
        most=MAX_HISTORY,
    )
    embed: bool = option(
        "embed",
        Kind.FLAG,
        "Start an etcd on the machine the endpoint names if none answers there; with the user and "
        "password given, if any.",
        default=False,
    )
    embed_grace_s: float = option(
        "embed_grace",
        Kind.SECONDS,
        "An embedded etcd stops when no node has been there for this long.",
        default=30.0,
    )

    def __post_init__(self) -> None:
        if not self.job_id:
            raise SettingsError("the job id (--rdzv-id) is empty")
        check_short("the job id (--rdzv-id)", self.job_id, MAX_ID)
        check_short("etcd_prefix", self.prefix, MAX_ID)
        check_short("rank_key", self.rank_key or "", MAX_RANK_KEY)
        check_short("--local-addr", self.local_addr or "", MAX_HOST)
        gate_words(self.gate_command)
        check_metrics_file(self.metrics_file)
        object.__setattr__(self, "data", checked_data(self.data))
        if not 0 <= self.epoch_floor <= MAX_EPOCH_CLAIM:
            raise SettingsError(
                f"epoch_floor is {shown(self.epoch_floor, 50)}; it must be from 0 to "
                f"{MAX_EPOCH_CLAIM}"
            )
        check_numbers(self)

    @property
    def peer_silence_limit_s(self) -> float:
        """``peer_silence_s`` with its default applied: whoever gives a longer lease means to
        forgive longer pauses."""
        if self.peer_silence_s is None:
            return 0.3 * self.timing.lease_ttl_s
        return self.peer_silence_s


_PROTOCOL = Option(
    "protocol",
    Kind.TEXT,
    "`http`",
    "`http` or `https`; must agree with the scheme in the endpoint if it has one.",
)
_FACTORS = (
    Option(
        "keep_alive_interval",
        Kind.SECONDS,
        "5, if the next is given",
        "As in etcd-v2: `lease_ttl` = `keep_alive_interval` × `keep_alive_max_attempt`.",
    ),
    Option(
        "keep_alive_max_attempt",
        Kind.COUNT,
        "3, if the former is given",
        "See `keep_alive_interval`.",
    ),
)

OPTIONS: tuple[Option, ...] = (
    *options_of(Timing).values(),
    *_FACTORS,
    *options_of(JobSettings).values(),
    *options_of(Settings).values(),
    *options_of(Connection).values(),
    _PROTOCOL,
    *options_of(Tls).values(),
    *options_of(Credentials).values(),
)

WITHOUT_MEANING: dict[str, str] = {
    "is_host": "no node hosts the rendezvous: etcd does (with embed=1 on the endpoint's machine)",
    "store_type": "the rendezvous is kept in etcd, and the workers' store is a TCPStore",
}
"""Options of torch's c10d backend that are accepted, so that moving is one word, and why they have
no effect here."""

NAMES: dict[str, Option] = {name: option for option in OPTIONS for name in option.names}


def options_table() -> str:
    """Render the options as the markdown table that docs/options.md shows."""
    lines = [
        "| option | also accepted | value | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in OPTIONS:
        aliases = ", ".join(f"`{alias}`" for alias in one.aliases)
        cells = (f"`{one.name}`", aliases, one.kind.value, one.default, one.help)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

"""Every option, as a field of the settings: frozen, and validated as a whole when made. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.connection import Connection, Credentials, Scheme, Tls
from rdzv_etcd.settings.fields import (
    DEFAULT_PREFIX,
    DEFAULT_SLICE_NODES,
    MAX_DOMAIN,
    MAX_EPOCH_CLAIM,
    MAX_HISTORY,
    MAX_HOST,
    MAX_ID,
    MAX_NODES,
    MAX_RANK_KEY,
    MAX_SLICE_NODES,
    WHOLE_DOMAIN,
    Option,
    OptionKind,
    check_length,
    check_numbers,
    checked_data,
    gate_words,
    option,
    options_of,
    whole,
)
from rdzv_etcd.text import shown


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What all nodes of a job must agree on."""

    min_nodes: int
    max_nodes: int
    node_unit: int = option(
        "node_unit",
        OptionKind.COUNT,
        "Only worlds whose size is a multiple of this are formed.",
        default=1,
        most=MAX_NODES,
    )
    segment_size: int = option(
        "segment_size",
        OptionKind.COUNT_OR_ALL,
        "Only whole segments are in a world: so many nodes of one domain, with contiguous ranks. "
        "`all`: a domain is in a world with all its nodes or not at all. See "
        "[guide.md](guide.md#nodes-that-belong-together).",
        default=1,
        most=MAX_NODES,
    )
    """1: there are no segments."""

    def __post_init__(self) -> None:
        for name, source in (
            ("min_nodes", " (--nnodes)"),
            ("max_nodes", " (--nnodes)"),
            ("node_unit", ""),
        ):
            given = getattr(self, name)
            number = given if type(given) is int else whole(f"{name}{source}", given)
            if not 1 <= number <= MAX_NODES:
                raise SettingsError(
                    f"{name}{source} is {shown(number, 50)}; it must be a whole number from 1 to "
                    f"{MAX_NODES}"
                )
            if number is not given:  # what the others read is a plain int
                object.__setattr__(self, name, number)
        if self.max_nodes < self.min_nodes:
            raise SettingsError(
                f"max_nodes ({self.max_nodes}) is less than min_nodes ({self.min_nodes})"
            )
        if self.max_nodes // self.node_unit * self.node_unit < self.min_nodes:
            raise SettingsError(
                f"no multiple of node_unit ({self.node_unit}) lies between min_nodes "
                f"({self.min_nodes}) and max_nodes ({self.max_nodes})"
            )
        self._check_segments()

    def _check_segments(self) -> None:
        size = whole("segment_size", self.segment_size)
        object.__setattr__(self, "segment_size", size)
        if not WHOLE_DOMAIN <= size <= MAX_NODES:
            wanted = options_of(type(self))["segment_size"].wanted
            raise SettingsError(f"segment_size is {shown(size, 50)}; it must be {wanted}")
        if self.has_segments and self.node_unit != 1:
            raise SettingsError(
                f"node_unit={self.node_unit} and segment_size={self.segment_text} exclude each "
                "other: a world of whole segments has no other unit"
            )
        for name, number in (("min_nodes", self.min_nodes), ("max_nodes", self.max_nodes)):
            if number % self.unit and self.has_segments:
                below, above = number // size * size, -(-number // size) * size
                fit = f"{below} and {above}" if below else f"{above}"
                raise SettingsError(
                    f"{name} (--nnodes) is {number}, and segment_size={size} needs a multiple of "
                    f"it: the nearest that fit are {fit}"
                )

    @property
    def has_segments(self) -> bool:
        return self.segment_size != 1

    @property
    def segment_text(self) -> str:
        """The size of a segment as a user gives it."""
        return "all" if self.segment_size == WHOLE_DOMAIN else str(self.segment_size)

    @property
    def unit(self) -> int:
        """The size of each world is a multiple of this."""
        return max(self.node_unit, self.segment_size)

    def fitting(self, count: int) -> int:
        """How many of so many nodes a world may have, wherever they belong."""
        return min(count, self.max_nodes) // self.unit * self.unit

    @property
    def largest(self) -> int:
        """The most nodes that a world may have."""
        return self.fitting(self.max_nodes)

    @property
    def smallest(self) -> int:
        """The fewest nodes that a world may have."""
        return -(-self.min_nodes // self.unit) * self.unit

    @property
    def is_elastic(self) -> bool:
        """Whether worlds of more than one size may be formed."""
        return self.smallest < self.largest

    def __str__(self) -> str:
        unit = f", node_unit={self.node_unit}" if self.node_unit != 1 else ""
        segment = f", segment_size={self.segment_text}" if self.has_segments else ""
        return f"min_nodes={self.min_nodes}, max_nodes={self.max_nodes}{unit}{segment}"


class Orphans(Enum):
    """The values of ``orphans``."""

    LEAVE = "leave"
    KILL = "kill"


class AfterEnd(Enum):
    """The values of ``after_end``."""

    NEW_RUN = "new-run"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Timing:
    """All waits."""

    lease_ttl_s: int = option(
        "lease_ttl",
        OptionKind.WHOLE_SECONDS,
        "A node that is silent this long is lost; at least 2.",
        default=10,
    )
    join_timeout_s: float = option(
        "join_timeout",
        OptionKind.SECONDS,
        "How long a node waits for `min_nodes`; a spare waits for as long as there is no seat. "
        "torchrun always sets `timeout`; an explicit `join_timeout` beats it.",
        default=600.0,
        shown="600 (torchrun: 900)",
        aliases=("timeout",),
    )
    last_call_timeout_s: float = option(
        "last_call_timeout",
        OptionKind.SECONDS,
        "How long a first round with `min_nodes` stays open when more nodes may come; at most "
        "`join_timeout`.",
        default=30.0,
    )
    rejoin_timeout_s: float = option(
        "rejoin_timeout",
        OptionKind.SECONDS,
        "How long a later round stays open for live members of the one before. Longer than workers "
        "take to stop (torch gives them 30 s after `SIGTERM`), a checkpoint included.",
        default=120.0,
    )
    settle_s: float = option("settle", OptionKind.SECONDS, None, default=0.1, zero=True)
    """How long a round stays open when every live node is back already."""
    closed_ttl_s: int = option("closed_ttl", OptionKind.WHOLE_SECONDS, None, default=60)
    """How long a closed job counts as closed to nodes that are started afterwards."""
    ended_ttl_s: int = option(
        "ended_ttl",
        OptionKind.WHOLE_SECONDS,
        "How long etcd remembers that a run ended, for nodes of it that were cut off meanwhile, "
        "and the job's last epoch, for its next run; at least 60 is used.",
        default=86400,
        shown="86400 (`embed`: 60)",
    )
    job_lease_ttl_s: int | None = option(
        "job_lease_ttl", OptionKind.WHOLE_SECONDS, None, default=None
    )
    """See :attr:`job_ttl_s`."""
    close_timeout_s: float = option(
        "close_timeout",
        OptionKind.SECONDS,
        "Time limit for closing and for leaving the job.",
        default=30.0,
    )

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def job_ttl_s(self) -> int:
        """What a job left in etcd vanishes this long after its last node died."""
        if self.job_lease_ttl_s is not None:
            return self.job_lease_ttl_s
        return max(60, 6 * self.lease_ttl_s)

    @property
    def keep_alive_deadline_s(self) -> float:
        """How long one keep-alive waits for etcd's reply before the node tries another way."""
        return self.lease_ttl_s / 5  # so that three in a row fit into a TTL


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that one node is configured with."""

    job_id: str
    job: JobSettings
    connection: Connection = field(default_factory=Connection)
    timing: Timing = field(default_factory=Timing)
    prefix: str = option(
        "etcd_prefix",
        OptionKind.TEXT,
        "All keys are placed under it.",
        default=DEFAULT_PREFIX,
        shown=f"`{DEFAULT_PREFIX}`",
        aliases=("prefix",),
    )
    rank_key: str | None = option(
        "rank_key",
        OptionKind.TEXT,
        "Ranks follow this value in natural order (`node2` before `node10`). `env:NAME`, or a "
        "bare name in capitals such as `SLURM_PROCID`, is an environment variable, which must be "
        "set; anything else, or `value:TEXT`, is the value itself.",
        default=None,
    )
    """Resolved already."""
    domain_key: str | None = option(
        "domain_key",
        OptionKind.TEXT,
        "What this node shares with those that it belongs together with: a rack, an NVLink domain, "
        "a Slurm array task; written as `rank_key`. With `segment_size` only.",
        default=None,
    )
    """Resolved already."""
    local_addr: str | None = None
    """The address at which other nodes reach this one; ``None``: to be found."""
    slice_nodes: int = option(
        "slice_nodes", OptionKind.COUNT, None, default=DEFAULT_SLICE_NODES, most=MAX_SLICE_NODES
    )
    """The ranks of a larger world are published in slices of a quarter of this, so that what a node
    reads does not grow with the job."""
    after_end: AfterEnd = option(
        "after_end",
        OptionKind.TEXT,
        "What a node does that is started after a run of the job has ended. `new-run`: it begins a "
        "new one, and logs that. `finish`: for 60 seconds after the end, it ends as the run did, "
        "with code 0 if that finished. The end of a run with another `--nnodes` does not count.",
        default=AfterEnd.NEW_RUN,
        shown="`new-run`",
        choices=AfterEnd,
    )
    orphans: Orphans = option(
        "orphans",
        OptionKind.TEXT,
        "What becomes of the workers when their agent is killed, and of one that it leaves at a "
        "signal. `leave`: they run until they notice. `kill`: a guard, a process of its own, "
        "ends them: SIGTERM, after 10 s SIGKILL.",
        default=Orphans.LEAVE,
        shown="`leave`",
        choices=Orphans,
    )
    in_process: bool = option(
        "in_process",
        OptionKind.FLAG,
        "For torchrun: the workers form the world, each as a node, and continue in the same "
        "processes when it changes; the agent restarts those of its own host. The script calls "
        "`rdzv_etcd.torch.connect_worker()`: see [guide.md](guide.md#without-restarts).",
        default=False,
    )
    data: Mapping[str, object] = field(default_factory=dict)
    """What the node publishes to the other members: a JSON object of at most 4 KiB."""
    epoch_floor: int = 0
    """An epoch that the job has reached before: its next ones are higher."""
    peer_links: bool = option(
        "peer_links",
        OptionKind.FLAG,
        "Members watch each other over connections of their own, so that a death is noticed in "
        "milliseconds instead of after `lease_ttl`. Nodes that cannot connect rely on the lease.",
        default=True,
    )
    peer_silence_s: float | None = option(
        "peer_silence",
        OptionKind.SECONDS,
        "A host that has not answered for this long is asked, over etcd, whether it lives. 0: only "
        "deaths of processes are noticed early.",
        default=None,
        shown="0.3 × `lease_ttl`",
        zero=True,
    )
    gate_command: str | None = option(
        "gate_command",
        OptionKind.TEXT,
        "A program with its arguments, split at blanks as a shell does, that is run before each "
        "arrival; a node on which it fails does not join. See "
        "[guide.md](guide.md#a-gate-in-front-of-the-job).",
        default=None,
    )
    gate_timeout_s: float = option(
        "gate_timeout",
        OptionKind.SECONDS,
        "How long a gate may take; after that it counts as failed.",
        default=60.0,
    )
    metrics_port: int | None = option(
        "metrics_port",
        OptionKind.COUNT,
        "Serve this node's [metrics](metrics.md) on that port, for Prometheus. Each agent of a "
        "host needs its own. 0: any free port, which is logged.",
        default=None,
        zero=True,
        most=65535,
    )
    history: int = option(
        "history",
        OptionKind.COUNT,
        "For how many rounds etcd keeps what led to them, for `rdzv-etcd history`; the leader's "
        "number counts, so give all nodes the same. They outlive the job by `ended_ttl`, each has "
        "at most 8 KiB. 0: none.",
        default=100,
        zero=True,
        most=MAX_HISTORY,
    )
    embed: bool = option(
        "embed",
        OptionKind.FLAG,
        "Start an etcd on the machine that the endpoint names if none answers there, or a cluster "
        "on the three or five machines that are named.",
        default=False,
    )
    embed_grace_s: float = option("embed_grace", OptionKind.SECONDS, None, default=30.0)
    """An embedded etcd stops when no node has been there for this long."""

    def __post_init__(self) -> None:
        if not self.job_id:
            raise SettingsError("the job id (--rdzv-id) is empty")
        check_length("the job id (--rdzv-id)", self.job_id, MAX_ID)
        check_length("etcd_prefix", self.prefix, MAX_ID)
        check_length("rank_key", self.rank_key or "", MAX_RANK_KEY)
        check_length("--local-addr", self.local_addr or "", MAX_HOST)
        self._check_domain()
        gate_words(self.gate_command)
        object.__setattr__(self, "data", checked_data(self.data))
        if not 0 <= self.epoch_floor <= MAX_EPOCH_CLAIM:
            raise SettingsError(
                f"epoch_floor is {shown(self.epoch_floor, 50)}; it must be from 0 to "
                f"{MAX_EPOCH_CLAIM}"
            )
        check_numbers(self)

    def _check_domain(self) -> None:
        if self.in_process and (self.job.has_segments or self.job.node_unit != 1):
            raise SettingsError(
                "in_process=1 excludes segment_size and node_unit: the workers of each host are a "
                "segment there"
            )
        if self.domain_key is None:
            if self.job.has_segments:
                raise SettingsError(
                    f"segment_size={self.job.segment_text} needs domain_key: what this node shares "
                    "with the others of its domain, such as domain_key=env:RACK"
                )
            return
        if not self.job.has_segments:
            raise SettingsError(
                "domain_key needs segment_size: how many nodes of a domain belong together, or all"
            )
        check_length("domain_key", self.domain_key, MAX_DOMAIN)
        if not self.domain_key.isprintable():
            raise SettingsError(f"domain_key is {self.domain_key!r}; it must be printable")

    @property
    def embeds_cluster(self) -> bool:
        """Whether the machines that the endpoints name run etcd together."""
        return self.embed and len(self.connection.endpoints) > 1

    @property
    def peer_silence_limit_s(self) -> float:
        """``peer_silence_s`` with its default applied: a user who gives a longer lease means to
        forgive longer pauses."""
        if self.peer_silence_s is None:
            return 0.3 * self.timing.lease_ttl_s
        return self.peer_silence_s


# --- the table of all options ---------------------------------------------------------------------

_FACTORS = (
    Option(
        "keep_alive_interval",
        OptionKind.SECONDS,
        "5, if the next is given",
        "As in etcd-v2: `lease_ttl` = `keep_alive_interval` × `keep_alive_max_attempt`.",
    ),
    Option(
        "keep_alive_max_attempt",
        OptionKind.COUNT,
        "3, if the former is given",
        "See `keep_alive_interval`.",
    ),
)
_PROTOCOL = Option(
    "protocol",
    OptionKind.TEXT,
    "`http`",
    "`http` or `https`; must agree with the scheme in the endpoint if it has one.",
    choices=tuple(Scheme),
)

_ACCEPTED: tuple[Option, ...] = (
    *options_of(Timing).values(),
    *_FACTORS,
    *options_of(JobSettings).values(),
    *options_of(Settings).values(),
    *options_of(Connection).values(),
    _PROTOCOL,
    *options_of(Tls).values(),
    *options_of(Credentials).values(),
)
NAMES: dict[str, Option] = {name: option for option in _ACCEPTED for name in option.names}
OPTIONS = tuple(option for option in _ACCEPTED if option.help is not None)
"""Those that are documented."""

WITHOUT_MEANING: dict[str, str] = {
    "heartbeat_timeout": "a node waits for etcd's reply to a keep-alive for lease_ttl / 5",
    "is_host": "no node hosts the rendezvous: etcd does (with embed=1 on the endpoint's machine)",
    "store_type": "the rendezvous is kept in etcd, and the workers' store is a TCPStore",
}
"""Options of torch's other backends that are accepted, so that moving is one word, and why they
have no effect here."""


def options_table() -> str:
    """Render the options as the markdown table that docs/options.md shows."""
    lines = [
        "| option | also accepted | value | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in OPTIONS:
        aliases = ", ".join(f"`{alias}`" for alias in one.aliases)
        cells = (f"`{one.name}`", aliases, one.kind.value, one.default, one.help)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"

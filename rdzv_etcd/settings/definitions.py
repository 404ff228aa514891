"""Frozen settings, validated whole when they are made. Knows numbers and limits, no I/O."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.fields import Kind, check_numbers, option
from rdzv_etcd.text import shown

DEFAULT_PREFIX = "/rdzv_etcd"
DEFAULT_SLICE_NODES = 128
MAX_EPOCH_CLAIM = 2**53
"""No node may say that it knows of a higher epoch: microseconds until the year 2255, and exact in
every program that reads JSON."""
MAX_SLICE_NODES = 1024
"""More names in one value would not help anybody; etcd limits a request to 1.5 MiB."""
MAX_NODES = 1_000_000
"""More than any job has; every number in etcd that counts nodes is checked against it."""
MAX_HISTORY = 1000
"""Rounds: eight megabytes of etcd at most, and keys that the leader can read at once."""
MAX_ID = 1000
"""Characters of a job id and of a prefix: they are part of every key."""
MAX_RANK_KEY = 1000
"""Characters of a rank key: every node that leads reads all of them."""
MAX_DATA = 4096
"""Bytes of a node's data as JSON: every node that leads reads those of all."""
MAX_DATA_DEPTH = 32
"""Lists and dicts in each other in a node's data: how deep a reader can go is another's setting."""
MAX_HOST = 255
"""Characters of a host's name."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd member's client address."""

    host: str
    port: int = 2379

    @property
    def target(self) -> str:
        """``host:port``, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS towards etcd. Without ``ca_cert`` the system's roots are trusted."""

    ca_cert: Path | None = option(
        "ca_cert",
        Kind.FILE,
        "CA certificates (PEM) that etcd's certificate is checked against.",
        default=None,
        shown="the system's roots",
        aliases=("cacert",),
    )
    cert: Path | None = option(
        "cert",
        Kind.FILE,
        "Client certificate (PEM); may contain its key as well.",
        default=None,
        shown="none",
        aliases=("ssl_cert",),
    )
    key: Path | None = option(
        "key",
        Kind.FILE,
        "Key of the client certificate (PEM).",
        default=None,
        shown="in `cert`",
        aliases=("ssl_cert_key",),
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password; kept out of ``repr`` so that they stay out of logs."""

    user: str
    password: str = field(repr=False)
    user_file: Path | None = option(
        "user_file",
        Kind.FILE,
        "File that holds the etcd user's name; read again whenever a token is renewed.",
        default=None,
        shown="`$RDZV_ETCD_USER`",
        compare=False,
    )
    password_file: Path | None = option(
        "password_file",
        Kind.FILE,
        "File that holds the etcd user's password; read again whenever a token is renewed.",
        default=None,
        shown="`$RDZV_ETCD_PASSWORD`",
        compare=False,
    )


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one etcd cluster."""

    endpoints: tuple[Endpoint, ...] = (Endpoint("localhost"),)
    tls: Tls | None = None
    """``None``: plain http."""
    credentials: Credentials | None = None
    request_timeout_s: float = option(
        "request_timeout",
        Kind.SECONDS,
        "Bounds one request to etcd with its retries.",
        default=60.0,
        aliases=("read_timeout",),
    )
    connect_timeout_s: float = option(
        "connect_timeout",
        Kind.SECONDS,
        "Bounds the very first contact with etcd, so that a wrong endpoint is reported quickly.",
        default=10.0,
    )
    allow_plain_password: bool = option(
        "allow_plain_password",
        Kind.FLAG,
        "Send the password over plain http to an etcd on another machine, too; otherwise that is "
        "refused.",
        default=False,
    )

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise SettingsError(
                "no etcd endpoint was given (--rdzv-endpoint host:2379[,host:2379])"
            )
        check_numbers(self)

    def __str__(self) -> str:
        scheme = "https" if self.tls is not None else "http"
        return ",".join(f"{scheme}://{endpoint.target}" for endpoint in self.endpoints)


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


class Log(Enum):
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
        "[running.md](running.md#a-gate-in-front-of-the-job).",
        default=None,
        shown="none",
    )
    gate_timeout_s: float = option(
        "gate_timeout",
        Kind.SECONDS,
        "How long a gate may take; after that it counts as failed.",
        default=60.0,
    )
    gate_cooldown_s: float = option(
        "gate_cooldown",
        Kind.SECONDS,
        "A host on which the gate has failed twice in a row, also in processes that are no more, "
        "waits this long after the last failure before it tries again. 0: it never waits.",
        default=60.0,
        zero=True,
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
        "Prometheus' node exporter; `.prom` at its end. Further agents of a host take the next "
        "names: `name-2.prom` …",
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
        _require_short("the job id (--rdzv-id)", self.job_id, MAX_ID)
        _require_short("etcd_prefix", self.prefix, MAX_ID)
        _require_short("rank_key", self.rank_key or "", MAX_RANK_KEY)
        _require_short("--local-addr", self.local_addr or "", MAX_HOST)
        gate_words(self.gate_command)
        _check_metrics_file(self.metrics_file)
        object.__setattr__(self, "data", _checked_data(self.data))
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


def gate_words(command: str | None) -> list[str]:
    """Split a gate's command into the program and its arguments; raises SettingsError."""
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"gate_command={shown(command)!r} cannot be split: {error}") from None
    if not words or "\0" in command:
        raise SettingsError(f"gate_command={shown(command)!r} names no program")
    return words


def _check_metrics_file(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".prom" or "\0" in str(path):
        raise SettingsError(
            f"metrics_file is {shown(repr(str(path)))}; its name must end in .prom: the text-file "
            "collector reads no others, and what is there already is replaced"
        )


def _checked_data(data: object) -> dict[str, object]:
    """Return a copy; raise SettingsError unless the others would read exactly this."""
    if isinstance(data, Mapping):
        data = dict(data)
    if _is_deeper(data, MAX_DATA_DEPTH):
        raise SettingsError(
            f"data has lists or dicts in each other more than {MAX_DATA_DEPTH} deep; not every "
            "other node could read that"
        )
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        read = json.loads(text)
        same = read == data
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"data cannot be written as JSON: {error}") from error
    if not isinstance(data, dict) or not same:
        raise SettingsError(
            f"data is {shown(repr(data), 100)}; it must be a dict with texts as keys, and with "
            "texts, numbers, booleans, None, lists and such dicts as values"
        )
    if len(text) > MAX_DATA:
        raise SettingsError(
            f"data has {len(text)} bytes as JSON; it must have at most {MAX_DATA}: what is larger "
            "can be exchanged once the world is formed"
        )
    copied: dict[str, object] = read
    return copied


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in value)


def _require_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsError(f"{name} has {len(text)} characters; it must have at most {most}")

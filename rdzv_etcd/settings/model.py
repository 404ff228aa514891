"""Frozen settings, validated whole when they are made. Knows numbers and limits, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.text import shown

DEFAULT_PREFIX = "/rdzv_etcd"
DEFAULT_EMBED_GRACE_S = 30.0
DEFAULT_SLICE_NODES = 128
MAX_EPOCH_CLAIM = 2**53
"""No node may say that it knows of a higher epoch: microseconds until the year 2255, and exact in
every program that reads JSON."""
MAX_SLICE_NODES = 1024
"""More names in one value would not help anybody; etcd limits a request to 1.5 MiB."""
MAX_NODES = 1_000_000
"""More than any job has; every number in etcd that counts nodes is checked against it."""
MAX_ID = 1000
"""Characters of a job id and of a prefix: they are part of every key."""
MAX_RANK_KEY = 1000
"""Characters of a rank key: every node that leads reads all of them."""
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

    ca_cert: Path | None = None
    cert: Path | None = None
    """Client certificate (PEM); may contain the key as well."""
    key: Path | None = None
    """Client key (PEM); ``None`` with ``cert`` set: the key is in ``cert``."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """User and password; kept out of ``repr`` so that they stay out of logs."""

    user: str
    password: str = field(repr=False)
    user_file: Path | None = field(default=None, compare=False)
    """Where the user's name was read, and is read again when a token is renewed."""
    password_file: Path | None = field(default=None, compare=False)
    """The same for the password."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one etcd cluster."""

    endpoints: tuple[Endpoint, ...] = (Endpoint("localhost"),)
    tls: Tls | None = None
    """``None``: plain http."""
    credentials: Credentials | None = None
    allow_plain_password: bool = field(default=False, kw_only=True)
    """Over plain http, too, to an etcd on another machine; otherwise no client can be made."""
    request_timeout_s: float = 60.0
    """Bounds one call with its retries (``read_timeout``)."""
    connect_timeout_s: float = 10.0
    """Bounds the very first contact, so that a wrong endpoint is reported quickly."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise SettingsError(
                "no etcd endpoint was given (--rdzv-endpoint host:2379[,host:2379])"
            )
        for name in ("request_timeout_s", "connect_timeout_s"):
            _require_positive(name, getattr(self, name))

    def __str__(self) -> str:
        scheme = "https" if self.tls is not None else "http"
        return ",".join(f"{scheme}://{endpoint.target}" for endpoint in self.endpoints)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What all nodes of a job must agree on."""

    min_nodes: int
    max_nodes: int
    node_unit: int = 1
    """Only worlds whose size is a multiple of this are formed."""

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
    """All waits, in seconds; each comment says how a value relates to the others."""

    lease_ttl_s: int = 10
    """A node that is silent this long is lost. etcd's smallest TTL is 2 with default election
    settings; detection takes this long plus etcd's expiry tick (0.5 s)."""
    keep_alive_timeout_s: float | None = None
    """Deadline of one keep-alive reply (``heartbeat_timeout``); default TTL / 5, at most
    TTL / 3."""
    join_timeout_s: float = 600.0
    """How long one join waits for ``min_nodes``. A spare of a formed round is not bounded by it."""
    last_call_timeout_s: float = 30.0
    """How long a round with at least ``min_nodes`` stays open for more when it cannot be known
    whether more will come; at most ``join_timeout_s`` makes sense."""
    rejoin_timeout_s: float = 120.0
    """How long a round stays open for live members of the one before. Above the time workers take
    to stop: torch gives them 30 s after ``SIGTERM``, and a checkpoint is often saved then."""
    settle_s: float = 0.2
    """How long a round stays open when all live members are back and ``min_nodes`` are there."""
    closed_ttl_s: int = 60
    """How long a closed job counts as closed to nodes that are started afterwards."""
    ended_ttl_s: int = 86400
    """How long a node that was cut off when its run ended still hears of it, and how long etcd
    remembers what epochs count from; less than ``closed_ttl_s`` is of no use. With ``embed`` it is
    that: etcd itself does not stay longer."""
    job_lease_ttl_s: int | None = None
    """What a job left in etcd vanishes this long after its last node died; default 6 x
    ``lease_ttl_s``, at least 60."""
    close_timeout_s: float = 30.0
    """Bounds closing and leaving."""

    def __post_init__(self) -> None:
        for name in (
            "lease_ttl_s",
            "join_timeout_s",
            "last_call_timeout_s",
            "rejoin_timeout_s",
            "closed_ttl_s",
            "ended_ttl_s",
            "close_timeout_s",
        ):
            _require_positive(name, getattr(self, name))
        if not (math.isfinite(self.settle_s) and self.settle_s >= 0):
            raise SettingsError(f"settle_s is {self.settle_s}; it must not be negative")
        if self.keep_alive_timeout_s is not None:
            _require_positive("keep_alive_timeout_s", self.keep_alive_timeout_s)
        if self.job_lease_ttl_s is not None:
            _require_positive("job_lease_ttl_s", self.job_lease_ttl_s)

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
    prefix: str = DEFAULT_PREFIX
    rank_key: str | None = None
    """Orders ranks (natural order): the node's own value, already resolved; ``None``: sticky."""
    local_addr: str | None = None
    """The address other nodes reach this one at; ``None``: found out."""
    slice_nodes: int = DEFAULT_SLICE_NODES
    """The ranks of a world with more nodes than this are published in slices of a quarter of it."""
    after_end: AfterEnd = AfterEnd.NEW_RUN
    """What to do if this node was started after a run of the job has ended."""
    epoch_floor: int = 0
    """An epoch that the job has reached before: its next ones are higher."""
    embed: bool = False
    """Start an etcd on this machine if the endpoint is ours and none answers."""
    embed_grace_s: float = DEFAULT_EMBED_GRACE_S
    """An embedded etcd stops when it has had no node for this long."""

    def __post_init__(self) -> None:
        if not self.job_id:
            raise SettingsError("the job id (--rdzv-id) is empty")
        _require_short("the job id (--rdzv-id)", self.job_id, MAX_ID)
        _require_short("etcd_prefix", self.prefix, MAX_ID)
        _require_short("rank_key", self.rank_key or "", MAX_RANK_KEY)
        _require_short("--local-addr", self.local_addr or "", MAX_HOST)
        if not 1 <= self.slice_nodes <= MAX_SLICE_NODES:
            raise SettingsError(
                f"slice_nodes is {self.slice_nodes}; it must be from 1 to {MAX_SLICE_NODES}"
            )
        _require_positive("embed_grace_s", self.embed_grace_s)


def _require_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsError(f"{name} has {len(text)} characters; it must have at most {most}")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise SettingsError(f"{name} is {value}; it must be a positive number of seconds")

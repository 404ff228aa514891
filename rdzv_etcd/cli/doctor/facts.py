"""What the doctor has found out, and what it makes of it. Plain values; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from rdzv_etcd.cli.job_view import JobView
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.settings import Settings


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    text: str
    hint: str = ""
    """What to do."""


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def warn(text: str, hint: str = "") -> Finding:
    return Finding(Level.WARN, text, hint)


def fail(text: str, hint: str = "") -> Finding:
    return Finding(Level.FAIL, text, hint)


@dataclass(frozen=True, slots=True)
class Pages:
    """What an etcd says over HTTP; ``None``: it does not tell."""

    version: str | None = None
    alarm: str | None = None
    """The reason for which it calls itself not healthy."""
    database_bytes: int | None = None
    quota_bytes: int | None = None
    ping_every_s: float | None = None
    """The shortest time between pings that it was told to allow."""


@dataclass(frozen=True, slots=True)
class EndpointFacts:
    """One endpoint, asked by itself."""

    name: str
    error: RdzvEtcdError | None = None
    """Why it did not answer as an etcd."""
    round_trip_s: float = 0.0
    pages: Pages = field(default_factory=Pages)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This host."""

    name: str
    addresses: tuple[str, ...]
    """What the name resolves to."""
    own: tuple[str, ...]
    """Those of them that are addresses of this host."""
    interfaces: str
    """What GLOO_SOCKET_IFNAME says."""


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """This Python."""

    executable: str
    versions: Mapping[str, str | None]
    """By distribution; ``None``: not installed."""
    plugin: str | None
    """Where the backend is registered to be; ``None``: nowhere."""
    plugin_problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks look at."""

    settings: Settings
    host: HostFacts
    python: PythonFacts
    is_about_a_job: bool = False
    nnodes: str = ""
    """What ``--nnodes`` says; empty if nothing does."""
    endpoints: tuple[EndpointFacts, ...] = ()
    read_error: RdzvEtcdError | None = None
    """Why the job's keys cannot be read."""
    write_error: RdzvEtcdError | None = None
    """Why a node could not write them."""
    shortest_lease_s: int | None = None
    lease_error: RdzvEtcdError | None = None
    listened_s: float = 0.0
    """How long a connection was kept open …"""
    cut_after_s: float | None = None
    """… and after how long somebody ended it; ``None``: nobody did."""
    view: JobView | None = None
    view_error: RdzvEtcdError | None = None
    elsewhere: tuple[str, ...] = ()
    """Other prefixes under which there is a job of this id."""
    entangled: tuple[str, ...] = ()
    """Which other job's keys are below this one's, or the other way round."""
    similar: tuple[str, ...] = ()
    """Jobs under the same prefix that wait for nodes, too, and are spelt nearly the same."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Nodes whose links were tried from here, and why they cannot be reached; empty: they can."""

    @property
    def is_reached(self) -> bool:
        return any(endpoint.error is None for endpoint in self.endpoints)


Check: TypeAlias = Callable[[Facts], Iterable[Finding]]

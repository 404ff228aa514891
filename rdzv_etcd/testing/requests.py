"""What the model understands besides :class:`Get` and :class:`Txn`, and what it answers.

Plain values; knows neither time nor connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rdzv_etcd.etcd.port import Event, Get, GetResult, LeaseGrant, Txn, TxnResult


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant a lease; id 0: the server chooses."""

    ttl_s: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Revoke:
    """Revoke a lease and delete its keys in one revision (an expiry does the same)."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Renew a lease once."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """Ask how long a lease has left; changes nothing."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class LeaseLeft:
    """The seconds that a lease has left, -1 if there is no such lease."""

    left_s: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Forget the history before ``revision``."""

    revision: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """Whether the lease existed."""

    existed: bool
    revision: int


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """The lease's TTL, 0 if there is no such lease."""

    ttl_s: int


@dataclass(frozen=True, slots=True)
class Compacted:
    revision: int


Request: TypeAlias = "Get | Txn | Grant | Revoke | KeepAlive | TimeToLive | Compact"
Response: TypeAlias = (
    "GetResult | TxnResult | LeaseGrant | Revoked | KeptAlive | LeaseLeft | Compacted"
)


@dataclass(frozen=True, slots=True)
class Revision:
    """All changes of one revision, in the order they were made."""

    number: int
    events: tuple[Event, ...]

"""The port: what this library needs of an etcd, as plain values and one protocol.

Implemented by :mod:`rdzv_etcd.etcd.client` (real servers) and :mod:`rdzv_etcd.testing` (in memory).
Knows etcd v3's vocabulary; knows neither gRPC nor what the keys mean.

Sources: etcd v3 API, https://etcd.io/docs/v3.5/learning/api/
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from rdzv_etcd.errors import EtcdError


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value and etcd's bookkeeping (all revisions are of the whole store)."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int = 0


class Target(Enum):
    """What a :class:`Compare` tests of a key; all numbers of a missing key are zero."""

    VERSION = "version"
    CREATE = "create"
    MOD = "mod"
    VALUE = "value"
    LEASE = "lease"


class Relation(Enum):
    EQUAL = "="
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class Compare:
    """A guard. With ``range_end`` it must hold for every key in ``[key, range_end)``.

    Over an empty range numbers compare as zero, and a VALUE compare is false (as etcd does it).
    """

    key: bytes
    target: Target
    relation: Relation
    operand: int | bytes
    range_end: bytes | None = None


@dataclass(frozen=True, slots=True)
class Get:
    """Read one key, or the range ``[key, range_end)`` in ascending key order; linearizable."""

    key: bytes
    range_end: bytes | None = None
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False
    newest_first: bool = False
    """In the order of their last writes, the latest first, instead."""


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease_id: int = 0
    ignore_value: bool = False
    """Keep the current value (only the version rises); the key must exist."""


@dataclass(frozen=True, slots=True)
class Delete:
    key: bytes
    range_end: bytes | None = None


@dataclass(frozen=True, slots=True)
class Txn:
    """If all guards hold do ``success``, else ``failure``, atomically and in order.

    A key may be written once per transaction. The server limits the operations per list, nested
    ones included: see :data:`OPS_PER_TXN`.
    """

    guards: tuple[Compare, ...]
    success: tuple[Op, ...]
    failure: tuple[Op, ...] = ()

    def puts(self) -> Iterator[Put]:
        """Yield every put of either branch, those of nested transactions included."""
        for op in (*self.success, *self.failure):
            if isinstance(op, Put):
                yield op
            elif isinstance(op, Txn):
                yield from op.puts()

    @property
    def reads_only(self) -> bool:
        """Whether neither branch, nor one of a nested transaction, writes anything."""
        return all(
            op.reads_only if isinstance(op, Txn) else isinstance(op, Get)
            for op in (*self.success, *self.failure)
        )


Op: TypeAlias = "Get | Put | Delete | Txn"


@dataclass(frozen=True, slots=True)
class GetResult:
    revision: int
    kvs: tuple[KeyValue, ...]
    count: int
    """How many keys there are, including those beyond the limit."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Of a put or a delete."""

    revision: int


@dataclass(frozen=True, slots=True)
class TxnResult:
    revision: int
    succeeded: bool
    results: tuple[OpResult, ...]


OpResult: TypeAlias = "GetResult | WriteResult | TxnResult"


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    lease_id: int
    ttl_s: int
    """What the server granted; it may be more than was requested."""
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseLeft:
    """How long a lease has left, in whole seconds, rounded down."""

    left_s: int
    granted_s: int

    @property
    def silent_s(self) -> int:
        """How long ago it was renewed."""
        return max(0, self.granted_s - self.left_s)


OPS_PER_TXN = 100
"""The most that callers put into one list of a transaction: servers allow 128 by default
(``--max-txn-ops``), guards and nested operations included."""


class EventKind(Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    kv: KeyValue
    """For a DELETE only ``key`` and ``mod_revision`` (the deletion's) are meaningful."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Events in revision order; all events of one revision are in one batch."""

    revision: int
    events: tuple[Event, ...]


class Watch(Protocol):
    """A gapless stream of changes; it survives reconnects and endpoint changes by itself.

    Iterating raises :class:`~rdzv_etcd.errors.WatchLostError` when a gap cannot be excluded
    (compacted, data wiped, a read shows what the watch has not delivered), and auth or permission
    errors; it never ends silently, nor stays silent: see :class:`WatchHealth`.
    """

    def __aiter__(self) -> AsyncIterator[WatchBatch]: ...

    async def ready(self) -> int:
        """Wait until the server has confirmed the watch; return its revision then.

        There is no gap between a read made after this and the watch, and nothing to catch up: etcd
        delivers changes from before a watch began with a delay of up to 100 ms
        (``syncWatchersLoop`` in its mvcc package). Raises what iterating would raise.
        """

    def count_from(self, result: GetResult) -> None:
        """Take a read of the whole range that was made after :meth:`ready`.

        From then on the watch also notices if etcd does not report the deletion of a key.
        """

    async def close(self) -> None:
        """Cancel the watch; a pending iteration ends with ``StopAsyncIteration``. Idempotent."""


class WatchHealth(Protocol):
    """Whether the watches of a connection are up to date: about once a period, while there are
    watches, the connection compares them with reads."""

    problem: EtcdError | None
    """Why the last comparison did not find all watches up to date."""
    listeners: list[Callable[[], None]]
    """Called whenever there is a problem, and when it is over."""

    async def check_now(self) -> None:
        """Compare them now. Raises nothing: see :attr:`unsure_s`."""

    def check_every(self, period_s: float) -> None:
        """Set the period, of the comparisons after the next one."""

    @property
    def unsure_s(self) -> float:
        """For how long such a comparison has been due.

        While that is long, the watches may not show what is in etcd.
        """


class Etcd(Protocol):
    """One connection to one etcd cluster. All methods raise :class:`~rdzv_etcd.errors.EtcdError`.

    ``timeout_s`` bounds the whole call with its retries (``None``: the connection's own
    ``request_timeout_s``). Reads, and transactions that only read, are retried on other endpoints
    within it. Writes are retried only
    while it is certain that they did not reach a server; otherwise they raise
    :class:`~rdzv_etcd.errors.OutcomeUnknownError`. With ``repeatable=True`` the caller states that
    applying the write twice does no harm, and it is retried like a read.
    """

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called: no call can succeed any more."""

    @property
    def watch_health(self) -> WatchHealth: ...

    async def get(self, request: Get, *, timeout_s: float | None = None) -> GetResult: ...

    async def txn(
        self, request: Txn, *, timeout_s: float | None = None, repeatable: bool = False
    ) -> TxnResult: ...

    async def grant(
        self, ttl_s: int, *, lease_id: int = 0, timeout_s: float | None = None
    ) -> LeaseGrant:
        """Grant a lease (``lease_id`` 0: any that is free).

        Raises :class:`~rdzv_etcd.errors.LeaseExistsError` if the chosen id is taken. Retried and,
        if the id is not the caller's, given up like a read: a lease with an unknown id carries
        nothing, and expires.
        """

    async def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> bool:
        """Revoke a lease and with it its keys; ``False`` if it did not exist. Retried."""

    async def keep_alive(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        """Renew a lease once over the shared keep-alive stream.

        Returns its new TTL in seconds, 0 if the lease is gone. Raises
        :class:`~rdzv_etcd.errors.EtcdUnavailableError` if no reply came in time.
        """

    async def time_to_live(
        self, lease_id: int, *, timeout_s: float | None = None
    ) -> LeaseLeft | None:
        """Return how long a lease has left, ``None`` if there is no such lease. Does not renew it.

        On an etcd with users this needs permission to read the keys on the lease.
        """

    def watch(
        self,
        key: bytes,
        range_end: bytes | None = None,
        *,
        start_revision: int,
        puts_only: bool = False,
        mark_resumes: bool = False,
    ) -> Watch:
        """Watch ``[key, range_end)`` (or one key) from ``start_revision``, inclusive.

        0 means from now on, that is from when :meth:`Watch.ready` returns at the latest.
        ``puts_only``: without deletions, which makes catching up cheaper.
        ``mark_resumes``: with an empty batch whenever it resumes over another connection. It cannot
        show whether etcd lost data meanwhile (wiped, restored) and has written as much again since:
        a caller that must know reads then.

        Returns at once; errors appear when iterating.
        """

    async def close(self) -> None:
        """Close channels and streams; pending calls fail. Idempotent."""


def keys_text(key: bytes, range_end: bytes | None) -> str:
    """Return a key, a prefix or a range for a message, in one line and of bounded length."""
    name = repr(key.decode(errors="backslashreplace"))[:_NAME_LETTERS]
    if not range_end:
        return name
    if range_end == prefix_end(key):
        return f"all under {name}"
    return f"{name} up to {range_end.decode(errors='backslashreplace')!r:.{_NAME_LETTERS}}"


_NAME_LETTERS = 200


def prefix_end(prefix: bytes) -> bytes:
    """Return the ``range_end`` that makes a range of all keys starting with ``prefix``."""
    stem = prefix.rstrip(b"\xff")
    if not stem:
        return b"\x00"  # etcd: from `key` to the end of the key space
    return stem[:-1] + bytes([stem[-1] + 1])

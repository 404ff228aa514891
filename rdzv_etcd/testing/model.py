"""etcd v3 as a deterministic state machine: ``step(request) -> response``.

Knows what etcd does with each request; knows no time, no connections and no randomness. Leases
have a TTL here, but when one has run out is the server's business: it then steps a ``Revoke``.

Sources, all of etcd 3.4 to 3.5: API reference (https://etcd.io/docs/v3.5/learning/api/); request
checks in server/etcdserver/api/v3rpc/key.go; application in server/etcdserver/apply.go; leases in
server/lease/lessor.go. Every statement here is checked against real servers by tests/contract.
"""

from __future__ import annotations

import copy
import operator
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rdzv_etcd.errors import (
    CompactedError,
    EtcdNoSpaceError,
    InvalidRequestError,
    LeaseExistsError,
    LeaseNotFoundError,
)
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Event,
    EventKind,
    Get,
    GetResult,
    KeyValue,
    LeaseGrant,
    LeaseLeft,
    Op,
    OpResult,
    Put,
    Relation,
    Target,
    Txn,
    TxnResult,
    WriteResult,
)
from rdzv_etcd.testing.checks import Limits, check_key, check_txn

MAX_LEASE_TTL_S = 9_000_000_000
"""etcd's largest TTL (``MaxLeaseTTL`` in lessor.go)."""

_FIRST_LEASE_ID = 0x1000_0000_0000
_FROM_KEY = b"\x00"
"""As a ``range_end``: up to the end of the key space."""


_RELATIONS: dict[Relation, Callable[[Any, Any], bool]] = {
    Relation.EQUAL: operator.eq,
    Relation.GREATER: operator.gt,
    Relation.LESS: operator.lt,
}
_ASPECTS: dict[Target, Callable[[KeyValue], Any]] = {
    Target.VERSION: operator.attrgetter("version"),
    Target.CREATE: operator.attrgetter("create_revision"),
    Target.MOD: operator.attrgetter("mod_revision"),
    Target.LEASE: operator.attrgetter("lease_id"),
    Target.VALUE: operator.attrgetter("value"),
}


@dataclass(slots=True)
class Lease:
    """A granted lease and the keys that go with it."""

    ttl_s: int
    keys: set[bytes] = field(default_factory=set)


class Model:
    """The state of one etcd cluster. A request that raises has changed nothing."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits if limits is not None else Limits()
        self.revision = 1
        self.compact_revision = 0
        self.no_space = False
        """The NOSPACE alarm: puts and grants are refused, reads and deletes are not."""
        self.leases: dict[int, Lease] = {}
        self._values: dict[bytes, KeyValue] = {}
        self._sorted: list[bytes] = []
        self._history: deque[Revision] = deque()
        self._pending: list[Event] = []
        self._next_lease_id = _FIRST_LEASE_ID

    def step(self, request: Request) -> Response:  # noqa: PLR0911 - one for each kind
        """Apply one request; raise the port's errors as a server would refuse it."""
        match request:
            case Get():
                check_key(request.key)
                return self._get(request)
            case Txn():
                return self._step_txn(request)
            case Grant():
                return self._grant(request)
            case Revoke():
                return self._revoke(request.lease_id)
            case RenewLease():
                lease = self.leases.get(request.lease_id)
                return 0 if lease is None else lease.ttl_s
            case TimeToLive():  # as if it had just been renewed: the server keeps the time
                lease = self.leases.get(request.lease_id)
                return None if lease is None else LeaseLeft(lease.ttl_s, lease.ttl_s)
        self._compact(request.revision)
        return None

    def history(self, start_revision: int) -> Iterator[Revision]:
        """Return the changes from ``start_revision`` on; :class:`CompactedError` if forgotten."""
        if start_revision < self.compact_revision:
            raise CompactedError(self.compact_revision)
        if not self._history or self._history[-1].number < start_revision:
            return iter(())
        first = len(self._history)
        while first > 0 and self._history[first - 1].number >= start_revision:
            first -= 1
        return iter([self._history[index] for index in range(first, len(self._history))])

    # -- transactions -----------------------------------------------------------------------------

    def _step_txn(self, request: Txn) -> TxnResult:
        check_txn(request, self.limits)
        if self.no_space and any(request.puts()):
            raise EtcdNoSpaceError("etcdserver: mvcc: database space exceeded")
        # etcd also evaluates the guards of nested transactions before it applies anything.
        path = _Path.of(request, self)
        self._check_puts(request, path)
        result = self._apply(request, path)
        self._commit()
        return _at(result, self.revision)

    def _check_puts(self, request: Txn, path: _Path) -> None:
        nested = iter(path.nested)
        for op in request.success if path.succeeded else request.failure:
            if isinstance(op, Txn):
                self._check_puts(op, next(nested))
            elif isinstance(op, Put):
                if op.ignore_value and op.key not in self._values:
                    raise InvalidRequestError(f"etcdserver: key not found: {op.key!r}")
                if op.lease_id and op.lease_id not in self.leases:
                    raise LeaseNotFoundError(op.lease_id)

    def _apply(self, request: Txn, path: _Path) -> TxnResult:
        nested = iter(path.nested)
        results: list[OpResult] = []
        for op in request.success if path.succeeded else request.failure:
            results.append(self._apply_op(op, nested))
        return TxnResult(self._read_revision, path.succeeded, tuple(results))

    def _apply_op(self, op: Op, nested: Iterator[_Path]) -> OpResult:
        if isinstance(op, Get):
            return self._get(op)
        if isinstance(op, Put):
            self._put(op)
            return WriteResult(self.revision + 1)
        if isinstance(op, Delete):
            self._delete(list(self._keys_in(op.key, op.range_end)))
            return WriteResult(self._read_revision)
        return self._apply(op, next(nested))

    def holds(self, guard: Compare) -> bool:
        """Evaluate one guard against the current state."""
        holds, aspect = _RELATIONS[guard.relation], _ASPECTS[guard.target]
        keys = list(self._keys_in(guard.key, guard.range_end))
        if not keys:
            return guard.target is not Target.VALUE and holds(0, guard.operand)
        return all(holds(aspect(self._values[key]), guard.operand) for key in keys)

    # -- keys -------------------------------------------------------------------------------------

    @property
    def _read_revision(self) -> int:
        """What a reader inside the running transaction sees as the store's revision."""
        return self.revision + 1 if self._pending else self.revision

    def _keys_in(self, key: bytes, range_end: bytes | None) -> Iterator[bytes]:
        if not range_end:
            return iter((key,) if key in self._values else ())
        start = bisect_left(self._sorted, key)
        stop = None if range_end == _FROM_KEY else bisect_left(self._sorted, range_end)
        return iter(self._sorted[start:stop])

    def _get(self, request: Get) -> GetResult:
        keys = list(self._keys_in(request.key, request.range_end))
        if request.count_only:
            return GetResult(self._read_revision, (), len(keys))
        if request.newest_first:
            keys.sort(key=lambda key: self._values[key].mod_revision, reverse=True)
        wanted = keys[: request.limit] if request.limit > 0 else keys
        kvs = [self._values[key] for key in wanted]
        if request.keys_only:
            kvs = [replace(kv, value=b"") for kv in kvs]
        return GetResult(self._read_revision, tuple(kvs), len(keys))

    def _put(self, op: Put) -> None:
        revision = self.revision + 1
        old = self._values.get(op.key)
        created, version, value = revision, 1, op.value
        if old is None:
            insort(self._sorted, op.key)
        else:
            created, version = old.create_revision, old.version + 1
            value = old.value if op.ignore_value else op.value
            self._detach(old)
        kv = KeyValue(op.key, value, created, revision, version, op.lease_id)
        if op.lease_id:
            self.leases[op.lease_id].keys.add(op.key)
        self._values[op.key] = kv
        self._pending.append(Event(EventKind.PUT, kv))

    def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            self._detach(self._values.pop(key))
            del self._sorted[bisect_left(self._sorted, key)]
            gone = KeyValue(key, b"", 0, self.revision + 1, 0)
            self._pending.append(Event(EventKind.DELETE, gone))

    def _detach(self, kv: KeyValue) -> None:
        lease = self.leases.get(kv.lease_id)
        if lease is not None:
            lease.keys.discard(kv.key)

    def _commit(self) -> None:
        """Make the pending changes one revision; without any the revision stays."""
        if self._pending:
            self.revision += 1
            self._history.append(Revision(self.revision, tuple(self._pending)))
            self._pending = []

    def emptied(self) -> Model:
        """Return what is left when all data is lost: a new cluster with the old settings.

        Lease ids continue: real ones contain the time, so an earlier id is never assigned again.
        """
        model = Model(self.limits)
        model.no_space = self.no_space
        model._next_lease_id = self._next_lease_id
        return model

    def copied(self) -> Model:
        """Return this state as it is now: keys, leases, revision and history."""
        model = copy.copy(self)
        model.leases = {id_: Lease(each.ttl_s, set(each.keys)) for id_, each in self.leases.items()}
        model._values = dict(self._values)
        model._sorted = list(self._sorted)
        model._history = deque(self._history)
        model._pending = []
        return model

    def restored(self, saved: Model, bump_revision: int = 0) -> Model:
        """Return what is left when the data of ``saved`` take the place of what there is.

        With ``bump_revision`` as after ``etcdutl snapshot restore --bump-revision
        --mark-compacted``. Lease ids continue, as in :meth:`emptied`.
        """
        model = saved.copied()
        model.no_space = self.no_space
        model._next_lease_id = self._next_lease_id
        if bump_revision:
            model.revision += bump_revision
            model.compact_revision = model.revision
            model._history.clear()
        return model

    # -- leases and history -----------------------------------------------------------------------

    def _grant(self, request: Grant) -> LeaseGrant:
        if self.no_space:
            raise EtcdNoSpaceError("etcdserver: mvcc: database space exceeded")
        if request.ttl_s > MAX_LEASE_TTL_S:
            raise InvalidRequestError("etcdserver: too large lease TTL")
        lease_id = request.lease_id
        if lease_id in self.leases:
            raise LeaseExistsError(lease_id)
        while not lease_id:
            self._next_lease_id += 1
            if self._next_lease_id not in self.leases:
                lease_id = self._next_lease_id
        ttl_s = max(request.ttl_s, self.limits.min_lease_ttl_s)
        self.leases[lease_id] = Lease(ttl_s)
        return LeaseGrant(lease_id, ttl_s, self.revision)

    def _revoke(self, lease_id: int) -> bool:
        """Return whether there was such a lease."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return False
        self._delete(sorted(lease.keys))
        del self.leases[lease_id]
        self._commit()
        return True

    def _compact(self, revision: int) -> None:
        if revision <= self.compact_revision:
            raise CompactedError(self.compact_revision)
        if revision > self.revision:
            raise InvalidRequestError("etcdserver: mvcc: required revision is a future revision")
        self.compact_revision = revision
        while self._history and self._history[0].number < revision:
            self._history.popleft()


@dataclass(frozen=True, slots=True)
class _Path:
    """Which branch a transaction takes, and those of the nested ones in that branch, in order."""

    succeeded: bool
    nested: tuple[_Path, ...]

    @classmethod
    def of(cls, request: Txn, model: Model) -> _Path:
        succeeded = all(model.holds(guard) for guard in request.guards)
        taken = request.success if succeeded else request.failure
        return cls(succeeded, tuple(cls.of(op, model) for op in taken if isinstance(op, Txn)))


def _at(result: TxnResult, revision: int) -> TxnResult:
    """Give a transaction and those nested in it the revision at which the whole ended."""
    results = tuple(_at(r, revision) if isinstance(r, TxnResult) else r for r in result.results)
    return replace(result, revision=revision, results=results)


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
class RenewLease:
    """Renew a lease once."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """Ask how long a lease has left; changes nothing."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Forget the history before ``revision``."""

    revision: int


Request: TypeAlias = "Get | Txn | Grant | Revoke | RenewLease | TimeToLive | Compact"
Response: TypeAlias = "GetResult | TxnResult | LeaseGrant | LeaseLeft | bool | int | None"
"""In the order of the requests. A revocation returns whether there was such a lease; a renewal the
lease's TTL, or 0; a time to live ``None`` if there is no such lease."""


@dataclass(frozen=True, slots=True)
class Revision:
    """All changes of one revision, in the order they were made."""

    number: int
    events: tuple[Event, ...]

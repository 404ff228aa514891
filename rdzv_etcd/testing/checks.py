"""What an etcd server refuses before it looks at its data: malformed and oversized requests.

Knows requests only. Sources: ``checkTxnRequest`` and ``checkIntervals`` in etcd's
server/etcdserver/api/v3rpc/key.go (3.4 and 3.5 agree).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rdzv_etcd.errors import InvalidRequestError, RequestTooLargeError
from rdzv_etcd.etcd.port import Delete, Op, Put, Target, Txn


@dataclass(frozen=True, slots=True)
class Limits:
    """A server's limits, with etcd's defaults."""

    max_txn_ops: int = 128
    """``--max-txn-ops``: the longest of a transaction's three lists, plus that of nested ones."""
    max_request_bytes: int = 1_572_864
    """``--max-request-bytes``."""
    min_lease_ttl_s: int = 2
    """Shorter TTLs are raised to this: 1.5 election timeouts, rounded up to whole seconds."""


def check_txn(request: Txn, limits: Limits) -> None:
    """Refuse a malformed, conflicting or oversized transaction."""
    _check_shape(request, limits.max_txn_ops)
    _writes_of(request.success)
    _writes_of(request.failure)
    if any(request.puts()) and _size(request) > limits.max_request_bytes:
        raise RequestTooLargeError(
            f"etcdserver: request is too large: more than {limits.max_request_bytes} bytes"
        )


def _ops(request: Txn) -> Iterator[Op]:
    yield from request.success
    yield from request.failure


def _check_shape(request: Txn, max_ops: int) -> None:
    longest = max(len(request.guards), len(request.success), len(request.failure))
    if longest > max_ops:
        raise InvalidRequestError("etcdserver: too many operations in txn request")
    for guard in request.guards:
        check_key(guard.key)
    for op in _ops(request):
        if isinstance(op, Txn):
            _check_shape(op, max_ops - longest)
        else:
            check_key(op.key)
        if isinstance(op, Put) and op.ignore_value and op.value:
            raise InvalidRequestError("etcdserver: value is provided")


def check_types(request: Txn) -> None:
    """Raise :class:`TypeError` for a guard that compares bytes with a number, as a client would."""
    for guard in request.guards:
        expected = bytes if guard.target is Target.VALUE else int
        if not isinstance(guard.operand, expected):
            raise TypeError(
                f"a guard on {guard.target.name} needs {expected.__name__}, not {guard.operand!r}"
            )
    for op in _ops(request):
        if isinstance(op, Txn):
            check_types(op)


def check_key(key: bytes) -> None:
    """Refuse an empty key."""
    if not key:
        raise InvalidRequestError("etcdserver: key is not provided")


@dataclass(slots=True)
class _Writes:
    """What one list of operations may write: keys put, ranges deleted."""

    puts: set[bytes]
    deletes: list[tuple[bytes, bytes | None]]

    def add(self, key: bytes) -> None:
        if key in self.puts:
            raise InvalidRequestError(f"etcdserver: duplicate key given in txn request: {key!r}")
        self.forbid_deleted(key)
        self.puts.add(key)

    def forbid_deleted(self, key: bytes) -> None:
        if any(_covers(start, end, key) for start, end in self.deletes):
            raise InvalidRequestError(f"etcdserver: duplicate key given in txn request: {key!r}")


def _writes_of(ops: tuple[Op, ...]) -> _Writes:
    """Collect a list's writes; refuse a key put twice, or put and deleted.

    Two deletes may overlap. The two branches of one nested transaction may put the same key. As in
    etcd a nested delete conflicts with the siblings after it, not with those before it.
    """
    writes = _Writes(set(), [(op.key, op.range_end) for op in ops if isinstance(op, Delete)])
    for op in ops:
        if isinstance(op, Txn):
            then, otherwise = _writes_of(op.success), _writes_of(op.failure)
            for key in sorted(then.puts):
                writes.add(key)
            for key in sorted(otherwise.puts):
                if key in then.puts:
                    writes.forbid_deleted(key)
                else:
                    writes.add(key)
            writes.deletes += then.deletes + otherwise.deletes
    for op in ops:
        if isinstance(op, Put):
            writes.add(op.key)
    return writes


def _covers(start: bytes, end: bytes | None, key: bytes) -> bool:
    if not end:
        return key == start
    return start <= key and (end == b"\x00" or key < end)


def _size(request: Txn) -> int:
    """Return the payload's bytes: a little less than the encoded request, which etcd measures."""
    total = 0
    for guard in request.guards:
        total += len(guard.key) + (len(guard.operand) if isinstance(guard.operand, bytes) else 8)
    for op in _ops(request):
        if isinstance(op, Txn):
            total += _size(op)
        else:
            total += len(op.key) + (len(op.value) if isinstance(op, Put) else 0)
    return total

"""Every request of a round's key-value store. No I/O here.

A write is given as a :data:`Body`, and :func:`once` makes the transaction of it: how it comes to be
applied once is told in :mod:`rdzv_etcd.kv.writes`. Keys are etcd's (see
:class:`~rdzv_etcd.protocol.store_values.StoreKeys`), values are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rdzv_etcd.etcd.port import Compare, Delete, Get, KeyValue, Put, Relation, Target, Txn
from rdzv_etcd.protocol.store_values import Counter, encode_value

WROTE = b"1"
"""What a marker says of a write of which a branch that writes was taken."""
_KEPT = b"0"

Body: TypeAlias = Callable[[Put, Put], Txn]
"""Makes a transaction from two puts: one for each branch that writes, one for each that does not.

Every branch must contain exactly one of them.
"""


# --- reads --------------------------------------------------------------------------------------


def read(key: bytes, *, keys_only: bool = False) -> Get:
    return Get(key, keys_only=keys_only)


def read_together(reads: Sequence[Get]) -> Txn:
    return Txn((), tuple(reads))


# --- writes -------------------------------------------------------------------------------------


def once(marker: bytes, uses: int, lease_id: int, body: Body, whole: bytes) -> Txn:
    """Do ``body`` if the marker was put ``uses`` times and ``whole`` tells that nothing was lost;
    otherwise the result holds both."""
    made = body(Put(marker, WROTE, lease_id), Put(marker, _KEPT, lease_id))
    guards = (
        Compare(marker, Target.VERSION, Relation.EQUAL, uses),
        Compare(whole, Target.VERSION, Relation.GREATER, 0),
    )
    return Txn(guards, (made,) if made.guards else made.success, (Get(marker), Get(whole)))


def declare_lost(whole: bytes) -> Txn:
    """Let all know that the store has lost something. Twice does no harm: no marker."""
    return Txn((), (Delete(whole),))


def put_all(items: Sequence[tuple[bytes, bytes]], lease_id: int) -> Body:
    puts = [Put(key, value, lease_id) for key, value in items]
    return lambda wrote, _: Txn((), (*puts, wrote))


def delete(key: bytes) -> Body:
    """Delete the key if it is there."""
    there = Compare(key, Target.VERSION, Relation.GREATER, 0)
    return lambda wrote, kept: Txn((there,), (Delete(key), wrote), (kept,))


def put_if_unchanged(key: bytes, value: bytes, lease_id: int, seen: KeyValue | None) -> Body:
    """Put if the key holds what was seen (``None``: nothing); in any case read it.

    That is its value and its version, which is the other half of a counter's number. A revision
    would not tell: if etcd has lost data since, it may be another write's.
    """
    unchanged = [Compare(key, Target.VERSION, Relation.EQUAL, 0 if seen is None else seen.version)]
    if seen is not None:
        unchanged.append(Compare(key, Target.VALUE, Relation.EQUAL, seen.value))
    put = Put(key, value, lease_id)
    return lambda wrote, kept: Txn(tuple(unchanged), (put, wrote, Get(key)), (kept, Get(key)))


def put_if_expected(key: bytes, expected: bytes, desired: bytes, lease_id: int) -> Body:
    """Put ``desired`` if the value is ``expected``, or if both that and the key are missing;
    otherwise read it. These two are as users know them."""
    equal = Compare(key, Target.VALUE, Relation.EQUAL, encode_value(expected))
    missing = Compare(key, Target.VERSION, Relation.EQUAL, 0)
    put = Put(key, encode_value(desired), lease_id)

    def body(wrote: Put, kept: Put) -> Txn:
        on_missing = (kept, Get(key)) if expected else (put, wrote)
        return Txn((equal,), (put, wrote), (Txn((missing,), on_missing, (kept, Get(key))),))

    return body


def count_on(key: bytes, counter: Counter, lease_id: int, *, create: Counter) -> Body:
    """Put if the key holds ``counter``, which adds that one's scale; or make the counter ``create``
    if the key is missing; in any case read it."""
    same = Compare(key, Target.VALUE, Relation.EQUAL, counter.encode())
    again = Put(key, b"", lease_id, ignore_value=True)
    created = create_counter(key, create, lease_id)
    return lambda wrote, kept: Txn((same,), (again, wrote, Get(key)), (created(wrote, kept),))


def create_counter(key: bytes, counter: Counter, lease_id: int) -> Body:
    """Make the counter if the key is missing; in any case read it."""
    missing = Compare(key, Target.VERSION, Relation.EQUAL, 0)
    put = Put(key, counter.encode(), lease_id)
    return lambda wrote, kept: Txn((missing,), (put, wrote, Get(key)), (kept, Get(key)))

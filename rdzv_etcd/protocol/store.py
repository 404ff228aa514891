"""Key paths, values and requests inside the range of one round's key-value store.

Under ``store/<round>/`` (see :mod:`rdzv_etcd.protocol.keys`):

    k/<key>               a value or a counter
    k0                    there as long as nothing that was written here has been lost
    w/<writer>/<slot>     how often a writer has written, so that no write counts twice

A value is ``=`` and its bytes. A counter is ``#<scale>,<base>`` and stands for the decimal number
``base + scale x version``, where *version* is etcd's own count of the puts on the key: a put that
keeps the value adds ``scale``, and its writer need not know the number. No I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

from rdzv_etcd.arguments import encoded_key
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Put,
    Relation,
    Target,
    Txn,
    prefix_end,
)
from rdzv_etcd.protocol.keys import KeyRange, span

_VALUE = b"="
_COUNTER = re.compile(rb"#(-?[0-9]{1,40}),(-?[0-9]{1,40})")
_NUMBER = re.compile(rb"\s*([+-]?)0*([0-9]{1,19})\s*")


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """The keys of one round's store, all within ``range``."""

    range: KeyRange

    def value(self, key: str) -> bytes:
        """Return the etcd key of a store key; every string is one, the empty one included.

        Raises MisuseError for any other type."""
        return self.range.start + b"k/" + encoded_key(key)

    @property
    def values(self) -> KeyRange:
        return self._under(b"k/")

    @property
    def whole(self) -> bytes:
        """The key that is there as long as no write to the store was lost; the first one after
        :attr:`values`.

        It is put with the round's record, on the lease of all the others, and never later. A member
        that detects a loss deletes it.
        """
        return self.values.end

    @property
    def listing(self) -> KeyRange:
        """All values, and :attr:`whole` behind them."""
        return span([self.values.start, self.whole])

    def name(self, etcd_key: bytes) -> str:
        """Return the store key of an etcd key in :attr:`values`."""
        return etcd_key[len(self.values.start) :].decode(errors="replace")

    def begin(self, lease_id: int) -> Put:
        """Begin a store with nothing in it, on the lease of its round."""
        return Put(self.whole, b"", lease_id)

    def marker(self, writer: str, slot: int) -> bytes:
        return self.range.start + f"w/{quote(writer, safe='')}/{slot}".encode()

    def _under(self, path: bytes) -> KeyRange:
        prefix = self.range.start + path
        return KeyRange(prefix, prefix_end(prefix))


@dataclass(frozen=True, slots=True)
class Counter:
    """The number ``base + scale x version``; as torch's counters it wraps at 64 bits."""

    scale: int
    base: int = 0

    def at(self, version: int) -> int:
        return wrap(self.base + self.scale * version)

    def encode(self) -> bytes:
        return b"#%d,%d" % (wrap(self.scale), wrap(self.base))


def wrap(number: int) -> int:
    """Return the number of 64 bits, with a sign, that ``number`` is modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


def encode_value(value: bytes) -> bytes:
    return _VALUE + value


def counter_of(kv: KeyValue) -> Counter | None:
    """Return the counter a key holds, ``None`` if it holds a plain value."""
    match = _COUNTER.fullmatch(kv.value)
    return Counter(int(match[1]), int(match[2])) if match is not None else None


def content_of(kv: KeyValue) -> bytes:
    """Return the value that a reader of the store gets; a counter is its decimal number.

    Raises :class:`~rdzv_etcd.errors.StateCorruptError` if this library did not write the key.
    """
    if kv.value.startswith(_VALUE):
        return kv.value[len(_VALUE) :]
    counter = counter_of(kv)
    if counter is None:
        raise StateCorruptError(kv.key.decode(errors="replace"), "neither a value nor a counter")
    return b"%d" % counter.at(kv.version)


def number_of(kv: KeyValue) -> int | None:
    """Return the number a key holds, as a counter or in decimal.

    ``None`` if it is none, or none of 64 bits. Raises StateCorruptError.
    """
    counter = counter_of(kv)
    if counter is not None:
        return counter.at(kv.version)
    decimal = _NUMBER.fullmatch(content_of(kv))
    if decimal is None:
        return None
    number = int(decimal[1] + decimal[2])
    return number if number == wrap(number) else None


# --- requests ------------------------------------------------------------------------------------


WROTE = b"1"
"""The value of a marker if a branch that writes was taken."""
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
    """Do ``body`` if the marker was put ``uses`` times and ``whole`` shows that nothing was lost;
    otherwise the result holds both."""
    made = body(Put(marker, WROTE, lease_id), Put(marker, _KEPT, lease_id))
    guards = (
        Compare(marker, Target.VERSION, Relation.EQUAL, uses),
        Compare(whole, Target.VERSION, Relation.GREATER, 0),
    )
    return Txn(guards, (made,) if made.guards else made.success, (Get(marker), Get(whole)))


def declare_lost(whole: bytes) -> Txn:
    """Record that the store has lost data. Idempotent, so without a marker."""
    return Txn((), (Delete(whole),))


def put_all(items: Sequence[tuple[bytes, bytes]], lease_id: int) -> Body:
    puts = [Put(key, value, lease_id) for key, value in items]
    return lambda wrote, _: Txn((), (*puts, wrote))


def delete(key: bytes) -> Body:
    """Delete the key if it is there."""
    there = Compare(key, Target.VERSION, Relation.GREATER, 0)
    return lambda wrote, kept: Txn((there,), (Delete(key), wrote), (kept,))


def put_if_unchanged(key: bytes, value: bytes, lease_id: int, seen: KeyValue | None) -> Body:
    """Put if the key has the value and version that were seen (``None``: it was absent); in any
    case read it.

    The version is the other half of a counter's number. A revision would not do: if etcd has lost
    data since, it may be another write's.
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

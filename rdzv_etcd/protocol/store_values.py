"""Key paths and value encoding inside the range of one round's key-value store.

Under ``store/<round>/`` (see :mod:`rdzv_etcd.protocol.keys`):

    k/<key>               a value or a counter
    k0                    there as long as nothing that was written here has been lost
    w/<writer>/<slot>     how often a writer has written, so that no write counts twice

A value is ``=`` and its bytes. A counter is ``#<scale>,<base>`` and stands for the decimal number
``base + scale x version``, where *version* is etcd's own count of the puts on the key: a put that
keeps the value adds ``scale``, without anybody having to know the number. No I/O here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from rdzv_etcd.arguments import encoded_key
from rdzv_etcd.errors import StateCorruptError
from rdzv_etcd.etcd.port import KeyValue, Put, prefix_end
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

        Raises MisuseError for what is none."""
        return self.range.start + b"k/" + encoded_key(key)

    @property
    def values(self) -> KeyRange:
        return self._under(b"k/")

    @property
    def whole(self) -> bytes:
        """The key that is there as long as nothing was lost of what was written to the store; the
        first one after :attr:`values`.

        It is put with the round's record, on the lease of all the others, and by nobody later. A
        member that finds that something was lost deletes it.
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
    """Return what a reader of the store sees; a counter is its decimal number.

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

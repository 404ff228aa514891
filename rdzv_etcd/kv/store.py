"""The round's key-value store on etcd, with the operations of torch's stores.

Knows what each operation promises and how to keep that in as few requests as possible; must not
know torch, and starts no threads. :mod:`rdzv_etcd.kv.writes` applies a write once,
:mod:`rdzv_etcd.kv.reads` waits.

``add`` counts without compare-and-set: :mod:`rdzv_etcd.protocol.store` says how a counter is
kept in a key's version. Adding the amount that a counter was made with never conflicts with other
writers. Adding another amount, or to a number that was ``set``, re-bases the counter, guarded by
its number; only that, ``append`` and ``compare_set`` are repeated when another writer was quicker.

Requests: one for set, delete, check, get of a present key, add (two if the key holds anything but a
counter of only that amount), compare_set (two on a counter), append to a new key (two otherwise);
one per 100 keys for multi_get and multi_set, those of half a MiB side by side
(:mod:`rdzv_etcd.etcd.reads`); a few for num_keys and list_keys. A wait takes one watch, and another
read if something was written before the watch began.

All ``timeout_s`` bound the whole call; ``None``: no limit on waiting, and etcd's absence is bounded
by the connection's own limit. Every method raises :class:`~rdzv_etcd.errors.EtcdError`, and
:class:`~rdzv_etcd.errors.MisuseError` for invalid keys, values and amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rdzv_etcd.arguments import encoded_key, int64, named_key, value_of
from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    NotANumberError,
    OutcomeUnknownError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import OPS_PER_TXN, Etcd, KeyValue
from rdzv_etcd.etcd.reads import PART_BYTES, PartSize
from rdzv_etcd.kv.reads import Reader, side_by_side
from rdzv_etcd.kv.writes import OnceWriter, StoreDeadline, Written, named_if_too_large
from rdzv_etcd.protocol import store as requests
from rdzv_etcd.protocol.keys import KeyRange
from rdzv_etcd.protocol.store import (
    Body,
    Counter,
    StoreKeys,
    content_of,
    counter_of,
    encode_value,
    number_of,
)

Items: TypeAlias = "list[tuple[str, bytes]]"


class KeyValueStore:
    """One round's store. Values are bytes, keys are any text; every key lives as long as the job.

    ``writer`` must be unique among all stores ever opened on the same round.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: KeyRange,
        lease_id: int,
        *,
        writer: str,
        clock: Clock,
    ) -> None:
        """The store was begun with its round (:meth:`StoreKeys.begin`), and is refused with
        :class:`~rdzv_etcd.errors.StoreLostError` once it has lost anything."""
        self._etcd = etcd
        self._keys = StoreKeys(keys)
        self._lease_id = lease_id
        self._clock = clock
        self._writes = OnceWriter(etcd, self._keys, lease_id, writer)
        self._part = PartSize()
        self._reads = Reader(etcd, clock, self._part, self._writes)

    # -- reading ----------------------------------------------------------------------------------

    async def get(self, key: str, timeout_s: float | None) -> bytes:
        """Return the value, waiting for the key if it is missing.

        Raises :class:`~rdzv_etcd.errors.StoreTimeoutError`.
        """
        return (await self.multi_get([key], timeout_s))[0]

    async def multi_get(self, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        """Return the values in the order of ``keys``, waiting until each has been there.

        Raises :class:`~rdzv_etcd.errors.StoreTimeoutError` with the missing keys.
        """
        names = [self._keys.value(key) for key in keys]
        found = await self._reads.until_present(names, self._deadline(timeout_s), self._keys.name)
        return [content_of(found[name]) for name in names]

    async def wait(self, keys: Sequence[str], timeout_s: float | None) -> None:
        """Return when each key has been there; raises as :meth:`multi_get`."""
        names = [self._keys.value(key) for key in keys]
        await self._reads.until_present(
            names, self._deadline(timeout_s), self._keys.name, keys_only=True
        )

    async def check(self, keys: Sequence[str], timeout_s: float | None) -> bool:
        """Return at once whether all keys exist."""
        names = dict.fromkeys(self._keys.value(key) for key in keys)
        return await self._reads.all_there(list(names), self._deadline(timeout_s))

    async def num_keys(self, timeout_s: float | None) -> int:
        """Return the number of values; this library's own keys do not count."""
        return len(await self.list_keys(timeout_s))

    async def list_keys(self, timeout_s: float | None) -> list[str]:
        """Return the keys of all values in ascending order, read page by page."""
        deadline = self._deadline(timeout_s)
        found = await self._reads.keys(self._keys.listing, deadline)
        return [self._keys.name(key) for key in found if key in self._keys.values]

    # -- writing ----------------------------------------------------------------------------------

    async def set(self, key: str, value: bytes, timeout_s: float | None) -> None:
        await self.multi_set([(key, value)], timeout_s)

    async def multi_set(self, items: Sequence[tuple[str, bytes]], timeout_s: float | None) -> None:
        """Set all; of two values for one key the last counts. Each batch is atomic.

        Raises :class:`~rdzv_etcd.errors.RequestTooLargeError`, naming the largest value's key.
        """
        deadline = self._deadline(timeout_s)
        values = {key: value_of(key, value) for key, value in items}
        if values:
            self._part.expect(max(map(len, values.values())))
        for part in _cut(list(values.items()), PART_BYTES, len(values)):
            batches = _cut(part, PART_BYTES, OPS_PER_TXN)
            await side_by_side([self._set_batch(batch, deadline) for batch in batches])

    async def delete(self, key: str, timeout_s: float | None) -> bool:
        """Delete the key and return whether it was there."""
        body = requests.delete(self._keys.value(key))
        with named_if_too_large("to delete", key, 0):
            return (await self._writes.apply(body, self._deadline(timeout_s))).wrote

    async def compare_set(
        self, key: str, expected: bytes, desired: bytes, timeout_s: float | None
    ) -> bytes:
        """Set ``desired`` if the value is ``expected`` and return the value afterwards.

        A missing key is set if ``expected`` is empty; otherwise ``expected`` is returned, as
        torch's stores do.
        """
        expected, desired = value_of(key, expected), value_of(key, desired)
        deadline = self._deadline(timeout_s)
        name = self._keys.value(key)
        seen: KeyValue | None = None
        while True:
            if seen is not None and counter_of(seen) is not None:
                # A counter's number cannot be compared by etcd.
                body = self._put_if_unchanged(name, encode_value(desired), seen)
            else:
                body = requests.put_if_expected(name, expected, desired, self._lease_id)
            size = len(expected) + len(desired)
            with named_if_too_large("compare_set of", key, size, " with what is expected"):
                written = await self._writes.apply(body, deadline)
            if written.wrote:
                return desired
            seen = await self._after(name, written, deadline)
            if seen is None:
                if expected:
                    return expected
            elif content_of(seen) != expected:
                return content_of(seen)
            deadline.require(f"compare_set of {named_key(key)}")

    async def append(self, key: str, value: bytes, timeout_s: float | None) -> None:
        """Append to the value; a missing key is set. What was there before is sent twice."""
        value = value_of(key, value)
        deadline = self._deadline(timeout_s)
        name = self._keys.value(key)
        seen: KeyValue | None = None
        while True:
            before = b"" if seen is None else content_of(seen)
            body = self._put_if_unchanged(name, encode_value(before + value), seen)
            size = len(before) + len(before + value)
            of = f", the {len(before)} that were there before twice" if before else ""
            with named_if_too_large("to append to", key, size, of):
                written = await self._writes.apply(body, deadline)
            if written.wrote:
                return
            seen = await self._after(name, written, deadline)
            deadline.require(f"append to {named_key(key)}")

    async def add(self, key: str, amount: int, timeout_s: float | None) -> int:
        """Add to the number and return the sum; a missing key counts as zero. Never counts twice.

        All numbers have 64 bits, and sums wrap, as in torch's stores. Raises
        :class:`~rdzv_etcd.errors.NotANumberError` if the key holds something that is no such
        number, in decimal.
        """
        amount = int64(f"the amount to add to store key {named_key(key)}", amount)
        deadline = self._deadline(timeout_s)
        name = self._keys.value(key)
        seen = await self._peek(name, deadline) if amount == 0 else None
        while True:
            if seen is not None:
                number = self._number(key, seen)
                if amount == 0:
                    return number
            with named_if_too_large("to add to", key, 0):
                written = await self._writes.apply(self._add_body(name, amount, seen), deadline)
            kv = await self._after(name, written, deadline)
            if written.wrote and kv is not None:
                return self._number(key, kv)
            seen = kv
            deadline.require(f"add to {named_key(key)}")

    # -- how ---------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> StoreDeadline:
        return StoreDeadline(self._clock, timeout_s)

    def _put_if_unchanged(self, name: bytes, value: bytes, seen: KeyValue | None) -> Body:
        return requests.put_if_unchanged(name, value, self._lease_id, seen)

    async def _set_batch(self, items: Sequence[tuple[str, bytes]], deadline: StoreDeadline) -> None:
        encoded = [(self._keys.value(k), encode_value(v)) for k, v in items]
        body = requests.put_all(encoded, self._lease_id)
        key, _ = max(items, key=lambda item: len(item[1]))
        size = sum(len(encoded_key(k)) + len(v) for k, v in items) - len(encoded_key(key))
        of = f" with {len(items) - 1} smaller ones beside it" if len(items) > 1 else ""
        with named_if_too_large("to set", key, size, of):
            await self._writes.apply(body, deadline)

    def _add_body(self, name: bytes, amount: int, seen: KeyValue | None) -> Body:
        counter = None if seen is None else counter_of(seen)
        if seen is not None and (counter is None or counter.scale != amount):
            # The put raises the version by one, so this makes the new number: old + amount.
            number = number_of(seen) or 0
            rebased = Counter(amount, number - amount * seen.version)
            return self._put_if_unchanged(name, rebased.encode(), seen)
        if not amount:  # a scale of zero would add nothing later
            return requests.create_counter(name, Counter(1, -1), self._lease_id)
        fresh = Counter(amount)
        return requests.count_on(name, counter or fresh, self._lease_id, create=fresh)

    def _number(self, key: str, kv: KeyValue) -> int:
        number = number_of(kv)
        if number is None:
            raise NotANumberError(
                f"cannot add to store key {named_key(key)}: its value {content_of(kv)[:40]!r} is "
                "not a 64-bit number"
            )
        return number

    async def _peek(self, name: bytes, deadline: StoreDeadline) -> KeyValue | None:
        read = requests.read(name)
        kvs = (await self._etcd.get(read, timeout_s=deadline.request_s())).kvs
        return kvs[0] if kvs else None

    async def _after(
        self, name: bytes, written: Written, deadline: StoreDeadline
    ) -> KeyValue | None:
        """Return the key as the write left it, though its reply may be lost and others may have
        written since."""
        if written.recovered_at is None:
            return written.kv
        if not written.wrote:
            return await self._peek(name, deadline)
        try:
            return await self._reads.first_put(name, written.recovered_at, deadline)
        except (WatchLostError, TimeoutError) as error:
            raise OutcomeUnknownError(
                "the add was applied once, but its sum is no longer known"
            ) from error


def _cut(items: Sequence[tuple[str, bytes]], most_bytes: int, most: int) -> list[Items]:
    """Cut into parts of at most ``most_bytes`` and ``most`` items; a larger value goes alone."""
    parts: list[Items] = []
    size = 0
    for key, value in items:
        added = len(encoded_key(key)) + len(value)
        if not parts or len(parts[-1]) == most or size + added > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append((key, value))
        size += added
    return parts

"""Writes of the round's store that are applied once, however often they are sent.

Knows transactions, markers and deadlines; must not know what the written keys mean.

A reply can be lost, and a request can arrive after its sender has given up and sent it again. So
each write carries a *marker*: a key that only this writer puts, once with every write, under the
guard that its version is what the writer counted. Whichever copy of a request comes first raises
the version, and with that disarms all other copies, for good. A copy that finds its guard broken
by exactly one knows that an earlier copy was applied; the marker's value shows which branch was
taken, its revision when. Every branch puts the marker, so that a copy of a write that changed
nothing cannot come back to life either.

Concurrent writes use different markers (*slots*); a slot whose write ended in an error, its
outcome perhaps unknown, is never used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from rdzv_etcd.arguments import encoded_key, named_key
from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    EtcdError,
    LeaseNotFoundError,
    RequestTooLargeError,
    StateCorruptError,
    StoreLostError,
    StoreTimeoutError,
)
from rdzv_etcd.etcd.port import Etcd, GetResult, KeyValue, OpResult, TxnResult
from rdzv_etcd.protocol.store import WROTE, Body, StoreKeys, declare_lost, once

LEAST_REQUEST_S = 1.0
"""Even a wait of a millisecond gets one answer from a healthy etcd."""

_RETRY_S = 0.5


class StoreDeadline:
    """When one call on the store must be done; ``None`` seconds: never."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self.timeout_s = timeout_s
        self._at_s = None if timeout_s is None else clock.now_s() + timeout_s

    def left_s(self) -> float | None:
        """Return the seconds left, at least zero; ``None``: unlimited."""
        return None if self._at_s is None else max(0.0, self._at_s - self._clock.now_s())

    def request_s(self) -> float | None:
        """Return the limit of one request; ``None``: the connection's own."""
        left_s = self.left_s()
        return None if left_s is None else max(LEAST_REQUEST_S, left_s)

    async def pause(self) -> None:
        """Wait a little before the next try."""
        await self._clock.sleep(_RETRY_S)

    def require(self, doing: str) -> None:
        """Raise :class:`~rdzv_etcd.errors.StoreTimeoutError` if the time is up."""
        if self.left_s() == 0.0:
            raise StoreTimeoutError(f"{doing} kept losing to other writers for {self.timeout_s} s")


@contextmanager
def named_if_too_large(call: str, key: str, size: int, of: str = "") -> Iterator[None]:
    """Name the ``call`` and the ``key`` when etcd refuses a write because of its size.

    ``size``: the bytes sent besides the key; ``of``: what they are, if the caller gave only some of
    them. Raises :class:`~rdzv_etcd.errors.RequestTooLargeError`.
    """
    try:
        yield
    except RequestTooLargeError as error:
        sent = len(encoded_key(key)) + size
        raise too_large(f"{call} store key {named_key(key)}", sent, of) from error


def too_large(what: str, size: int, of: str = "") -> RequestTooLargeError:
    """Return the error for ``what`` a caller wanted to write, in the caller's words."""
    return RequestTooLargeError(
        f"{what} takes {size} bytes{of}, more than etcd accepts in one request: 1.5 MiB, "
        "everything included, unless its --max-request-bytes is raised; cut it into several, or "
        "pass on where it can be read instead"
    )


def store_lost() -> StoreLostError:
    return StoreLostError(
        "the store of this world has lost data: no member could renew the job's lease (6 × "
        "lease_ttl, at least 60 s) in time, or etcd's data was deleted, wiped or restored; or the "
        "world has been over for long. What was read or counted before may no longer hold. "
        "Join again: the next world has a new store"
    )


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write."""

    wrote: bool
    """Whether a branch that writes was taken."""
    kv: KeyValue | None
    """What the branch read last; ``None`` if nothing was there, or ``recovered_at`` is set."""
    recovered_at: int | None = None
    """The revision of the copy that was applied, if its reply, and with it ``kv``, was lost."""


@dataclass(slots=True)
class _Slot:
    """A marker, and how often its writer has put it."""

    key: bytes
    uses: int = 0


class OnceWriter:
    """Applies writes once. ``writer`` must be unique among all writers the store ever has.

    Nothing is written to a store that has lost data.
    """

    def __init__(self, etcd: Etcd, keys: StoreKeys, lease_id: int, writer: str) -> None:
        self._etcd = etcd
        self._keys = keys
        self._lease_id = lease_id
        self._writer = writer
        self._whole = keys.whole
        self._revision = 0
        """The highest of any answer."""
        self._last: dict[bytes, int] = {}
        """The marker of the last write that etcd has answered, with its version."""
        self._has_lost = False
        """Whether this writer has seen that the store has lost something."""
        self._free: list[_Slot] = []
        self._numbers = count(1)

    async def apply(self, body: Body, deadline: StoreDeadline) -> Written:
        """Apply ``body`` exactly once and return which branch was taken.

        Raises :class:`~rdzv_etcd.errors.EtcdError`; after
        :class:`~rdzv_etcd.errors.OutcomeUnknownError` it was applied once or not at all, and so it
        was after :class:`~rdzv_etcd.errors.StoreLostError`.
        """
        if self._has_lost:
            raise await self._declare_lost(deadline)
        slot = self._take_slot()
        txn = once(slot.key, slot.uses, self._lease_id, body, self._whole)
        known = self._revision
        try:
            result = await self._etcd.txn(txn, timeout_s=deadline.request_s(), repeatable=True)
        except LeaseNotFoundError:
            raise store_lost() from None  # all that was there has gone with its lease
        if result.revision < known:
            raise await self._declare_lost(deadline)  # etcd has gone back
        self._revision = max(self._revision, result.revision)
        if result.succeeded:
            self._give_back(slot)
            return _read(result)
        reads = [leaf for leaf in _leaves(result) if isinstance(leaf, GetResult)]
        found = {kv.key: kv for read in reads for kv in read.kvs}
        self._require_whole(found)
        marker = found.get(slot.key)
        if marker is not None and marker.version == slot.uses + 1:
            self._give_back(slot)
            return Written(marker.value == WROTE, None, marker.mod_revision)
        if marker is not None and marker.version > slot.uses:
            raise StateCorruptError(slot.key.decode(), "another writer uses it as well")
        # The marker is older than what was seen: etcd's data was restored.
        raise await self._declare_lost(deadline)

    def proof(self) -> dict[bytes, int]:
        """Return the keys that prove that nothing is lost, with their lowest versions, for
        :meth:`require`."""
        return {self._whole: 1, **self._last}

    async def require(
        self, proof: Mapping[bytes, int], found: Iterable[KeyValue], deadline: StoreDeadline
    ) -> None:
        """Raise :class:`~rdzv_etcd.errors.StoreLostError` if what was found does not prove it."""
        kvs = {kv.key: kv for kv in found}
        self._require_whole(kvs)
        if any(key not in kvs or kvs[key].version < version for key, version in proof.items()):
            raise await self._declare_lost(deadline)

    def _require_whole(self, found: Mapping[bytes, KeyValue]) -> None:
        if self._whole not in found:
            raise store_lost()

    async def _declare_lost(self, deadline: StoreDeadline) -> StoreLostError:
        """Record for the others what only this writer can know; return what to raise here."""
        self._has_lost = True
        with contextlib.suppress(EtcdError):
            txn = declare_lost(self._whole)
            await self._etcd.txn(txn, timeout_s=deadline.request_s(), repeatable=True)
        return store_lost()

    def _take_slot(self) -> _Slot:
        try:
            return self._free.pop()
        except IndexError:
            return _Slot(self._keys.marker(self._writer, next(self._numbers)))

    def _give_back(self, slot: _Slot) -> None:
        """Free a slot whose write has been answered."""
        slot.uses += 1
        self._last = {slot.key: slot.uses}
        self._free.append(slot)


def _read(result: TxnResult) -> Written:
    leaves = list(_leaves(result))
    reads = [leaf for leaf in leaves if isinstance(leaf, GetResult)]
    kv = reads[-1].kvs[0] if reads and reads[-1].kvs else None
    # Each branch puts its marker; whatever it writes beyond that is the write itself.
    return Written(len(leaves) - len(reads) > 1, kv)


def _leaves(result: TxnResult) -> Iterator[OpResult]:
    for part in result.results:
        if isinstance(part, TxnResult):
            yield from _leaves(part)
        else:
            yield part

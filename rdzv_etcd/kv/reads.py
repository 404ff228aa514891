"""Reads of the round's store: many keys at once, and waiting until keys are there.

Knows batches, watches and deadlines; must not know what the values mean. Waiting is one read and a
watch; nothing is polled, and what the watch delivers is not read a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rdzv_etcd.arguments import KEY_SHOWN
from rdzv_etcd.clock import Clock, abandon, race
from rdzv_etcd.errors import (
    EtcdError,
    EtcdUnavailableError,
    RequestTooLargeError,
    StoreTimeoutError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import OPS_PER_TXN, Etcd, EventKind, Get, GetResult, KeyValue
from rdzv_etcd.etcd.reads import PartSize, puts_after, read_range
from rdzv_etcd.kv.writes import OnceWriter, StoreDeadline, store_lost
from rdzv_etcd.protocol import store as requests
from rdzv_etcd.protocol.keys import KeyRange, span
from rdzv_etcd.text import shown as shown_text

T = TypeVar("T")

QUICK_ANSWER_S = 0.05
"""If answers come this quickly, reading once more is better than letting a watch catch up, which
etcd does only every 100 ms. If everything is slow, a second read would only make it slower."""

_NAMED_KEYS = 16


class Reader:
    """Reads keys given as etcd keys."""

    def __init__(self, etcd: Etcd, clock: Clock, part: PartSize, writes: OnceWriter) -> None:
        """``part``: how many values are read at once. ``writes`` knows whether the store has lost
        anything; what is missing then raises :class:`~rdzv_etcd.errors.StoreLostError`."""
        self._etcd = etcd
        self._clock = clock
        self._part = part
        self._writes = writes

    async def all_there(self, keys: Sequence[bytes], deadline: StoreDeadline) -> bool:
        """Return whether all keys exist; no value travels."""
        reads = [requests.read(key, keys_only=True) for key in keys]
        proof = self._writes.proof()
        results = await self._read_all([*map(requests.read, proof), *reads], deadline)
        if all(result.kvs for result in results[len(proof) :]):
            return True
        await self._require(proof, results, deadline)
        return False

    async def keys(self, listing: KeyRange, deadline: StoreDeadline) -> list[bytes]:
        """Return all keys of the range, including the one that shows losses."""
        proof = {key: 1 for key in self._writes.proof() if key in listing}
        reading = read_range(
            self._etcd, listing.start, listing.end, keys_only=True, limit_s=deadline.request_s
        )
        found = [kv async for part in reading for kv in part.kvs]
        await self._writes.require(proof, found, deadline)
        return [kv.key for kv in found]

    async def until_present(
        self,
        keys: Iterable[bytes],
        deadline: StoreDeadline,
        name: Callable[[bytes], str],
        *,
        keys_only: bool = False,
    ) -> dict[bytes, KeyValue]:
        """Return all keys as soon as each has been there; ``keys_only``: their values may be empty.

        A key that comes and goes before the first read is not seen, nor, where answers are quick,
        one that does so between that and the beginning of the watch.
        Raises :class:`~rdzv_etcd.errors.StoreTimeoutError` with the names of the missing ones.
        """
        wanted = _Wanted(keys, keys_only=keys_only)
        while wanted.missing:
            began_s = self._clock.now_s()
            revision = await self._look(wanted, deadline)
            if not wanted.missing:
                break
            is_quick = self._clock.now_s() - began_s < QUICK_ANSWER_S
            following = self._follow(wanted, revision, deadline, catch_up=not is_quick)
            try:
                await self._clock.wait_for(
                    self._unless_lost(following, revision), deadline.left_s()
                )
            except WatchLostError:
                continue  # read again: that is all a lost watch asks for
            except TimeoutError:
                raise _timed_out(deadline, [name(key) for key in wanted.missing]) from None
        return wanted.found

    async def first_put(self, key: bytes, revision: int, deadline: StoreDeadline) -> KeyValue:
        """Return the first put on the key at or after ``revision``.

        Raises :class:`TimeoutError`, :class:`~rdzv_etcd.errors.WatchLostError`.
        """

        async def put() -> KeyValue:
            after = puts_after(self._etcd, key, None, revision - 1, catch_up=True)
            async with after as (watch, _):
                async for batch in watch:
                    for event in batch.events:
                        return event.kv
            raise WatchLostError("the watch was closed")

        return await self._clock.wait_for(put(), deadline.left_s())

    async def _look(self, wanted: _Wanted, deadline: StoreDeadline) -> int:
        """Read what is wanted and not found yet; return the revision of that."""
        rest = [requests.read(key, keys_only=wanted.keys_only) for key in wanted.missing]
        keys = len(rest) if wanted.keys_only else self._part.keys
        revisions: list[int] = []
        proof = unread = self._writes.proof()
        proved: list[GetResult] = []
        while rest:
            part, rest = rest[:keys], rest[keys:]
            results = await self._read_all([*map(requests.read, unread), *part], deadline)
            proved += results[: len(unread)]
            kvs = [kv for result in results[len(unread) :] for kv in result.kvs]
            unread = {}
            wanted.take(kvs)
            revisions += [result.revision for result in results]
            if kvs and not wanted.keys_only:
                self._part.note(kvs)
                keys = self._part.keys
            else:
                keys *= 4  # missing keys cost nothing
        if wanted.missing:
            await self._require(proof, proved, deadline)
        return min(revisions)  # of several parts: the oldest one misses nothing

    async def _look_again(self, wanted: _Wanted, deadline: StoreDeadline) -> None:
        """Read once more until etcd answers; if it refuses to, there is only the watch."""
        while True:
            try:
                await self._look(wanted, deadline)
            except EtcdUnavailableError:
                await deadline.pause()
                continue
            except EtcdError:
                pass
            return

    async def _require(
        self, proof: Mapping[bytes, int], results: Sequence[GetResult], deadline: StoreDeadline
    ) -> None:
        found = (kv for result in results for kv in result.kvs)
        await self._writes.require(proof, found, deadline)

    async def _unless_lost(self, following: Coroutine[Any, Any, None], revision: int) -> None:
        """Follow, unless the store loses something after ``revision``."""
        losing = self._lost(next(iter(self._writes.proof())), revision)
        first = next(filter(None, await race(following, losing)))
        first.result()

    async def _lost(self, whole: bytes, revision: int) -> None:
        watch = self._etcd.watch(whole, start_revision=revision + 1)
        try:
            async for batch in watch:
                if any(event.kind is EventKind.DELETE for event in batch.events):
                    raise store_lost()
        finally:
            await watch.close()

    async def _follow(
        self, wanted: _Wanted, revision: int, deadline: StoreDeadline, *, catch_up: bool
    ) -> None:
        """Watch what is put after ``revision`` until nothing is missing.

        Read again when the watch has resumed after a break: etcd may have lost data meanwhile.
        """
        key, range_end = wanted.key_range()
        after = puts_after(
            self._etcd, key, range_end, revision, catch_up=catch_up, mark_resumes=True
        )
        async with after as (watch, missed):
            if missed:
                await self._look(wanted, deadline)
                if not wanted.missing:
                    return
            async for batch in watch:
                if batch.events:
                    wanted.take(event.kv for event in batch.events)
                else:
                    await self._look_again(wanted, deadline)
                if not wanted.missing:
                    return
        raise WatchLostError("the watch was closed")

    async def _read_all(self, reads: Sequence[Get], deadline: StoreDeadline) -> list[GetResult]:
        batches = [
            reads[start : start + OPS_PER_TXN] for start in range(0, len(reads), OPS_PER_TXN)
        ]
        answers = await side_by_side([self._read_batch(batch, deadline) for batch in batches])
        return [result for answer in answers for result in answer]

    async def _read_batch(self, reads: Sequence[Get], deadline: StoreDeadline) -> list[GetResult]:
        if len(reads) == 1:
            return [await self._etcd.get(reads[0], timeout_s=deadline.request_s())]
        try:
            answer = await self._etcd.txn(
                requests.read_together(reads), timeout_s=deadline.request_s(), repeatable=True
            )
        except RequestTooLargeError:
            # The answer is larger than the client accepts at once; each half may not be.
            half = len(reads) // 2
            return [
                *await self._read_batch(reads[:half], deadline),
                *await self._read_batch(reads[half:], deadline),
            ]
        return [result for result in answer.results if isinstance(result, GetResult)]


async def side_by_side(coros: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; if one fails, cancel the others and raise its error when they have ended."""
    if len(coros) == 1:
        return [await coros[0]]
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await abandon(*tasks)


class _Wanted:
    """The keys that a wait is for, and what of them has been found."""

    def __init__(self, keys: Iterable[bytes], *, keys_only: bool) -> None:
        self.keys_only = keys_only
        self.found: dict[bytes, KeyValue] = {}
        self.missing = dict.fromkeys(keys)

    def key_range(self) -> tuple[bytes, bytes | None]:
        """Return the range to watch."""
        if len(self.missing) == 1:
            return next(iter(self.missing)), None
        keys = span(self.missing)
        return keys.start, keys.end

    def take(self, kvs: Iterable[KeyValue]) -> None:
        """Note what was read, or put."""
        for kv in kvs:
            if kv.key in self.missing:
                self.found[kv.key] = kv
                del self.missing[kv.key]


def _timed_out(deadline: StoreDeadline, names: Sequence[str]) -> StoreTimeoutError:
    shown = ", ".join(shown_text(name, KEY_SHOWN) for name in names[:_NAMED_KEYS])
    more = f" and {len(names) - _NAMED_KEYS} more" if len(names) > _NAMED_KEYS else ""
    return StoreTimeoutError(
        f"wait timeout after {round(1000 * (deadline.timeout_s or 0))}ms, keys: {shown}{more}",
        keys=names,
    )

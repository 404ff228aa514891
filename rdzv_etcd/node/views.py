"""Keeps a view of a key range up to date: a watch from now on, and one read beside it.

The read must not be older than the watch, or it is repeated. A watch from the revision of an
earlier read would be behind by the time etcd gets it if anything was written in between, and etcd
lets a watch that is behind catch up only every 100 ms: that was most of the time the first round
took.

Large ranges are read in parts, so that neither etcd nor the reader has all of a large job in one
response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rdzv_etcd.clock import Clock, abandon
from rdzv_etcd.errors import (
    EtcdError,
    EtcdPermissionError,
    EtcdUnavailableError,
    RdzvEtcdError,
    RevisionRegressedError,
    StateCorruptError,
    WatchLostError,
)
from rdzv_etcd.etcd.port import (
    Etcd,
    EventKind,
    Get,
    GetResult,
    KeyValue,
    Watch,
    WatchBatch,
)
from rdzv_etcd.etcd.reads import own_limit, read_range
from rdzv_etcd.etcd.retry import Deadline
from rdzv_etcd.node.waiting import RETRY_S, Wakeup
from rdzv_etcd.protocol.keys import KeyRange

V = TypeVar("V")


class ViewWatch(Generic[V]):
    """A live view of a range. :attr:`view` is memory; reading it never blocks or raises."""

    def __init__(
        self,
        etcd: Etcd,
        clock: Clock,
        wakeup: Wakeup,
        *,
        request: Get,
        build: Callable[[GetResult], V],
        fold: Callable[[V, WatchBatch], V],
        notice: Callable[[V], None] | None = None,
        complain: Callable[[StateCorruptError], None] | None = None,
        on_regress: Callable[[], None] | None = None,
        longest_retry_s: float = 5.0,
        in_parts: bool = False,
    ) -> None:
        """``build`` makes the view from a read, ``fold`` applies changes to it (it may raise only
        if there is a ``notice``). ``notice`` is called with every new view; ``complain`` once for a
        key that cannot be read, which is read again when it changes, and now and then: in the end
        every ``longest_retry_s``; ``on_regress`` (before ``notice``) when etcd's revision went
        back: its data were wiped or restored. ``in_parts``: read what ``request`` asks for as
        :func:`read_pages` does."""
        self._etcd = etcd
        self._clock = clock
        self._wakeup = wakeup
        self._request = request
        self._build = build
        self._fold = fold
        self._in_parts = in_parts
        self._notice = notice
        self._complain = complain
        self._longest_retry_s = longest_retry_s
        self._retry_s = RETRY_S
        self._runs = False
        self._on_regress = on_regress
        self._view: V | None = None
        self._news: list[WatchBatch] = []
        """What the watch has brought since the view was read last. Each fold may copy thousands of
        nodes, so one fold takes all that have arrived between two looks."""
        self._revision = 0
        self._watch: Watch | None = None
        self._in_doubt = False
        """Whether the watch resumed after a break: etcd may have gone back meanwhile, and have
        written as much again since, which the watch does not notice."""
        self.breaks = 0
        """How often the watch has begun, or resumed after a break. At each of these etcd may have
        gone back, unnoticed if nothing in this range was different."""
        self.problem: RdzvEtcdError | None = None
        """Why the view cannot be trusted: a corrupt value, or etcd refusing us."""

    @property
    def view(self) -> V:
        if self._news or self._view is None:
            self._view = self._folded()
        return self._view

    @property
    def is_blind(self) -> bool:
        """Whether the view is an old one, because what is there now cannot be read."""
        return isinstance(self.problem, StateCorruptError)

    @property
    def has_begun(self) -> bool:
        """Whether changes of the range are heard of: the watch was confirmed once."""
        return self.breaks > 0

    @property
    def seen(self) -> V | None:
        """The latest view, ``None`` before the first."""
        return None if self._view is None else self.view

    def adopt(self, view: V) -> None:
        """Take over what the node itself has just written; the watch will show the same again."""
        self._show(view)

    async def open(self, timeout_s: float | None = None) -> V:
        """Begin to watch, and read: the first view. Follow it with :meth:`run`.

        Raises :class:`~rdzv_etcd.errors.EtcdError`, StateCorruptError.
        """
        until_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        while True:
            try:
                return await self._open(timeout_s)
            except WatchLostError as error:  # etcd has gone back or was compacted in this moment
                if isinstance(error, RevisionRegressedError):
                    self._report_regress()
                await self._clock.sleep(RETRY_S)
                if until_s is not None and self._clock.now_s() >= until_s:
                    raise EtcdUnavailableError(f"etcd did not keep the watch: {error}") from error

    async def _open(self, timeout_s: float | None) -> V:
        self._revision = 0  # what was seen before does not matter any more
        watch = self._watch = self._etcd.watch(
            self._request.key, self._request.range_end, start_revision=0, mark_resumes=True
        )
        confirming = asyncio.ensure_future(self._confirmation(watch, timeout_s))
        reading = asyncio.ensure_future(self.refresh(timeout_s))
        try:
            try:
                confirmed, view = await asyncio.gather(confirming, reading)
            finally:
                await abandon(confirming, reading)  # if one fails, the other would continue
            if self._revision < confirmed:  # the read was first, and something was written since
                view = await self.refresh(timeout_s)
            self._note_break()
            return view
        except TimeoutError as error:
            await self._stop_watch()
            raise EtcdUnavailableError(
                f"etcd did not confirm the watch within {timeout_s} s"
            ) from error
        except EtcdPermissionError:
            await self._stop_watch()
            # A watch without any user is refused in the same words as one of a wrong user; the
            # error of a read distinguishes them.
            await self._etcd.get(self._request, timeout_s=timeout_s)
            raise
        except StateCorruptError:
            if self._runs:  # the watch shows when the value is a different one
                self._note_break()
            else:
                await self._stop_watch()
            raise
        except BaseException:
            await self._stop_watch()
            raise

    async def _confirmation(self, watch: Watch, timeout_s: float | None) -> int:
        return await self._clock.wait_for(watch.ready(), timeout_s)

    async def refresh(self, timeout_s: float | None = None) -> V:
        """Read the range again. Raises :class:`~rdzv_etcd.errors.EtcdError`, StateCorruptError."""
        known = self._revision
        request, range_end = self._request, self._request.range_end
        if self._in_parts and range_end is not None:
            limit_s = within(self._clock, timeout_s)
            reading = read_range(self._etcd, request.key, range_end, limit_s=limit_s)
            result = await _joined(reading)
        else:
            result = await self._etcd.get(request, timeout_s=timeout_s)
        if result.revision < known:
            # Data wiped or restored: the running watch waits for revisions that may never come.
            self._report_regress()
            await self._stop_watch()
        elif result.revision < self._revision:
            return self.view  # the watch has brought something newer meanwhile
        if self._watch is not None:
            self._watch.count_from(result)
        try:
            view = self._build(result)
        except RdzvEtcdError as error:
            self._report(error)
            raise
        self._revision, self.problem, self._retry_s = result.revision, None, RETRY_S
        self._in_doubt = False
        self._show(view)
        return view

    async def run(self) -> None:
        """Follow the range until cancelled; what goes wrong is in :attr:`problem` meanwhile."""
        self._runs = True
        while True:
            try:
                if self._watch is None:
                    await self.open()
                await self._follow()
            except RevisionRegressedError:
                self._report_regress()
            except WatchLostError:
                pass  # a new watch and a read behind it close the gap
            except EtcdUnavailableError:
                await self._clock.sleep(RETRY_S)
            except RdzvEtcdError as error:
                self._report(error)
                if self._watch is None:
                    await self._clock.sleep(self._retry_s)
                    self._wait_longer()

    async def _follow(self) -> None:
        watch = self._watch
        if watch is None:
            return
        batches = aiter(watch)
        try:
            while True:
                try:
                    batch = await self._next(batches)
                except StopAsyncIteration:
                    return
                if batch is not None and batch.events:
                    if batch.revision <= self._revision:
                        continue  # the read behind the watch has shown it already
                    try:
                        self._take(batch)
                    except StateCorruptError as error:
                        self._report(error)
                        continue
                elif batch is not None:
                    self._in_doubt = True
                    self._note_break()
                if batch is None or self.is_blind or self._in_doubt:
                    await self._look_again(watch)
        finally:
            await self._stop_watch()

    async def _next(self, batches: AsyncIterator[WatchBatch]) -> WatchBatch | None:
        """Wait for a change; ``None`` if it is time to look again at what could not be read."""
        if not (self.is_blind or self._in_doubt):
            return await anext(batches)
        try:
            return await self._clock.wait_for(anext(batches), self._retry_s)
        except TimeoutError:
            return None

    async def _look_again(self, watch: Watch) -> None:
        """Read the range if it can be read: a change did not show all that has changed."""
        self._wait_longer()
        try:
            await watch.ready()  # or something could be written between the read and the watch
            await self.refresh()
        except RdzvEtcdError as error:
            if not isinstance(error, EtcdError):  # an error of etcd's ends the watch as well
                self._report(error)

    def _wait_longer(self) -> None:
        self._retry_s = min(2 * self._retry_s, self._longest_retry_s)

    def _take(self, batch: WatchBatch) -> None:
        """Note what the watch has brought. Raises StateCorruptError, if there is a ``notice``."""
        if self.is_blind:
            self._fold(self.view, batch)  # unless this cannot be read either, the range is read
            return
        self._news.append(batch)
        if self._notice is not None:
            self._notice(self.view)
        self._revision = batch.revision
        if len(self._news) <= 1:  # otherwise its reader was woken, and has not looked yet
            self._wakeup.notify()

    def _folded(self) -> V:
        if self._view is None:
            raise RuntimeError("the view was not read before its first use")
        news, self._news = self._news, []
        events = tuple(event for batch in news for event in batch.events)
        return self._fold(self._view, WatchBatch(news[-1].revision, events))

    def _show(self, view: V) -> None:
        self._view = view
        self._news.clear()
        if self._notice is not None:
            self._notice(view)
        self._wakeup.notify()

    def _note_break(self) -> None:
        self.breaks += 1
        self._wakeup.notify()

    def _report_regress(self) -> None:
        if self._on_regress is not None:
            self._on_regress()

    async def close(self) -> None:
        """Give the watch back; for one whose :meth:`run` was never started, or has ended."""
        await self._stop_watch()

    async def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()

    def _report(self, error: RdzvEtcdError) -> None:
        before, self.problem = self.problem, error.copy()  # this one's traceback grows to callers
        if isinstance(error, StateCorruptError):
            if isinstance(before, StateCorruptError) and before.key == error.key:
                return
            if self._complain is not None and self._runs:
                self._complain(error)
        self._wakeup.notify()


@dataclass(frozen=True, slots=True)
class KeyView:
    """What one key holds, as of a revision of the store."""

    revision: int
    kv: KeyValue | None
    """``None``: there is no such key."""


def key_from(result: GetResult) -> KeyView:
    """Build the view of a key from a read of it."""
    return KeyView(result.revision, next(iter(result.kvs), None))


def key_after(view: KeyView, batch: WatchBatch) -> KeyView:
    """Apply a watch batch, of which ``view`` may include some already."""
    for event in batch.events:
        if event.kv.mod_revision > view.revision:
            view = KeyView(batch.revision, event.kv if event.kind is EventKind.PUT else None)
    return view


async def read_pages(
    etcd: Etcd,
    keys: KeyRange,
    *,
    keys_only: bool = False,
    limit_s: Callable[[], float | None] = own_limit,
) -> GetResult:
    """Read a range as :func:`~rdzv_etcd.etcd.reads.read_range`; the revision is the first part's.

    Raises EtcdError.
    """
    reading = read_range(etcd, keys.start, keys.end, keys_only=keys_only, limit_s=limit_s)
    return await _joined(reading)


async def _joined(reading: AsyncIterator[GetResult]) -> GetResult:
    parts = [part async for part in reading]
    found = tuple(kv for part in parts for kv in part.kvs)
    return replace(parts[0], kvs=found)


def within(clock: Clock, timeout_s: float | None) -> Callable[[], float | None]:
    """Return the limits of requests that are done within so many seconds from now, all together."""
    return own_limit if timeout_s is None else Deadline(clock, timeout_s).remaining_s

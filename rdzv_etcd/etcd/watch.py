"""A watch that survives reconnects without a gap, or says that it cannot.

Knows the Watch call, revisions and resuming. Must not know what the keys mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from rdzv_etcd.errors import (
    CompactedError,
    EtcdError,
    EtcdPermissionError,
    EtcdUnavailableError,
    RevisionRegressedError,
)
from rdzv_etcd.etcd import codec, retry
from rdzv_etcd.etcd.api import WatchBatch, keys_text
from rdzv_etcd.etcd.codec import Codec
from rdzv_etcd.etcd.faults import AttemptError, Fault, Verdict, judge_text, told, unavailable
from rdzv_etcd.etcd.link import OpenStream
from rdzv_etcd.etcd.quiet import grpc
from rdzv_etcd.etcd.server import ClosedError, Stream
from rdzv_etcd.etcd.watch_streams import PutOffError, WatchStreams

_OPEN_LIMIT_S = 5.0
"""How long an endpoint may take to confirm the watch before the next one is tried."""
_DENIALS = 4
"""Being denied so often in a row, each time with a token just issued, is no matter of tokens."""
BUFFERED_BATCHES = 1_000
"""What a slow reader may leave unread before the stream is left to gRPC's flow control."""


class EtcdWatch:
    """Implements :class:`rdzv_etcd.etcd.api.Watch`; see there for its promise.

    A task of its own reads ahead, so that giving up one iteration step (a timeout around it) loses
    nothing. ``close`` ends that task.
    """

    def __init__(
        self,
        streams: WatchStreams,
        messages: Codec,
        key_range: tuple[bytes, bytes | None],
        start_revision: int,
        current_revision: Callable[[bytes], Awaitable[int]],
        *,
        puts_only: bool,
        tell_resumes: bool = False,
    ) -> None:
        self._link = streams.link
        self._streams = streams
        self._codec = messages
        self._key, self._range_end = key_range
        self._next_revision = start_revision
        self._current_revision = current_revision
        self._puts_only = puts_only
        self._tell_resumes = tell_resumes
        self._denials = 0
        self._pause = self._link.pause()
        self._batches: deque[WatchBatch] = deque()
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._confirmed: int | None = None
        """The store's revision when the watch was confirmed first."""
        self._task = asyncio.create_task(self._run(), name=f"rdzv-etcd watch {self._key!r}")
        self._task.add_done_callback(self._ended)

    # -- the reader's side ------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[WatchBatch]:
        return self

    async def __anext__(self) -> WatchBatch:
        while not self._batches:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        batch = self._batches.popleft()
        self._drained.set()
        return batch

    async def ready(self) -> int:
        while self._confirmed is None:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise EtcdUnavailableError("the watch was closed before etcd confirmed it")
            self._changed.clear()
            await self._changed.wait()
        return self._confirmed

    async def close(self) -> None:
        self._closed = True
        self._batches.clear()
        self._changed.set()
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the stream's side ------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await retry.attempts(lambda: retry.endless(self._pause, self._link.clock), self._follow)
        except AttemptError as failed:
            self._failure = told(failed, self._link.user)
            if isinstance(self._failure, EtcdPermissionError):
                keys = keys_text(self._key, self._range_end)
                self._failure = EtcdPermissionError(f"{self._failure}: watch {keys}")
        except EtcdError as error:
            self._failure = error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the reader what nobody expected, too, rather than let it wait for ever."""
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    async def _follow(self) -> None:
        """Follow one stream until it breaks. Raises :class:`AttemptError` or the last word."""
        while not await self._follow_from(self._next_revision):
            # etcd (seen: 3.4.23, 3.5.1) accepts a watch from the very revision that it has
            # compacted to, but has forgotten its deletions. So a watch that has to catch up begins
            # one revision earlier, which `_deliver` drops. One that has not sees all live; asked
            # for an earlier revision it would wait for the next catch-up, up to 100 ms. Who wants
            # no deletions need not begin again: the puts of that revision are kept.
            if await self._follow_from(self._next_revision - 1):
                return

    async def _follow_from(self, start_revision: int) -> bool:
        """Follow one stream; ``False`` if it turns out that this watch has to catch up."""
        opened = await self._streams.open(_OPEN_LIMIT_S)
        try:
            revision = await self._confirm(opened.stream, start_revision)
            behind = 1 < start_revision == self._next_revision <= revision
            if behind and not self._puts_only:
                return False
            self._note_confirmed(revision)
            self._pause.good()
            self._denials = 0
            while True:
                await self._deliver(await _next(opened.stream))
        except _Cancelled as cancelled:
            raise self._judge_cancel(opened, cancelled.reason) from None
        except PutOffError as error:  # no reason to leave the server
            fault = unavailable(Verdict.UNKNOWN, str(error))
            raise AttemptError(fault, opened.server.name) from error
        except (grpc.RpcError, ClosedError) as error:
            raise self._link.failed(opened.server, error, opened.metadata) from error
        except TimeoutError:
            silent = ClosedError(f"no answer within {_OPEN_LIMIT_S:g} s")
            raise self._link.failed(opened.server, silent) from None
        finally:
            opened.stream.cancel()

    async def _confirm(self, stream: Stream, start_revision: int) -> int:
        """Open the watch and make sure that the cluster is not older than what was seen.

        Returns the member's revision when it began to watch.

        A cluster that was wiped accepts a watch from a future revision and would stay silent until
        it gets there. The confirmation carries the member's revision; a member that merely lags
        behind is told apart by a linearizable read.
        """
        request = self._codec.watch(
            self._key, self._range_end, start_revision, puts_only=self._puts_only
        )
        await stream.write(request)
        created = await self._link.clock.wait_for(_next(stream), _OPEN_LIMIT_S)
        seen = self._next_revision - 1
        if created.header.revision < seen:
            try:
                current = await self._current_revision(self._key)
            except EtcdUnavailableError as error:  # an outage: it does not end the watch
                raise ClosedError(str(error)) from error
            if current < seen:
                raise RevisionRegressedError(seen, current)
        return int(created.header.revision)

    def _note_confirmed(self, revision: int) -> None:
        if not self._next_revision:
            self._next_revision = revision + 1
        if self._confirmed is None:
            self._confirmed = revision
            self._changed.set()
        elif self._tell_resumes:
            self._batches.append(WatchBatch(self._next_revision - 1, ()))
            self._changed.set()

    async def _deliver(self, response: Any) -> None:
        # Old events can precede those asked for (etcd issue 15220); all events of one revision are
        # in one response, because fragmentation was not asked for.
        events = tuple(
            codec.event(message)
            for message in response.events
            if message.kv.mod_revision >= self._next_revision
        )
        if not response.events:  # a progress notification: everything up to it was delivered
            self._next_revision = max(self._next_revision, response.header.revision + 1)
        if not events:
            return
        revision = events[-1].kv.mod_revision
        self._next_revision = revision + 1
        while len(self._batches) >= BUFFERED_BATCHES:
            self._drained.clear()
            await self._drained.wait()
        self._batches.append(WatchBatch(revision, events))
        self._changed.set()

    def _judge_cancel(self, opened: OpenStream, reason: str) -> AttemptError:
        fault = judge_text(None, reason, authenticated=self._link.can_renew_token)
        # etcd 3.4 and 3.5 say "permission denied" for a stale token as well: ask with a new one,
        # and more than once, as a change of users makes tokens stale as soon as they are issued.
        denied = "permission denied" in reason and self._link.can_renew_token
        self._denials += denied
        if denied and self._denials < _DENIALS:
            fault = Fault(Verdict.STALE_TOKEN, fault.reason, fault.error)
        return self._link.failed(
            opened.server, AttemptError(fault, opened.server.name), opened.metadata
        )


class _Cancelled(Exception):
    """etcd cancelled the watch; the stream is intact."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def _next(stream: Stream) -> Any:
    response = await stream.read()
    if response is None:
        raise ClosedError("etcd ended the watch stream")
    if response.compact_revision:
        raise CompactedError(response.compact_revision)
    if response.canceled:
        raise _Cancelled(response.cancel_reason or "etcd cancelled the watch")
    return response

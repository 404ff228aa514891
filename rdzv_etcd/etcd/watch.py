"""Watches that survive reconnects without a gap, or raise an error.

Knows the Watch call's messages, revisions and resuming. Must not know what the keys mean.

Each watch has a stream of its own, and a task that opens it, reads it and resumes it elsewhere when
it breaks.
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
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.channel import ClosedError, Stream
from rdzv_etcd.etcd.errors import AttemptError, Fault, Verdict, final_error, judge_text
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.port import GetResult, WatchBatch, keys_text
from rdzv_etcd.etcd.retry import Failover
from rdzv_etcd.etcd.watch_check import Delivered, Keys

UNREAD_LIMIT = 2_000
"""A watch reads no more from its stream while its reader has left so many batches."""
_OPEN_LIMIT_S = 5.0
"""How long an endpoint may take to confirm the watch before the next one is tried."""
_DENIALS = 4
"""Being denied so often in a row, each time with a token just issued, is no matter of tokens."""


class _CancelledError(Exception):
    """etcd cancelled the watch, for the reason given."""


class EtcdWatch:
    """Implements :class:`rdzv_etcd.etcd.port.Watch`; see there for its promise.

    Batches are queued, so that a timeout around one iteration step loses nothing. A task of its own
    opens and resumes the watch; ``close`` ends it.
    """

    def __init__(
        self,
        failover: Failover,
        key_range: tuple[bytes, bytes | None],
        start_revision: int,
        current_revision: Callable[[bytes], Awaitable[int]],
        *,
        puts_only: bool,
        mark_resumes: bool = False,
    ) -> None:
        self._failover = failover
        self._key, self._range_end = key_range
        self._next_revision = start_revision
        self._current_revision = current_revision
        self._puts_only = puts_only
        self._mark_resumes = mark_resumes
        self._denials = 0
        self._pause = self._failover.pause()
        self._batches: deque[WatchBatch] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self.delivered = Delivered(puts_only=puts_only)
        self._confirmed: int | None = None
        """The store's revision when the watch was confirmed first."""
        self._task = asyncio.create_task(self._run(), name=f"rdzv-etcd watch {self._key!r}")
        self._task.add_done_callback(self._ended)

    # -- the reader's side ------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[WatchBatch]:
        return self

    async def __anext__(self) -> WatchBatch:
        while not self._batches or self._closed:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        batch = self._batches.popleft()
        self._has_room.set()
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

    def count_from(self, result: GetResult) -> None:
        self.delivered.count_from(result.revision, result.count)

    @property
    def keys(self) -> Keys:
        return self._key, self._range_end

    @property
    def upto(self) -> int:
        is_behind = len(self._batches) >= UNREAD_LIMIT
        if self._confirmed is None or self._closed or self._failure is not None or is_behind:
            return 0
        return self._next_revision - 1

    def lose(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._task.cancel()
            self._changed.set()

    async def close(self) -> None:
        self._closed = True
        self._batches.clear()
        self._changed.set()
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the stream's side ------------------------------------------------------------------------

    async def _run(self) -> None:
        """Watch, and resume, until there is an error for the reader."""
        start_revision = self._next_revision
        try:
            while True:
                try:
                    start_revision = await self._follow(start_revision)
                    continue
                except AttemptError as failed:
                    if failed.fault.verdict is Verdict.FINAL:
                        self._failure = self._final_error(failed)
                        return
                start_revision = self._next_revision
                await self._failover.clock.sleep(self._pause.next_s())
        except EtcdError as error:
            self._failure = error

    def _final_error(self, failed: AttemptError) -> EtcdError:
        error = final_error(failed, self._failover.auth.user)
        if isinstance(error, EtcdPermissionError):
            return EtcdPermissionError(f"{error}: watch {keys_text(self._key, self._range_end)}")
        return error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the reader an unexpected error as well, rather than let it wait forever."""
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    async def _follow(self, start_revision: int) -> int:
        """Watch until the stream breaks; return from where to begin again if it has not.

        Raises :class:`AttemptError`, or what ends the watch.
        """
        request = messages.watch_request(
            self._key, self._range_end, start_revision, puts_only=self._puts_only
        )
        stream = await self._failover.open("Watch", request, _OPEN_LIMIT_S)
        try:
            revision = await self._confirm(stream)
            behind = 1 < start_revision == self._next_revision <= revision
            if behind and not self._puts_only:
                # etcd (seen: 3.4.23, 3.5.1) accepts a watch from the very revision that it has
                # compacted to, but has forgotten its deletions. So a watch that has to catch up
                # begins one revision earlier, which `_receive` drops. One that has not sees all
                # live; from an earlier revision it would wait for the next catch-up, up to
                # 100 ms. A watch without deletions need not begin again: the puts of that revision
                # are kept.
                return self._next_revision - 1
            self._note_confirmed(revision)
            self._pause.good()
            self._denials = 0
            while True:
                self._receive(await _next_response(stream))
                while len(self._batches) >= UNREAD_LIMIT:
                    self._has_room.clear()
                    await self._has_room.wait()
        except _CancelledError as cancelled:
            raise self._judge_cancel(stream, str(cancelled)) from None
        except (grpc.RpcError, ClosedError) as error:
            raise self._failover.failed(stream.server, error, stream.metadata) from error
        finally:
            stream.cancel()

    async def _confirm(self, stream: Stream) -> int:
        """Make sure that etcd watches, and that the cluster is not older than what was seen; return
        the member's revision when it began to watch.

        A cluster that was wiped accepts a watch from a future revision and would stay silent until
        it gets there. The confirmation carries the member's revision; a member that merely lags
        behind is recognized by a linearizable read.
        """
        try:
            response = await self._failover.clock.wait_for(_next_response(stream), _OPEN_LIMIT_S)
        except TimeoutError:
            raise ClosedError(f"no answer within {_OPEN_LIMIT_S:g} s") from None
        revision = int(response.header.revision)
        seen = self._next_revision - 1
        if revision < seen:
            try:
                current = await self._current_revision(self._key)
            except EtcdUnavailableError as error:  # an outage: it does not end the watch
                raise ClosedError(str(error)) from error
            if current < seen:
                raise RevisionRegressedError(seen, current)
        return revision

    def _note_confirmed(self, revision: int) -> None:
        if not self._next_revision:
            self._next_revision = revision + 1
        if self._confirmed is None:
            self._confirmed = revision
            self._changed.set()
        elif self._mark_resumes:
            self._batches.append(WatchBatch(self._next_revision - 1, ()))
            self._changed.set()

    def _receive(self, response: Any) -> None:
        self._failover.note_term(response.header.raft_term)
        # Older events than requested can come first (etcd issue 15220); all events of one revision
        # are in one response, because fragmentation was not requested.
        events = tuple(
            messages.event(message)
            for message in response.events
            if message.kv.mod_revision >= self._next_revision
        )
        if not response.events:  # a progress notification: everything up to it was delivered
            self._next_revision = max(self._next_revision, response.header.revision + 1)
        if not events:
            return
        revision = events[-1].kv.mod_revision
        self._next_revision = revision + 1
        self.delivered.take(events)
        self._batches.append(WatchBatch(revision, events))
        self._changed.set()

    def _judge_cancel(self, stream: Stream, reason: str) -> AttemptError:
        fault = judge_text(None, reason, authenticated=self._failover.auth.can_renew)
        # etcd 3.4 and 3.5 send "permission denied" for a stale token as well: try a new one,
        # and more than once, as a change of users makes tokens stale as soon as they are issued.
        denied = "permission denied" in reason and self._failover.auth.can_renew
        self._denials += denied
        if denied and self._denials < _DENIALS:
            fault = Fault(Verdict.STALE_TOKEN, fault.reason, fault.error)
        return self._failover.failed(
            stream.server, AttemptError(fault, stream.server.name), stream.metadata
        )


async def _next_response(stream: Stream) -> Any:
    """Return the next response; raise what ends the watch."""
    response = await stream.read()
    if response is None:
        raise ClosedError("etcd ended the watch stream")
    if response.compact_revision:
        raise CompactedError(response.compact_revision)
    if response.canceled:
        raise _CancelledError(response.cancel_reason or "etcd cancelled the watch")
    return response

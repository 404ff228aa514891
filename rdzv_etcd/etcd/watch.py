"""Watches that survive reconnects without a gap, or raise an error.

Knows the Watch call's messages, revisions and resuming. Must not know what the keys mean.

Watches share a stream, which costs both sides several times what a watch does: its reader hands
each response to the watch that it is for, into a queue from which its iteration takes it.
A stream that breaks breaks for all its watches; each has a task, which opens and resumes it and
sleeps meanwhile. etcd confirms watches in the order of the requests, and names each by
a number from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import (
    CompactedError,
    EtcdError,
    EtcdPermissionError,
    EtcdUnavailableError,
    RevisionRegressedError,
)
from rdzv_etcd.etcd import messages
from rdzv_etcd.etcd.channel import ClosedError
from rdzv_etcd.etcd.errors import AttemptError, Fault, Verdict, final_error, judge_text
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.port import GetResult, WatchBatch, keys_text
from rdzv_etcd.etcd.retry import Failover, OpenStream
from rdzv_etcd.etcd.watch_check import Delivered, Keys

UNREAD_LIMIT = 2_000
"""A watch that leaves more batches unread is taken off its stream, so that the others need not wait
for it, nor memory grow. It resumes where it was when its reader has caught up with half of them."""

_CANCEL_AFTER_S = 0.1
"""Watches often end together, and the stream with the last of them, which cancels them all. In a
barrier of 512 agents a process, cancelling each was a tenth of the work."""


class _ResumeError(Exception):
    """The watch must leave its stream and resume on another one, by no fault of the server's."""


class _CancelledError(Exception):
    """etcd cancelled this watch, for the reason given; the stream is intact."""


class WatchStreams:
    """All watch streams of a client; one, unless the endpoint or the token has changed."""

    def __init__(self, failover: Failover) -> None:
        self.failover = failover
        self._opening = asyncio.Lock()
        self._current: _SharedStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def subscribe(self, request: Any, limit_s: float) -> Subscription:
        """Ask for a watch. Raises :class:`AttemptError` if no stream can be opened."""
        async with self._opening:
            shared = self._current
            if shared is None or not shared.usable or not self.failover.is_current(shared.opened):
                opened = await self.failover.open("Watch", limit_s)
                shared = self._current = _SharedStream(opened, self.failover.clock, self._tasks)
            return shared.subscribe(request)

    def give_up(self) -> None:
        """Let the watches of the stream resume on another one."""
        if self._current is not None:
            self._current.give_up(_ResumeError("a watch on the stream was silent"))
            self._current = None

    async def close(self) -> None:
        """Wait until the streams have ended; their watches must have been closed before."""
        self._current = None
        if self._tasks:
            await asyncio.wait(self._tasks)


class Subscription:
    """One watch on a stream, from the request for it to its end."""

    def __init__(self, stream: _SharedStream) -> None:
        self.opened = stream.opened
        self.watch_id: int | None = None
        self._stream = stream
        loop = asyncio.get_running_loop()
        self._confirmed: asyncio.Future[int | None] = loop.create_future()
        """``None``: it has ended before."""
        self._ended: asyncio.Future[Exception] = loop.create_future()
        self._early: list[Any] = []
        """What came before :meth:`deliver`."""
        self._receive: Callable[[Any], None] | None = None

    async def confirmed(self, limit_s: float) -> int:
        """Wait until etcd watches; return the revision that the member had then.

        Raises what ended the watch, or :class:`ClosedError` if the member does not answer.
        """
        try:
            revision = await self._stream.clock.wait_for(self._confirmed, limit_s)
        except TimeoutError:
            raise ClosedError(f"no answer within {limit_s:g} s") from None
        if revision is None:
            await self._until_ended()
        return revision

    async def deliver(self, receive: Callable[[Any], None]) -> NoReturn:
        """Pass each response to ``receive`` as it comes, without a task; raise what ends the watch.

        That is gRPC's error or :class:`ClosedError` if the stream broke, or else one of this
        module's, or :class:`CompactedError`. ``receive`` may raise :class:`_ResumeError`.
        """
        for response in self._early:
            receive(response)
        self._early.clear()
        self._receive = receive
        await self._until_ended()

    async def _until_ended(self) -> NoReturn:
        raise (await self._ended).with_traceback(None)  # others raise it as well

    def close(self) -> None:
        """End the watch. Idempotent, does not block."""
        self.end(ClosedError("the watch was closed"))

    # -- the stream's side ------------------------------------------------------------------------

    def take(self, response: Any) -> None:
        if response.compact_revision:
            self.end(CompactedError(response.compact_revision))
        elif response.canceled:
            self.end(_CancelledError(response.cancel_reason or "etcd cancelled the watch"))
        elif response.created:
            if not self._confirmed.done():  # and the limit has not passed
                self._confirmed.set_result(response.header.revision)
        elif self._receive is None:
            self._early.append(response)
            if len(self._early) > UNREAD_LIMIT:
                self.end(_ResumeError(f"{UNREAD_LIMIT} responses wait to be delivered"))
        else:
            try:
                self._receive(response)
            except _ResumeError as error:
                self.end(error)

    def end(self, error: Exception) -> None:
        """Leave the stream, and let the watch raise ``error``."""
        self._stream.leave(self)
        if not self._ended.done():
            self._ended.set_result(error)
        if not self._confirmed.done():
            self._confirmed.set_result(None)


class _SharedStream:
    """One stream; it ends when it breaks, or with the last of its watches."""

    def __init__(self, opened: OpenStream, clock: Clock, tasks: set[asyncio.Task[None]]) -> None:
        """``tasks``: where those of this stream are while they run."""
        self.opened = opened
        self.clock = clock
        self.usable = True
        self._tasks = tasks
        self._subscriptions: set[Subscription] = set()
        self._asked: deque[Subscription] = deque()
        """In the order in which etcd will confirm them."""
        self._watching: dict[int, Subscription] = {}
        self._unwanted: list[int] = []
        self._canceller: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = self._start(self._read(), "stream")

    def subscribe(self, request: Any) -> Subscription:
        subscription = Subscription(self)
        self._subscriptions.add(subscription)
        self._asked.append(subscription)
        self.opened.stream.send(request)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Forget the subscription, and end its watch."""
        if subscription not in self._subscriptions:
            return
        self._subscriptions.remove(subscription)
        if subscription in self._asked:
            self.usable = False  # perhaps it gave up on a stream that does not answer
        if not self._subscriptions:
            self._end()
        elif subscription.watch_id in self._watching:
            del self._watching[subscription.watch_id]
            self._cancel_soon(subscription.watch_id)

    def _start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"rdzv-etcd watch {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self) -> None:
        """Stop the tasks and forget them, as a task may keep the connection alive."""
        self.usable = False
        self.opened.stream.cancel()
        tasks = (self._reader, self._canceller)
        self._reader = self._canceller = None
        for task in tasks:
            if task is not None:
                task.cancel()

    async def _read(self) -> None:
        """Read until the stream breaks: what ends it then ends every watch that is left."""
        failure: Exception = ClosedError("the watch stream was given up")
        try:
            while True:
                response = await self.opened.stream.read()
                if response is None:
                    raise ClosedError("etcd ended the watch stream")
                self._dispatch(response)
        except (grpc.RpcError, ClosedError, _ResumeError) as error:
            failure = error
        finally:
            self._reader = None
            self.give_up(failure)

    def give_up(self, failure: Exception) -> None:
        """End the stream, and every watch that is left."""
        left, self._subscriptions = self._subscriptions, set()
        for subscription in left:
            subscription.end(failure)
        self._end()

    def _dispatch(self, response: Any) -> None:
        watch_id = response.watch_id
        if response.created:
            subscription = self._asked.popleft()
            if response.canceled:
                subscription.take(response)
                # With the refusal etcd (seen: 3.5.1) forgets the stream's watch 0 as well, which
                # would be silent forever. So all others resume, on a stream of their own.
                raise _ResumeError("etcd refused another watch on the stream")
            if subscription in self._subscriptions:
                subscription.watch_id = watch_id
                self._watching[watch_id] = subscription
                subscription.take(response)
            else:
                self._cancel_soon(watch_id)
        else:
            receiver = self._watching.get(watch_id)
            if response.canceled:
                self._watching.pop(watch_id, None)
            if receiver is not None:
                receiver.take(response)

    def _cancel_soon(self, watch_id: int) -> None:
        self._unwanted.append(watch_id)
        if self._canceller is None:
            self._canceller = self._start(self._cancel_unwanted(), "cancels")

    async def _cancel_unwanted(self) -> None:
        await self.clock.sleep(_CANCEL_AFTER_S)
        self._canceller = None
        rpc = messages.load()
        for watch_id in self._unwanted:
            cancel = rpc.WatchCancelRequest(watch_id=watch_id)
            self.opened.stream.send(rpc.WatchRequest(cancel_request=cancel))
        self._unwanted.clear()


_OPEN_LIMIT_S = 5.0
"""How long an endpoint may take to confirm the watch before the next one is tried."""
_DENIALS = 4
"""Being denied so often in a row, each time with a token just issued, is no matter of tokens."""
_READ_UP = UNREAD_LIMIT // 2
"""A watch whose reader fell behind resumes when no more than this is unread."""


class EtcdWatch:
    """Implements :class:`rdzv_etcd.etcd.port.Watch`; see there for its promise.

    Batches are queued, so that a timeout around one iteration step loses nothing. A task of its own
    opens and resumes the watch; ``close`` ends it.
    """

    def __init__(
        self,
        streams: WatchStreams,
        key_range: tuple[bytes, bytes | None],
        start_revision: int,
        current_revision: Callable[[bytes], Awaitable[int]],
        *,
        puts_only: bool,
        mark_resumes: bool = False,
    ) -> None:
        self._failover = streams.failover
        self._streams = streams
        self._key, self._range_end = key_range
        self._next_revision = start_revision
        self._current_revision = current_revision
        self._puts_only = puts_only
        self._mark_resumes = mark_resumes
        self._denials = 0
        self._pause = self._failover.pause()
        self._batches: deque[WatchBatch] = deque()
        self._changed = asyncio.Event()
        self._read_up = asyncio.Event()
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
        if len(self._batches) <= _READ_UP:
            self._read_up.set()
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
        is_behind = len(self._batches) > _READ_UP
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
        try:
            await self._failover.repeat(
                self._follow,
                lambda failed: failed.fault.verdict is not Verdict.FINAL,
                self._pause,
            )
        except AttemptError as failed:
            self._failure = final_error(failed, self._failover.user)
            if isinstance(self._failure, EtcdPermissionError):
                keys = keys_text(self._key, self._range_end)
                self._failure = EtcdPermissionError(f"{self._failure}: watch {keys}")
        except EtcdError as error:
            self._failure = error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the reader an unexpected error as well, rather than let it wait forever."""
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    async def _follow(self) -> None:
        """Watch until the stream breaks. Raises :class:`AttemptError`, or what ends the watch."""
        start_revision = self._next_revision
        while True:
            start_revision = await self._follow_from(start_revision)
            while len(self._batches) > _READ_UP:
                self._read_up.clear()
                await self._read_up.wait()

    async def _follow_from(self, start_revision: int) -> int:
        """Watch until the stream breaks; return from where to begin again if it has not."""
        request = messages.watch_request(
            self._key, self._range_end, start_revision, puts_only=self._puts_only
        )
        subscription = await self._streams.subscribe(request, _OPEN_LIMIT_S)
        opened = subscription.opened
        try:
            revision = await self._confirm(subscription)
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
            await subscription.deliver(self._receive)
        except _ResumeError:
            # No reason to leave the server. Nor to pause: the watches of a stream that was given up
            # resume together, on a new one, before the watch that etcd refused comes with a new
            # token, on another one, and is perhaps refused again.
            return self._next_revision
        except _CancelledError as cancelled:
            raise self._judge_cancel(opened, str(cancelled)) from None
        except (grpc.RpcError, ClosedError) as error:
            raise self._failover.failed(opened.server, error, opened.metadata) from error
        finally:
            subscription.close()

    async def _confirm(self, subscription: Subscription) -> int:
        """Make sure that etcd watches, and that the cluster is not older than what was seen; return
        the member's revision when it began to watch.

        A cluster that was wiped accepts a watch from a future revision and would stay silent until
        it gets there. The confirmation carries the member's revision; a member that merely lags
        behind is recognized by a linearizable read.
        """
        revision = await subscription.confirmed(_OPEN_LIMIT_S)
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
        if len(self._batches) >= UNREAD_LIMIT:
            raise _ResumeError(f"{UNREAD_LIMIT} batches of events are unread")
        revision = events[-1].kv.mod_revision
        self._next_revision = revision + 1
        self.delivered.take(events)
        self._batches.append(WatchBatch(revision, events))
        self._changed.set()

    def _judge_cancel(self, opened: OpenStream, reason: str) -> AttemptError:
        fault = judge_text(None, reason, authenticated=self._failover.can_renew_token)
        # etcd 3.4 and 3.5 send "permission denied" for a stale token as well: try a new one,
        # and more than once, as a change of users makes tokens stale as soon as they are issued.
        denied = "permission denied" in reason and self._failover.can_renew_token
        self._denials += denied
        if denied and self._denials < _DENIALS:
            fault = Fault(Verdict.STALE_TOKEN, fault.reason, fault.error)
        return self._failover.failed(
            opened.server, AttemptError(fault, opened.server.name), opened.metadata
        )

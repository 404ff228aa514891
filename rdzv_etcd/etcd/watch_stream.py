"""Watches share a stream; whoever reads it hands each response to the watch that it is for.

Knows the Watch call's messages: what is asked for, confirmed and cancelled. Must not know what is
watched, nor resume anything: a stream that breaks breaks for all its watches, who open it again.

A stream costs both sides several times what a watch does. etcd confirms watches in the order in
which they were asked for, and names each by a number from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from rdzv_etcd.clock import Clock
from rdzv_etcd.errors import CompactedError
from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.failover import Failover, OpenStream
from rdzv_etcd.etcd.grpc_start import grpc
from rdzv_etcd.etcd.server import ClosedError

UNREAD_LIMIT = 2_000
"""A watch that leaves more batches unread is taken off its stream, so that the others need not wait
for it, nor memory grow. It resumes where it was when its reader has caught up with half of them."""

_CANCEL_AFTER_S = 0.1
"""Watches often end together, and with the last of them the stream, which tells etcd at once. In a
barrier of 512 agents a process, cancelling each was a tenth of the work."""


class FellBehindError(Exception):
    """The reader, in this process, is slow. Nothing has failed, least of all the server."""


class StreamGivenUpError(Exception):
    """The stream is of no more use, by no fault of the server's: its watches go on over another."""


class WatchCancelledError(Exception):
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
        """Let the watches of the stream go on over another one."""
        if self._current is not None:
            self._current.give_up(StreamGivenUpError("a watch on the stream was silent"))
            self._current = None

    async def close(self) -> None:
        """Wait until the streams have ended, whose watches must have been closed before."""
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
        """Hand each response to ``receive`` as it comes, without a task; raise what ends the watch.

        That is gRPC's error or :class:`ClosedError` if the stream broke, or else one of this
        module's, or :class:`CompactedError`. ``receive`` may raise :class:`FellBehindError`.
        """
        for response in self._early:
            receive(response)
        self._early.clear()
        self._receive = receive
        await self._until_ended()

    async def _until_ended(self) -> NoReturn:
        raise (await self._ended).with_traceback(None)  # the stream's other watches raise it, too

    def close(self) -> None:
        """End the watch. Idempotent, does not block."""
        self.end(ClosedError("the watch was closed"))

    # -- the stream's side ------------------------------------------------------------------------

    def take(self, response: Any) -> None:
        if response.compact_revision:
            self.end(CompactedError(response.compact_revision))
        elif response.canceled:
            self.end(WatchCancelledError(response.cancel_reason or "etcd cancelled the watch"))
        elif response.created:
            if not self._confirmed.done():  # and the limit has not passed
                self._confirmed.set_result(response.header.revision)
        elif self._receive is None:
            self._early.append(response)
            if len(self._early) > UNREAD_LIMIT:
                self.end(FellBehindError(f"{UNREAD_LIMIT} responses wait to be delivered"))
        else:
            try:
                self._receive(response)
            except FellBehindError as error:
                self.end(error)

    def end(self, error: Exception) -> None:
        """Leave the stream, and tell the watch why."""
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
        """Stop the tasks and let go of them, as a task may keep the connection alive."""
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
        except (grpc.RpcError, ClosedError, StreamGivenUpError) as error:
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
                # would be silent for ever. So all others resume, on a stream of their own.
                raise StreamGivenUpError("etcd refused another watch on the stream")
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
        rpc = stubs.load()
        for watch_id in self._unwanted:
            cancel = rpc.WatchCancelRequest(watch_id=watch_id)
            self.opened.stream.send(rpc.WatchRequest(cancel_request=cancel))
        self._unwanted.clear()

"""Watches share a stream, and each sees one of its own.

Knows the Watch call's messages: what is asked for, confirmed and cancelled. Must not know what is
watched, nor resume anything: a stream that breaks breaks for all its watches, who open it again.

A stream costs both sides several times what a watch does. etcd confirms watches in the order in
which they were asked for, and names each by a number from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from rdzv_etcd.clock import Clock
from rdzv_etcd.etcd import stubs
from rdzv_etcd.etcd.link import Link, OpenStream
from rdzv_etcd.etcd.outbox import Outbox
from rdzv_etcd.etcd.quiet import grpc
from rdzv_etcd.etcd.server import ClosedError

UNREAD_LIMIT = 1_000
"""A watch that leaves more responses unread is put off the stream, so that the others need not wait
for it, nor memory grow. It resumes where it was."""

_CANCEL_AFTER_S = 0.1
"""Watches often end together, and with the last of them the stream, which tells etcd at once. In a
barrier of 512 agents a process, cancelling each was a tenth of the work."""


class PutOffError(Exception):
    """A watch has lost its stream by no fault of the server's: it goes on where it was, there."""


class FellBehindError(PutOffError):
    """Its reader is slow."""


class WatchStreams:
    """All watch streams of a client; one, unless the endpoint or the token has changed."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._opening = asyncio.Lock()
        self._current: _SharedStream | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self, limit_s: float) -> OpenStream:
        """Return a stream for one watch. Raises :class:`AttemptError`."""
        async with self._opening:
            shared = self._current
            if shared is None or not shared.usable or not self.link.is_current(shared.opened):
                opened = await self.link.open("Watch", limit_s)
                shared = _SharedStream(opened, self.link.clock, self._ending)
                self._current = shared
            return OpenStream(shared.opened.server, shared.opened.metadata, shared.lane())

    async def close(self) -> None:
        """Wait until the streams have ended, whose watches must have been closed before."""
        self._current = None
        if self._ending:
            await asyncio.wait(self._ending)


class _SharedStream:
    """One stream; it ends when it breaks, or with the last of its watches."""

    def __init__(self, opened: OpenStream, clock: Clock, ending: set[asyncio.Task[None]]) -> None:
        self.opened = opened
        self.usable = True
        self._clock = clock
        self._lanes: set[_Lane] = set()
        self._asked: deque[_Lane] = deque()
        """In the order in which etcd will confirm them."""
        self._watching: dict[int, _Lane] = {}
        self._requests = Outbox(opened.stream, "rdzv-etcd watch requests")
        self._unwanted: list[int] = []
        self._canceller: asyncio.Task[None] | None = None
        self._ending = ending
        self._reader: asyncio.Task[None] | None = asyncio.create_task(
            self._read(), name="rdzv-etcd watch stream"
        )

    def lane(self) -> _Lane:
        lane = _Lane(self)
        self._lanes.add(lane)
        return lane

    def ask(self, lane: _Lane, request: Any) -> None:
        """Ask for the lane's watch; the answer is the lane's first response."""
        self._asked.append(lane)
        self._requests.send(request)

    def leave(self, lane: _Lane) -> None:
        """Forget the lane, and end its watch."""
        if lane not in self._lanes:
            return
        self._lanes.remove(lane)
        if lane in self._asked:
            self.usable = False  # perhaps it gave up on a stream that does not answer
        if not self._lanes:
            self._end()
        elif lane.watch_id in self._watching:
            del self._watching[lane.watch_id]
            self._cancel_soon(lane.watch_id)

    # -- the stream's side ------------------------------------------------------------------------

    def _end(self) -> None:
        """Stop the tasks and let go of them, as a task may keep the connection alive."""
        self.usable = False
        self.opened.stream.cancel()
        tasks = (self._reader, self._requests.stop(), self._canceller)
        self._reader = self._canceller = None
        for task in tasks:
            if task is not None:
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
                task.cancel()

    async def _read(self) -> None:
        failure: BaseException = ClosedError("the watch stream was given up")
        try:
            while True:
                response = await self.opened.stream.read()
                if response is None:
                    raise ClosedError("etcd ended the watch stream")
                self._dispatch(response)
        except (grpc.RpcError, ClosedError, PutOffError) as error:
            failure = error
        finally:
            self._reader = None
            for lane in tuple(self._lanes):
                lane.fail(failure)
            self._end()

    def _dispatch(self, response: Any) -> None:
        watch_id = response.watch_id
        if response.created:
            lane = self._asked.popleft()
            if response.canceled:
                lane.take(response)
                # With the refusal etcd (seen: 3.5.1) forgets the stream's watch 0 as well, which
                # would be silent for ever. So all others resume, on a stream of their own.
                raise PutOffError("etcd refused another watch on the stream")
            if lane in self._lanes:
                lane.watch_id = watch_id
                self._watching[watch_id] = lane
                lane.take(response)
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
            self._canceller = asyncio.create_task(
                self._cancel_unwanted(), name="rdzv-etcd watch cancels"
            )

    async def _cancel_unwanted(self) -> None:
        await self._clock.sleep(_CANCEL_AFTER_S)
        self._canceller = None
        rpc = stubs.load()
        for watch_id in self._unwanted:
            cancel = rpc.WatchCancelRequest(watch_id=watch_id)
            self._requests.send(rpc.WatchRequest(cancel_request=cancel))
        self._unwanted.clear()


class _Lane:
    """Implements :class:`rdzv_etcd.etcd.server.Stream` for one watch."""

    def __init__(self, shared: _SharedStream) -> None:
        self.watch_id: int | None = None
        self._shared = shared
        self._responses: deque[Any] = deque()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def write(self, message: Any) -> None:
        self._shared.ask(self, message)

    async def read(self) -> Any:
        while not self._responses:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._changed.clear()
            await self._changed.wait()
        return self._responses.popleft()

    def cancel(self) -> None:
        self._shared.leave(self)
        self.fail(ClosedError("the watch was cancelled"))

    def take(self, response: Any) -> None:
        self._responses.append(response)
        self._changed.set()
        if len(self._responses) > UNREAD_LIMIT:
            self._shared.leave(self)
            self.fail(FellBehindError("the watch fell behind"))

    def fail(self, failure: BaseException) -> None:
        """Let the reader know, once it has read what came before."""
        if self._failure is None:
            self._failure = failure
            self._changed.set()

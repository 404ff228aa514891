"""``MemoryWatch``: a gapless stream of changes over a simulated link.

Changes are put into the watch's queue as the server makes them, unless the link is cut; then the
watch notes where it was and resumes from there later. As with a real etcd, a wiped cluster is
recognised by its revision alone: one that has caught up with the watch's revision before the watch
is back looks like the old one (the cluster's id is the same again). Knows the server's
history, and nothing of what the keys mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

from rdzv_etcd.errors import (
    CompactedError,
    EtcdError,
    EtcdPermissionError,
    EtcdUnavailableError,
    InvalidRequestError,
    RevisionRegressedError,
)
from rdzv_etcd.etcd.port import Event, EventKind, Get, GetResult, WatchBatch
from rdzv_etcd.etcd.watch_check import Delivered, Keys
from rdzv_etcd.testing.network import Client, Server


@dataclass(slots=True)
class _InFlight:
    """A batch or error in flight; if it is lost, the watch resumes at ``resume_at``."""

    due_s: float
    content: WatchBatch | EtcdError
    resume_at: int
    has_come: bool = False
    """Whether :attr:`MemoryWatch.delivered` knows of it."""


class MemoryWatch:
    """One watch; implements :class:`rdzv_etcd.etcd.port.Watch`. For one iterating task."""

    def __init__(
        self,
        server: Server,
        connection: Client,
        key_range: tuple[bytes, bytes | None],
        start_revision: int,
        *,
        puts_only: bool,
        mark_resumes: bool = False,
    ) -> None:
        self._server = server
        self._connection = connection
        self._key, self._range_end = key_range
        self._next_revision = start_revision
        self._puts_only = puts_only
        self._mark_resumes = mark_resumes
        self._queue: deque[_InFlight] = deque()
        self._wakeup: asyncio.Future[None] | None = None
        self._lost = False
        """Whether an error was put into the queue: nothing follows it."""
        self._failure: BaseException | None = None
        self._closed = False
        self._attached = False
        self.delivered = Delivered(puts_only=puts_only)
        self._upto = start_revision - 1
        self.missed_since_s: float | None = None
        """Since when (loop time) it has kept an event back; see
        :meth:`~rdzv_etcd.testing.network.Link.stall_watches`."""
        self._confirmed: int | None = None
        """The server's revision when the confirmation reached the client."""
        self._waiting: list[asyncio.Future[None]] = []
        """The waits for the confirmation."""
        self._over = connection.link.connection
        """Which connection it was opened over last."""
        connection.link.listen(self._link_changed)
        server.call_later(connection.link.draw_delay_s(), self._attach)

    def __aiter__(self) -> MemoryWatch:
        return self

    async def __anext__(self) -> WatchBatch:
        loop = asyncio.get_running_loop()
        while not self._closed:
            if self._failure is not None and not self._queue:
                raise self._failure
            delay_s: float | None = None
            if self._queue:
                delay_s = self._queue[0].due_s - loop.time()
                if delay_s <= 0:
                    return self._take()
            self._wakeup = loop.create_future()
            await asyncio.wait((self._wakeup,), timeout=delay_s)
        raise StopAsyncIteration

    async def ready(self) -> int:
        while self._confirmed is None:
            if self._failure is not None:
                raise self._failure
            if self._queue and isinstance(self._queue[0].content, EtcdError):
                raise self._queue[0].content
            if self._closed:
                raise EtcdUnavailableError("the watch was closed before etcd confirmed it")
            confirmed = asyncio.get_running_loop().create_future()
            self._waiting.append(confirmed)
            await confirmed
        return self._confirmed

    def count_from(self, result: GetResult) -> None:
        self.delivered.count_from(result.revision, result.count)

    @property
    def keys(self) -> Keys:
        return self._key, self._range_end

    @property
    def upto(self) -> int:
        if self._confirmed is None or self._closed or self._failure is not None:
            return 0
        self._note_arrivals()
        return max(self._upto, 0)

    def lose(self, error: BaseException) -> None:
        self._note_arrivals()
        self._queue = deque(message for message in self._queue if message.has_come)
        self._failure = error
        self._leave()

    async def close(self) -> None:
        self._closed = True
        self._queue.clear()
        self._leave()

    def pump(self) -> None:
        """Put what has happened since the last look into the queue."""
        if not self._attached or self._lost or not self._connection.passing:
            return
        server = self._server
        if self._connection.link.stalls(*self.keys):
            self._keep_back()
            return
        self.missed_since_s = None
        if server.revision < self._next_revision - 1:
            self._send(RevisionRegressedError(self._next_revision - 1, server.revision))
            return
        try:
            events = self._fresh_events()
        except CompactedError as error:
            self._send(error)
            return
        if events:
            self._send(WatchBatch(events[-1].kv.mod_revision, events))
        self._next_revision = server.revision + 1

    # -- inside -----------------------------------------------------------------------------------

    def _fresh_events(self) -> tuple[Event, ...]:
        # One revision more than needed, as the real client asks for it: etcd accepts a watch
        # from the revision it has compacted to, but has forgotten the deletions made by it.
        start = self._next_revision if self._puts_only else self._next_revision - 1
        revisions = list(self._server.model.history(max(1, start)))
        fresh = [each for each in revisions if each.number >= self._next_revision]
        return tuple(event for each in fresh for event in each.events if self._has(event))

    def _keep_back(self) -> None:
        with contextlib.suppress(CompactedError):
            if self.missed_since_s is None and self._fresh_events():
                self.missed_since_s = asyncio.get_running_loop().time()

    def _note_arrivals(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for message in self._queue:
            if message.due_s > now_s:
                return
            if not message.has_come and isinstance(message.content, WatchBatch):
                message.has_come = True
                if message.content.events:
                    self.delivered.take(message.content.events)
                    self._upto = message.content.revision

    def _take(self) -> WatchBatch:
        self._note_arrivals()
        content = self._queue.popleft().content
        if isinstance(content, EtcdError):
            self._failure = content  # every further iteration raises it again
            self._leave()
            raise content
        return content

    def _attach(self) -> None:
        """The server learns of the watch: at first, and again after every cut."""
        if self._closed or self._failure is not None or self._attached:
            return
        if not self._connection.passing or self._over != self._connection.link.connection:
            return
        self._attached = True
        if self._connection.link.refusal is not None:
            self._send(self._connection.link.refusal())
            return
        try:
            self._server.check_permission(Get(self._key, self._range_end))
        except EtcdPermissionError as error:
            self._send(error)
            return
        if not self._key:
            self._send(InvalidRequestError("etcdserver: key is not provided"))
            return
        if self._next_revision <= 0:
            self._next_revision = self._server.revision + 1
            self._upto = self._server.revision
        revision = self._server.revision
        if self._confirmed is not None and self._mark_resumes:
            self._send(WatchBatch(self._next_revision - 1, ()))
        delay_s = self._connection.link.draw_delay_s()
        self._server.call_later(delay_s, lambda: self._confirm(revision))
        self.pump()

    def _confirm(self, revision: int) -> None:
        """The confirmation reaches the client, unless the link was cut meanwhile."""
        if self._attached and self._confirmed is None:
            self._confirmed = revision
            self._wake()

    def _link_changed(self) -> None:
        """Drop what was under way over a broken connection; resume once there is another."""
        link = self._connection.link
        if self._attached and link.connection == self._over and self._connection.passing:
            return
        self._over = link.connection
        self._attached = False
        now_s = asyncio.get_running_loop().time()
        while self._queue and self._queue[-1].due_s > now_s:
            lost = self._queue.pop()
            self._next_revision = lost.resume_at
            self._lost = False
        if self._connection.passing:
            self._server.call_later(link.draw_delay_s(), self._attach)

    def _send(self, content: WatchBatch | EtcdError) -> None:
        link = self._connection.link
        due_s = asyncio.get_running_loop().time() + link.draw_delay_s() + link.watch_lag_s
        if self._queue:
            due_s = max(due_s, self._queue[-1].due_s)
        self._queue.append(_InFlight(due_s, content, self._next_revision))
        self._lost = isinstance(content, EtcdError)
        self._wake()

    def _has(self, event: Event) -> bool:
        if self._puts_only and event.kind is EventKind.DELETE:
            return False
        key, end = event.kv.key, self._range_end
        if not end:
            return key == self._key
        return self._key <= key and (end == b"\x00" or key < end)

    def _leave(self) -> None:
        self._connection.link.unlisten(self._link_changed)
        self._connection.forget(self)
        self._wake()

    def _wake(self) -> None:
        for waiter in (self._wakeup, *self._waiting):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

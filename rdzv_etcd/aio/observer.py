"""Looking at one job, and reading what happens in it, from asyncio."""

from __future__ import annotations

from types import TracebackType

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.errors import RendezvousFailedError
from rdzv_etcd.protocol.events import JobEvent
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.runtime.loop_thread import told_from_a_thread
from rdzv_etcd.world import observer as blocking


class JobEvents:
    """What happens in a job, as :class:`rdzv_etcd.JobEvents`, for ``async for``."""

    def __init__(self, events: blocking.JobEvents) -> None:
        """Made by :meth:`Group.events` and :meth:`Observer.events`."""
        self._events = events

    async def next(self, timeout_s: float | None = None) -> JobEvent | None:
        """As :meth:`rdzv_etcd.JobEvents.next`. One that is cancelled has taken no event."""
        limit_s = seconds_or_none(timeout_s)
        try:
            with self._events._handing_over() as taken:
                return await self._events._runner.call(self._events._next(limit_s, taken))
        except RendezvousFailedError as error:
            if self._events._is_end(error):
                return None
            raise

    @property
    def is_closed(self) -> bool:
        """Whether there will be nothing more."""
        return self._events.is_closed

    def close(self) -> None:
        """As :meth:`rdzv_etcd.JobEvents.close`: does not wait."""
        self._events.close()

    def __aiter__(self) -> JobEvents:
        return self

    async def __anext__(self) -> JobEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> JobEvents:
        try:
            await self._events._runner.call(self._events._begin(self._events._watch))
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Observer:
    """Looks at one job from outside, as :class:`rdzv_etcd.Observer`; :func:`observe` makes one."""

    def __init__(self, observer: blocking.Observer) -> None:
        """Use ``observer`` from asyncio; it may be used in both ways at the same time."""
        self._observer = observer

    @property
    def job(self) -> str:
        """The job's id."""
        return self._observer.job

    async def state(self, timeout_s: float | None = None) -> JobState:
        """As :meth:`rdzv_etcd.Observer.state`."""
        part = self._observer._part
        return await part.call(part.state(seconds_or_none(timeout_s)))

    def events(self) -> JobEvents:
        """As :meth:`rdzv_etcd.Observer.events`, for ``async for``; it begins when it is first
        asked, or with ``async with``."""
        return JobEvents(self._observer._part.events())

    async def close(self) -> None:
        """As :meth:`rdzv_etcd.Observer.close`. If this is cancelled, it closes all the same."""
        if self._observer._part.is_foreign:  # a forked child has no event loop to wait on
            self._observer.close()
            return
        closed, tell = told_from_a_thread()
        self._observer._part.begin_to_close(tell)
        await closed

    async def __aenter__(self) -> Observer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

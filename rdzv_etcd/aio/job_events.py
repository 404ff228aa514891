"""What happens in a job, as an asynchronous iterator."""

from __future__ import annotations

from types import TracebackType

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.errors import RendezvousFailedError
from rdzv_etcd.protocol.events import JobEvent
from rdzv_etcd.world import job_events as blocking_events


class JobEvents:
    """What happens in a job, as :class:`rdzv_etcd.JobEvents`, for ``async for``."""

    def __init__(self, events: blocking_events.JobEvents) -> None:
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

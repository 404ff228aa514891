"""Looking at one job from outside, from asyncio."""

from __future__ import annotations

from types import TracebackType

from rdzv_etcd.aio.job_events import JobEvents
from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.runtime.loop_thread import told_from_a_thread
from rdzv_etcd.world import observer as blocking_observer


class Observer:
    """Looks at one job from outside, as :class:`rdzv_etcd.Observer`; :func:`observe` makes one."""

    def __init__(self, observer: blocking_observer.Observer) -> None:
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

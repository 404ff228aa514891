"""The events of a job as a program reads them, one after the other. Blocking."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.errors import RendezvousFailedError
from rdzv_etcd.node.job_watch import JobWatch
from rdzv_etcd.process import process_id
from rdzv_etcd.protocol.events import JobEvent

T = TypeVar("T")


class Runner(Protocol):
    """Who runs something on the library's event loop."""

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T: ...

    def begin(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def call(self, work: Coroutine[Any, Any, T]) -> T: ...


class JobEvents:
    """What happens in a job, as an iterator without end; made by :meth:`rdzv_etcd.Group.events` and
    :meth:`rdzv_etcd.Observer.events`.

    ::

        with group.events() as events:
            for event in events:
                if isinstance(event, rdzv_etcd.NodeLost):
                    print(event.node, event.how, event.after_s)

    The first event is a :class:`~rdzv_etcd.Snapshot` of the job, so that nothing is missing between
    that and what follows. 10,000 events wait for a slow reader; one that is slower than that gets
    :class:`~rdzv_etcd.Missed` and a new snapshot. It ends when it is closed, be that by another
    thread, and with the group or the observer that made it. It costs one watch of etcd and of this
    process; nothing waits for its reader. Its methods may be called from any thread.
    """

    def __init__(
        self,
        runner: Runner,
        watch: JobWatch,
        begin: Callable[[JobWatch], Coroutine[Any, Any, None]],
    ) -> None:
        self._runner = runner
        self._watch = watch
        self._begin = begin
        self._process = process_id()
        self._finalizer = weakref.finalize(self, _stop, runner, watch)
        self._finalizer.atexit = False

    def next(self, timeout_s: float | None = None) -> JobEvent | None:
        """Block until something happens, for at most ``timeout_s`` seconds (``None``: no limit).

        Returns ``None`` if nothing has happened within that time, or there will be nothing more:
        see :attr:`is_closed`. Raises :class:`~rdzv_etcd.errors.EtcdError` and
        :class:`~rdzv_etcd.errors.StateCorruptError` only where it begins; later, what cannot be
        read is told at log level WARNING, and is read again.
        """
        limit_s = seconds_or_none(timeout_s)
        try:
            with self._handing_over() as taken:
                return self._runner.run(self._next(limit_s, taken))
        except RendezvousFailedError as error:
            if self._is_end(error):
                return None
            raise

    def _is_end(self, error: RendezvousFailedError) -> bool:
        """Whether that is how a call ends because there will be nothing more."""
        return self.is_closed or type(error) is RendezvousFailedError  # this node has left

    async def _next(self, timeout_s: float | None, taken: list[JobEvent]) -> JobEvent | None:
        await self._begin(self._watch)
        event = await self._watch.next(timeout_s)
        if event is not None:
            taken.append(event)
        return event

    @contextlib.contextmanager
    def _handing_over(self) -> Iterator[list[JobEvent]]:
        """Give back what was taken on the loop by a call that does not return it."""
        taken: list[JobEvent] = []
        try:
            yield taken
        except BaseException:
            self._runner.begin(self._give_back(taken))
            raise

    async def _give_back(self, taken: list[JobEvent]) -> None:
        for event in taken:
            self._watch.give_back(event)

    @property
    def is_closed(self) -> bool:
        """Whether there will be nothing more; true in a forked child, which is told nothing."""
        return self._watch.is_closed or self._process != process_id()

    def close(self) -> None:
        """Stop watching, without waiting for that. Idempotent."""
        self._finalizer()

    def __iter__(self) -> JobEvents:
        return self

    def __next__(self) -> JobEvent:
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> JobEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def begun(events: JobEvents) -> JobEvents:
    """Begin to watch now: what happens from here on is told. Blocks and raises as
    :meth:`JobEvents.next`, and for a node that has left RendezvousFailedError."""
    try:
        events._runner.run(events._begin(events._watch))
    except BaseException:
        events.close()
        raise
    return events


def _stop(runner: Runner, watch: JobWatch) -> None:
    watch.end()
    runner.begin(watch.close())

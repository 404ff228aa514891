"""Looks at a job from outside, for tools: takes no part and writes nothing. Blocking."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import MisuseError
from rdzv_etcd.etcd.first_contact import first_contact
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.node.job_watch import JobWatch, read_state
from rdzv_etcd.process import refuse_after_fork
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.runtime.lifecycle import Lifecycle
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Connection, Settings
from rdzv_etcd.world.job_events import JobEvents, begun
from rdzv_etcd.world.participation import Connect, open_etcd

T = TypeVar("T")


class Observation(Lifecycle):
    """What an observer holds until it is closed: the connection, a hold on the loop, watches."""

    ended = "the observer was closed meanwhile"

    def __init__(self, loop_thread: LoopHold, etcd: Etcd, settings: Settings, clock: Clock) -> None:
        super().__init__(loop_thread)
        self._etcd = etcd
        self.settings = settings
        self._clock = clock
        self._keys = JobKeys(settings.prefix, settings.job_id)
        self._watches: weakref.WeakSet[JobWatch] = weakref.WeakSet()
        """Those that are open are kept by their tasks."""

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        self._require_open(work)
        return super().run(work, timeout_s)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        self._require_open(work)
        return await super().call(work)

    def _require_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self.has_ended:
            work.close()
            raise MisuseError(
                f"the observer of job {self.settings.job_id!r} was closed: make another one"
            )

    async def contact(self, connection: Connection | None) -> None:
        """Ask etcd something that needs no more than what an observer may read. Raises EtcdError,
        within ``connect_timeout_s``. ``connection``: how it is reached, if it is as the settings
        say."""
        limit_s = self.settings.connection.connect_timeout_s
        async with first_contact(connection):
            await self._etcd.get(requests.count_nodes(self._keys), timeout_s=limit_s)

    async def state(self, timeout_s: float | None) -> JobState:
        """See :meth:`Observer.state`."""
        return await read_state(self._etcd, self._keys, self._clock, timeout_s)

    def events(self) -> JobEvents:
        """Make a reader of events; nothing is watched yet."""
        return JobEvents(self, JobWatch(self._etcd, self._keys, self._clock), self._begin_watch)

    async def _begin_watch(self, watch: JobWatch) -> None:
        self._watches.add(watch)
        await watch.open(self.settings.connection.request_timeout_s)

    def close(self) -> None:
        """End everything, and wait for it, except on the library's own thread. Idempotent."""
        self.has_ended = True
        if not self.is_foreign:  # what a child has is its parent's
            self.last_work.run(self._close)

    def begin_to_close(self, then: Callable[[], None] | None = None) -> None:
        """End everything without waiting for it; ``then`` is called, in some thread, at its end.

        May be called anywhere, by the garbage collector in the midst of anything.
        """
        self.has_ended = True
        self.last_work.begin(self._close, then)

    async def _close(self) -> None:
        atexit.unregister(self.at_exit)
        for watch in tuple(self._watches):
            await watch.close()
        await self._etcd.close()

    def at_exit(self) -> None:
        """A thread that reads events learns that there will be no more."""
        self.close()


class Observer:
    """Looks at one job from outside; :func:`rdzv_etcd.observe` makes one.

    ::

        with rdzv_etcd.observe("etcd-host:2379", job="my-job") as observer:
            state = observer.state()
            print(state.stage, state.round, state.members, dict(state.missing))
            for event in observer.events():
                print(event)

    It reads etcd and writes nothing, takes no lease and no part: no node notices it. A user that
    may read the job's keys is enough. The constructor makes the first contact, which blocks for at
    most ``connect_timeout`` seconds, and raises :class:`~rdzv_etcd.errors.EtcdError`. All methods
    may be called from any thread, and none after :meth:`close`
    (:class:`~rdzv_etcd.errors.MisuseError`); an observer that nobody refers to closes by itself.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Connect | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``settings``: of these only the job's id, the prefix and the connection matter.
        ``connect`` as that of :class:`rdzv_etcd.Group`."""
        refuse_after_fork()
        loop_thread = LoopHold.acquire()
        try:
            etcd = loop_thread.run(open_etcd(settings, connect))
        except BaseException:
            loop_thread.release()
            raise
        self._part = Observation(loop_thread, etcd, settings, clock or SystemClock())
        self._finalizer = weakref.finalize(self, self._part.begin_to_close)
        self._finalizer.atexit = False
        try:
            connection = settings.connection if connect is None else None
            self._part.run(self._part.contact(connection))
        except BaseException:
            self.close()
            raise

    @property
    def job(self) -> str:
        """The job's id."""
        return self._part.settings.job_id

    def state(self, timeout_s: float | None = None) -> JobState:
        """Read what the job is now. Nothing is remembered from one call to the next.

        One read of etcd per 500 nodes, one more in a large world, and one for the job's lease; it
        blocks for at most ``timeout_s`` seconds in all, or ``request_timeout`` for each of them.
        A job that is not there is no error: see :attr:`~rdzv_etcd.JobState.stage`. Raises
        :class:`~rdzv_etcd.errors.StateCorruptError` if somebody else wrote there, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._part.run(self._part.state(seconds_or_none(timeout_s)))

    def events(self) -> JobEvents:
        """Watch the job from now on: see :class:`~rdzv_etcd.JobEvents`.

        Blocks until the watch has begun, for some ``request_timeout`` seconds at most. Raises
        :class:`~rdzv_etcd.errors.StateCorruptError` if somebody else wrote there, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return begun(self._part.events())

    def close(self) -> None:
        """Close the connection and end the events that are being read. Idempotent; waits until it
        is done, except on the library's own thread."""
        self._part.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

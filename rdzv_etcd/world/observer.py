"""Looks at a job: its state from outside, and its events one after the other. Blocking."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import MisuseError, RendezvousFailedError
from rdzv_etcd.etcd.first_contact import first_contact
from rdzv_etcd.etcd.port import Etcd
from rdzv_etcd.node.job_watch import JobWatch, read_state
from rdzv_etcd.process import process_id, refuse_after_fork
from rdzv_etcd.protocol.events import JobEvent
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.runtime.lifecycle import Lifecycle
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Connection, Settings
from rdzv_etcd.world.participation import Connect, open_etcd

T = TypeVar("T")


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
        runner: Lifecycle,
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


def _stop(runner: Lifecycle, watch: JobWatch) -> None:
    watch.end()
    runner.begin(watch.close())


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
            await self._etcd.get(self._keys.nodes.read(count_only=True), timeout_s=limit_s)

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

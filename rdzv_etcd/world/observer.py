"""Look at a job: its state from outside, and its events one after the other."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol

from rdzv_etcd.arguments import seconds_or_none
from rdzv_etcd.clock import Clock, SystemClock
from rdzv_etcd.errors import MisuseError, RdzvEtcdError, RendezvousFailedError
from rdzv_etcd.etcd.first_contact import first_contact
from rdzv_etcd.node.job_watch import JobWatch, read_state
from rdzv_etcd.process import refuse_after_fork
from rdzv_etcd.protocol.events import JobEvent
from rdzv_etcd.protocol.job_state import JobState
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.runtime.faces import Blocking, Call, LastCall, Runner
from rdzv_etcd.runtime.lifecycle import Lifecycle
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Connection, Settings
from rdzv_etcd.world.participant import Connect, open_etcd


class Watcher(Runner, Protocol):
    """Makes watches of one job, and keeps them until it ends: a participant, or an observation."""

    @property
    def is_foreign(self) -> bool: ...

    def new_watch(self) -> JobWatch: ...

    async def begin_watch(self, watch: JobWatch) -> None: ...


class AnyJobEvents:
    """What happens in a job; see :class:`JobEvents`."""

    def __init__(self, part: Watcher) -> None:
        """Watch nothing yet."""
        self._part = part
        self._watch = part.new_watch()
        self._finalizer = weakref.finalize(self, _stop, part, self._watch)
        self._finalizer.atexit = False

    @Call
    def next(self, timeout_s: float | None = None) -> Coroutine[Any, Any, JobEvent | None]:
        """Wait until something happens, for at most ``timeout_s`` seconds (``None``: no limit).

        Returns ``None`` if nothing has happened within that time, or there will be nothing more:
        see :attr:`is_closed`. A call that is interrupted or cancelled has taken no event. Raises
        :class:`~rdzv_etcd.errors.EtcdError` and :class:`~rdzv_etcd.errors.StateCorruptError` only
        where it begins; later, what cannot be read is logged at level WARNING, and is read again.
        """
        return self._next(seconds_or_none(timeout_s))

    async def _next(self, limit_s: float | None) -> JobEvent | None:
        await self._part.begin_watch(self._watch)
        return await self._watch.next(limit_s)

    @next.if_interrupted
    async def _give_back(self, _: BaseException, taken: list[JobEvent | None]) -> None:
        for event in taken:
            if event is not None:
                self._watch.give_back(event)

    @next.if_failed
    def _nothing_more(self, error: RdzvEtcdError) -> list[None]:
        has_left = type(error) is RendezvousFailedError
        is_end = has_left or (isinstance(error, RendezvousFailedError) and self.is_closed)
        return [None] if is_end else []

    @Call
    async def _open(self) -> None:
        """Begin to watch now. Raises as :meth:`next`, and for a node that has left
        RendezvousFailedError."""
        try:
            await self._part.begin_watch(self._watch)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether there will be nothing more; true in a forked child, which receives nothing."""
        return self._watch.is_closed or self._part.is_foreign

    def close(self) -> None:
        """Stop watching, without waiting for that. Idempotent."""
        self._finalizer()


class JobEvents(Blocking, AnyJobEvents):
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


def open_events(part: Watcher) -> JobEvents:
    """Watch from now on."""
    events = JobEvents(part)
    events._open()
    return events


def _stop(part: Watcher, watch: JobWatch) -> None:
    watch.end()
    part.begin(watch.close())


class Observation(Lifecycle):
    """What an observer holds until it is closed: the connection, a hold on the loop, watches."""

    ended = "the observer was closed meanwhile"

    def __init__(self, settings: Settings, connect: Connect | None, clock: Clock) -> None:
        refuse_after_fork()
        loop_thread = LoopHold.acquire()
        try:
            self._etcd = loop_thread.run(open_etcd(settings, connect))
        except BaseException:
            loop_thread.release()
            raise
        super().__init__(loop_thread)
        self.settings = settings
        self._clock = clock
        self._keys = JobKeys(settings.prefix, settings.job_id)
        self._watches: weakref.WeakSet[JobWatch] = weakref.WeakSet()
        """Those that are open are kept by their tasks."""
        try:
            self.run(self._contact(settings.connection if connect is None else None))
        except BaseException:
            self.end(self.close)
            raise

    async def _contact(self, connection: Connection | None) -> None:
        """Ask etcd something that needs no more than what an observer may read. Raises EtcdError,
        within ``connect_timeout_s``. ``connection``: how it is reached, if it is as the settings
        say."""
        limit_s = self.settings.connection.connect_timeout_s
        async with first_contact(connection):
            await self._etcd.get(self._keys.nodes.read(count_only=True), timeout_s=limit_s)

    def check_open(self) -> None:
        if self.has_ended:
            raise MisuseError(
                f"the observer of job {self.settings.job_id!r} was closed: make another one"
            )

    async def state(self, timeout_s: float | None) -> JobState:
        return await read_state(self._etcd, self._keys, self._clock, timeout_s)

    def new_watch(self) -> JobWatch:
        return JobWatch(self._etcd, self._keys, self._clock)

    async def begin_watch(self, watch: JobWatch) -> None:
        self._watches.add(watch)
        await watch.open(self.settings.connection.request_timeout_s)

    async def close(self) -> None:
        """Do the last work."""
        atexit.unregister(self.at_exit)
        for watch in tuple(self._watches):
            await watch.close()
        await self._etcd.close()

    def drop(self) -> None:
        """Begin to end; may be called anywhere, by the garbage collector in the middle of
        anything."""
        self.begin_to_end(self.close)

    def at_exit(self) -> None:
        self.end(self.close)  # threads that read events learn that there will be no more


class AnyObserver:
    """Looks at one job from outside; see :class:`Observer`."""

    _part: Observation

    @property
    def job(self) -> str:
        """The job's id."""
        return self._part.settings.job_id

    @Call
    def state(self, timeout_s: float | None = None) -> Coroutine[Any, Any, JobState]:
        """Read the present state of the job. Nothing is remembered from one call to the next.

        One read of etcd per 500 nodes, one more in a large world, and one for the job's lease; it
        takes at most ``timeout_s`` seconds in all, or ``request_timeout`` for each of them.
        A job that is not there is no error: see :attr:`~rdzv_etcd.JobState.stage`. Raises
        :class:`~rdzv_etcd.errors.StateCorruptError` if somebody else wrote there, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return self._part.state(seconds_or_none(timeout_s))

    @LastCall
    async def close(self) -> None:
        """Close the connection and end the events that are being read. Idempotent; waits until it
        is done, except on the library's own thread. If it is interrupted or cancelled, the observer
        closes all the same."""
        await self._part.close()


class Observer(Blocking, AnyObserver):
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
        self._part = Observation(settings, connect, clock or SystemClock())
        self._finalizer = weakref.finalize(self, self._part.drop)
        self._finalizer.atexit = False

    def events(self) -> JobEvents:
        """Watch the job from now on: see :class:`~rdzv_etcd.JobEvents`.

        Blocks until the watch has begun, for a few times ``request_timeout`` at most. Raises
        :class:`~rdzv_etcd.errors.StateCorruptError` if somebody else wrote there, and
        :class:`~rdzv_etcd.errors.EtcdError`.
        """
        return open_events(self._part)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

"""The library for programs on asyncio: the same names as in :mod:`rdzv_etcd`, to be awaited.

::

    async with await rdzv_etcd.aio.connect("etcd-host:2379", job="my-job", nodes=2) as group:
        async for world in group.worlds():
            print(world.rank, await world.exchange(b"10.0.0.7:9000"))

Everything runs on the library's own event loop, in its own thread; nothing here blocks the
caller's, and what waits long occupies no further thread. A call that is cancelled ends what it has
begun within some two seconds. What each method does and raises is what it does and raises there.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rdzv_etcd.arguments import Bytes, named_key, seconds_or_none, several_items, several_keys
from rdzv_etcd.core.elections import Fence
from rdzv_etcd.core.events import JobEvent
from rdzv_etcd.core.job_state import JobState
from rdzv_etcd.core.model import Closure
from rdzv_etcd.core.over import WorldChange
from rdzv_etcd.errors import DrainedError, JobClosedError, MisuseError, RendezvousFailedError
from rdzv_etcd.etcd.forks import refuse_after_fork
from rdzv_etcd.group import group as blocking
from rdzv_etcd.group import job_events as blocking_events
from rdzv_etcd.group import leaderships as blocking_leaderships
from rdzv_etcd.group import observer as blocking_observer
from rdzv_etcd.group import round_store as blocking_store
from rdzv_etcd.group import world as blocking_world
from rdzv_etcd.group.connect import (
    ConnectionOptions,
    Options,
    settings_for,
    settings_to_observe,
)
from rdzv_etcd.group.gate_check import GateFunction
from rdzv_etcd.group.listener import Listener
from rdzv_etcd.group.loop_thread import told_from_a_thread
from rdzv_etcd.group.opening import lent
from rdzv_etcd.group.participation import Participation
from rdzv_etcd.group.round_store import TIMEOUT_S, named
from rdzv_etcd.group.world import Master, WorldMember
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.logs import show

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Group",
    "JobEvents",
    "Leadership",
    "Observer",
    "RoundStore",
    "World",
    "connect",
    "observe",
]

T = TypeVar("T")


async def connect(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    nodes: int | tuple[int, int],
    data: Mapping[str, object] | None = None,
    local_addr: str | None = None,
    epoch_floor: int = 0,
    etcd: Any = None,
    gate: GateFunction | None = None,
    **options: Unpack[Options],
) -> Group:
    """As :func:`rdzv_etcd.connect`. If this is cancelled, the node leaves as soon as it has
    connected."""
    settings = settings_for(
        endpoints,
        options,
        job=job,
        nodes=nodes,
        data=data,
        local_addr=local_addr,
        epoch_floor=epoch_floor,
        etcd=etcd,
    )
    show(settings.log)
    make = partial(blocking.Group, settings, connect=lent(etcd), gate=gate)
    return Group(await _in_thread(make, lambda group: group._part.drop()))


async def observe(
    endpoints: str | Sequence[str] | None = None,
    *,
    job: str,
    etcd: Any = None,
    **options: Unpack[ConnectionOptions],
) -> Observer:
    """As :func:`rdzv_etcd.observe`."""
    settings = settings_to_observe(endpoints, options, job=job, etcd=etcd)
    make = partial(blocking_observer.Observer, settings, connect=lent(etcd))
    return Observer(await _in_thread(make, _close_observer))


def _close_observer(observer: blocking_observer.Observer) -> None:
    observer._part.begin_to_close()


class Group:
    """One participant of one job, as :class:`rdzv_etcd.Group`; :func:`connect` makes one.

    Its methods may be awaited on any event loop, :meth:`join` only when no other call of it is
    under way.
    """

    def __init__(self, group: blocking.Group) -> None:
        """Use ``group`` from asyncio; it may be used in both ways at the same time."""
        self._group = group

    @property
    def job(self) -> str:
        """The job's id."""
        return self._group.job

    @property
    def node_id(self) -> str:
        """This node's id, ``<host>~<pid>~<random>``: names the process, not only the host."""
        return self._group.node_id

    async def worlds(self) -> AsyncIterator[World]:
        """As :meth:`rdzv_etcd.Group.worlds`, for ``async for``."""
        while True:
            try:
                world = await self.join()
            except JobClosedError as error:
                if error.succeeded and not error.is_refused:
                    return
                raise
            except DrainedError:
                return
            yield world

    async def join(self, timeout_s: float | None = None, *, because: str = "") -> World:
        """As :meth:`rdzv_etcd.Group.join`. If this is cancelled, the node takes its arrival back,
        and may join again."""
        group, part = self._group, self._group._part
        bound = None
        if part.bound is None and not part.has_left:
            bound = await _in_thread(group._bind, lambda listener: listener.close())
        try:
            with group._one_join(bound) as listener:
                await self._pass_gate(timeout_s)
                seat = await part.call(group._arrive(listener, timeout_s, because))
                return World(group._enter(listener, seat))
        except DrainedError as error:
            await self.leave(group._note_drained(error))
            raise

    async def _pass_gate(self, timeout_s: float | None) -> None:
        gate, part = self._group._gate, self._group._part
        if gate.is_open or not await part.call(gate.cool_down(seconds_or_none(timeout_s))):
            return
        with part.node.call_ins.awaited():
            try:
                failure = await _in_thread(gate.ask, lambda _: None)
            except asyncio.CancelledError:
                gate.abandon()
                raise
        await part.call(gate.settle(failure))

    def drain(self, reason: str = "no reason given") -> None:
        """As :meth:`rdzv_etcd.Group.drain`: does not wait."""
        self._group.drain(reason)

    @property
    def drain_reason(self) -> str | None:
        """As :attr:`rdzv_etcd.Group.drain_reason`: from memory."""
        return self._group.drain_reason

    def waiting_count(self) -> int:
        """As :meth:`rdzv_etcd.Group.waiting_count`: from memory."""
        return self._group.waiting_count()

    def closure(self) -> Closure | None:
        """As :meth:`rdzv_etcd.Group.closure`: from memory."""
        return self._group.closure()

    def events(self) -> JobEvents:
        """As :meth:`rdzv_etcd.Group.events`, for ``async for``; it begins when it is first asked,
        or with ``async with``."""
        return JobEvents(self._group._events())

    async def report_dead(
        self, member: WorldMember | str, evidence: str, *, certain: bool = False
    ) -> bool:
        """As :meth:`rdzv_etcd.Group.report_dead`."""
        work = self._group._report_dead(member, evidence, certain=certain)
        return await self._group._part.call(work)

    async def finish(self, reason: str = "the work is done") -> bool:
        """As :meth:`rdzv_etcd.Group.finish`."""
        return await self._end(reason, succeeded=True, force=False)

    async def fail(self, reason: str, *, force: bool = False) -> bool:
        """As :meth:`rdzv_etcd.Group.fail`."""
        return await self._end(reason, succeeded=False, force=force)

    async def _end(self, reason: str, *, succeeded: bool, force: bool) -> bool:
        work = self._group._end_it(reason, succeeded=succeeded, force=force)
        return await self._group._part.call(work)

    async def leave(self, reason: str = "left") -> None:
        """As :meth:`rdzv_etcd.Group.leave`. If this is cancelled, the node leaves all the same."""
        if self._group._part.is_foreign:  # a forked child has nothing to end, and no event loop
            return
        left, tell = told_from_a_thread()
        if self._group._begin_to_leave(reason, tell):
            await left

    @property
    def has_left(self) -> bool:
        return self._group.has_left

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.leave(blocking.reason_after(kind))


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
        self._observer._finalizer.detach()
        closed, tell = told_from_a_thread()
        if self._observer._part.begin_to_close(tell):
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


class World:
    """One formed round, as :class:`rdzv_etcd.World`. Never changes; it gets over."""

    def __init__(self, world: blocking_world.World) -> None:
        """Made by :meth:`Group.join`."""
        self._world = world
        self._part = world._part
        self._node_ids: tuple[str, ...] | None = None
        self._members: tuple[WorldMember, ...] | None = None

    def __repr__(self) -> str:
        return repr(self._world)

    @property
    def rank(self) -> int:
        """This node's rank, from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._world.size

    @property
    def epoch(self) -> int:
        """Fencing token: see :attr:`rdzv_etcd.World.epoch`."""
        return self._world.epoch

    @property
    def round(self) -> int:
        """Counts the worlds of one run of the job, from 1; for people."""
        return self._world.round

    @property
    def master(self) -> Master:
        """Where rank 0 is reached by the others."""
        return self._world.master

    async def node_ids(self) -> tuple[str, ...]:
        """As :attr:`rdzv_etcd.World.node_ids`: in a large world the first call reads etcd."""
        if self._node_ids is None:
            self._node_ids = await self._part.call(self._world._read_node_ids())
        return self._node_ids

    async def members(self) -> tuple[WorldMember, ...]:
        """As :attr:`rdzv_etcd.World.members`: the first call reads etcd."""
        if self._members is None:
            self._members = await self._part.call(self._world._read_members())
        return self._members

    @property
    def over(self) -> bool:
        """As :attr:`rdzv_etcd.World.over`: from memory."""
        return self._world.over

    @property
    def change(self) -> WorldChange | None:
        """As :attr:`rdzv_etcd.World.change`: from memory."""
        return self._world.change

    @property
    def should_yield(self) -> bool:
        """As :attr:`rdzv_etcd.World.should_yield`: from memory."""
        return self._world.should_yield

    def alive(self) -> None:
        """As :meth:`rdzv_etcd.World.alive`, for the event loop's thread."""
        self._world.alive()

    async def wait_over(self, timeout_s: float | None = None) -> bool:
        """Wait until this world is over; ``False`` after ``timeout_s`` seconds (``None``: no
        limit)."""
        limit_s = seconds_or_none(timeout_s)
        if not self.over:
            try:
                await self._part.call(self._world._until_over(limit_s))
            except MisuseError:
                raise
            except (TimeoutError, asyncio.TimeoutError, RendezvousFailedError):
                pass
        return self.over

    async def barrier(self, name: str, timeout_s: float = 300.0) -> None:
        """As :meth:`rdzv_etcd.World.barrier`."""
        await self._part.call(self._world._barriers.wait(name, timeout_s))

    async def exchange(self, data: Bytes, timeout_s: float = 300.0) -> list[bytes]:
        """As :meth:`rdzv_etcd.World.exchange`."""
        return await self._part.call(self._world._exchange.give(data, timeout_s))

    async def elect(self, name: str, timeout_s: float | None = None) -> Leadership:
        """As :meth:`rdzv_etcd.World.elect`."""
        return Leadership(await self._part.call(self._world._elect(name, timeout_s)))

    async def leader(self, name: str) -> str | None:
        """As :meth:`rdzv_etcd.World.leader`."""
        return await self._part.call(self._world._elections.leader(name))

    @cached_property
    def store(self) -> RoundStore:
        """The world's own key-value store; empty when the world begins, gone after it."""
        return RoundStore(self._world.store, self._part)

    def take_listener(self) -> Listener | None:
        """As :meth:`rdzv_etcd.World.take_listener`: does not wait."""
        return self._world.take_listener()


class Leadership:
    """A leadership that this member came to, as :class:`rdzv_etcd.Leadership`."""

    def __init__(self, leadership: blocking_leaderships.Leadership) -> None:
        """Made by :meth:`World.elect`."""
        self._leadership = leadership

    def __repr__(self) -> str:
        return repr(self._leadership)

    @property
    def name(self) -> str:
        """What this member leads in."""
        return self._leadership.name

    @property
    def fence(self) -> Fence:
        """As :attr:`rdzv_etcd.Leadership.fence`."""
        return self._leadership.fence

    @property
    def is_held(self) -> bool:
        """As :attr:`rdzv_etcd.Leadership.is_held`: from memory."""
        return self._leadership.is_held

    async def wait_lost(self, timeout_s: float | None = None) -> bool:
        """As :meth:`rdzv_etcd.Leadership.wait_lost`."""
        limit_s = seconds_or_none(timeout_s)
        try:
            await self._leadership._part.call(self._leadership._lost(limit_s))
        except MisuseError:
            raise
        except (TimeoutError, asyncio.TimeoutError, RendezvousFailedError):
            pass
        return self._leadership._is_over

    async def set(self, key: str, value: Bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """As :meth:`rdzv_etcd.Leadership.set`."""
        await self._leadership._part.call(self._leadership._set(key, value, timeout_s))

    async def resign(self) -> None:
        """As :meth:`rdzv_etcd.Leadership.resign`. If this is cancelled, it is resigned all the
        same."""
        work = self._leadership._resigned()
        if work is not None:
            with contextlib.suppress(RendezvousFailedError):  # this node leaves
                await self._leadership._part.call(work)

    async def __aenter__(self) -> Leadership:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.resign()


class RoundStore:
    """The key-value store of a world, as :class:`rdzv_etcd.RoundStore`, which says what each method
    does. ``timeout_s`` are seconds, ``None``: without limit."""

    def __init__(self, store: blocking_store.RoundStore, part: Participation) -> None:
        """Made by :attr:`World.store`."""
        self._blocking = store
        self._part = part

    # -- reading ----------------------------------------------------------------------------------

    async def get(
        self, key: str, timeout_s: float | None = TIMEOUT_S, *, even_if_over: bool = False
    ) -> bytes:
        """Return the value; waits for a missing key."""
        return await self._do(
            lambda store, limit_s: store.get(key, limit_s),
            timeout_s,
            f"store key {named_key(key)}",
            even_if_over=even_if_over,
        )

    async def multi_get(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> list[bytes]:
        """Return the values in the order of ``keys``; waits for missing ones."""
        keys = several_keys(keys)
        return await self._do(
            lambda store, limit_s: store.multi_get(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    async def wait(
        self,
        keys: Iterable[str],
        timeout_s: float | None = TIMEOUT_S,
        *,
        even_if_over: bool = False,
    ) -> None:
        """Return when there is a value or a queue's item under each key."""
        keys = several_keys(keys)
        await self._do(
            lambda store, limit_s: store.wait(keys, limit_s),
            timeout_s,
            named(keys),
            even_if_over=even_if_over,
        )

    async def check(self, keys: Iterable[str], timeout_s: float | None = TIMEOUT_S) -> bool:
        """Tell at once whether all keys exist."""
        keys = several_keys(keys)
        return await self._do(lambda store, limit_s: store.check(keys, limit_s), timeout_s)

    async def num_keys(self, timeout_s: float | None = TIMEOUT_S) -> int:
        """Return how many values there are."""
        return await self._do(lambda store, limit_s: store.num_keys(limit_s), timeout_s)

    async def list_keys(self, timeout_s: float | None = TIMEOUT_S) -> list[str]:
        """Return the keys of all values in ascending order."""
        return await self._do(lambda store, limit_s: store.list_keys(limit_s), timeout_s)

    # -- writing ----------------------------------------------------------------------------------

    async def set(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Set the value."""
        await self._do(lambda store, limit_s: store.set(key, value, limit_s), timeout_s)

    async def multi_set(
        self, values: Mapping[str, bytes], timeout_s: float | None = TIMEOUT_S
    ) -> None:
        """Set all."""
        items = several_items(values)
        await self._do(lambda store, limit_s: store.multi_set(items, limit_s), timeout_s)

    async def add(self, key: str, amount: int, timeout_s: float | None = TIMEOUT_S) -> int:
        """Add to a number and return the sum; never counts twice."""
        return await self._do(lambda store, limit_s: store.add(key, amount, limit_s), timeout_s)

    async def append(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Append to the value; a missing key is set."""
        await self._do(lambda store, limit_s: store.append(key, value, limit_s), timeout_s)

    async def compare_set(
        self, key: str, expected: bytes, desired: bytes, timeout_s: float | None = TIMEOUT_S
    ) -> bytes:
        """Set the value if it is the expected one; return the value afterwards."""
        return await self._do(
            lambda store, limit_s: store.compare_set(key, expected, desired, limit_s), timeout_s
        )

    async def delete(self, key: str, timeout_s: float | None = TIMEOUT_S) -> bool:
        """Delete the key; tell whether it was there."""
        return await self._do(lambda store, limit_s: store.delete(key, limit_s), timeout_s)

    # -- queues -----------------------------------------------------------------------------------

    async def queue_push(self, key: str, value: bytes, timeout_s: float | None = TIMEOUT_S) -> None:
        """Put an item at the end of a queue."""
        await self._do(lambda store, limit_s: store.queue_push(key, value, limit_s), timeout_s)

    async def queue_pop(
        self,
        key: str,
        timeout_s: float | None = TIMEOUT_S,
        *,
        block: bool = True,
        even_if_over: bool = False,
    ) -> bytes | None:
        """Take the oldest item; without one wait, or return ``None`` at once unless ``block``."""
        return await self._do(
            lambda store, limit_s: store.queue_pop(key, limit_s, block=block),
            timeout_s,
            f"queue {named_key(key)}",
            last_look=False,
            even_if_over=even_if_over,
        )

    async def queue_len(self, key: str, timeout_s: float | None = TIMEOUT_S) -> int:
        """Return how many items the queue has."""
        return await self._do(lambda store, limit_s: store.queue_len(key, limit_s), timeout_s)

    async def _do(
        self,
        operation: Callable[[KeyValueStore, float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        waits_for: str | None = None,
        *,
        last_look: bool = True,
        even_if_over: bool = False,
    ) -> T:
        store = self._blocking
        work = store._work(
            lambda limit_s: operation(store._store, limit_s),
            seconds_or_none(timeout_s),
            waits_for,
            last_look=last_look,
            even_if_over=even_if_over,
        )
        return await self._part.call(work)


async def _in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what blocks for a moment in a thread of its own: those of the event loop may all be taken.

    If the caller is cancelled meanwhile, undo it when it is done, be that after the end of the
    caller's event loop. ``undo`` must not block. A forked child is refused here.
    """
    refuse_after_fork()
    made: list[T] = []
    abandoned = threading.Event()

    def undo_it() -> None:
        with contextlib.suppress(IndexError):  # the other thread has done it
            undo(made.pop())

    def do_it() -> T:
        result = work()
        made.append(result)
        if abandoned.is_set():
            undo_it()
        return result

    pool = ThreadPoolExecutor(1, "rdzv-etcd start")
    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, context.run, do_it)
    except asyncio.CancelledError:
        abandoned.set()
        undo_it()
        raise
    finally:
        pool.shutdown(wait=False)

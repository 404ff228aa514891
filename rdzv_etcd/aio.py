"""The library for programs on asyncio: the same names as in :mod:`rdzv_etcd`, to be awaited.

::

    async with await rdzv_etcd.aio.connect("etcd-host:2379", job="my-job", nodes=2) as group:
        async for world in group.worlds():
            print(world.rank, await world.exchange(b"10.0.0.7:9000"))

Everything runs on the library's own event loop, in its own thread; nothing here blocks the
caller's, and what waits long occupies no further thread. A call that is cancelled ends what it has
begun within some two seconds. Each method does and raises the same as its blocking twin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from rdzv_etcd.errors import RendezvousFailedError
from rdzv_etcd.protocol.events import JobEvent
from rdzv_etcd.runtime.faces import Asyncio
from rdzv_etcd.runtime.threads import in_thread
from rdzv_etcd.world import connect as blocking_connect
from rdzv_etcd.world import group as blocking_group
from rdzv_etcd.world import observer as blocking_observer
from rdzv_etcd.world.round_store import AnyRoundStore
from rdzv_etcd.world.world import AnyWorld, WorldMember

P = ParamSpec("P")
B = TypeVar("B", blocking_group.Group, blocking_observer.Observer)
A = TypeVar("A")

__all__ = [
    "Group",
    "JobEvents",
    "Observer",
    "RoundStore",
    "World",
    "connect",
    "observe",
]


class RoundStore(Asyncio, AnyRoundStore):
    """The key-value store of a world, as :class:`rdzv_etcd.RoundStore`; made by
    :attr:`World.store`."""


class World(Asyncio, AnyWorld[RoundStore]):
    """One formed round, as :class:`rdzv_etcd.World`. Never changes; it gets over."""

    _store_class = RoundStore

    async def node_ids(self) -> tuple[str, ...]:
        """As :attr:`rdzv_etcd.World.node_ids`: in a large world the first call reads etcd."""
        return await self._node_ids()

    async def members(self) -> tuple[WorldMember, ...]:
        """As :attr:`rdzv_etcd.World.members`: the first call reads etcd."""
        return await self._members()


class JobEvents(Asyncio, blocking_observer.AnyJobEvents):
    """What happens in a job, as :class:`rdzv_etcd.JobEvents`, for ``async for``; made by
    :meth:`Group.events` and :meth:`Observer.events`. It begins when it is first asked, or with
    ``async with``."""

    def __aiter__(self) -> JobEvents:
        return self

    async def __anext__(self) -> JobEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> JobEvents:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Group(Asyncio, blocking_group.AnyGroup[World]):
    """One participant of one job, as :class:`rdzv_etcd.Group`; :func:`connect` makes one.

    Its methods may be awaited on any event loop, :meth:`join` only when no other call of it is
    under way.
    """

    _world_class = World

    def __init__(self, group: blocking_group.Group) -> None:
        """Use ``group`` from asyncio; it may be used in both ways at the same time."""
        self._part = group._part
        self._kept = group  # its node leaves when it is garbage

    async def worlds(self) -> AsyncIterator[World]:
        """As :meth:`rdzv_etcd.Group.worlds`, for ``async for``."""
        while True:
            try:
                world = await self.join()
            except RendezvousFailedError as error:
                if blocking_group.is_good_end(error):
                    return
                raise
            yield world

    def events(self) -> JobEvents:
        """As :meth:`rdzv_etcd.Group.events`, for ``async for``; it begins when it is first asked,
        or with ``async with``."""
        return JobEvents(self._part)

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.leave(blocking_group.reason_after(kind))


class Observer(Asyncio, blocking_observer.AnyObserver):
    """Looks at one job from outside, as :class:`rdzv_etcd.Observer`; :func:`observe` makes one."""

    def __init__(self, observer: blocking_observer.Observer) -> None:
        """Use ``observer`` from asyncio; it may be used in both ways at the same time."""
        self._part = observer._part
        self._kept = observer

    def events(self) -> JobEvents:
        """As :meth:`rdzv_etcd.Observer.events`, for ``async for``; it begins when it is first
        asked, or with ``async with``."""
        return JobEvents(self._part)

    async def __aenter__(self) -> Observer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _awaited(make: Callable[P, B], face: Callable[[B], A]) -> Callable[P, Coroutine[Any, Any, A]]:
    """Return an ``async`` function that does the same as ``make``; if it is cancelled, the node
    leaves, or the observer closes, as soon as it is connected."""

    @wraps(make)
    async def made(*args: P.args, **options: P.kwargs) -> A:
        work = partial(make, *args, **options)
        return face(await in_thread(work, lambda unwanted: unwanted._part.drop()))

    return made


connect = _awaited(blocking_connect.connect, Group)
observe = _awaited(blocking_connect.observe, Observer)

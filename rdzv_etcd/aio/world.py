"""One formed round and its key-value store, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from rdzv_etcd.arguments import Bytes, named_key, seconds_or_none, several_items, several_keys
from rdzv_etcd.errors import MisuseError, RendezvousFailedError
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.world import round_store as blocking_store
from rdzv_etcd.world import world as blocking_world
from rdzv_etcd.world.participation import Participation
from rdzv_etcd.world.round_store import TIMEOUT_S, named
from rdzv_etcd.world.world import Master, WorldMember
from rdzv_etcd.world_change import WorldChange

T = TypeVar("T")


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
        """Return when all keys exist."""
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

    async def _do(
        self,
        operation: Callable[[KeyValueStore, float | None], Coroutine[Any, Any, T]],
        timeout_s: float | None,
        waits_for: str | None = None,
        *,
        even_if_over: bool = False,
    ) -> T:
        store = self._blocking
        work = store._work(
            lambda limit_s: operation(store._store, limit_s),
            seconds_or_none(timeout_s),
            waits_for,
            even_if_over=even_if_over,
        )
        return await self._part.call(work)


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
        try:
            await self._part.call(self._world._collectives.barrier(name, timeout_s))
        except BaseException as error:
            self._world._leave_if_interrupted(error, "a barrier")
            raise

    async def exchange(self, data: Bytes, timeout_s: float = 300.0) -> list[bytes]:
        """As :meth:`rdzv_etcd.World.exchange`."""
        try:
            return await self._part.call(self._world._collectives.exchange(data, timeout_s))
        except BaseException as error:
            self._world._leave_if_interrupted(error, "an exchange")
            raise

    @cached_property
    def store(self) -> RoundStore:
        """The world's own key-value store; empty when the world begins, gone after it."""
        return RoundStore(self._world.store, self._part)

    def take_listener(self) -> Listener | None:
        """As :meth:`rdzv_etcd.World.take_listener`: does not wait."""
        return self._world.take_listener()

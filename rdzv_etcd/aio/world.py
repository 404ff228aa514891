"""One formed round, for asyncio."""

from __future__ import annotations

import asyncio
from functools import cached_property

from rdzv_etcd.aio.round_store import RoundStore
from rdzv_etcd.arguments import Bytes, seconds_or_none
from rdzv_etcd.errors import MisuseError, RendezvousFailedError
from rdzv_etcd.runtime.listener import Listener
from rdzv_etcd.world import world as blocking_world
from rdzv_etcd.world.world import Master, WorldMember
from rdzv_etcd.world_change import WorldChange


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

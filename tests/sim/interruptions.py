"""Barriers and exchanges whose calls run out of time and are made again, or are interrupted.

Calls as callers on threads and event loops of their own do (:mod:`rdzv_etcd.aio.world`): a caller
that is interrupted waits for the library's own loop only so long, and may be interrupted when all
is done but the result is on its way. Its node has then left the world.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from typing import Any, TypeVar

from rdzv_etcd.clock import wait_for
from rdzv_etcd.errors import BarrierTimeoutError, MisuseError, RdzvEtcdError, WorldOverError
from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.runtime.loop_thread import CANCEL_GRACE_S
from rdzv_etcd.testing import SimLoop
from rdzv_etcd.world.collectives import Collectives
from tests.sim.history import History
from tests.sim.invariants import Invariant

T = TypeVar("T")

STEP_S = 1.0
LONGEST_S = 15.0

INTERRUPTED_AFTER_S = (0.0, 0.001, 0.003, 0.0045, 0.006, 0.008, 0.1, 1.0, LONGEST_S + 10.0)
"""A request and its answer take 2 ms where nothing is wrong."""
_LIMITS_S = (0.0, 0.002, 0.005, 0.5, LONGEST_S)
_ON_ITS_WAY_S = (0.0, 0.001, 0.3)
_PAUSE_S = (0.0, 0.0, 0.1, STEP_S)
"""Between a call that ran out of time and the next."""
_PATIENT = 0.4
"""So many of the calls have all the time they need."""
_INTERRUPTED = 0.01
"""So many of the calls are interrupted, until everything is healed: each ends the world."""


class _InterruptedError(Exception):
    """The call was interrupted, so its node has left the world."""


class Interrupted:
    """One member's calls in one world."""

    def __init__(self, node: Node, world: Seat, collectives: Collectives, history: History) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop = loop
        self._node = node
        self._world = world
        self._history = history
        self._node_id = node.context.identity.node_id
        self._collectives = collectives
        self._rng = random.Random(f"interruptions {loop.seed} {self._node_id} {world.epoch}")
        self.barriers = 0
        """How many it has passed …"""
        self.exchanges = 0
        """… and how many it has done."""

    async def meet(self) -> None:
        """Pass one barrier after the other, until cancelled or interrupted."""
        history, world, me = self._history, self._world, self._node_id
        for turn in count(1):
            name = f"interrupted, turn {turn}"
            while True:
                history.reach_barrier(world, name, me)
                try:
                    passed = await self._call(partial(self._collectives.barrier, "interrupted"))
                except _InterruptedError:
                    return
                except BarrierTimeoutError as error:
                    if error.missing is not None:  # etcd has heard of it
                        history.give_up_barrier(world, name, me)
                    passed = []
                if passed:
                    break
                await self._pause()
            history.pass_barrier(world, name, me)
            self.barriers = turn
            await asyncio.sleep(STEP_S)

    async def exchange(self) -> None:
        """Exchange something again and again, until cancelled or interrupted."""
        history, world, me = self._history, self._world, self._node_id
        for turn in count(1):
            for attempt in count(1):
                data = f"{me}: turn {turn}, attempt {attempt}".encode()
                history.give(world, turn, me, data)
                try:
                    taken = await self._call(partial(self._collectives.exchange, data))
                except _InterruptedError:
                    return
                except BarrierTimeoutError:
                    taken = []
                if taken:
                    break
                await self._pause()
            history.take(world, turn, me, taken[0])
            self.exchanges = turn
            await asyncio.sleep(STEP_S)

    async def _call(self, call: Callable[[float], Coroutine[Any, Any, T]]) -> list[T]:
        """Call once; return the result, if there is one. Raises BarrierTimeoutError, and
        _InterruptedError."""
        rng = self._rng
        limit_s = LONGEST_S if rng.random() < _PATIENT else rng.choice(_LIMITS_S)
        if rng.random() < _INTERRUPTED and not self._history.is_healed:
            return [await self._interrupted(call, rng.choice(INTERRUPTED_AFTER_S))]
        try:
            return [await call(limit_s)]
        except BarrierTimeoutError:
            raise
        except MisuseError as error:
            self._history.demand(
                False, Invariant.IN_STEP, f"{self._node_id} may not call again: {error}"
            )
        except RdzvEtcdError as error:
            self._history.note(self._loop.time(), f"{self._node_id}: {error}")
        return []

    async def _interrupted(
        self, call: Callable[[float], Coroutine[Any, Any, T]], after_s: float
    ) -> T:
        try:
            return await wait_for(self._carried(call(LONGEST_S)), after_s)
        except TimeoutError:
            await self._check_over()
            raise _InterruptedError from None
        except RdzvEtcdError as error:
            self._history.note(self._loop.time(), f"{self._node_id}: {error}")
            raise BarrierTimeoutError("it ended by itself") from None

    async def _check_over(self) -> None:
        """The world is over for this member, and its later calls say so."""
        with_error: RdzvEtcdError | None = None
        try:
            await self._collectives.barrier("after an interruption", LONGEST_S)
        except RdzvEtcdError as error:
            with_error = error
        self._history.demand(
            isinstance(with_error, WorldOverError) or self._node.is_gone,
            Invariant.IN_STEP,
            f"{self._node_id} was interrupted, and goes on in its world: {with_error!r}",
        )

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice(_PAUSE_S))

    async def _carried(self, work: Coroutine[Any, Any, T]) -> T:
        """What :meth:`rdzv_etcd.runtime.loop_thread.LoopHold.call` does, the result's way, and what
        :class:`rdzv_etcd.World` does with an interruption."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({task})
            if not task.exception():
                await asyncio.sleep(self._rng.choice(_ON_ITS_WAY_S))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            self._node.attend(self._node.leave_world(self._world, "was interrupted"), "leaving")
            await asyncio.sleep(0)
            raise
        return task.result()

"""Barriers and exchanges whose calls are interrupted, and made again until they are done.

Calls as callers on threads and event loops of their own do (:mod:`rdzv_etcd.aio.world`): who is
interrupted waits for the library's own loop only so long, and may have been interrupted when all
was done but the result was on its way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from typing import Any, TypeVar

from rdzv_etcd.clock import wait_for
from rdzv_etcd.core.member import Seat
from rdzv_etcd.errors import BarrierTimeoutError, MisuseError, RdzvEtcdError
from rdzv_etcd.group.barrier import Barriers
from rdzv_etcd.group.exchange import Exchange
from rdzv_etcd.group.handover import hand_over_awaited
from rdzv_etcd.group.loop_thread import CANCEL_GRACE_S
from rdzv_etcd.group.node import Node
from rdzv_etcd.testing import SimLoop
from tests.sim.history import History
from tests.sim.invariants import Invariant

T = TypeVar("T")

STEP_S = 1.0
LONGEST_S = 15.0

INTERRUPTED_AFTER_S = (0.0, 0.001, 0.003, 0.0045, 0.006, 0.008, 0.1, 1.0, LONGEST_S + 10.0)
"""A request and its answer take 2 ms where nothing is wrong."""
_LIMITS_S = (0.0, 0.005, 0.5, LONGEST_S, LONGEST_S)
_ON_ITS_WAY_S = (0.0, 0.001, 0.3)
_PAUSE_S = (0.0, 0.0, 0.1, STEP_S)
"""Between a call that was interrupted and the next."""
_PATIENT = 0.4
"""So many of the calls end by themselves."""


class Interrupted:
    """One member's calls in one world."""

    def __init__(self, node: Node, world: Seat, barriers: Barriers, history: History) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop = loop
        self._world = world
        self._history = history
        self._node_id = node.context.identity.node_id
        self._barrier = barriers.named("interrupted")
        self._exchange = Exchange(node, world)
        self._rng = random.Random(f"interruptions {loop.seed} {self._node_id} {world.epoch}")
        self.barriers = 0
        """How many it has passed …"""
        self.exchanges = 0
        """… and how many it has done."""

    async def meet(self) -> None:
        """Pass one barrier after the other, until cancelled."""
        history, world, me = self._history, self._world, self._node_id
        for turn in count(1):
            name = f"interrupted, turn {turn}"
            passed: list[list[int]] = []
            while not passed:
                history.reach_barrier(world, name, me)
                passed = await self._call(self._meet)
                if not passed and await self._pause() >= STEP_S:  # by now etcd has been told
                    history.give_up_barrier(world, name, me)
                    await asyncio.sleep(STEP_S)
            history.pass_barrier(world, name, me)
            self.barriers = turn
            await asyncio.sleep(STEP_S)

    async def exchange(self) -> None:
        """Exchange something again and again, until cancelled."""
        history, world, me = self._history, self._world, self._node_id
        for turn in count(1):
            taken: list[list[bytes]] = []
            for attempt in count(1):
                data = f"{me}: turn {turn}, attempt {attempt}".encode()
                history.give(world, turn, me, data)
                taken = await self._call(partial(self._give, data))
                if taken:
                    break
                await self._pause()
            history.take(world, turn, me, taken[0])
            self.exchanges = turn
            await asyncio.sleep(STEP_S)

    async def _meet(self, limit_s: float) -> list[int]:
        passed: list[int] = []
        await hand_over_awaited(
            lambda: self._carried(self._barrier.wait(limit_s, passed)),
            lambda: self._barrier.not_told(passed),
        )
        return passed

    async def _give(self, data: bytes, limit_s: float) -> list[bytes]:
        taken: list[list[bytes]] = []
        return await hand_over_awaited(
            lambda: self._carried(self._exchange.give(data, limit_s, taken)),
            lambda: self._exchange.not_told(taken),
        )

    async def _call(self, call: Callable[[float], Coroutine[Any, Any, T]]) -> list[T]:
        """Call once; return the result, if there is one."""
        limit_s, patience_s = LONGEST_S, LONGEST_S + 10.0
        if self._rng.random() > _PATIENT:
            limit_s = self._rng.choice(_LIMITS_S)
            patience_s = self._rng.choice(INTERRUPTED_AFTER_S)
        try:
            return [await wait_for(call(limit_s), patience_s)]
        except (TimeoutError, BarrierTimeoutError):
            pass
        except MisuseError as error:
            self._history.demand(
                False, Invariant.IN_STEP, f"{self._node_id} may not call again: {error}"
            )
        except RdzvEtcdError as error:
            self._history.note(self._loop.time(), f"{self._node_id}: {error}")
        return []

    async def _pause(self) -> float:
        pause_s = self._rng.choice(_PAUSE_S)
        await asyncio.sleep(pause_s)
        return pause_s

    async def _carried(self, work: Coroutine[Any, Any, T]) -> T:
        """What :meth:`rdzv_etcd.group.loop_thread.LoopHold.call` does, and the result's way."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({task})
            await asyncio.sleep(self._rng.choice(_ON_ITS_WAY_S))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            raise
        return task.result()

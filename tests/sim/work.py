"""What an agent's workers do in a world: steps, adds to a shared counter, barriers, and calls that
are interrupted.

Knows the node's face and the round's store; every step and every outcome goes to the history.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

from rdzv_etcd.errors import BarrierTimeoutError, RdzvEtcdError, StateCorruptError, StoreLostError
from rdzv_etcd.kv.store import KeyValueStore
from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol.member import Seat
from rdzv_etcd.world.collectives import Collectives
from tests.sim.history import COUNTER, History
from tests.sim.interruptions import Interrupted

STEP_S = 1.0
ADD_EVERY = 3
BARRIER_EVERY = 16
LIMIT_S = 15.0
"""An add or a barrier that takes longer is given up; its outcome then is unknown."""

EXIT_LIMIT_S = 300.0


class Work:
    """One node's work in one world."""

    def __init__(self, node: Node, world: Seat, history: History) -> None:
        context = node.context
        self._node = node
        self._world = world
        self._collectives = Collectives(node, world)
        self._turns: Counter[str] = Counter()
        self.interrupted = Interrupted(node, world, self._collectives, history)
        self._history = history
        self._node_id = context.identity.node_id
        self.store = KeyValueStore(
            context.etcd,
            context.keys.store(world.round, world.run),
            world.job_lease,
            writer=f"{self._node_id}@{world.epoch}",
            clock=context.clock,
        )

    async def run(self) -> None:
        """Work until cancelled; returns when the job was closed because it is done, or a call was
        interrupted."""
        works = [self._work()]
        if self._history.interrupts:
            works += [self.interrupted.meet(), self.interrupted.exchange()]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()

    def _note(self, text: str) -> None:
        self._history.note(asyncio.get_running_loop().time(), f"{self._node_id}: {text}")

    async def _work(self) -> None:
        node = self._node
        for step in count(1):
            await asyncio.sleep(STEP_S)
            record = node._member.record
            if node.waiting_count() or record is None:
                continue  # the agent is about to stop this work
            self._history.act(
                self._node_id, record, node.control, node._member.evicted, node.closure()
            )
            if node.closure() is not None:
                return
            try:
                if step % BARRIER_EVERY == 0:
                    await self.meet("all here")
                elif step % ADD_EVERY == 0:
                    await self.add(1 + (step + self._world.rank) % 2)
            except StateCorruptError:
                raise
            except RdzvEtcdError as error:
                self._note(f"step {step}: {error}")

    async def add(self, amount: int) -> int:
        counter = self._history.counter(self._world)
        counter.ask(self._node_id, amount)
        total = await self.store.add(COUNTER, amount, LIMIT_S)
        counter.tell(self._node_id, amount, total)
        return total

    async def exit_barrier(self) -> None:
        """What torch's agents do at the end (``store_util.barrier``): the last one tells all. If
        the store has lost anything, they meet at a barrier (``AgentStore``)."""
        self._history.reach_barrier(self._world, "exit", self._node_id)
        try:
            if await self.store.add("exit", 1, EXIT_LIMIT_S) == self._world.size:
                await self.store.set("exit/last", b"1", EXIT_LIMIT_S)
            await self.store.get("exit/last", EXIT_LIMIT_S)
        except StoreLostError:
            await self._collectives.barrier("exit", EXIT_LIMIT_S)
        self._history.pass_barrier(self._world, "exit", self._node_id)

    async def meet(self, name: str) -> None:
        """Reach a barrier, and pass it when all are there as often; who gives up tries again."""
        turn = f"{name}, turn {self._turns[name] + 1}"
        self._history.reach_barrier(self._world, turn, self._node_id)
        try:
            await self._collectives.barrier(name, LIMIT_S)
        except BarrierTimeoutError as error:
            if error.missing is not None:  # etcd has heard of it
                self._history.give_up_barrier(self._world, turn, self._node_id)
            raise
        self._history.pass_barrier(self._world, turn, self._node_id)
        self._turns[name] += 1

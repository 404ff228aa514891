"""The processes of a ``scale`` run: real nodes that lead, and simulated ones.

Each process is a participant of :mod:`benchmarks.fleet`, which calls the methods without an
underscore. All processes have all methods; what is not theirs to do they skip.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc.aio

from benchmarks.loop_thread import LoopHold
from benchmarks.plan import LEADER_PROCESS, SUCCESSORS_PROCESS, Plan
from benchmarks.simulated import SimulatedNode
from benchmarks.streams import renew, watch
from rdzv_etcd.clock import SystemClock
from rdzv_etcd.etcd.client import EtcdClient
from rdzv_etcd.node.context import Identity
from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol.member import Seat

LIMIT_S = 600.0
"""A bound for waits that the benchmark's own --limit ends earlier."""
_SETUP_AT_ONCE = 64


class ScaleProcess:
    """What all processes have in common."""

    def __init__(self, plan: Plan, process: int) -> None:
        self._plan = plan
        self._process = process
        self._gone: set[int] = set()

    def prepare(self) -> None:
        self._loop = LoopHold()
        self._loop.run(self._prepare())
        # The objects of thousands of nodes stay: no collection shall go through them again.
        gc.collect()
        gc.freeze()

    async def _prepare(self) -> None:
        raise NotImplementedError

    def cpu_s(self) -> float:
        return time.process_time()

    def lead(self) -> None:
        """Let the leader arrive."""

    def follow(self) -> None:
        """Let those arrive who may take over the lead, and the others hear who leads."""

    def run(self) -> dict[str, Any]:
        """Let all others arrive; return when every node here holds its rank."""
        return self.hold_ranks()

    def hold_ranks(self) -> dict[str, Any]:
        """Wait until every node here holds a rank of the next round; return what they hold."""
        raise NotImplementedError

    def watch_own(self) -> None:
        """Let each watch its own presence, as a member does some time after its first round."""

    def lose_alone(self) -> list[int]:
        self._gone |= self._plan.lost_alone
        return self._lose(self._plan.lost_alone)

    def lose_together(self) -> list[int]:
        self._gone |= self._plan.lost_together
        return self._lose(self._plan.lost_together)

    def lose_leader(self) -> list[int]:
        self._gone.add(0)
        return []

    def _lose(self, _victims: Iterable[int]) -> list[int]:
        """Let these nodes do nothing any more, if they are here; return their leases."""
        return []

    def finish(self) -> None:
        """Nothing: the server ends with the run."""


def report(index: int, world: Seat, told_s: float, arrived_s: float, ranked_s: float) -> Any:
    """What is said of a node: what it holds, and when on the machine's clock it got there."""
    place = (world.round, world.size, world.epoch, world.master_address, world.master_port)
    return (index, world.rank, place, (told_s, arrived_s, ranked_s))


class RealNodes(ScaleProcess):
    """Nodes of the library, each with a connection of its own."""

    async def _prepare(self) -> None:
        plan = self._plan
        self._frozen = False
        self._changed = asyncio.Event()
        self._worlds: dict[int, Any] = {}
        self._round = 0
        self._arrived = plan.keys.nodes
        clock = SystemClock()
        self._clients = [EtcdClient(plan.connection, clock) for _ in plan.share(self._process)]
        self._nodes = {
            index: Node(
                client,
                replace(plan.settings, domain_key=plan.rack(index)),
                Identity(plan.node_id(index), f"run{index}"),
                clock,
            )
            for index, client in zip(plan.share(self._process), self._clients, strict=True)
        }
        for node in self._nodes.values():
            await node.start()

    def lead(self) -> None:
        if self._process == LEADER_PROCESS:
            self._loop.run(self._begin())

    def follow(self) -> None:
        if self._process == SUCCESSORS_PROCESS:
            self._loop.run(self._begin())

    async def _begin(self) -> None:
        """Begin to take part; return when all here have arrived, and the leader leads."""
        arrivals = self._clients[0].watch(self._arrived.start, self._arrived.end, start_revision=0)
        await arrivals.ready()
        self._living = [
            asyncio.ensure_future(self._live(index, node)) for index, node in self._nodes.items()
        ]
        for living in self._living:
            living.add_done_callback(lambda _: self._changed.set())
        missing = {self._plan.node_id(index) for index in self._nodes}
        async for batch in arrivals:
            missing -= {self._plan.keys.node_id(event.kv.key) for event in batch.events}
            if not missing:
                break
        await arrivals.close()
        leader = self._nodes.get(0)
        while leader is not None and not leader.leads:
            await leader.context.wakeup.wait()

    async def _live(self, index: int, node: Node) -> None:
        told_s = time.monotonic()
        while True:
            world = await node.join(self._plan.address(index), 29400, LIMIT_S)
            self._worlds[index] = report(index, world, told_s, told_s, time.monotonic())
            self._changed.set()
            await node.changed()
            told_s = time.monotonic()

    def hold_ranks(self) -> dict[str, Any]:
        if self._frozen:
            return {"nodes": [], "problems": [], "resigned": 0}
        return self._loop.run(self._hold_ranks())

    async def _hold_ranks(self) -> dict[str, Any]:
        seated = self._plan.seated(self._gone).intersection(self._nodes)
        while True:
            self._changed.clear()
            for living in self._living:
                if living.done():
                    living.result()
            held = [world for index, world in self._worlds.items() if index in seated]
            rounds = {place[0] for _, _, place, _ in held}
            if len(held) == len(seated) and min(rounds, default=self._round + 1) > self._round:
                self._round = max(rounds, default=self._round + 1)
                return {"nodes": held, "problems": [], "resigned": 0}
            await self._changed.wait()

    def lose_leader(self) -> list[int]:
        """Freeze the process that leads: to the others the machine has died."""
        super().lose_leader()
        if self._process != LEADER_PROCESS:
            return []
        (node,) = self._nodes.values()
        self._loop.freeze()
        self._frozen = True
        return [node.context.session.lease_id]


class SimulatedNodes(ScaleProcess):
    """A share of the simulated nodes, over a few connections."""

    async def _prepare(self) -> None:
        plan, keys = self._plan, self._plan.keys
        self._told = asyncio.Event()
        self._round = 0
        self._seated: frozenset[int] = frozenset()
        """Who is to hold a rank of the next round."""
        self._waited_for: set[int] = set()
        self._reached: Callable[[SimulatedNode], bool] = self._holds_next
        clock = SystemClock()
        clients = [EtcdClient(plan.connection, clock) for _ in range(plan.connections)]
        self._channels = [
            grpc.aio.insecure_channel(plan.target, options=[("grpc.use_local_subchannel_pool", 1)])
            for _ in range(plan.connections)
        ]
        share = list(plan.share(self._process))
        self._nodes = [
            SimulatedNode(index, plan, keys, client, self._note)
            for index, client in zip(share, itertools.cycle(clients), strict=False)
        ]
        self._leases = {node.lease_id: node for node in self._nodes}
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        """By the index of the node whose watches they read; -1: of all."""
        gate = asyncio.Semaphore(_SETUP_AT_ONCE)

        async def set_up(node: SimulatedNode) -> None:
            async with gate:
                await node.open_session()
                await self._watch(node, keys.control.start, keys.control.end, node.note_events)
                await node.read_control()

        await asyncio.gather(*map(set_up, self._nodes))
        renewals = renew(self._channels[0], plan.lease_ttl_s / 3, self._leases)
        self._keep(-1, asyncio.ensure_future(renewals))

    async def _watch(
        self, node: SimulatedNode, key: bytes, end: bytes | None, notify: Callable[[Any], None]
    ) -> None:
        channel = self._channels[node.index % len(self._channels)]
        self._keep(node.index, await watch(channel, key, end, notify))

    def _keep(self, index: int, task: asyncio.Task[None]) -> None:
        self._tasks.setdefault(index, []).append(task)
        task.add_done_callback(lambda _: self._told.set())

    def follow(self) -> None:
        """Wait until all here have heard of the leader: it came before the clock starts."""
        self._loop.run(self._until(lambda node: node.knows_a_leader))

    def watch_own(self) -> None:
        self._loop.run(self._watch_own())

    async def _watch_own(self) -> None:
        for node in self._nodes:
            await self._watch(node, node.presence_key, None, node.note_presence)

    def run(self) -> dict[str, Any]:
        return self._loop.run(self._join())

    async def _join(self) -> dict[str, Any]:
        for node in self._nodes:
            node.join()
        return await self._hold_ranks()

    def hold_ranks(self) -> dict[str, Any]:
        return self._loop.run(self._hold_ranks())

    async def _hold_ranks(self) -> dict[str, Any]:
        self._seated = self._plan.seated(self._gone)
        problems = await self._until(self._holds_next)
        nodes = [node for node in self._nodes if not node.is_gone]
        held = [
            report(node.index, node.world, node.told_s, node.arrived_s, node.ranked_s)
            for node in nodes
            if node.world is not None
        ]
        self._round = max((place[0] for _, _, place, _ in held), default=self._round + 1)
        resigned = sum(node.resigned for node in self._nodes)
        return {"nodes": held, "problems": problems[:3], "resigned": resigned}

    def _holds_next(self, node: SimulatedNode) -> bool:
        if node.index not in self._seated:
            return True
        return node.world is not None and node.world.round > self._round

    async def _until(self, reached: Callable[[SimulatedNode], bool]) -> list[str]:
        """Wait until all living nodes are so, or something fails; return the problems."""
        self._reached = reached
        self._waited_for = {
            node.index for node in self._nodes if not node.is_gone and not reached(node)
        }
        self._told.clear()
        problems = self._problems()
        while self._waited_for and not problems:
            await self._told.wait()
            self._told.clear()
            problems = self._problems()
        return problems

    def _problems(self) -> list[str]:
        problems = [repr(node.problem) for node in self._nodes if node.problem is not None]
        ended = (task for tasks in self._tasks.values() for task in tasks if task.done())
        return problems + [repr(task.exception()) for task in ended]

    def _note(self, node: SimulatedNode) -> None:
        if self._reached(node):
            self._waited_for.discard(node.index)
        if not self._waited_for or node.problem is not None:
            self._told.set()

    def _lose(self, victims: Iterable[int]) -> list[int]:
        return self._loop.run(self._let_die(frozenset(victims)))

    async def _let_die(self, victims: frozenset[int]) -> list[int]:
        dying = [node for node in self._nodes if node.index in victims and not node.is_gone]
        for node in dying:
            node.die()
            del self._leases[node.lease_id]
            for task in self._tasks.pop(node.index):
                task.cancel()
        return [node.lease_id for node in dying]


def scale_process(plan: Plan, process: int) -> ScaleProcess:
    kind = RealNodes if process <= SUCCESSORS_PROCESS else SimulatedNodes
    return kind(plan, process)

"""A simulated job: one etcd, nodes with clocks and links of their own, agents that behave like
torch's. Everything in virtual time; one seed is one schedule.

Knows the real driver's face (:class:`rdzv_etcd.node.node.Node`) and the in-memory etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from rdzv_etcd.clock import wait_for
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.metrics import Recorder
from rdzv_etcd.node.context import Identity
from rdzv_etcd.node.node import Node
from rdzv_etcd.protocol import requests
from rdzv_etcd.protocol.keys import JobKeys
from rdzv_etcd.protocol.member import Phase, Seat
from rdzv_etcd.protocol.model import Accusation
from rdzv_etcd.runtime.lifecycle import LastWork
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.settings import Connection, JobSettings, Settings, Timing
from rdzv_etcd.settings.fields import DEFAULT_SLICE_NODES
from rdzv_etcd.settings.options import AfterEnd
from rdzv_etcd.testing import Link, MemoryConnection, MemoryEtcd
from rdzv_etcd.testing.model import Model, Revoke
from tests.sim.commits import OPERATOR, Saved
from tests.sim.history import History
from tests.sim.interruptions import INTERRUPTED_AFTER_S
from tests.sim.invariants import Invariant
from tests.sim.peers import MemoryPeer, PeerSwitch
from tests.sim.work import EXIT_LIMIT_S, Work
from tests.support.machines import MachineClock, MachineLoop, run_on_machines
from tests.support.scenarios import as_test

TTL_S = 10
TICK_S = 0.5
REQUEST_TIMEOUT_S = 20.0
"""A call whose request was lost hangs this long at most."""
LEFT_S = 10.0
"""Within this time every call of a node that has left has ended."""
TIMING = Timing(
    lease_ttl_s=TTL_S,
    join_timeout_s=600.0,
    last_call_timeout_s=30.0,
    settle_s=0.2,
    closed_ttl_s=60,
    ended_ttl_s=600,
    close_timeout_s=30.0,
)


class NotReachedError(AssertionError):
    """A state that was waited for did not come; the message has the seed and the history."""


@dataclass(frozen=True)
class Snapshot:
    """What etcd held, and what the history knew of it."""

    data: Model
    known: tuple[Saved, ...]
    """Of the job, and of its neighbours."""


@dataclass(eq=False)
class SimNode:
    """One node and the agent that drives it as torch's does: join, work, join again when told."""

    name: str
    node: Node
    connection: MemoryConnection
    loop: MachineLoop
    history: History
    port: int
    join_timeout_s: float
    works: bool = False
    """Whether its workers do something; otherwise it just is in its world."""
    peer: MemoryPeer | None = None
    """Its end of the links between nodes, if there are any."""
    work: Work | None = None
    stops_in_s: float = 0.0
    """How long its agent needs to stop its workers before it joins again."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: its agent stops its workers at once, also if it has begun."""
    finished: bool = False
    """Whether its job was closed because it is done, or its agent waits for that no longer."""
    is_done: bool = False
    """Whether its workers have finished before the others': its agent only waits for those."""
    world: Seat | None = None
    """The world it works in; ``None`` while it waits."""
    worlds: list[Seat] = field(default_factory=list)
    joins: int = 0
    """How often its agent asked to join; 1 means that nothing ever disturbed its work."""
    error: RdzvEtcdError | None = None
    tried_s: float = 0.0
    """How long, on its own clock, it tried to join before it ended with ``error``."""
    ended_s: float = 0.0
    """When it ended with ``error``."""
    alive: bool = True
    crashed: bool = False
    is_stranger: bool = False
    """Whether it was started with settings other than the job's."""
    because: str = ""
    """What it says of why it joins the next time."""
    agent: asyncio.Task[None] | None = None

    @property
    def node_id(self) -> str:
        return self.node.context.identity.node_id

    @property
    def domain(self) -> str | None:
        return self.node.context.settings.domain_key

    @property
    def lease_id(self) -> int:
        """Its session's; 0: it has none."""
        return self.node.context.session.lease_id

    @property
    def is_working(self) -> bool:
        return (
            self.alive
            and self.world is not None
            and self.node.phase is Phase.MEMBER
            and self.node.waiting_count() == 0
        )

    async def run(self) -> None:
        """The agent: until the job is closed or a join fails."""
        try:
            while not self.finished:
                world = await self.join()
                if self.works:
                    await self._work(world)
                else:
                    await self.node.changed()
                self.world = None
                if self.stops_in_s and not self.finished:
                    with contextlib.suppress(TimeoutError):
                        await wait_for(self.hurry.wait(), self.stops_in_s)
        except RdzvEtcdError as error:
            self.error, self.ended_s = error, self.loop.time()
            self.history.note(self.loop.time(), f"{self.name} ends: {error}")

    async def wait_for_the_others(self) -> None:
        """What torch's agent does when its workers have finished."""
        world, self.world = self.world, None
        assert world is not None
        try:
            await self.node.finish_work(world)
            await wait_for(self.node.closed(), EXIT_LIMIT_S)
        except TimeoutError:
            pass
        except RdzvEtcdError as error:
            self.history.note(self.loop.time(), f"{self.name}, which has finished: {error}")
        self.finished = True

    async def _work(self, world: Seat) -> None:
        """Work until the round is over or the job is done."""
        self.work = Work(self.node, world, self.history)
        working = self.loop.create_task(self.work.run())
        over = self.loop.create_task(self.node.changed())
        try:
            await asyncio.wait((working, over), return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                over.result()
            else:
                working.result()
                self.finished = self.node.closure() is not None  # else a call was interrupted
        finally:
            working.cancel()
            over.cancel()
            await asyncio.wait((working, over))

    async def join(self) -> Seat:
        self.joins += 1
        self.port += 1  # a fresh listening socket each time
        self.world = None
        listens = (_address(self.name), self.port)
        clock = self.node.context.clock
        began_s = clock.now_s()
        try:
            world = await self.node.join(*listens, self.join_timeout_s, self.because)
        finally:
            self.because = ""
            self.tried_s = clock.now_s() - began_s
        self.history.tell(self.node_id, world, self.loop.time(), listens)
        self.worlds.append(world)
        self.world = world
        return world

    @property
    def rank(self) -> int:
        assert self.world is not None
        return self.world.rank


class SimJob:
    """One job id on one etcd."""

    def __init__(
        self,
        loop: MachineLoop,
        server: MemoryEtcd,
        *,
        job_id: str = "job",
        prefix: str = "/rdzv_etcd",
        min_nodes: int = 1,
        max_nodes: int = 4,
        node_unit: int = 1,
        segment_size: int = 1,
        timing: Timing = TIMING,
        after_end: AfterEnd = AfterEnd.NEW_RUN,
        works: bool = False,
        slice_nodes: int = DEFAULT_SLICE_NODES,
        peer_links: bool = False,
        peer_silence_s: float | None = None,
        history: int = 100,
    ) -> None:
        self.loop = loop
        self.server = server
        self.agents_work = works
        self.settings = Settings(
            job_id,
            JobSettings(min_nodes, max_nodes, node_unit, segment_size),
            domain_key=None if segment_size == 1 else "rack-9",
            prefix=prefix,
            connection=Connection(request_timeout_s=REQUEST_TIMEOUT_S),
            timing=timing,
            after_end=after_end,
            slice_nodes=slice_nodes,
            peer_silence_s=peer_silence_s,
            history=history,
        )
        silence_s = self.settings.peer_silence_limit_s
        self.switch = PeerSwitch(silence_s=silence_s) if peer_links else None
        self.keys = JobKeys(self.settings.prefix, job_id)
        self.history = History(self.keys, self.settings)
        server.observers.append(self.history.observe)
        self.nodes: dict[str, SimNode] = {}
        self.neighbours: list[SimJob] = []
        """Other jobs on the same etcd."""
        self._incarnations = 0

    @property
    def network(self) -> PeerSwitch:
        """The network over which members watch each other, if they do."""
        assert self.switch is not None
        return self.switch

    # -- nodes ----------------------------------------------------------------------------------

    def make(
        self,
        name: str,
        *,
        job: JobSettings | None = None,
        rank_key: str | None = None,
        domain: str | None = None,
        join_timeout_s: float | None = None,
        delay_s: float = 0.001,
        clock_ahead_s: float = 0.0,
        lease_ttl_s: int | None = None,
        recorder: Recorder | None = None,
    ) -> SimNode:
        """Make a node; nothing of it runs yet. A name may be used again after its node's end."""
        self._incarnations += 1
        serial = self._incarnations
        unique = f"{name}~{serial}~x"
        clock = MachineClock(
            self.loop,
            offset_s=1000.0 * serial,
            wall_skew_s=100.0 * serial + clock_ahead_s,
            seed=unique,
        )
        self.history.clocks_s.add(clock.wall_skew_s)
        connection = self.server.connect(unique)
        self.history.writers.add(unique)
        connection.link.delay(0.0, delay_s)
        timing = self.settings.timing
        settings = replace(
            self.settings,
            job=job if job is not None else self.settings.job,
            rank_key=rank_key,
            domain_key=domain or self.settings.domain_key,
            timing=replace(timing, lease_ttl_s=lease_ttl_s or timing.lease_ttl_s),
        )
        identity = Identity(unique, f"run-of-{unique}")
        peer = None
        if self.switch is not None:
            peer = self.switch.plug(_address(name), 50_000 + serial)
        node = SimNode(
            name,
            Node(connection, settings, identity, clock, peer, recorder=recorder),
            connection,
            self.loop,
            self.history,
            20_000 + 100 * (serial % 400),
            self.settings.timing.join_timeout_s if join_timeout_s is None else join_timeout_s,
            self.agents_work,
            peer,
        )
        self.nodes[name] = node
        return node

    def start(self, name: str, **options: Any) -> SimNode:
        """Make a node and start its agent."""
        node = self.make(name, **options)
        node.agent = self.on(node, node.run())
        return node

    def start_all(self, names: Iterable[str], **options: Any) -> list[SimNode]:
        return [self.start(name, **options) for name in names]

    def rejoin(self, node: SimNode) -> None:
        """Let a node's agent join again by itself, as when a worker fails."""
        assert node.agent is not None
        node.agent.cancel()
        node.agent = self.on(node, node.run())

    async def all_work(self, names: str, **options: Any) -> list[SimNode]:
        """Start nodes and wait until they work, in one world of exactly them."""
        nodes = self.start_all(names, **options)
        await self.until_works(names)
        return nodes

    def assert_undisturbed(self, names: str) -> None:
        """All work in one world, and none of them has ever joined again."""
        assert self.works(names), self.tell()
        assert all(self.nodes[name].joins == 1 for name in names), self.tell()

    async def join_again(self, name: str, because: str = "") -> None:
        """Let a member's agent give its world up, as torch's does when a worker fails."""
        node = self.nodes[name]
        if not await self._end_agent(node):
            return
        node.because = because
        node.agent = self.on(node, node.run())

    async def finish_early(self, name: str) -> None:
        """Let the workers of a member finish while the others still work."""
        node = self.nodes[name]
        if not await self._end_agent(node):
            return
        if node.node.phase is Phase.IDLE and node.alive:  # a call was cut off, so its part is over
            node.agent = self.on(node, node.run())
        elif node.alive and node.world is not None and not node.is_done:
            self.history.note(self.loop.time(), f"{name} has finished")
            node.is_done = True
            node.agent = self.on(node, node.wait_for_the_others())

    async def _end_agent(self, node: SimNode) -> bool:
        """Let a node's agent end, whose last calls may take seconds; ``False`` if the node crashes
        meanwhile."""
        assert node.agent is not None
        node.agent.cancel()
        while not (node.crashed or node.agent.done()):
            await asyncio.wait({node.agent}, timeout=TICK_S)
        return not node.crashed

    def on(self, node: SimNode, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something as part of a node: a crash stops it."""
        with self.loop.node(self._place(node)):
            return self.loop.create_task(work)

    def _place(self, node: SimNode) -> str:
        return f"{self.settings.job_id}: {node.node_id}"

    def crash(self, *names: str) -> None:
        """Power off: no code of the node runs again, nothing it sends arrives."""
        for name in names:
            node = self.nodes[name]
            node.alive, node.crashed = False, True
            self.loop.crash(self._place(node))
            node.connection.link.partition()
            if node.peer is not None:
                node.peer.switch.silence(node.peer)
            self.history.note(self.loop.time(), f"{name} crashes")

    def kill(self, *names: str) -> None:
        """End the processes: their hosts say so to whoever asks."""
        for name in names:
            node = self.nodes[name]
            if node.peer is not None:
                node.peer.switch.kill(node.peer)
            node.alive, node.crashed = False, True
            self.loop.crash(self._place(node))
            node.connection.link.partition()
            self.history.note(self.loop.time(), f"{name} is killed")

    def pause(self, name: str) -> None:
        """Let nothing of the node run (SIGSTOP, a long pause of the machine)."""
        node = self.nodes[name]
        self.loop.pause(self._place(node))
        if node.peer is not None:
            node.peer.switch.stop(node.peer)

    def resume(self, name: str) -> None:
        node = self.nodes[name]
        if not node.crashed:
            self.loop.resume(self._place(node))
            if node.peer is not None:
                node.peer.switch.resume(node.peer)

    def suspend(self, name: str) -> None:
        """Suspend the node's machine: nothing of it runs, and its timers stand still."""
        node = self.nodes[name]
        self.loop.suspend(self._place(node))
        if node.peer is not None:
            node.peer.switch.stop(node.peer)

    def wake(self, name: str) -> None:
        node = self.nodes[name]
        if not node.crashed:
            slept_s = self.loop.wake(self._place(node))
            clock = node.node.context.clock
            assert isinstance(clock, MachineClock)
            clock.woke(slept_s)
            self.history.note_woke(node.node_id, slept_s, self.loop.time())
            if node.peer is not None:
                node.peer.switch.resume(node.peer)

    async def leave(self, name: str, reason: str = "SIGTERM") -> None:
        """What a signal does to a torchrun: the agent's work ends, the node leaves."""
        node = self.nodes[name]
        node.alive = False
        self.history.note(self.loop.time(), f"{name} leaves")
        await self.on(node, self._leave(node, reason))

    async def _leave(self, node: SimNode, reason: str) -> None:
        rng = random.Random(f"leave {self.loop.seed} {node.node_id}")
        in_midst = self.history.interrupts and bool(node.node._tasks) and rng.random() < 0.5
        if node.agent is not None and not in_midst:
            node.agent.cancel()
            await asyncio.wait({node.agent})
        if self.history.interrupts:  # and called again
            ending = LastWork(cast(LoopHold, None))  # what follows is on the loop already
            leave = partial(ending.once, partial(node.node.leave, reason))
            with contextlib.suppress(TimeoutError):
                await wait_for(leave(), rng.choice(INTERRUPTED_AFTER_S))
            await leave()
        await node.node.leave(reason)
        await node.connection.close()
        if node.agent is not None and in_midst:
            node.hurry.set()
            _, waits = await asyncio.wait({node.agent}, timeout=LEFT_S)
            self.history.demand(
                not waits, Invariant.IN_STEP, f"{node.name} has left, and its calls wait on"
            )

    async def close(self, node: SimNode, reason: str = "done", *, succeeded: bool = True) -> None:
        """Let a member close the job."""
        await self.on(node, node.node.close_job(succeeded=succeeded, reason=reason))

    async def end(self, names: str, reason: str = "done", *, succeeded: bool = True) -> None:
        """Let the first of these nodes close the job, and all of them leave."""
        await self.close(self.nodes[names[0]], reason, succeeded=succeeded)
        for name in names:
            await self.leave(name)

    def cut(self, nodes: Iterable[SimNode | str], *, silent: bool = False) -> None:
        """Cut nodes off from etcd."""
        for link in self._links(nodes):
            link.partition(silent=silent)

    def heal(self, nodes: Iterable[SimNode | str]) -> None:
        """Let nodes reach etcd again."""
        for link in self._links(nodes):
            link.heal()

    def _links(self, nodes: Iterable[SimNode | str]) -> list[Link]:
        these = (self.nodes[node] if isinstance(node, str) else node for node in nodes)
        return [node.connection.link for node in these]

    def wipe(self) -> None:
        """Let etcd lose all its data."""
        self.server.wipe()
        for job in (self, *self.neighbours):
            job.history.lose_all(self.loop.time())
            job.history.lose()

    def revoke(self, lease_ids: Iterable[int]) -> None:
        """Have leases revoked, one after the other, that have not run out."""
        for lease_id in lease_ids:
            self.server.apply(Revoke(lease_id), OPERATOR)

    def accuse(self, node: SimNode, by: SimNode, *, certain: bool = True) -> None:
        """Put an accusation in place of a node's presence, on another one's session."""
        (presence,) = self.server.snapshot(self.keys.node(node.node_id))
        accusation = Accusation(by.node_id, "its process exited", certain)
        txn = requests.accuse(self.keys, node.node_id, presence, accusation, by.lease_id)
        self.server.apply(txn, by.node_id)

    def save(self) -> Snapshot:
        """Make a snapshot of etcd."""
        known = tuple(job.history.saved() for job in (self, *self.neighbours))
        return Snapshot(self.server.save(), known)

    def restore(self, snapshot: Snapshot, *, bump_revision: int = 0) -> None:
        """Let etcd go back to a snapshot: what was written since is lost."""
        self.server.restore(snapshot.data, bump_revision=bump_revision)
        for job, known in zip((self, *self.neighbours), snapshot.known, strict=True):
            job.history.go_back(known, self.loop.time())

    # -- what to wait for -----------------------------------------------------------------------

    def members_now(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.is_working]

    def works(self, names: Iterable[str]) -> bool:
        """Whether exactly these nodes work, in one world of exactly them."""
        nodes = [self.nodes[name] for name in names]
        if not all(node.is_working for node in nodes):
            return False
        ids = {node.node_id for node in nodes}
        epochs = {node.world.epoch for node in nodes if node.world is not None}
        return len(epochs) == 1 and all(
            node.world is not None and set(self.history.members_of(node.world)) == ids
            for node in nodes
        )

    async def until(self, holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> float:
        """Wait in simulated time; return how long it took."""
        began_s = self.loop.time()
        while not holds():
            self.history.stop_if_broken()
            if self.loop.time() > began_s + limit_s:
                raise NotReachedError(
                    f"seed {self.loop.seed}: after {limit_s:g} s not reached: {what}\n{self.tell()}"
                )
            await asyncio.sleep(0.02)
        return self.loop.time() - began_s

    async def until_works(self, names: Sequence[str] | str, limit_s: float = 60.0) -> float:
        return await self.until(
            lambda: self.works(names), f"a world of exactly {', '.join(names)}", limit_s
        )

    async def pass_time(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    @property
    def leader(self) -> SimNode:
        (leader,) = [node for node in self.nodes.values() if node.alive and node.node.leads]
        return leader

    def followers(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive and not node.node.leads]

    def tell(self) -> str:
        """Everything worth knowing after a failure."""
        lines = list(self.history.log)
        for node in self.nodes.values():
            lines.append(
                f"{node.name}: alive={node.alive} {node.node.phase.value}, joins={node.joins}, "
                f"error={node.error!r}, world={node.world}"
            )
            if node.alive and node.node._tasks:
                lines.append(f"    sees {node.node.control}, waiting={node.node.waiting_count()}")
        lines += [f"key {kv.key!r} = {kv.value!r}" for kv in self.server.snapshot()]
        return "\n".join(lines)


def _address(name: str) -> str:
    return f"10.0.0.{name}"


Scenario = Callable[[SimJob], Coroutine[Any, Any, None]]

SEEDS_AT_MOST: int | None = None
"""Of the seeds given to :func:`simulate` only so many are run, the first; ``None``: all."""


def simulate(
    scenario: Scenario, seeds: Iterable[int] = range(20), *, limit_s: float = 20_000.0, **job: Any
) -> None:
    """Run ``scenario`` under every seed and check the invariants; a failure names its seed."""
    for seed in itertools.islice(seeds, SEEDS_AT_MOST):
        try:
            run_on_machines(lambda loop: _one(loop, scenario, job), seed, limit_s=limit_s)
        except BaseException:
            logging.getLogger("tests.sim").error("failed with seed %d", seed)
            raise


def simulated(
    seeds: Iterable[int] = range(20),
    *,
    limit_s: float = 20_000.0,
    options: Sequence[str] = (),
    **job: Any,
) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[..., None]]:
    """Make a scenario a test, which :func:`simulate` runs; its other arguments are the test's, and
    those named in ``options`` the job's."""

    def run(scenario: Scenario, **more: Any) -> None:
        simulate(scenario, seeds, limit_s=limit_s, **job, **more)

    return as_test(run, given=1, options=options)


async def _one(loop: MachineLoop, scenario: Scenario, options: dict[str, Any]) -> None:
    async with MemoryEtcd(
        MachineClock(loop), seed=loop.seed, request_timeout_s=REQUEST_TIMEOUT_S
    ) as server:
        job = SimJob(loop, server, **options)
        await scenario(job)
        job.history.check()

"""One random life of a job: a phase of faults, then everything is healed and must converge.

Knows what can go wrong; what may never happen is in :mod:`tests.sim.history`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rdzv_etcd.errors import EtcdNoSpaceError, JobClosedError, RdzvEtcdError
from rdzv_etcd.etcd.api import KeyValue
from rdzv_etcd.group.standing import Phase
from rdzv_etcd.schema import values
from rdzv_etcd.settings.model import DEFAULT_SLICE_NODES
from rdzv_etcd.testing import SimClock
from tests.sim.aimed import Aimed
from tests.sim.invariants import Invariant, InvariantError
from tests.sim.work import EXIT_LIMIT_S
from tests.sim.world import REQUEST_TIMEOUT_S, TIMING, NotReachedError, SimJob, SimNode

FAULTS_S = (20.0, 200.0)
PAUSE_BETWEEN_FAULTS_S = 6.0
CONVERGE_S = 150.0
CALM_S = 40.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed is about."""

    min_nodes: int
    max_nodes: int
    node_unit: int
    ttl_s: int
    nodes: int
    wipes: bool
    closes: bool | None
    """How the job is closed in the end: well, badly, or (``None``) not at all."""
    works: bool = True
    """Whether workers do something, and everything that came with it; see :data:`FOUND`."""
    closes_midway: bool = False
    """Whether the job may be closed, and its id used again, in the midst of it all."""
    comes_back: bool = False
    """Whether the id is used again after the end."""
    slice_nodes: int = DEFAULT_SLICE_NODES
    """Worlds of more nodes are published in slices: small ones, too, in some lives."""
    aims: bool = False
    """Whether faults wait for the moments that matter, see :mod:`tests.sim.aimed`."""


def plan(rng_seed: int, *, works: bool = True) -> Plan:
    """Draw the settings of one seed."""
    rng = random.Random(f"plan {rng_seed}")
    unit = rng.choice([1, 1, 1, 2])
    least = rng.randint(1, 3)
    most = max(least, unit, rng.randint(least, 5))
    most += most % unit
    return Plan(
        least,
        most,
        unit,
        rng.choice([2, 5, 10]),
        rng.randint(1, most + 2),
        rng.random() < 0.3,
        rng.choice([None, True, False]),
        works,
        works and rng.random() < 0.3,
        works and rng.random() < 0.5,
        random.Random(f"slices {rng_seed}").choice([DEFAULT_SLICE_NODES, 1, 2])
        if works
        else DEFAULT_SLICE_NODES,
        works,
    )


class Life:
    """Drives one job through its faults."""

    def __init__(self, job: SimJob, what: Plan) -> None:
        self._job = job
        self._plan = what
        self._rng = job.loop.rng
        self._serial = 0
        self._background: set[asyncio.Future[None]] = set()
        self._aimed = Aimed(job, what.ttl_s, self._later, self._newcomer)

    async def run(self) -> None:
        job = self._job
        for _ in range(self._plan.nodes):
            self._newcomer()
        ends_s = job.loop.time() + self._rng.uniform(*FAULTS_S)
        while job.loop.time() < ends_s:
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_BETWEEN_FAULTS_S))
            job.history.stop_if_broken()
            fault = self._rng.choice(self._faults())
            self._note(fault.__name__.strip("_"))
            fault()
            if self._plan.works:
                self._replace_ended()
        self._note("everything is healed")
        await self._heal()
        await self._converge()
        await self._end()
        if self._plan.comes_back:
            self._note("the job comes back")
            for _ in range(max(self._least(), self._plan.nodes)):
                self._newcomer()
            await self._converge()
            await self._leave_all()
        await self._check_nothing_left()

    # -- faults ---------------------------------------------------------------------------------

    def _faults(self) -> list[Callable[[], None]]:
        faults = [
            self._newcomer,
            self._newcomer,
            self._crash,
            self._leave,
            self._cut_one,
            self._cut_one,
            self._cut_all,
            self._restart_etcd,
            self._compact,
            self._expire,
            self._lose_messages,
            self._lose_a_reply,
            self._slow,
            self._freeze,
            self._worker_fails,
        ]
        if self._plan.wipes:
            faults.append(self._wipe)
        if self._plan.works:
            faults += [
                self._crash_leader,
                self._cut_leader,
                self._freeze_leader,
                self._expire_leader,
                self._cut_a_subset,
                self._compact_behind_a_cut,
                self._compact_all_the_time,
                self._hold_messages,
                self._jump_clocks,
                self._run_out_of_space,
                self._expire_job,
            ]
        if self._plan.closes_midway:
            faults.append(self._close)
        if self._plan.aims:
            faults += self._aimed.faults()
        return faults

    def _newcomer(self) -> None:
        if len(self._alive()) < self._plan.max_nodes + 2:
            self._serial += 1
            self._job.start(f"n{self._serial}", delay_s=self._rng.choice([0.001, 0.05]))

    def _crash(self) -> None:
        for node in self._some():
            self._job.crash(node.name)

    def _leave(self) -> None:
        for node in self._some():
            self._later(self._job.leave(node.name))

    def _cut_one(self) -> None:
        for node in self._some():
            self._later(self._cut(node, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    def _cut_all(self) -> None:
        duration_s = self._rng.uniform(0, 3 * self._plan.ttl_s)
        for node in self._alive():
            self._later(self._cut(node, duration_s + self._rng.random()))

    async def _cut(self, node: SimNode, duration_s: float) -> None:
        node.connection.link.partition(silent=self._rng.random() < 0.5)
        await asyncio.sleep(duration_s)
        if not node.crashed:
            node.connection.link.heal()

    def _restart_etcd(self) -> None:
        if self._job.server.up:
            self._job.server.restart(self._rng.choice([0.1, 2.0, 30.0]))

    def _wipe(self) -> None:
        self._job.wipe()

    def _compact(self) -> None:
        server = self._job.server
        if server.revision > server.model.compact_revision:
            server.compact()

    def _expire(self) -> None:
        leases = sorted(self._job.server.leases())
        if leases and self._job.server.up:
            self._job.server.expire(self._rng.choice(leases))

    def _lose_messages(self) -> None:
        for node in self._some():
            node.connection.link.lose(self._rng.choice([0, 0.1, 0.3]), self._rng.choice([0, 0.2]))

    def _lose_a_reply(self) -> None:
        for node in self._alive():
            link = node.connection.link
            self._rng.choice([link.drop_replies, link.drop_requests])(self._rng.randint(1, 2))

    def _crash_leader(self) -> None:
        for node in self._leader():
            self._job.crash(node.name)

    def _cut_leader(self) -> None:
        for node in self._leader():
            self._later(self._cut(node, self._rng.uniform(0, 3 * self._plan.ttl_s)))

    def _freeze_leader(self) -> None:
        for node in self._leader():
            self._later(self._frozen(node))

    def _expire_leader(self) -> None:
        for node in self._leader():
            lease_id = node.node.context.session.lease_id
            if lease_id in self._job.server.leases() and self._job.server.up:
                self._job.server.expire(lease_id)

    def _expire_job(self) -> None:
        for formed in self._job.history.formed[-1:]:
            if formed.record.job_lease in self._job.server.leases() and self._job.server.up:
                self._job.server.expire(formed.record.job_lease)

    def _cut_a_subset(self) -> None:
        duration_s = self._rng.uniform(0, 4 * self._plan.ttl_s)
        for node in self._alive():
            if self._rng.random() < 0.5:
                self._later(self._cut(node, duration_s + self._rng.random()))

    def _compact_behind_a_cut(self) -> None:
        self._cut_a_subset()
        self._later(self._compactions(1, self._rng.uniform(0, self._plan.ttl_s)))

    def _compact_all_the_time(self) -> None:
        self._later(self._compactions(self._rng.randint(1, 40), 1.0))

    async def _compactions(self, times: int, pause_s: float) -> None:
        for _ in range(times):
            await asyncio.sleep(pause_s)
            self._compact()

    def _hold_messages(self) -> None:
        """Requests arrive late, perhaps after their copies, or after their sender gave up."""
        for node in self._some():
            delay_s = self._rng.choice([0.5, 6.0, 30.0])
            node.connection.link.hold_requests(delay_s, self._rng.randint(1, 3))

    def _jump_clocks(self) -> None:
        for node in self._some():
            clock = node.node.context.clock
            assert isinstance(clock, SimClock)
            clock.wall_skew_s = self._rng.uniform(-3600, 3600)
            if self._rng.random() < 0.5:
                clock.jump(self._rng.choice([1.0, self._plan.ttl_s, 100.0]))

    def _run_out_of_space(self) -> None:
        longest = 8 if self._plan.aims else 3
        self._later(self._no_space(self._rng.uniform(0, longest * self._plan.ttl_s)))

    async def _no_space(self, duration_s: float) -> None:
        self._job.server.set_no_space(True)
        await asyncio.sleep(duration_s)
        self._job.server.set_no_space(False)

    def _close(self) -> None:
        for node in self._job.members_now()[:1]:
            if self._plan.aims:
                self._aimed.delay_the_end(node)
            self._later(self._closed_by(node, succeeded=self._rng.random() < 0.5))

    async def _closed_by(self, node: SimNode, *, succeeded: bool) -> None:
        closing = self._job.on(node, node.node.close_job(succeeded=succeeded, reason="midway"))
        await asyncio.wait((closing,), timeout=2 * TIMING.close_timeout_s)  # it may be crashed
        if not closing.done():
            closing.cancel()
        elif isinstance(closing.exception(), RdzvEtcdError):
            self._note(f"not closed: {closing.exception()}")

    def _slow(self) -> None:
        for node in self._some():
            node.connection.link.delay(0.0, self._rng.choice([0.001, 0.1, 2.0]))

    def _freeze(self) -> None:
        for node in self._some():
            self._later(self._frozen(node))

    async def _frozen(self, node: SimNode) -> None:
        self._job.pause(node.name)
        await asyncio.sleep(self._rng.uniform(0, 3 * self._plan.ttl_s))
        self._job.resume(node.name)

    def _worker_fails(self) -> None:
        """The agent joins again by itself."""
        for node in self._some():
            if node.world is not None and node.node.phase is Phase.MEMBER and node.agent:
                self._later(self._rejoin(node))

    async def _rejoin(self, node: SimNode) -> None:
        assert node.agent is not None
        node.agent.cancel()
        if node.alive and node.world is not None:
            node.agent = self._job.on(node, node.run())

    # -- afterwards -----------------------------------------------------------------------------

    async def _heal(self) -> None:
        job = self._job
        self._aimed.enough()
        while self._background:
            await asyncio.wait(set(self._background))
        if not job.server.up:
            await job.until(lambda: job.server.up, "etcd is back", 40)
        job.server.set_no_space(False)
        for node in self._alive():
            self._heal_link(node)
            node.hurry.set()
        if self._plan.works:
            self._replace_ended()
            while self._background:
                await asyncio.wait(set(self._background))
        while len(self._alive()) < self._least():
            self._newcomer()

    def _heal_link(self, node: SimNode) -> None:
        link = node.connection.link
        link.heal()
        link.lose()
        link.refuse(None)
        link.delay(0.0, 0.001)
        link._planned.clear()

    def _least(self) -> int:
        unit = self._plan.node_unit
        return (self._plan.min_nodes + unit - 1) // unit * unit

    async def _replace_failed(self) -> None:
        """A process whose join failed ends; whoever watches over it starts another."""
        for node in self._alive():
            if node.error is not None and not isinstance(node.error, JobClosedError):
                await self._job.leave(node.name)
                self._newcomer()

    def _replace_ended(self) -> None:
        """The same for any end: the job is started again under its id."""
        for node in self._alive():
            if node.error is not None or node.finished:
                self._check_error(node)
                node.alive = False
                self._later(self._job.leave(node.name))
                self._newcomer()
        while len(self._alive()) < self._least():
            self._newcomer()

    def _check_error(self, node: SimNode) -> None:
        """An etcd that only needs an operator ends no member."""
        self._job.history.demand(
            not (isinstance(node.error, EtcdNoSpaceError) and node.worlds),
            Invariant.CONVERGENCE,
            f"{node.name} was a member, and gave up: {node.error}",
        )

    def _converged(self) -> bool:
        alive = self._alive()
        unit = self._plan.node_unit
        size = min(self._plan.max_nodes, len(alive)) // unit * unit
        working = [node for node in alive if node.is_working]
        return len(working) == size and self._job.works(node.name for node in working)

    async def _converge(self) -> None:
        job = self._job
        ends_s = job.loop.time() + CONVERGE_S
        # what is lost, and what still hangs, shows within this time
        await asyncio.sleep(3 * self._plan.ttl_s + REQUEST_TIMEOUT_S)
        while not self._converged() and job.loop.time() < ends_s:
            await asyncio.sleep(0.5)
            if self._plan.works:
                self._replace_ended()
            else:
                await self._replace_failed()
        await self._demand(Invariant.CONVERGENCE, self._converged, "all work, or wait for a seat")
        before = {node.name: node.joins for node in self._alive()}
        await asyncio.sleep(CALM_S)
        await self._demand(
            Invariant.CALM,
            lambda: {node.name: node.joins for node in self._alive()} == before,
            "nobody joins again",
        )
        await self._demand(Invariant.CALM, self._converged, "all still work")

    async def _demand(
        self, invariant: Invariant, holds: Callable[[], bool], what: str, limit_s: float = 0
    ) -> None:
        try:
            await self._job.until(holds, what, limit_s)
        except NotReachedError as error:
            self._job.history.check()  # a broken promise is the better explanation
            raise InvariantError(invariant, str(error)) from None

    async def _end(self) -> None:
        job = self._job
        if self._plan.closes is not None:
            if self._plan.works and self._plan.closes:
                await self._exit_barrier()
            closer = self._rng.choice(job.members_now())
            await job.on(
                closer, closer.node.close_job(succeeded=self._plan.closes, reason="the end")
            )
            await self._demand(
                Invariant.CONVERGENCE,
                lambda: all(n.node.closure() for n in self._alive() if n.error is None),
                "all members hear of it",
                5,
            )
        await self._leave_all()

    async def _exit_barrier(self) -> None:
        """All members meet on the round's store, though replies are lost – unless one is called
        lost over that: then the round is over, and its store will be swept away."""
        nodes = self._job.members_now()
        worlds = [node.world for node in nodes]
        for node in nodes:
            node.connection.link.lose(0.1, 0.2)
        meeting = [
            self._job.on(node, node.work.exit_barrier()) for node in nodes if node.work is not None
        ]
        await self._demand(
            Invariant.BARRIER,
            lambda: (
                all(task.done() for task in meeting) or [node.world for node in nodes] != worlds
            ),
            "all pass the exit barrier, or the round is over",
            EXIT_LIMIT_S,
        )
        if all(task.done() for task in meeting):
            for task in meeting:
                await task
        else:
            for task in meeting:
                task.cancel()
            await asyncio.wait(meeting)
        for node in nodes:
            self._heal_link(node)
        await asyncio.sleep(REQUEST_TIMEOUT_S)  # what was lost shows within this time
        await self._converge()

    async def _leave_all(self) -> None:
        await asyncio.gather(*(self._job.leave(node.name) for node in self._alive()))
        if self._plan.works:
            await asyncio.sleep(1.0)
            left = [kv for kv in self._job.server.snapshot() if not self._is_marker(kv)]
            await self._demand(
                Invariant.NOTHING_LEFT, lambda: not left, f"all keys are gone at once: {left}"
            )

    def _is_marker(self, kv: KeyValue) -> bool:
        key = self._job.keys.round
        return kv.key == key and values.decode_round(key, kv.value).closure is not None

    async def _check_nothing_left(self) -> None:
        job = self._job
        await asyncio.sleep(max(60.0, 6 * self._plan.ttl_s) + 2.0)
        left = [kv.key for kv in job.server.snapshot()]
        await self._demand(
            Invariant.NOTHING_LEFT,
            lambda: not left and not job.server.leases(),
            f"no key and no lease is left: {left}, {job.server.leases()}",
        )

    def _leader(self) -> list[SimNode]:
        return [node for node in self._alive() if node.node.leads][:1]

    def _alive(self) -> list[SimNode]:
        return [node for node in self._job.nodes.values() if node.alive]

    def _some(self) -> list[SimNode]:
        alive = self._alive()
        return self._rng.sample(alive, min(len(alive), self._rng.choice([1, 1, 2])))

    def _later(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _note(self, text: str) -> None:
        self._job.history.note(self._job.loop.time(), f"-- {text}")


def options(what: Plan) -> dict[str, Any]:
    """The job that a plan asks for, as keywords of SimJob."""
    return {
        "min_nodes": what.min_nodes,
        "max_nodes": what.max_nodes,
        "node_unit": what.node_unit,
        "timing": replace(TIMING, lease_ttl_s=what.ttl_s, last_call_timeout_s=20.0),
        "works": what.works,
        "slice_nodes": what.slice_nodes,
    }

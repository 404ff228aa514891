"""One random life of a job: a phase of faults, then everything is healed and must converge.

Draws what goes wrong and when. The faults are in :mod:`tests.sim.faults_nodes`,
:mod:`tests.sim.faults_etcd` and :mod:`tests.sim.aimed`; what must come true afterwards is in
:mod:`tests.sim.waits`, what may never happen in :mod:`tests.sim.history`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.protocol.keys import JobKeys
from tests.sim.aimed import Aimed
from tests.sim.faults_etcd import EtcdFaults
from tests.sim.faults_nodes import NodeFaults
from tests.sim.faults_operator import OperatorFaults
from tests.sim.faults_peers import PeerFaults
from tests.sim.kinds import DEAF, ETCD, NODES, OPERATOR, PEERS
from tests.sim.plan import Plan
from tests.sim.stage import Part, Stage
from tests.sim.waits import Afterwards
from tests.sim.world import REQUEST_TIMEOUT_S, TIMING, SimJob, SimNode

FAULTS_S = (20.0, 200.0)
PAUSE_BETWEEN_FAULTS_S = 6.0
WIDE_SHARE = 0.4
"""How many of a life's faults are of its own kinds, if it has any."""
NEIGHBOURS = "xy"
BELOW = ("team", "store", "barrier", "ranks", "audit")
NEIGHBOURS_CONVERGE_S = 150.0


class Life(Part):
    """Drives one job through its faults."""

    def __init__(self, job: SimJob, what: Plan) -> None:
        super().__init__(Stage(job, what))
        self._nodes = NodeFaults(self._stage)
        self._etcd = EtcdFaults(self._stage, self._nodes)
        self._operator = OperatorFaults(self._stage)
        self._peers = PeerFaults(self._stage)
        self._aimed = Aimed(self._stage)
        self._afterwards = Afterwards(self._stage)

    async def run(self) -> None:
        job = self._job
        job.history.interrupts = "interrupted_calls" in self._plan.kinds
        for _ in range(self._plan.nodes):
            self._stage.newcomer()
        neighbour = Neighbour(self._stage) if "neighbour" in self._plan.kinds else None
        if neighbour is not None:
            neighbour.start()
        wide = self._wide_faults()
        ends_s = job.loop.time() + self._rng.uniform(*FAULTS_S)
        while job.loop.time() < ends_s:
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_BETWEEN_FAULTS_S))
            job.history.stop_if_broken()
            fault = self._rng.choice(self._faults())
            if wide and self._rng.random() < WIDE_SHARE:
                fault = self._rng.choice(wide)
            self._stage.note(fault.__name__.strip("_"))
            fault()
            self._afterwards.check_tasks()
            self._afterwards.replace_ended()
        self._stage.note("everything is healed")
        job.history.is_healed = True
        self._aimed.enough()
        await self._afterwards.heal()
        for kind in DEAF:
            if kind in self._plan.kinds:
                getattr(self._nodes, kind)()  # to find that out is up to the node
        await self._afterwards.converge()
        if neighbour is not None:
            await neighbour.end()
        if self._plan.kinds:
            await self._afterwards.meet()
            await self._afterwards.keep_step()
            await self._afterwards.finish_early()
        await self._afterwards.end()
        if self._plan.comes_back:
            if "lose_data_between_runs" in self._plan.kinds:
                job.wipe()
            self._stage.note("the job comes back")
            for _ in range(max(self._stage.least(), self._plan.nodes)):
                self._stage.newcomer()
            self._stage.complete()
            await self._afterwards.converge()
            await self._afterwards.leave_all()
        await self._afterwards.check_nothing_left()

    def _faults(self) -> list[Callable[[], None]]:
        return [
            self._stage.newcomer,
            self._stage.newcomer,
            self._nodes.crash,
            self._nodes.leave,
            self._nodes.cut_one,
            self._nodes.cut_one,
            self._nodes.cut_all,
            self._etcd.restart_etcd,
            self._etcd.compact,
            self._etcd.expire,
            self._nodes.lose_messages,
            self._nodes.lose_a_reply,
            self._nodes.slow,
            self._nodes.freeze,
            self._nodes.worker_fails,
            *([self._etcd.wipe] if self._plan.wipes else []),
            self._nodes.crash_leader,
            self._nodes.cut_leader,
            self._nodes.freeze_leader,
            self._etcd.expire_leader,
            self._nodes.cut_a_subset,
            self._etcd.compact_behind_a_cut,
            self._etcd.compact_all_the_time,
            self._nodes.hold_messages,
            self._nodes.jump_clocks,
            self._etcd.run_out_of_space,
            self._etcd.expire_job,
            *([self._close] if self._plan.closes_midway else []),
            *self._aimed.faults(),
        ]

    def _wide_faults(self) -> list[Callable[[], None]]:
        """The faults of this life's kinds."""
        parts: tuple[tuple[Part, tuple[str, ...]], ...] = (
            (self._nodes, NODES),
            (self._etcd, ETCD),
            (self._operator, OPERATOR),
            (self._peers, PEERS),
        )
        drawn = self._plan.kinds
        return [getattr(part, kind) for part, kinds in parts for kind in kinds if kind in drawn]

    def _close(self) -> None:
        for node in self._job.members_now()[:1]:
            self._aimed.delay_the_end(node)
            self._stage.later(self._closed_by(node, succeeded=self._rng.random() < 0.5))

    async def _closed_by(self, node: SimNode, *, succeeded: bool) -> None:
        closing = self._job.on(node, node.node.close_job(succeeded=succeeded, reason="midway"))
        await asyncio.wait((closing,), timeout=2 * TIMING.close_timeout_s)  # it may be crashed
        if not closing.done():
            closing.cancel()
        elif isinstance(closing.exception(), RdzvEtcdError):
            self._stage.note(f"not closed: {closing.exception()}")


class Neighbour(Part):
    """Another job on the same etcd, of two nodes, that meets its faults and none of its own.

    Whatever happens to the first job, nobody touches its keys.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        job = stage.job
        job_id, prefix = f"{job.settings.job_id}s", job.settings.prefix  # begins with its letters
        rng = random.Random(f"neighbour {job.loop.seed}")
        if rng.random() < 0.5:  # a team's prefix that is below the job, as if it were its own
            job_id, prefix = rng.choice(BELOW), job.keys.root.decode().rstrip("/")
            job.history.below.add(JobKeys(prefix, job_id).root)
        self._other = SimJob(
            job.loop,
            job.server,
            job_id=job_id,
            prefix=prefix,
            min_nodes=2,
            max_nodes=2,
            timing=job.settings.timing,
            works=True,
        )
        job.neighbours.append(self._other)

    def start(self) -> None:
        for name in NEIGHBOURS:
            self._other.start(name)

    async def end(self) -> None:
        """Both work in one world once everything is healed; then they leave."""
        other = self._other
        ends_s = other.loop.time() + NEIGHBOURS_CONVERGE_S
        while not other.works(NEIGHBOURS) and other.loop.time() < ends_s:
            for name in NEIGHBOURS:
                if other.nodes[name].error is not None:
                    await other.leave(name)
                    other.start(name)
            await other.pass_time(0.5)
        await other.until_works(NEIGHBOURS, REQUEST_TIMEOUT_S)
        for name in NEIGHBOURS:
            await other.leave(name)
        other.history.check()

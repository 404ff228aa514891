"""What has to come true once everything is healed: all work, nothing moves, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv_etcd.errors import (
    DrainedError,
    EtcdRefusedError,
    EtcdUnavailableError,
    JobClosedError,
    JobSettingsMismatchError,
    JoinTimeoutError,
    RdzvEtcdError,
    StateCorruptError,
)
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.node.context import REFUSED_TTL_S
from rdzv_etcd.node.leave import REQUEST_TTL_S
from rdzv_etcd.protocol import codec as values
from rdzv_etcd.protocol.member import Phase
from tests.sim.invariants import Invariant, InvariantError
from tests.sim.kinds import DEAF
from tests.sim.stage import Part, Stage
from tests.sim.work import EXIT_LIMIT_S
from tests.sim.world import REQUEST_TIMEOUT_S, NotReachedError, SimNode

CONVERGE_S = 150.0
CALM_S = 40.0
IN_STEP_S = 120.0
TOLD_AFTER_S = 2.0
"""After this time all know that a member has finished."""
HEARS_TTLS = 2
"""Within so many TTLs, and a little, a node finds out that a watch brings nothing."""
HEARD_S = 5.0
"""Within this time everybody who is not cut off has heard of a round."""


class Afterwards(Part):
    """Heals a job, and waits for what is promised then."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._healed_s: float | None = None
        """Since when nobody is cut off any more."""

    async def heal(self) -> None:
        job = self._job
        self._stage.calm = True
        await self._stage.all_done()
        if not job.server.up:
            await job.until(lambda: job.server.up, "etcd is back", 40)
        job.server.set_no_space(False)
        job.server.set_overloaded(False)
        job.server.forbidden.clear()
        if job.switch is not None:
            job.switch.heal()
        for node in self._stage.alive():
            self._heal_link(node)
            node.hurry.set()
            if node.is_stranger or node.is_done:  # its agent waits for so long only
                self._stage.later(job.leave(node.name))
        self._healed_s = job.loop.time()
        self.replace_ended()
        await self._stage.all_done()
        await self._obey()
        self._stage.complete()

    async def _obey(self) -> None:
        """Every node that was asked to leave has heard of it, and leaves."""
        asked = [node for node in self._stage.asked if node.alive]

        def heard() -> bool:
            return all(
                node.node.drain or node.error or node.finished or node.node.closure()
                for node in asked
            )

        await self._demand(
            Invariant.ASKED, heard, f"{[node.name for node in asked]} hear of it", CONVERGE_S
        )
        for node in asked:
            if node.alive and node.node.drain:
                await self._job.leave(node.name, "drained")

    def _heal_link(self, node: SimNode) -> None:
        link = node.connection.link
        link.heal()
        link.lose()
        link.refuse(None)
        link.lag_watches(0)
        link.delay(0.0, 0.001)
        link._planned.clear()

    def replace_ended(self) -> None:
        """Start another process for each that has ended, under the job's id."""
        for node in self._stage.alive():
            if node.error is not None or node.finished:
                self._check_error(node)
                node.alive = False
                self._stage.later(self._job.leave(node.name))
                self._stage.newcomer()
        self._stage.complete()

    def _check_error(self, node: SimNode) -> None:
        """An etcd that only needs an operator ends no member early, and no spare gives up;
        nobody who belongs gives up early, or with an error that no fault explains."""
        self._job.history.demand(
            node.error is None or isinstance(node.error, self._explained()),
            Invariant.CONVERGENCE,
            f"{node.name} ended, and no fault explains why: {node.error!r}",
        )
        too_late = isinstance(node.error, JoinTimeoutError) or (
            isinstance(node.error, EtcdUnavailableError | EtcdRefusedError) and bool(node.worlds)
        )
        self._job.history.demand(
            not too_late or node.tried_s >= 0.9 * node.join_timeout_s,
            Invariant.CONVERGENCE,
            f"{node.name} gave up after {node.tried_s:.0f} s: {node.error}",
        )
        healthy_s, healed_s = self._job.history.healthy_s(), self._healed_s
        self._job.history.demand(
            not isinstance(node.error, JoinTimeoutError)
            or healed_s is None
            or healthy_s is None
            or node.ended_s - max(healthy_s, healed_s) < HEARD_S,
            Invariant.CONVERGENCE,
            f"{node.name} gave up, though a round is healthy since {healthy_s}: {node.error}",
        )

    def _explained(self) -> tuple[type[RdzvEtcdError], ...]:
        """The errors that a join may end with in this life."""
        always = (JobClosedError, JoinTimeoutError, EtcdRefusedError, EtcdUnavailableError)
        sometimes = {
            "write_nonsense": StateCorruptError,
            "overwrite_a_slice": StateCorruptError,
            "start_a_stranger": JobSettingsMismatchError,
            "ask_to_leave": DrainedError,
        }
        return (*always, *(sometimes[kind] for kind in self._plan.kinds if kind in sometimes))

    def check_tasks(self) -> None:
        """Every background task of a node that lives goes on, as long as its job does."""
        for node in self._stage.alive():
            if node.node.closure() is not None:
                continue  # what follows the end of a job ends itself
            dead = [task.get_name() for task in node.node._duties if task.done()]
            self._job.history.demand(not dead, Invariant.TASKS, f"{node.name}: {dead} ended")

    def _converged(self) -> bool:
        alive = self._stage.at_work()
        working = [node for node in alive if node.is_working]
        begun = all(node.joins for node in alive)  # also who is to wait for a seat
        room = self._stage.has_room(working, alive)
        return begun and not room and self._job.works(node.name for node in working)

    async def converge(self) -> None:
        job = self._job
        ends_s = job.loop.time() + CONVERGE_S
        if "start_a_stranger" in self._plan.kinds:  # what a dead job of theirs left is outlasted
            ends_s += job.settings.timing.job_ttl_s
        if "after_end" in self._plan.kinds:  # nobody begins again before that
            ends_s += job.settings.timing.closed_ttl_s
        # what is lost, and what still hangs, shows within this time
        await asyncio.sleep(3 * self._plan.ttl_s + REQUEST_TIMEOUT_S)
        while not self._converged() and job.loop.time() < ends_s:
            await asyncio.sleep(5.0 if "after_end" in self._plan.kinds else 0.5)
            self.replace_ended()
        self.check_hearing()
        await self._demand(Invariant.CONVERGENCE, self._converged, "all work, or wait for a seat")
        before = {node.name: node.joins for node in self._stage.alive()}
        await asyncio.sleep(CALM_S)
        await self._demand(
            Invariant.CALM,
            lambda: {node.name: node.joins for node in self._stage.alive()} == before,
            "nobody joins again",
        )
        await self._demand(Invariant.CALM, self._converged, "all still work")
        for node in self._stage.alive():  # spares, too
            self._check_error(node)
        self.check_tasks()
        self.check_hearing()

    def _hears_within_s(self) -> float:
        is_deaf = any(kind in self._plan.kinds for kind in DEAF)
        return HEARD_S + (HEARS_TTLS * self._plan.ttl_s if is_deaf else 0)

    def check_hearing(self) -> None:
        """No watch of a node that reaches etcd keeps back for long what there is."""
        now_s = self._job.loop.time()
        for node in self._stage.alive():
            for watch in node.connection._watches:
                missed_s = now_s - (watch.missed_since_s or now_s)
                self._job.history.demand(
                    missed_s < self._hears_within_s(),
                    Invariant.HEARS,
                    f"{node.name} has not heard of changes of {watch.keys} for {missed_s:.0f} s",
                )

    async def _demand(
        self, invariant: Invariant, holds: Callable[[], bool], what: str, limit_s: float = 0
    ) -> None:
        try:
            await self._job.until(holds, what, limit_s)
        except NotReachedError as error:
            self._job.history.check()  # a broken promise is the better explanation
            raise InvariantError(invariant, str(error)) from None

    async def meet(self) -> None:
        """All members meet at a barrier, and again under the same name; nothing disturbs them."""
        for _ in range(2):
            members = self._job.members_now()
            meeting = [
                self._job.on(node, node.work.meet("the end"))
                for node in members
                if node.work is not None
            ]
            await self._demand(
                Invariant.BARRIER,
                lambda meeting=meeting: all(task.done() for task in meeting),  # type: ignore[misc]
                f"all {len(meeting)} pass a barrier as soon as they are there",
                5.0,
            )
            await asyncio.gather(*meeting)

    async def keep_step(self) -> None:
        """Calls that are interrupted, and made again, come to their end."""
        members, history = self._job.members_now(), self._job.history
        calls = [node.work.interrupted for node in members if node.work is not None]
        if not history.interrupts or not calls or members[0].world is None:
            return
        goals = [(each.barriers + 2, each.exchanges + 2) for each in calls]

        def in_step() -> bool:
            return all(
                each.barriers >= barriers and each.exchanges >= exchanges
                for each, (barriers, exchanges) in zip(calls, goals, strict=True)
            )

        await self._demand(
            Invariant.IN_STEP,
            in_step,
            f"all {len(calls)} pass two barriers more, and do two exchanges: {goals}",
            IN_STEP_S,
        )

    async def finish_early(self) -> None:
        """A member finishes before the others. Nothing moves for that; when one of the others joins
        again, none of them waits for it."""
        members = self._job.members_now()
        if "finish_early" not in self._plan.kinds or len(members) < 2:
            return
        there = self._stage.at_work()
        if any(
            self._stage.largest(other for other in there if other is not node) < self._stage.least()
            for node in members
        ):
            return
        done, fails = self._rng.sample(members, 2)
        joins = {node.name: node.joins for node in members}
        await self._job.finish_early(done.name)
        if not done.is_done:  # it was in a call, which ended its part in the world
            await self.converge()
            return
        await asyncio.sleep(TOLD_AFTER_S)
        await self._demand(
            Invariant.UNDISTURBED,
            lambda: {node.name: node.joins for node in members} == joins,
            "nobody joins again because a member has finished",
        )
        await self._job.join_again(fails.name)
        await self._demand(
            Invariant.UNAWAITED,
            self._converged,
            f"the others go on without {done.name}",
            self._hears_within_s(),
        )
        await self.converge()

    async def end(self) -> None:
        job = self._job
        if self._plan.closes is not None:
            if self._plan.closes:
                await self._exit_barrier()
            closer = self._rng.choice(job.members_now())
            await job.on(
                closer, closer.node.close_job(succeeded=self._plan.closes, reason="the end")
            )
            await self._demand(
                Invariant.CONVERGENCE,
                lambda: all(n.node.closure() for n in self._stage.alive() if n.error is None),
                "all members hear of it",
                self._hears_within_s(),
            )
        await self.leave_all()

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
            if node.alive and node.node.phase is Phase.IDLE:  # its call was cut off
                await self._job.join_again(node.name)
        await asyncio.sleep(REQUEST_TIMEOUT_S)  # what was lost shows within this time
        await self.converge()

    async def leave_all(self) -> None:
        await asyncio.gather(*(self._job.leave(node.name) for node in self._stage.alive()))
        await asyncio.sleep(1.0)
        left = [kv for kv in self._job.server.snapshot() if not self._is_marker(kv)]
        await self._demand(
            Invariant.NOTHING_LEFT, lambda: not left, f"all keys are gone at once: {left}"
        )

    def _is_marker(self, kv: KeyValue) -> bool:
        """Also a neighbour's; and what remembers the rounds, for as long as that, or is meant for a
        node that may be back."""
        key = self._job.keys.round
        ends = (b"/ctl/ended", b"/ctl/epoch", b"/ctl/stranger")
        if kv.key.endswith(ends) or b"/audit/" in kv.key or b"/ctl/drain/" in kv.key:
            return kv.lease_id != 0
        return kv.key == key and values.decode_round(key, kv.value).closure is not None

    async def check_nothing_left(self) -> None:
        job = self._job
        timing = job.settings.timing
        lasts_s = max(timing.job_ttl_s, timing.closed_ttl_s, timing.ended_ttl_s, REFUSED_TTL_S)
        if "ask_to_leave" in self._plan.kinds:
            lasts_s = max(lasts_s, REQUEST_TTL_S)
        await asyncio.sleep(lasts_s + 2.0)
        left = [kv.key for kv in job.server.snapshot()]
        await self._demand(
            Invariant.NOTHING_LEFT,
            lambda: not left and not job.server.leases(),
            f"no key and no lease is left: {left}, {job.server.leases()}",
        )

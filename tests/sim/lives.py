"""Lives one seed, and tells its trace: everything that etcd was asked and that nodes were told."""

from __future__ import annotations

import hashlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.node.leave import REQUEST_TTL_S
from rdzv_etcd.testing import Applied, SimulationError, SimulationTimeoutError
from tests.sim.faults import Life
from tests.sim.plan import Plan, plan
from tests.sim.world import SimJob, simulate


@dataclass(slots=True)
class Trace:
    """A life in one number: the same for the same seed, in any process."""

    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    rounds: int = 0

    def observe(self, applied: Applied) -> None:
        self._digest.update(repr(applied).encode())

    def end(self, job: SimJob) -> None:
        self.rounds = len(job.history.formed)
        self._digest.update("\n".join(job.history.log).encode())

    def __str__(self) -> str:
        return self._digest.hexdigest()[:16]


def live(seed: int, what: Plan | None = None, *, traced: bool = False) -> Trace:
    """Live one life; raises AssertionError or SimulationError with all that had happened.

    ``traced``: put what etcd was asked into the trace, too, which takes an eighth of the time.
    """
    what = plan(seed) if what is None else what
    trace = Trace()

    async def scenario(job: SimJob) -> None:
        if traced:
            job.server.observers.append(trace.observe)
        try:
            await Life(job, what).run()
        finally:
            trace.end(job)

    # a request to leave that was never heard goes with its lease
    simulate(scenario, [seed], limit_s=20_000.0 + REQUEST_TTL_S, **what.job())
    return trace


LONGEST_CPU_S = 60.0
"""A life takes a third of a second or so; one that takes this long goes round in circles.

Time of the processor, for a life waits for nothing real: beside other work it may get little of it.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one life went."""

    seed: int
    trace: str = ""
    rounds: int = 0
    failure: str | None = None


def outcome_of(seed: int, *, traced: bool = False, kinds: Sequence[str] = ()) -> Outcome:
    """Live one life, and tell instead of raising."""
    logging.disable(logging.CRITICAL)
    before = signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_CPU_S)
    try:
        trace = live(seed, plan(seed, kinds=kinds), traced=traced)
    except (AssertionError, SimulationError, RdzvEtcdError) as error:
        return Outcome(seed, failure=f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        logging.disable(logging.NOTSET)
    return Outcome(seed, str(trace) if traced else "", trace.rounds)


def _give_up(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SimulationTimeoutError(f"not done after {LONGEST_CPU_S:g} s of CPU time")

"""Random lives of jobs: ``python -m tests.sim --seeds 1000 --start 0 --jobs 2``.

A life that fails prints what happened in it and the command that lives it again, exactly.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.testing import SimulationError, SimulationTimeoutError
from tests.sim.faults import plan
from tests.sim.lives import live


LONGEST_S = 120
"""A life takes a tenth of a second or so; one that takes this long goes round in circles."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one life went."""

    seed: int
    trace: str = ""
    rounds: int = 0
    failure: str | None = None


def outcome_of(seed: int) -> Outcome:
    """Live one life, and tell instead of raising."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LONGEST_S)
    try:
        trace = live(seed)
    except (AssertionError, SimulationError, RdzvEtcdError) as error:
        return Outcome(seed, failure=f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    return Outcome(seed, str(trace), trace.rounds)


def _give_up(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SimulationTimeoutError(f"not done after {LONGEST_S} s of real time")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--brief", action="store_true", help="only a failure's first line")
    parser.add_argument("--traces", action="store_true", help="a line with each life's trace")
    given = parser.parse_args()
    seeds = range(given.start, given.start + given.seeds)
    began_s = time.monotonic()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    failed, rounds = [], 0
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for outcome in pool.imap(outcome_of, seeds, chunksize=min(10, -(-len(seeds) // given.jobs))):
            rounds += outcome.rounds
            if given.traces:
                print(f"seed {outcome.seed}: {outcome.trace}")
            if outcome.failure is not None:
                failed.append(outcome.seed)
                text = outcome.failure.splitlines()[0] if given.brief else outcome.failure
                print(f"seed {outcome.seed}: {plan(outcome.seed)}\n{text}")
                print(f"again: python -m tests.sim --seeds 1 --start {outcome.seed}", flush=True)
    took_s = time.monotonic() - began_s
    well = given.seeds - len(failed)
    print(f"{well} of {given.seeds} lives with {rounds} rounds went well in {took_s:.0f} s")
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random lives of jobs: ``python -m tests.sim --seeds 1000 --start 0 --jobs 2``.

A life that fails prints what happened in it and the command that lives it again, exactly.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.kinds import KINDS
from tests.sim.lives import outcome_of
from tests.sim.plan import plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--brief", action="store_true", help="only a failure's first line")
    parser.add_argument("--traces", action="store_true", help="a line with each life's trace")
    parser.add_argument("--kinds", default="", help="draw just these besides: see tests/sim/kinds")
    given = parser.parse_args()
    kinds = tuple(filter(None, given.kinds.split(",")))
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"--kinds: unknown {sorted(unknown)}; there are {', '.join(KINDS)}")
    seeds = range(given.start, given.start + given.seeds)
    began_s = time.monotonic()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    failed, rounds = [], 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawn) as pool:
        outcomes = partial(outcome_of, traced=given.traces, kinds=kinds)
        for outcome in pool.map(outcomes, seeds, chunksize=5):
            rounds += outcome.rounds
            if given.traces:
                print(f"seed {outcome.seed}: {outcome.trace}")
            if outcome.failure is not None:
                failed.append(outcome.seed)
                text = outcome.failure.splitlines()[0] if given.brief else outcome.failure
                print(f"seed {outcome.seed}: {plan(outcome.seed, kinds=kinds)}\n{text}")
                again = f"--start {outcome.seed}" + (f" --kinds {given.kinds}" if kinds else "")
                print(f"again: python -m tests.sim --seeds 1 {again}", flush=True)
    took_s = time.monotonic() - began_s
    well = given.seeds - len(failed)
    print(f"{well} of {given.seeds} lives with {rounds} rounds went well in {took_s:.0f} s")
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

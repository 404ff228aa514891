"""Random lives of jobs: ``python -m tests.sim --seeds 1000 --start 0``; prints seeds that fail."""

from __future__ import annotations

import argparse
import logging
import sys

from rdzv_etcd.testing import SimulationError
from tests.sim.faults import Life, options, plan
from tests.sim.world import SimJob, simulate


def run_seed(seed: int) -> None:
    """Live one life; raises what went wrong."""
    what = plan(seed)

    async def scenario(job: SimJob) -> None:
        await Life(job, what).run()

    simulate(scenario, [seed], **options(what))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--brief", action="store_true", help="only a failure's first line")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failed = []
    for seed in range(given.start, given.start + given.seeds):
        try:
            run_seed(seed)
        except (AssertionError, SimulationError) as error:
            failed.append(seed)
            text = str(error)
            print(f"seed {seed}: {plan(seed)}\n{text.splitlines()[0] if given.brief else text}")
    print(f"{given.seeds - len(failed)} of {given.seeds} lives went well; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random lives of jobs; more of them: ``python -m tests.sim --seeds 1000``."""

from __future__ import annotations

import pytest

from tests.sim.__main__ import run_seed

FOUND = [1, 18, 183, 203, 338, 1116, 1903, 2308, 2641, 3055, 3384, 6952]
"""Seeds that have found a defect."""


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once_stays_mended(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("start", range(10_000, 10_080, 20))
def test_whatever_happens_all_work_again_when_it_is_over(start: int) -> None:
    for seed in range(start, start + 20):
        run_seed(seed)

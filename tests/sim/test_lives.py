"""Random lives of jobs; more of them: ``python -m tests.sim --seeds 2000 --jobs 2``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.sim import lives
from tests.sim.lives import live, outcome_of
from tests.sim.plan import Plan

FOUND = (
    9400178,
    30010563,
    10000498,
    10004596,
    11004599,
    13004614,
    50003500,
    91000117,
    91000196,
    110008476,
)
"""Seeds that have found a defect."""


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once_stays_mended(seed: int) -> None:
    live(seed)


@pytest.mark.parametrize("start", [10_000, pytest.param(10_005, marks=pytest.mark.slow)])
def test_whatever_happens_all_work_again_when_it_is_over(start: int) -> None:
    for seed in range(start, start + 5):
        live(seed)


@pytest.mark.slow
def test_a_seed_replays_exactly_in_another_process() -> None:
    """Sets of strings are ordered by the process's hash seed: nothing may depend on it."""
    traces = [_traces_of_a_process(hash_seed) for hash_seed in ("1", "2")]
    assert traces[0] == traces[1]
    assert len(set(traces[0].splitlines())) == 6


def test_a_life_that_goes_round_in_circles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def circles(_seed: int, _what: Plan, *, traced: bool) -> lives.Trace:
        while True:
            pass

    monkeypatch.setattr(lives, "LONGEST_CPU_S", 0.2)
    monkeypatch.setattr(lives, "live", circles)
    assert outcome_of(1).failure == "SimulationTimeoutError: not done after 0.2 s of CPU time"


def test_a_life_that_gets_no_processor_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(_seed: int, _what: Plan, *, traced: bool) -> lives.Trace:
        assert not threading.Event().wait(5 * lives.LONGEST_CPU_S)
        return lives.Trace(rounds=3)

    monkeypatch.setattr(lives, "LONGEST_CPU_S", 0.2)
    monkeypatch.setattr(lives, "live", starved)
    assert outcome_of(1).failure is None


def _traces_of_a_process(hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.sim", "--seeds", "6", "--start", "70", "--traces"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("seed "))

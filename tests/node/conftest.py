"""How many schedules a scenario is run under."""

from __future__ import annotations

import pytest

from tests.sim import world
from tests.support import suite

FEW, SOME = 1, 2
"""In a quick run, and in CI. Before a release it is all, mostly 20."""


@pytest.fixture(autouse=True)
def _few_seeds_but_before_a_release(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of them these scenarios take a quarter of the whole suite's CPU time."""
    if not suite.before_a_release(request.config):
        count = SOME if suite.with_slow_tests(request.config) else FEW
        monkeypatch.setattr(world, "SEEDS_AT_MOST", count)

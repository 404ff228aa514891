"""How many schedules a scenario is run under."""

from __future__ import annotations

import pytest

from tests.sim import world
from tests.support import suite

FEW = 3


@pytest.fixture(autouse=True)
def _few_seeds_without_the_slow_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most scenarios have 20 seeds, which take a quarter of the whole suite's CPU time."""
    if not suite.with_slow_tests(request.config):
        monkeypatch.setattr(world, "SEEDS_AT_MOST", FEW)

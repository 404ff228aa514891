"""Fixtures for the examples: their processes, and the frameworks' environments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.environments import make_environment
from tests.examples.programs import Programs
from tests.support.gloo_threads import none_left_behind


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with none_left_behind(tmp_path_factory.mktemp("exits")):
        started = Programs()
        yield started
        started.close()


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with the module's ``FRAMEWORK``."""
    name: str = request.module.FRAMEWORK
    return str(make_environment(name, tmp_path_factory.mktemp(name)))

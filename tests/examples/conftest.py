"""The processes of the examples' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.programs import Programs
from tests.support.gloo_threads import none_left_behind


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with none_left_behind(tmp_path_factory.mktemp("exits")):
        started = Programs()
        yield started
        started.close()

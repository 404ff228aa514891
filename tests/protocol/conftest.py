from __future__ import annotations

import pytest

from tests.protocol.store import Store


@pytest.fixture
def store() -> Store:
    return Store()

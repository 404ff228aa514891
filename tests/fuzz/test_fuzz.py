"""A few inputs for each parser; 100,000 each: ``python -m tests.fuzz``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rdzv_etcd
from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import COSTLY, TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_only_our_own_errors_come_out(name: str) -> None:
    fuzz(name, max(20, 2_000 // COSTLY.get(name, 1)))


def test_nothing_from_the_network_is_ever_executed() -> None:
    """Nothing in the library imports pickle or marshal, or calls eval or exec."""
    forbidden = re.compile(
        r"\b(import|from) (pickle|marshal|shelve|dill)\b|\b(pickle|marshal)\.[a-z]|"
        r"(?<![\w.])(eval|exec)\("
    )
    root = Path(rdzv_etcd.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if forbidden.search(line)
    ]
    assert not found

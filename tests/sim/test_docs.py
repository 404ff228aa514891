"""What docs/reliability.md says is there, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.invariants import Invariant

_ROOT = Path(__file__).parents[2]
_TEXT = (_ROOT / "docs/reliability.md").read_text("utf-8")


@pytest.mark.parametrize("invariant", Invariant)
def test_every_promise_is_written_down(invariant: Invariant) -> None:
    assert f"**{invariant.value}**" in _TEXT


def test_every_file_that_shows_something_is_there() -> None:
    for name in re.findall(r"`(tests/[\w/.]+)`", _TEXT):
        assert (_ROOT / name).exists(), name


def test_the_example_works() -> None:
    match = re.search(r"example:begin -->\n```python\n(.*?)```", _TEXT, re.DOTALL)
    assert match is not None
    exec(compile(match[1], "docs/reliability.md", "exec"), {})

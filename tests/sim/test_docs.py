"""What docs/reliability.md and docs/testing.md say is there, and their examples work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.invariants import Invariant

_ROOT = Path(__file__).parents[2]
_TEXTS = {
    name: (_ROOT / "docs" / name).read_text("utf-8") for name in ("reliability.md", "testing.md")
}
_EXAMPLES = [
    pytest.param(code, name, id=f"{name}-{number}")
    for name, text in _TEXTS.items()
    for number, code in enumerate(
        re.findall(r"example:begin -->\n```python\n(.*?)```", text, re.DOTALL), 1
    )
]


@pytest.mark.parametrize("invariant", Invariant)
def test_every_promise_is_written_down(invariant: Invariant) -> None:
    assert f"**{invariant.value}**" in _TEXTS["reliability.md"]


@pytest.mark.parametrize("name", _TEXTS)
def test_every_file_that_shows_something_is_there(name: str) -> None:
    found = re.findall(r"`(tests/[\w/.]+)`", _TEXTS[name])
    assert found
    for path in found:
        assert (_ROOT / path).exists(), path


def test_every_folder_of_tests_is_described() -> None:
    folders = {path.parent.name for path in (_ROOT / "tests").glob("*/test_*.py")}
    assert {one for one in folders if f"`tests/{one}`" not in _TEXTS["testing.md"]} <= {"support"}


def test_there_are_examples() -> None:
    assert len(_EXAMPLES) == 3


@pytest.mark.parametrize(("code", "name"), _EXAMPLES)
def test_the_example_works(code: str, name: str) -> None:
    exec(compile(code, f"docs/{name}", "exec"), {})

"""What the documents for developers name is there, and their example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.invariants import Invariant

_ROOT = Path(__file__).parents[2]
_TEXTS = {
    name: (_ROOT / name).read_text("utf-8") for name in ("docs/reliability.md", "CONTRIBUTING.md")
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
    assert f"**{invariant.value}**" in _TEXTS["docs/reliability.md"]


@pytest.mark.parametrize("name", _TEXTS)
def test_every_file_that_shows_something_is_there(name: str) -> None:
    found = re.findall(r"`(tests/[\w/.]+)`", _TEXTS[name])
    assert found
    for path in found:
        assert (_ROOT / path).exists(), path


def test_every_module_of_the_architecture_is_there() -> None:
    text = (_ROOT / "ARCHITECTURE.md").read_text("utf-8")
    found = re.findall(r"`([\w/]+\.py)`", text)
    assert found
    assert [path for path in found if not (_ROOT / "rdzv_etcd" / path).exists()] == []
    packages = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    described = {name for cell in packages for name in re.findall(r"`(\w+)`", cell)}
    assert described == {path.parent.name for path in (_ROOT / "rdzv_etcd").glob("*/__init__.py")}


def test_every_folder_of_tests_is_described() -> None:
    folders = {path.parent.name for path in (_ROOT / "tests").glob("*/test_*.py")}
    assert {one for one in folders if f"`tests/{one}`" not in _TEXTS["CONTRIBUTING.md"]} <= {
        "support"
    }


def test_there_is_an_example() -> None:
    assert len(_EXAMPLES) == 1


@pytest.mark.parametrize(("code", "name"), _EXAMPLES)
def test_the_example_works(code: str, name: str) -> None:
    exec(compile(code, name, "exec"), {})

"""docs/troubleshooting.md has every error, and messages that are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.packaging.generated import error_classes
from tests.support.markdown import ROOT

_MESSAGE = re.compile(r"^\| `([^`]+)` \| .*?`(\w+Error)`", re.MULTILINE)
MESSAGES = _MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
"""Each with its class."""
BASES = {"RdzvEtcdError", "EtcdRefusedError"}  # raised as what they are the base of


def test_every_error_that_is_raised_has_a_message_with_what_to_do() -> None:
    assert {kind.__name__ for kind in error_classes()} - BASES == {error for _, error in MESSAGES}


def test_every_message_is_in_the_code() -> None:
    code = "\n".join(
        text
        for path in (ROOT / "rdzv_etcd").rglob("*.py")
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert [message for message, _ in MESSAGES if message.strip() not in code] == []


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text, joined where Python joins it; ``…`` for what is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))

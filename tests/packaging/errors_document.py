"""Keeps the classes in docs/troubleshooting.md those of ``rdzv_etcd/errors.py``.

.venv/bin/python -m tests.packaging.errors_document      writes them
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from rdzv_etcd import errors
from rdzv_etcd.errors import RdzvEtcdError
from tests.support.markdown import ROOT

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
_TREE = re.compile(r"(<!-- errors:begin -->\n).*?(<!-- errors:end -->)", re.DOTALL)
_MESSAGE = re.compile(r"^\| `([^`]+)` \| .*?`(\w+Error)`", re.MULTILINE)


def kinds() -> list[type[RdzvEtcdError]]:
    """Every class of the module, in its order."""
    found = (thing for thing in vars(errors).values() if inspect.isclass(thing))
    return [thing for thing in found if issubclass(thing, RdzvEtcdError)]


def renewed(text: str) -> str:
    """The document with the classes as they are now."""
    tree = "\n".join(_branch(RdzvEtcdError, 0))
    return _TREE.sub(lambda found: f"{found[1]}```text\n{tree}\n```\n{found[2]}", text)


def _branch(kind: type[RdzvEtcdError], depth: int) -> Iterator[str]:
    """A class and, below it, those whose first base it is."""
    also = ", ".join(base.__name__ for base in kind.__bases__[1:])
    yield f"{'    ' * depth}{kind.__name__}{f' (also {also})' if also else ''}"
    for other in kinds():
        if other.__bases__[0] is kind:
            yield from _branch(other, depth + 1)


def messages(text: str) -> list[tuple[str, str]]:
    """The messages that the document explains, each with its class."""
    return _MESSAGE.findall(_TREE.sub("", text))


def written_in_the_code() -> str:
    """Every text in the package's code, joined where Python joins it; ``…`` for what is put in."""
    return "\n".join(
        text
        for path in sorted((ROOT / "rdzv_etcd").rglob("*.py"))
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
    )


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")

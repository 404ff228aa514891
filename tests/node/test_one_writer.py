"""In the rooms that run a node, the fields of an object have one writer: the object itself. The
state of the node, :class:`~rdzv_etcd.protocol.member.Member`, belongs to all its parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdzv_etcd

LIBRARY = Path(rdzv_etcd.__file__).parent
ROOMS = ("node", "world", "runtime")
THREADS = "loop_thread.py"
"""Its three classes are one thread, its calls and the count of who holds it, under one lock."""
FINALIZER = "atexit"
"""The standard library's: :class:`weakref.finalize` is set up by assigning to it. So are the names
with two underscores of a function that is made."""


def foreign_writes(source: str) -> Iterator[int]:
    """Yield the lines that assign to an attribute of anything but ``self`` and the member."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store | ast.Del):
            continue
        if node.attr == FINALIZER or node.attr.startswith("__"):
            continue
        if ast.unparse(node.value) not in ("self", "member", "self._member"):
            yield node.lineno


def test_nobody_writes_another_objects_fields() -> None:
    found = [
        f"{path.name}:{line}"
        for room in ROOMS
        for path in sorted((LIBRARY / room).glob("*.py"))
        if path.name != THREADS
        for line in foreign_writes(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "watch.view = view",
        "self._context.control.problem = problem",
        "world, part.bound = part.bound, None",
        "session.failures += 1",
    ],
)
def test_a_write_from_outside_is_found(source: str) -> None:
    assert list(foreign_writes(source))

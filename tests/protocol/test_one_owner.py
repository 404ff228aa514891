"""Whatever is written to etcd, and every key of it, is built in ``rdzv_etcd/protocol``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdzv_etcd

LIBRARY = Path(rdzv_etcd.__file__).parent
OWNERS = ("protocol", "etcd", "testing")
"""The protocol itself, the client below it, and the etcd in memory that stands for both sides."""

REQUESTS = {"Txn", "Put", "Delete", "Compare", "Get"}
KEYS = {"KeyRange", "prefix_end"}
PARTS_OF_KEYS = {"root", "start", "end"}
KNOW_KEYS = ("node", "world", "kv", "torch_plugin")
"""The packages that are given keys, and might put together another one."""


def built_by_hand(source: str, *, knows_keys: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of whatever belongs in the protocol."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in REQUESTS | KEYS:
                yield node.lineno, f"builds a {name}"
        elif isinstance(node, ast.BinOp) and knows_keys and any(map(_is_part, _sides(node))):
            yield node.lineno, "puts bytes together as if for a key"


def _sides(node: ast.BinOp) -> tuple[ast.expr, ...]:
    if isinstance(node.op, ast.Mod):
        return (node.left,)
    return (node.left, node.right) if isinstance(node.op, ast.Add) else ()


def _is_part(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in PARTS_OF_KEYS
    return isinstance(node, ast.Constant) and isinstance(node.value, bytes)


def test_only_the_schema_builds_keys_and_transactions() -> None:
    found = []
    for path in sorted(LIBRARY.rglob("*.py")):
        place, *_ = path.relative_to(LIBRARY).parts
        if place not in OWNERS:
            lines = built_by_hand(path.read_text(), knows_keys=place in KNOW_KEYS)
            found += [f"{path.relative_to(LIBRARY)}:{line} {why}" for line, why in lines]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "etcd.txn(Txn((), ()))",
        "api.Delete(key)",
        "KeyRange(start, end)",
        "watch(key, prefix_end(key))",
        "keys.store(1, run).start + name.encode()",
        "key + b'\\x00'",
        "b'arrived/%d' % turn",
    ],
)
def test_a_request_that_is_built_by_hand_is_found(source: str) -> None:
    assert list(built_by_hand(source))

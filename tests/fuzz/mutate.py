"""Makes bad input out of good: changed bytes, changed JSON, and things of any type."""

from __future__ import annotations

import json
import random
from typing import Any

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, -(2**63) - 1, 10**400, 0.0, -0.5, 1e308, float("nan"),
    float("inf"), "", " ", "\x00", "\ud800", "é" * 50, "1e5", "0x10", "٣", "-1", "null", "http",
    "/", "~", "[]", b"", b"\xff", [], {}, (), [None], {"v": 1}, {"": []}, object, range(3),
)  # fmt: skip


def nasty_bytes(rng: random.Random, valid: bytes) -> bytes:
    """Return random bytes, or ``valid`` with a few bytes changed, lost, doubled or put in."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(64))
    content = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(content) + 1)
        way = rng.randrange(5)
        if way == 0:
            content[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        elif way == 1:
            del content[at : at + rng.randrange(1, 20)]
        elif way == 2:
            content[at:at] = content[at : at + rng.randrange(1, 40)]
        elif way == 3 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        else:
            content[at:at] = rng.choice((b"{", b"}", b"[" * 50, b'"', b"\\u", b"-", b"9" * 25))
    return bytes(content)


def nasty_text(rng: random.Random, valid: str) -> str:
    if rng.random() < 0.1:
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000))))
                       for _ in range(rng.randrange(20)))  # fmt: skip
    return nasty_bytes(rng, valid.encode()).decode(errors="surrogateescape")


def nasty_json(rng: random.Random, valid: bytes) -> bytes:
    """Return JSON of nearly the right shape: a field lost, added, or of another type."""
    tree = json.loads(valid)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = _changed(rng, tree)
    return json.dumps(tree, default=str).encode(errors="surrogatepass")


def _changed(rng: random.Random, tree: Any) -> Any:
    if not tree or not isinstance(tree, dict | list) or rng.random() < 0.2:
        return rng.choice((*NASTY[:25], [], {}, [None], {"v": 1}))
    tree = tree.copy()
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    way = rng.random()
    if way < 0.2:
        del tree[key]
    elif way < 0.3 and isinstance(tree, dict):
        tree[str(rng.random())] = tree[key]
    elif way < 0.4 and isinstance(tree, list):
        tree.append(tree[key])
    else:
        tree[key] = _changed(rng, tree[key])
    return tree

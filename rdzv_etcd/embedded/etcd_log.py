"""What an etcd that failed said about it, for a person. Knows etcd's log, nothing else.

Its last lines are Go's stack trace; the cause stands some lines before.
"""

from __future__ import annotations

import json
import re

from rdzv_etcd.text import shown

MOST = 400
_DULL = frozenset({"level", "ts", "caller", "msg", "stacktrace"})
_TROUBLE = re.compile(r"error|fatal|panic|in use|denied|no space|too many", re.IGNORECASE)


def last_words(log: str) -> str:
    """Return what explains the end best: printable, one line, at most some 400 characters."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    entries = [entry for entry in map(_entry, lines) if entry is not None]
    for levels in (("fatal", "panic"), ("error",), ("warn",)):
        told = [_sentence(entry) for entry in entries if entry.get("level") in levels]
        if told:
            return shown(told[-1], MOST)
    plain = [line for line in lines if _TROUBLE.search(line)] or lines
    return shown(plain[-1], MOST) if plain else "it said nothing"


def _entry(line: str) -> dict[str, object] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "msg" in entry else None


def _sentence(entry: dict[str, object]) -> str:
    details = [
        str(value) if name == "error" else f"{name}={value}"
        for name, value in entry.items()
        if name not in _DULL
    ]
    return f"{entry['msg']}: {', '.join(details)}" if details else str(entry["msg"])

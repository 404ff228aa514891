"""What a number, a text, a path or a node's data must be; raises SettingsError, in the user's
words."""

from __future__ import annotations

import json
import operator
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.limits import MAX_DATA, MAX_DATA_DEPTH
from rdzv_etcd.text import named, shown


def whole_or_none(number: object) -> int | None:
    """Return a whole number, of whatever type that is one; ``None`` if it is none."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole(name: str, number: object) -> int:
    """Return a whole number, of whatever type that is one; raises SettingsError if it is none."""
    found = whole_or_none(number)
    if found is None:
        raise SettingsError(f"{name} is {named(number)}; it must be a whole number")
    return found


def gate_words(command: str | None) -> list[str]:
    """Split a gate's command into the program and its arguments; raises SettingsError."""
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"gate_command={shown(command)!r} cannot be split: {error}") from None
    if not words or "\0" in command:
        raise SettingsError(f"gate_command={shown(command)!r} names no program")
    return words


def check_metrics_file(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".prom" or "\0" in str(path):
        raise SettingsError(
            f"metrics_file is {shown(repr(str(path)))}; its name must end in .prom: the text-file "
            "collector reads no others, and what is there already is replaced"
        )


def checked_data(data: object) -> dict[str, object]:
    """Return a copy; raise SettingsError unless the others would read exactly this."""
    if isinstance(data, Mapping):
        data = dict(data)
    problem = nesting_problem(data)
    if problem is not None:
        raise SettingsError(f"data {problem}")
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        read = json.loads(text)
        same = read == data
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(f"data cannot be written as JSON: {error}") from error
    if not isinstance(data, dict) or not same:
        raise SettingsError(
            f"data is {shown(repr(data), 100)}; it must be a dict with texts as keys, and with "
            "texts, numbers, booleans, None, lists and such dicts as values"
        )
    if len(text) > MAX_DATA:
        raise SettingsError(
            f"data has {len(text)} bytes as JSON; it must have at most {MAX_DATA}: what is larger "
            "can be exchanged once the world is formed"
        )
    copied: dict[str, object] = read
    return copied


def nesting_problem(data: object) -> str | None:
    """Say what is wrong with data that has too much in it, or too deep; ``None``: nothing.

    It looks at no more values than could be written, however large one is or how often the same
    one is in it. What is left is for :func:`json.dumps`.
    """
    containers, values = [data], 1
    for _ in range(MAX_DATA_DEPTH):
        items = list(islice(_items_of(containers), MAX_DATA))
        values += len(items)
        if values > MAX_DATA:  # each takes a byte at least
            return (
                f"has more than {MAX_DATA} values in it; it must have at most {MAX_DATA} bytes as "
                "JSON: what is larger can be exchanged once the world is formed"
            )
        containers = [item for item in items if isinstance(item, dict | list | tuple)]
        if not containers:
            return None
    return (
        f"has lists or dicts in each other more than {MAX_DATA_DEPTH} deep; not every other node "
        "could read that"
    )


def _items_of(containers: list[object]) -> Iterator[object]:
    for each in containers:
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, list | tuple):
            yield from each


def check_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsError(f"{name} has {len(text)} characters; it must have at most {most}")

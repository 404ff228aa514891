"""What a text, a path or a node's data must be; raises SettingsError, in the user's words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.limits import MAX_DATA, MAX_DATA_DEPTH
from rdzv_etcd.text import shown


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
    if _is_deeper(data, MAX_DATA_DEPTH):
        raise SettingsError(
            f"data has lists or dicts in each other more than {MAX_DATA_DEPTH} deep; not every "
            "other node could read that"
        )
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


def _is_deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in value)


def check_short(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsError(f"{name} has {len(text)} characters; it must have at most {most}")

"""Fields of settings that are options as well: type, default, limits, aliases and help, once.

The parser, the limits of values given in code, the "did you mean" of errors and docs/options.md all
come from them.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.text import named, shown
from rdzv_etcd.text import shown as shown_text

LONGEST_S = 10 * 365 * 86400
"""Ten years: longer waits are mistakes, and overflow some timers."""

_OPTION = "option"


class Kind(Enum):
    """How a value is written; the value is what the table in docs/options.md calls it."""

    SECONDS = "seconds"
    WHOLE_SECONDS = "whole seconds"
    COUNT = "whole number"
    FLAG = "0 or 1"
    FILE = "file"
    NEW_FILE = "file to write"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting a user may give."""

    name: str
    kind: Kind
    default: str
    """As it is shown to people."""
    help: str
    aliases: tuple[str, ...] = ()
    """The names that torch's legacy ``etcd`` and ``etcd-v2`` backends use."""
    zero: bool = False
    """Whether a number may be zero."""
    most: int | None = None
    """The highest number."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it may be given by, ours first."""
        return (self.name, *self.aliases)


def option(
    name: str,
    kind: Kind,
    help_: str,
    *,
    default: Any,
    shown: str | None = None,
    aliases: tuple[str, ...] = (),
    zero: bool = False,
    most: int | None = None,
    **of_field: Any,
) -> Any:
    """Make a dataclass field that may be given as an option; ``shown`` is its default for people,
    ``of_field`` what :func:`dataclasses.field` takes besides."""
    text = f"{default:g}" if shown is None else shown
    described = Option(name, kind, text, help_, aliases, zero, most)
    return dataclasses.field(default=default, metadata={_OPTION: described}, **of_field)


def options_of(settings: type) -> dict[str, Option]:
    """Return the options among a dataclass's fields, by the field's name."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata[_OPTION] for field in fields if _OPTION in field.metadata}


def check_numbers(settings: object) -> None:
    """Check the numbers among the options of a dataclass's instance; raises SettingsError."""
    for name, described in options_of(type(settings)).items():
        value = getattr(settings, name)
        if value is None:
            continue
        if described.kind in (Kind.SECONDS, Kind.WHOLE_SECONDS):
            right = 0 < value <= LONGEST_S or (value == 0 and described.zero)
            wanted = f"{seconds_wanted(described)}, at most ten years ({LONGEST_S})"
        elif described.most is not None:
            least = 0 if described.zero else 1
            right = least <= value <= described.most
            wanted = f"from {least} to {described.most}"
        else:
            continue
        if not right:
            raise SettingsError(f"{name} is {shown_text(value)}; it must be {wanted}")


def seconds_wanted(described: Option) -> str:
    """Say what a number of seconds has to be."""
    if described.zero:
        return "a number of seconds, zero or more"
    return "a positive number of seconds"


DEFAULT_PREFIX = "/rdzv_etcd"
DEFAULT_SLICE_NODES = 128
MAX_EPOCH_CLAIM = 2**53
"""No node may say that it knows of a higher epoch: microseconds until the year 2255, and exact in
every program that reads JSON."""
MAX_SLICE_NODES = 1024
"""More names in one value would not help anybody; etcd limits a request to 1.5 MiB."""
MAX_NODES = 1_000_000
"""More than any job has; every number in etcd that counts nodes is checked against it."""
MAX_ROUND = 10**9
"""Of a record. No round can follow that of this number: nobody could read it."""
MAX_HISTORY = 1000
"""Rounds: eight megabytes of etcd at most, and keys that the leader can read at once."""
MAX_ID = 1000
"""Characters of a job id and of a prefix: they are part of every key."""
MAX_RANK_KEY = 1000
"""Characters of a rank key: every node that leads reads all of them."""
MAX_DATA = 4096
"""Bytes of a node's data as JSON: every node that leads reads those of all."""
MAX_DATA_DEPTH = 32
"""Lists and dicts in each other in a node's data: how deep a reader can go is another's setting."""
MAX_HOST = 255
"""Characters of a host's name."""
MAX_REASON = 500
"""Characters of the reason why a node leaves or is drained, or a job is closed, that others see."""
MAX_SECRET = 16384
"""Bytes of the file that holds a user's name or password; it may be a token."""


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

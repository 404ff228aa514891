"""Fields of settings that are options as well, and the limits of what a setting may hold.

An option's type, default, limits, aliases and help are declared once, with its field: the parser,
the limits of values given in code, the "did you mean" of errors and docs/options.md use them.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rdzv_etcd.arguments import LONGEST_S, whole_or_none
from rdzv_etcd.errors import SettingsError
from rdzv_etcd.text import named
from rdzv_etcd.text import shown as shown_text

DEFAULT_PREFIX = "/rdzv_etcd"
DEFAULT_JOB_ID = "none"
"""torchrun's, which all jobs share that are started without an id."""
DEFAULT_SLICE_NODES = 128
MAX_EPOCH_CLAIM = 2**53
"""No node may claim to know a higher epoch: microseconds until the year 2255, and exact in every
program that reads JSON."""
MAX_SLICE_NODES = 1024
"""More names in one value would not help; etcd limits a request to 1.5 MiB."""
MAX_NODES = 1_000_000
"""More than any job has; every number in etcd that counts nodes is checked against it."""
MAX_ROUND = 10**9
"""Of a record. No round can follow that of this number: no node could read it."""
MAX_HISTORY = 1000
"""Rounds: eight megabytes of etcd at most, and keys that the leader can read at once."""
MAX_ID = 1000
"""Characters of a job id and of a prefix: they are part of every key."""
MAX_RANK_KEY = 1000
"""Characters of a rank key: every node that leads reads all of them."""
MAX_DOMAIN = 255
"""Characters of a domain's name."""
WHOLE_DOMAIN = 0
"""The size of a segment that has all nodes of its domain: ``segment_size=all``."""
MAX_DATA = 4096
"""Bytes of a node's data as JSON: every node that leads reads those of all."""
MAX_DATA_DEPTH = 32
"""Levels of nested lists and dicts in a node's data: a reader's own limit may be low."""
MAX_HOST = 255
"""Characters of a host's name."""
MAX_REASON = 500
"""Characters of the reason why a node leaves or is drained, or a job is closed."""
MAX_SECRET = 16384
"""Bytes of the file that holds a user's name or password; it may be a token."""

_OPTION = "option"


class OptionKind(Enum):
    """How a value is written; the value is what the table in docs/options.md calls it."""

    SECONDS = "seconds"
    WHOLE_SECONDS = "whole seconds"
    COUNT = "whole number"
    COUNT_OR_ALL = "whole number or `all`"
    FLAG = "0 or 1"
    FILE = "file"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting that a user may give."""

    name: str
    kind: OptionKind
    default: str
    """As it is shown to people."""
    help: str | None
    """``None``: a value that only tests change. It is accepted, and shown nowhere."""
    aliases: tuple[str, ...] = ()
    """The names that torch's legacy ``etcd`` and ``etcd-v2`` backends use."""
    zero: bool = False
    """Whether a number may be zero."""
    most: int = LONGEST_S
    """The highest number."""
    choices: tuple[Enum, ...] = ()
    """What a text may be, by the values of these."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it may be given by, ours first."""
        return (self.name, *self.aliases)

    @property
    def wanted(self) -> str:
        """What a number has to be, for messages."""
        if self.kind in (OptionKind.COUNT, OptionKind.COUNT_OR_ALL):
            others = ", or all" if self.kind is OptionKind.COUNT_OR_ALL else ""
            return f"a whole number from {int(not self.zero)} to {self.most}{others}"
        whole = "whole " if self.kind is OptionKind.WHOLE_SECONDS else ""
        least = f"a positive {whole}number of seconds"
        if self.zero:
            least = f"a {whole}number of seconds, zero or more"
        return f"{least}, at most ten years ({self.most})"

    def allows(self, number: float) -> bool:
        return 0 < number <= self.most or (self.zero and number == 0)


def option(
    name: str,
    kind: OptionKind,
    help_: str | None,
    *,
    default: Any,
    shown: str | None = None,
    aliases: tuple[str, ...] = (),
    zero: bool = False,
    most: int = LONGEST_S,
    choices: type[Enum] | None = None,
    **of_field: Any,
) -> Any:
    """Make a dataclass field that may be given as an option; ``shown`` is its default for people,
    ``of_field`` what :func:`dataclasses.field` takes besides."""
    if shown is None:
        shown = "none" if default is None else f"{default:g}"
    described = Option(name, kind, shown, help_, aliases, zero, most, tuple(choices or ()))
    return dataclasses.field(default=default, metadata={_OPTION: described}, **of_field)


def options_of(settings: type) -> dict[str, Option]:
    """Return the options among a dataclass's fields, by the field's name."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata[_OPTION] for field in fields if _OPTION in field.metadata}


def check_numbers(settings: object) -> None:
    """Check the numbers among the options of a dataclass's instance; raises SettingsError."""
    for name, described in options_of(type(settings)).items():
        value = getattr(settings, name)
        is_number = described.kind in (
            OptionKind.SECONDS,
            OptionKind.WHOLE_SECONDS,
            OptionKind.COUNT,
        )
        if is_number and value is not None and not described.allows(value):
            raise SettingsError(f"{name} is {shown_text(value)}; it must be {described.wanted}")


def whole(name: str, number: object) -> int:
    """Return a whole number, of whatever type that is one; raises SettingsError."""
    found = whole_or_none(number)
    if found is None:
        raise SettingsError(f"{name} is {named(number)}; it must be a whole number")
    return found


def check_length(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsError(f"{name} has {len(text)} characters; it must have at most {most}")


def gate_words(command: str | None) -> list[str]:
    """Split a gate's command into the program and its arguments; raises SettingsError."""
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(
            f"gate_command={shown_text(command)!r} cannot be split: {error}"
        ) from None
    if not words or "\0" in command:
        raise SettingsError(f"gate_command={shown_text(command)!r} names no program")
    return words


def checked_data(data: object) -> dict[str, object]:
    """Return a copy; raise SettingsError unless other nodes would read exactly this."""
    if isinstance(data, Mapping):
        data = dict(data)
    # In pieces: the same list may be in it a million times.
    pieces = json.JSONEncoder(separators=(",", ":"), allow_nan=False).iterencode(data)
    text = ""
    try:
        while len(text) <= MAX_DATA and (piece := next(pieces, "")):
            text += piece
    except RecursionError:
        raise SettingsError(f"data {TOO_DEEP}") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"data cannot be written as JSON: {error}") from error
    if len(text) > MAX_DATA:
        raise SettingsError(
            f"data has more than {MAX_DATA} bytes as JSON, the most it may have: exchange larger "
            "values once the world is formed"
        )
    if is_too_deep(data):
        raise SettingsError(f"data {TOO_DEEP}")
    copied = json.loads(text)
    if not isinstance(data, dict) or copied != data:
        raise SettingsError(
            f"data is {shown_text(repr(data), 100)}; it must be a dict with texts as keys, and "
            "with texts, numbers, booleans, None, lists and such dicts as values"
        )
    return dict(copied)


TOO_DEEP = (
    f"has lists or dicts in each other more than {MAX_DATA_DEPTH} deep; not every other node could "
    "read that"
)


def is_too_deep(data: object, most: int = MAX_DATA_DEPTH) -> bool:
    """Return whether lists and dicts are nested more than ``most`` deep."""
    if not isinstance(data, dict | list | tuple):
        return False
    values = data.values() if isinstance(data, dict) else data
    return most == 0 or any(is_too_deep(value, most - 1) for value in values)

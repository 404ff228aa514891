"""Fields of settings that are options as well: type, default, limits, aliases and help, once.

The parser, the limits of values given in code, the "did you mean" of errors and docs/options.md all
come from them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rdzv_etcd.errors import SettingsError
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

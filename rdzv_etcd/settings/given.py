"""The options as one user gave them: names resolved, values parsed, the typed name remembered.

Knows how each kind of value is written; does not know what an option is for.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.settings.checks import whole_or_none
from rdzv_etcd.settings.fields import LONGEST_S, Kind, Option, options_of, seconds_wanted
from rdzv_etcd.settings.options import NAMES, WITHOUT_MEANING
from rdzv_etcd.text import named

_SECRETS = frozenset({"user", "username", "password", "passwd", "token", "credentials"})
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})

Value = float | int | bool | str | Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One option that was given."""

    typed: str
    """The name the user typed."""
    value: Value


class Given:
    """All options that were given, by our name.

    torchrun passes strings; library users may pass numbers of any type, booleans and paths.
    ``None`` counts as not given.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._entries: dict[str, Entry] = {}
        for typed, raw in config.items():
            if typed in WITHOUT_MEANING:
                continue
            option = _find(typed)
            if raw is None:
                continue
            entry = Entry(typed, _parse(option, typed, raw))
            other = self._entries.get(option.name)
            if other is None:
                self._entries[option.name] = entry
            else:
                self._entries[option.name] = _merge(other, entry)

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def typed(self, name: str) -> str:
        """The name to use in a message: what the user typed, or ours."""
        entry = self._entries.get(name)
        return name if entry is None else entry.typed

    def fields(self, settings: type) -> dict[str, Any]:
        """Return what was given for the fields of a dataclass, by the field's name."""
        by_field = {
            field: self.entry(option.name) for field, option in options_of(settings).items()
        }
        return {field: entry.value for field, entry in by_field.items() if entry is not None}

    def number(self, name: str) -> float | None:
        value = self._value(name)
        return value if isinstance(value, int | float) else None

    def text(self, name: str) -> str | None:
        value = self._value(name)
        return None if value is None else str(value)

    def file(self, name: str) -> Path | None:
        value = self._value(name)
        return value if isinstance(value, Path) else None

    def _value(self, name: str) -> Value | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.value


def _find(typed: object) -> Option:
    if not isinstance(typed, str):
        raise SettingsError(f"the name of a rendezvous option must be text, not {_shown(typed)}")
    if typed.lower() in _SECRETS:
        raise SettingsError(
            f"{typed}= is refused, because values given here end up in process lists and logs: "
            "set RDZV_ETCD_USER and RDZV_ETCD_PASSWORD in the environment, or give user_file= and "
            "password_file="
        )
    option = NAMES.get(typed)
    if option is None:
        near = difflib.get_close_matches(typed.lower(), NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(NAMES))}"
        raise SettingsError(f"unknown rendezvous option {typed!r}; {hint}")
    return option


def _merge(first: Entry, second: Entry) -> Entry:
    if {first.typed, second.typed} == {"timeout", "join_timeout"}:
        # torchrun sets `timeout` by itself: it says nothing about what the user wants.
        return first if first.typed == "join_timeout" else second
    if first.value != second.value:
        raise SettingsError(
            f"{first.typed}={first.value} and {second.typed}={second.value} are two names of the "
            "same setting with different values: keep one"
        )
    return first


def _parse(option: Option, typed: str, raw: object) -> Value:
    if isinstance(raw, str):
        raw = raw.strip()
        if not raw:
            raise SettingsError(f"{typed} is empty")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in raw):
            raise SettingsError(f"{typed}={raw!r} is not valid UTF-8")
    if option.kind is Kind.FLAG:
        return _parse_flag(typed, raw)
    if option.kind in (Kind.WHOLE_SECONDS, Kind.COUNT):
        return _parse_whole(option, typed, raw)
    if option.kind is Kind.SECONDS:
        return _parse_seconds(option, typed, raw)
    if option.kind in (Kind.FILE, Kind.NEW_FILE):
        return (_parse_file if option.kind is Kind.FILE else _parse_new_file)(typed, raw)
    if isinstance(raw, str):
        return raw
    number = whole_or_none(raw)
    if number is not None and abs(number) < 10**18:
        return str(number)  # rank_key=7
    raise SettingsError(f"{typed}={_shown(raw)} must be text")


def _parse_flag(typed: str, raw: object) -> bool:
    word = raw.lower() if isinstance(raw, str) else ""
    if word in _YES or _equals(raw, 1):
        return True
    if word in _NO or _equals(raw, 0):
        return False
    raise SettingsError(f"{typed}={_shown(raw)} must be 0 or 1")


def _equals(raw: object, number: int) -> bool:
    """Whether they are equal; what has several values, as an array has, equals no number."""
    try:
        return bool(raw == number)
    except (TypeError, ValueError, RuntimeError):
        return False


def _number(typed: str, raw: object, wanted: str) -> float:
    whole = whole_or_none(raw)
    value = raw if whole is None else whole
    if isinstance(value, str | numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise SettingsError(f"{typed}={_shown(raw)} must be {wanted}")


def _parse_seconds(option: Option, typed: str, raw: object) -> float:
    wanted = seconds_wanted(option)
    number = _number(typed, raw, wanted)
    if number < 0 or (number == 0 and not option.zero):
        raise SettingsError(f"{typed}={raw} must be {wanted}")
    if number > LONGEST_S:
        raise SettingsError(f"{typed}={raw} is more than ten years ({LONGEST_S} seconds)")
    return number


def _parse_whole(option: Option, typed: str, raw: object) -> int:
    least = 0 if option.zero else 1
    unit = " of seconds" if option.kind is Kind.WHOLE_SECONDS else ""
    number = _number(typed, raw, f"a whole number{unit}")
    if number != int(number) or number < least:
        raise SettingsError(f"{typed}={raw} must be a whole number{unit}, at least {least}")
    if number > LONGEST_S:
        raise SettingsError(f"{typed}={raw} is too large (the most is {LONGEST_S})")
    return int(number)


def _shown(raw: object) -> str:
    """A value for a message: whatever a caller passed, short, and with its type unless that is
    plain to see."""
    if isinstance(raw, str | float | bool) or (type(raw) is int and abs(raw) < 10**18):
        return repr(raw)[:80]
    return named(raw)


def _parse_file(typed: str, raw: object) -> Path:
    if not isinstance(raw, str | Path):
        raise SettingsError(f"{typed}={_shown(raw)} must be the path of a file")
    try:
        path = Path(raw).expanduser()
        path.stat()
        if path.is_file() or path.is_dir():  # what is read from a pipe is gone
            with path.open("rb") as file:
                file.read(1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{typed}={str(raw)!r} cannot be read: {reason}") from error
    return path


def _parse_new_file(typed: str, raw: object) -> Path:
    """Where a file will be written; whether that can be done shows when it is."""
    if not isinstance(raw, str | Path):
        raise SettingsError(f"{typed}={_shown(raw)} must be the path of a file")
    try:
        return Path(raw).expanduser().absolute()  # the process may change its directory
    except (OSError, RuntimeError) as error:
        raise SettingsError(f"{typed}={str(raw)!r} is no path: {error}") from error

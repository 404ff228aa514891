"""Reads and writes JSON objects with typed, bounded fields. Knows limits, not what fields mean.

Whatever is written is checked as if it had just been read, so nothing is ever written that cannot
be read: another node could only report it as corrupt. Only numbers that are counted on may be
written above what is read: see :meth:`Fields.counted`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from rdzv_etcd.errors import (
    SettingsError,
    StateCorruptError,
    StateVersionError,
    UnwritableValueError,
)
from rdzv_etcd.etcd.port import KeyValue
from rdzv_etcd.settings.fields import MAX_NODES, TOO_DEEP, is_too_deep
from rdzv_etcd.text import shown

VERSION = 1
MAX_NAME = 512
"""Characters of a name: a node's id, a run, an address."""
MAX_TEXT = 1024
"""Characters of a text for people, and of a rank key."""
MAX_EPOCH = 2**61
"""Of a record that is read, and of what epochs count from. The next base may be higher by etcd's
revision; with that added once more it still is a number of 64 bits."""
_MAX_NUMBER = 2**63 - 1

T = TypeVar("T")
_MISSING = object()


class Fields:
    """Typed access to a JSON object's fields; a problem is a ValueError that names the field."""

    def __init__(self, raw: object, *, to_write: bool = False) -> None:
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        self._raw: dict[str, Any] = raw
        self._to_write = to_write

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def text(self, name: str) -> str:
        """A text for people."""
        return _text(name, self._get(name, str, _MISSING))

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.has(name) else None

    def name(self, name: str) -> str:
        """A name: printable, not empty, not long."""
        return a_name(name, self._get(name, str, _MISSING))

    def whole(
        self, name: str, default: object = _MISSING, *, least: int = 0, most: int = _MAX_NUMBER
    ) -> int:
        value = self._raw.get(name, default)
        if type(value) is int and least <= value <= most:
            return value
        return _whole(name, self._get(name, int, default), least, most)

    def counted(self, name: str, default: object = _MISSING, *, least: int = 0, most: int) -> int:
        """A whole number that the next writer counts on from: ``most`` on reading, twice as much on
        writing, so that whatever was read has a successor.

        No job comes near ``most``, only what a stranger wrote does. Were the limits the same, the
        highest number would be accepted, and nobody could ever write again.
        """
        return self.whole(name, default, least=least, most=2 * most if self._to_write else most)

    def number(self, name: str) -> float:
        value = self._raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name!r} is {_short(value)}, not a number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{name!r} is {number}, not a finite number")
        return number

    def flag(self, name: str) -> bool:
        return bool(self._get(name, bool, _MISSING))

    def names(self, name: str, default: object = _MISSING) -> tuple[str, ...]:
        value = self._get(name, list, default)
        if len(value) > MAX_NODES:
            raise ValueError(f"{name!r} has more than {MAX_NODES} entries")
        if not _are_names(value):
            for item in value:
                a_name(name, item)  # says which one is wrong
        return tuple(value)

    def texts_by_name(self, name: str) -> dict[str, str]:
        value = self._get(name, dict, _MISSING)
        return {a_name(name, key): _text(name, item) for key, item in value.items()}

    def wholes_by_name(self, name: str, *, most: int) -> dict[str, int]:
        value = self._get(name, dict, _MISSING)
        return {a_name(name, key): _whole(name, item, 0, most) for key, item in value.items()}

    def objects(self, name: str) -> list[Fields]:
        return [Fields(item) for item in self._get(name, list, _MISSING)]

    def nested(self, name: str) -> Fields:
        return Fields(self._get(name, dict, _MISSING))

    def data(self, name: str, *, most: int) -> dict[str, object]:
        """Any JSON object of at most so many bytes, no deeper than a node may write it: else it
        would depend on the depth of the reader's stack who can read or copy it."""
        value: dict[str, object] = self._get(name, dict, _MISSING)
        size = len(json.dumps(value, separators=(",", ":"), allow_nan=False))
        if size > most:
            raise ValueError(f"{name!r} has {size} bytes, more than {most}")
        if is_too_deep(value):
            raise ValueError(f"{name!r} {TOO_DEEP}")
        return value

    def _get(self, name: str, kind: type, default: object) -> Any:
        value = self._raw.get(name, default)
        if value is _MISSING:
            raise ValueError(f"field {name!r} is missing")
        if not isinstance(value, kind):
            raise ValueError(f"{name!r} is {_short(value)}, not a {kind.__name__}")
        return value


def a_name(field: str, value: object) -> str:
    """Return ``value`` if it can be a name; raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{field!r} holds {_short(value)}, not a name")
    if not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(
            f"{field!r} holds {_short(value)}, not a name of 1 to {MAX_NAME} printable characters"
        )
    return value


def _are_names(values: list[object]) -> bool:
    """Whether all can be names: every node reads those of all its peers, so none is looked at by
    itself."""
    if not values:
        return True
    if set(map(type, values)) != {str}:
        return False
    names = cast(list[str], values)
    lengths = set(map(len, names))
    return min(lengths) > 0 and max(lengths) <= MAX_NAME and "".join(names).isprintable()


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field!r} holds {_short(value)}, not a string")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{field!r} has {len(value)} characters, more than {MAX_TEXT}")
    value.encode()  # a lone surrogate is a ValueError
    return value


def _whole(field: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{field!r} is {_short(value)}, not a whole number from {least} to {most}")
    return value


def _short(value: object) -> str:
    return shown(repr(value), 80)


# --- values ---------------------------------------------------------------------------------------


def encode(fields: Mapping[str, object], build: Callable[[Fields], object]) -> bytes:
    """Return the value that ``build`` makes sense of.

    Raises :class:`~rdzv_etcd.errors.UnwritableValueError` if it would not.
    """
    try:
        build(Fields(fields, to_write=True))
        return json.dumps({"v": VERSION, **fields}, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, OverflowError) as error:
        raise UnwritableValueError(str(error)) from error


def decode(key: bytes, value: bytes, build: Callable[[Fields], T]) -> T:
    """Build what ``value`` describes. Raises :class:`~rdzv_etcd.errors.StateCorruptError`."""
    try:
        fields = Fields(_JSON.decode(value.decode()))
        version = fields.whole("v")
        if version != VERSION:
            problem = f"it has format version {version}, and this library reads {VERSION}"
            raise StateVersionError(key.decode(errors="replace"), problem)
        return build(fields)
    except (ValueError, OverflowError, RecursionError, SettingsError) as error:
        problem = str(error) or type(error).__name__
        raise StateCorruptError(key.decode(errors="replace"), problem) from error


def decode_key(decode_value: Callable[[bytes, bytes], T], kv: KeyValue) -> T:
    """Decode the value of a key. Raises StateCorruptError, which says who wrote it."""
    try:
        return decode_value(kv.key, kv.value)
    except StateCorruptError as error:
        raise type(error)(error.key, error.problem, _writer(kv)) from error.__cause__


def _writer(kv: KeyValue) -> str:
    """What etcd knows about who wrote a key."""
    created = "" if kv.version == 1 else f" (the key exists since revision {kv.create_revision})"
    if not kv.lease_id:
        return f"written at revision {kv.mod_revision}{created} without a lease"
    return (
        f"written at revision {kv.mod_revision}{created} on lease {kv.lease_id:016x}; "
        f"`etcdctl lease timetolive {kv.lease_id:x} --keys` shows what else its writer keeps there"
    )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has the same field twice")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"it contains {constant}, which is not JSON")


_JSON = json.JSONDecoder(object_pairs_hook=_once_each, parse_constant=_refuse)

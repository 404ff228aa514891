"""Typed, bounded fields of JSON objects. Knows limits, not what fields mean.

A :class:`Kind` is one field's type and bounds, stated once and checked both ways: every reader
accepts every value that is written; another node could only report it as corrupt. A :class:`Shape`
is an object: its fields' kinds in the order in which they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

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
_MAX_NUMBER = 2**63 - 1

T = TypeVar("T")
Object = dict[str, Any]


# --- kinds of fields ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One field's type and bounds. Both functions take the field's name and a value, and raise a
    ValueError that names the field."""

    read: Callable[[str, Any], T]
    write: Callable[[str, T], Any]


def _same(check: Callable[[str, Any], T]) -> Kind[T]:
    return Kind(check, check)


def whole(least: int = 0, most: int = _MAX_NUMBER) -> Kind[int]:
    """A whole number."""

    def check(name: str, value: Any) -> int:
        if type(value) is int and least <= value <= most:
            return value
        raise ValueError(f"{name!r} is {_short(value)}, not a whole number from {least} to {most}")

    return _same(check)


def counted(most: int) -> Kind[int]:
    """A whole number that the next writer counts on from: at most ``most`` on reading, twice as
    much on writing, so that every number that was read has a successor.

    No job comes near ``most``, only a foreign value does. If the limits were the same, the highest
    number would be accepted, and no node could ever write again.
    """
    return Kind(whole(0, most).read, whole(0, 2 * most).write)


def clamped(most: int) -> Kind[int]:
    """A whole number that is written as the nearest one that readers accept."""

    def nearest(name: str, value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"{name!r} is {_short(value)}, not a whole number")
        return min(max(0, value), most)

    return Kind(whole(0, most).read, nearest)


def a_name(name: str, value: object) -> str:
    """Return ``value`` if it can be a name: printable, not empty, not long."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} holds {_short(value)}, not a name")
    if not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(
            f"{name!r} holds {_short(value)}, not a name of 1 to {MAX_NAME} printable characters"
        )
    return value


def a_text(name: str, value: object) -> str:
    """Return ``value`` if it can be a text for people."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} holds {_short(value)}, not a string")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{name!r} has {len(value)} characters, more than {MAX_TEXT}")
    value.encode()  # a lone surrogate is a ValueError
    return value


def _names(name: str, value: object) -> Sequence[str]:
    names = a_list(name, value)
    if len(names) > MAX_NODES:
        raise ValueError(f"{name!r} has more than {MAX_NODES} entries")
    return [a_name(name, each) for each in names]


def by_name(kind: Kind[T]) -> Kind[dict[str, T]]:
    """An object whose keys are names, and whose values are of that kind."""

    def each(check: Callable[[str, Any], T]) -> Callable[[str, Any], dict[str, T]]:
        return lambda name, value: {
            a_name(name, key): check(name, item) for key, item in _object(name, value).items()
        }

    return Kind(each(kind.read), each(kind.write))


def several(kind: Kind[T]) -> Kind[Sequence[T]]:
    """A list of that kind."""
    return Kind(
        lambda name, value: tuple(kind.read(name, each) for each in a_list(name, value)),
        lambda name, value: [kind.write(name, each) for each in value],
    )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name!r} is {_short(value)}, not a bool")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} is {_short(value)}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name!r} is {number}, not a finite number")
    return number


def data(most: int) -> Kind[Object]:
    """Any JSON object of at most so many bytes, no deeper than a node may write it: otherwise it
    would depend on the depth of a reader's stack whether it can be read or copied."""

    def check(name: str, value: object) -> Object:
        content = dict(_object(name, value))
        size = len(json.dumps(content, separators=(",", ":"), allow_nan=False))
        if size > most:
            raise ValueError(f"{name!r} has {size} bytes, more than {most}")
        if is_too_deep(content):
            raise ValueError(f"{name!r} {TOO_DEEP}")
        return content

    return _same(check)


def _object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r} is {_short(value)}, not a dict")
    return value


def a_list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name!r} is {_short(value)}, not a list")
    return value


def _short(value: object) -> str:
    return shown(repr(value), 80)


NAME = _same(a_name)
TEXT = _same(a_text)
SHOWN = Kind(a_text, lambda name, value: a_text(name, shown(value)))
"""A text that is cut off where it gets too long to be shown."""
NAMES: Kind[Sequence[str]] = Kind(lambda name, value: tuple(_names(name, value)), _names)
FLAG = _same(_flag)
NUMBER = _same(_number)


# --- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class At:
    """A field that has another name than its attribute, or whose default is written as well."""

    kind: Kind[Any]
    attribute: str | None = None
    """Empty: it stands for the whole object; reading it gives arguments for that."""
    always: bool = False


class Shape(Generic[T]):
    """How objects of one type are written: a kind for each field, by its name, in this order.

    A field whose attribute has a default may be missing; the default is not written.
    """

    def __init__(
        self,
        make: Callable[..., T],
        check: Callable[[T], object] = lambda _: None,
        **entries: Kind[Any] | At,
    ) -> None:
        """``check`` raises ValueError for an impossible value that was read or is to be written."""
        self._make = make
        self._check = check
        self._entries = [_entry(make, name, each) for name, each in entries.items()]

    def read(self, name: str, raw: Any) -> T:
        made = self._make(**self.arguments(name, raw))
        self._check(made)
        return made

    def arguments(self, name: str, raw: Any) -> Object:
        """Read the fields; return them by attribute."""
        raw, found = _object(name, raw), Object()
        for field, attribute, kind, default, _ in self._entries:
            value = raw.get(field)
            if value is None:
                if default is MISSING:
                    raise ValueError(f"field {field!r} is missing")
            elif attribute:
                found[attribute] = kind.read(field, value)
            else:
                found |= kind.read(field, value)
        return found

    def write(self, _name: str, value: T) -> Object:
        self._check(value)
        written: Object = {}
        for field, attribute, kind, default, always in self._entries:
            part = getattr(value, attribute) if attribute else value
            if always or part != default:
                written[field] = kind.write(field, part)
        return written

    @property
    def kind(self) -> Kind[T]:
        """Such an object as a field of another one."""
        return Kind(self.read, self.write)


def _entry(
    make: Callable[..., object], name: str, at: Kind[Any] | At
) -> tuple[str, str, Kind[Any], object, bool]:
    if isinstance(at, Kind):
        at = At(at)
    attribute = name if at.attribute is None else at.attribute
    default: object = MISSING
    for of in fields(make) if is_dataclass(make) else ():
        if of.name == attribute:
            default = of.default if of.default_factory is MISSING else of.default_factory()
    return name, attribute, at.kind, default, at.always


def alone(field: str, kind: Kind[T]) -> Kind[T]:
    """An object with this one field, whose value is all there is to it."""

    def read(name: str, raw: Any) -> T:
        value = _object(name, raw).get(field)
        if value is None:
            raise ValueError(f"field {field!r} is missing")
        return kind.read(field, value)

    return Kind(read, lambda _, value: {field: kind.write(field, value)})


# --- values ---------------------------------------------------------------------------------------


def encode(kind: Kind[T], value: T) -> bytes:
    """Return the bytes. Raises :class:`~rdzv_etcd.errors.UnwritableValueError` for a value that
    others could not read."""
    try:
        written = {"v": VERSION, **kind.write("value", value)}
        return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, OverflowError) as error:
        raise UnwritableValueError(str(error)) from error


def decode(key: bytes, value: bytes, read: Callable[[str, Any], T]) -> T:
    """Read a value. Raises :class:`~rdzv_etcd.errors.StateCorruptError`."""
    try:
        raw = _JSON.decode(value.decode())
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
        version = whole().read("v", raw.get("v"))
        if version != VERSION:
            problem = f"it has format version {version}, and this library reads {VERSION}"
            raise StateVersionError(key.decode(errors="replace"), problem)
        return read("value", raw)
    except (ValueError, OverflowError, RecursionError, SettingsError) as error:
        problem = str(error) or type(error).__name__
        raise StateCorruptError(key.decode(errors="replace"), problem) from error


def decode_key(decode_value: Callable[[bytes, bytes], T], kv: KeyValue) -> T:
    """Decode the value of a key. Raises StateCorruptError, which names its writer."""
    try:
        return decode_value(kv.key, kv.value)
    except StateCorruptError as error:
        raise type(error)(error.key, error.problem, _writer(kv)) from error.__cause__


def _writer(kv: KeyValue) -> str:
    """Describe the writer of a key, as far as etcd knows it."""
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

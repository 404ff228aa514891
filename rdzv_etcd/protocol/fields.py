"""Typed, bounded fields of JSON objects. Knows limits, not what fields mean.

A :class:`Kind` is one field's type and bounds, stated once and checked both ways: what is written
is what every reader accepts, since another node could only report it as corrupt. A :class:`Shape`
is an object: its fields' kinds in the order in which they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar, cast

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
class Kind:
    """One field's type and bounds. Both functions take the field's name and a value, and raise a
    ValueError that names the field."""

    read: Callable[[str, Any], Any]
    write: Callable[[str, Any], Any]


def _same(check: Callable[[str, Any], Any]) -> Kind:
    return Kind(check, check)


def whole(least: int = 0, most: int = _MAX_NUMBER) -> Kind:
    """A whole number."""

    def check(name: str, value: Any) -> int:
        if type(value) is int and least <= value <= most:
            return value
        raise ValueError(f"{name!r} is {_short(value)}, not a whole number from {least} to {most}")

    return _same(check)


def counted(most: int) -> Kind:
    """A whole number that the next writer counts on from: at most ``most`` on reading, twice as
    much on writing, so that whatever was read has a successor.

    No job comes near ``most``, only what a stranger wrote does. Were the limits the same, the
    highest number would be accepted, and nobody could ever write again.
    """
    return Kind(whole(0, most).read, whole(0, 2 * most).write)


def clamped(most: int) -> Kind:
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
    if not _are_names(names):
        for item in names:
            a_name(name, item)  # says which one is wrong
    return cast(Sequence[str], names)


def _are_names(values: Sequence[object]) -> bool:
    """Whether all can be names: every node reads those of all its peers, so none is looked at by
    itself."""
    if not values:
        return True
    if set(map(type, values)) != {str}:
        return False
    names = cast(Sequence[str], values)
    lengths = set(map(len, names))
    return min(lengths) > 0 and max(lengths) <= MAX_NAME and "".join(names).isprintable()


def by_name(kind: Kind) -> Kind:
    """An object whose keys are names, and whose values are of that kind."""

    def each(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Object]:
        return lambda name, value: {
            a_name(name, key): check(name, item) for key, item in _object(name, value).items()
        }

    return Kind(each(kind.read), each(kind.write))


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


def data(most: int) -> Kind:
    """Any JSON object of at most so many bytes, no deeper than a node may write it: else it would
    depend on the depth of the reader's stack who can read or copy it."""

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
NAMES = Kind(
    lambda name, value: tuple(_names(name, value)), lambda name, value: list(_names(name, value))
)
FLAG = _same(_flag)
NUMBER = _same(_number)


# --- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class At:
    """A field that has another name than the attribute, or that may be missing."""

    kind: Kind
    attribute: str | None = None
    """Empty: it stands for the whole object; reading it gives arguments for that."""
    optional: bool = False
    """If it is missing, the attribute has its default; the default is not written."""
    always: bool = False
    """It is optional for readers, and always written."""


class Shape(Generic[T]):
    """How objects of one type are written: a kind for each field, by its name, in this order."""

    def __init__(
        self,
        make: Callable[..., T],
        check: Callable[[T], object] = lambda _: None,
        **entries: Kind | At,
    ) -> None:
        """``check`` raises ValueError for what cannot be, as read or about to be written."""
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
    def kind(self) -> Kind:
        """Such an object as a field of another one."""
        return Kind(self.read, self.write)


def _entry(
    make: Callable[..., object], name: str, at: Kind | At
) -> tuple[str, str, Kind, object, bool]:
    if isinstance(at, Kind):
        at = At(at)
    attribute = name if at.attribute is None else at.attribute
    default: object = MISSING
    if at.optional and is_dataclass(make):
        of = next(each for each in fields(make) if each.name == attribute)
        default = of.default_factory() if of.default_factory is not MISSING else of.default
        if default is MISSING:
            raise TypeError(f"the field {name!r} is optional, and its attribute has no default")
    return name, attribute, at.kind, default, at.always


class Single(Generic[T]):
    """An object with one field, whose value is all there is to it."""

    def __init__(
        self, name: str, kind: Kind, check: Callable[[T], object] = lambda _: None
    ) -> None:
        self._name, self._kind, self._check = name, kind, check

    def read(self, name: str, raw: Any) -> T:
        value = _object(name, raw).get(self._name)
        if value is None:
            raise ValueError(f"field {self._name!r} is missing")
        found: T = self._kind.read(self._name, value)
        self._check(found)
        return found

    def write(self, _name: str, value: T) -> Object:
        self._check(value)
        return {self._name: self._kind.write(self._name, value)}


# --- values ---------------------------------------------------------------------------------------


def encode(write: Callable[[str, T], Object], value: T) -> bytes:
    """Return the bytes. Raises :class:`~rdzv_etcd.errors.UnwritableValueError` for a value that
    others could not read."""
    try:
        written = {"v": VERSION, **write("value", value)}
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

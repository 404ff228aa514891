"""The types of what is in etcd: each has its bounds. Knows limits, not what a value means.

A :class:`Kind` is a type's bounds, stated once and checked both ways: every reader accepts every
value that is written; another node could only report it as corrupt. The dataclasses of
:mod:`rdzv_etcd.protocol.model` are annotated with the types at the end of this module, and
:mod:`rdzv_etcd.protocol.codec` writes and reads them by that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from rdzv_etcd.names import is_unknown
from rdzv_etcd.settings.fields import (
    MAX_DATA,
    MAX_EPOCH_CLAIM,
    MAX_NODES,
    MAX_ROUND,
    TOO_DEEP,
    is_too_deep,
)
from rdzv_etcd.text import shown

MAX_NAME = 512
"""Characters of a name: a node's id, a run, an address."""
MAX_TEXT = 1024
"""Characters of a text for people, and of a rank key."""
MAX_EPOCH = 2**61
"""Of a record that is read, and of the base of epochs. The next base may be higher by etcd's
revision; with that added once more it still is a number of 64 bits."""
_MAX_NUMBER = 2**63 - 1
_MAX_PORT = 65535
_MAX_TTL_S = 9_000_000_000
"""etcd grants no lease for longer."""
_LEASE = re.compile("[0-9a-f]{1,16}")

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
            a_name(name, key): check(name, item) for key, item in an_object(name, value).items()
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
        content = dict(an_object(name, value))
        size = len(json.dumps(content, separators=(",", ":"), allow_nan=False))
        if size > most:
            raise ValueError(f"{name!r} has {size} bytes, more than {most}")
        if is_too_deep(content):
            raise ValueError(f"{name!r} {TOO_DEEP}")
        return content

    return _same(check)


def an_object(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r} is {_short(value)}, not a dict")
    return value


def a_list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name!r} is {_short(value)}, not a list")
    return value


def _short(value: object) -> str:
    return shown(repr(value), 80)


def _an_address(name: str, value: object) -> str:
    address = a_name(name, value)
    if " " in address:  # it becomes MASTER_ADDR
        raise ValueError(f"{name!r} is {address[:80]!r}, neither a host name nor an address")
    return address


def _a_node_id(_name: str, value: object) -> str:
    if is_unknown(a_name("the node's id", value)):
        raise ValueError("its name is reserved for nodes whose names are not known")
    return str(value)


def _read_lease(name: str, value: object) -> int:
    text = a_name(name, value)
    if not _LEASE.fullmatch(text) or int(text, 16) > _MAX_NUMBER:
        raise ValueError(f"{name!r} is {text[:80]!r}, not a lease id")
    return int(text, 16)


def _write_lease(name: str, lease: int) -> str:
    text = f"{lease:016x}"
    _read_lease(name, text)
    return text


# --- types ----------------------------------------------------------------------------------------

WHOLE = whole()
FLAG = _same(_flag)
NUMBER = _same(_number)
NAME = _same(a_name)
TEXT = _same(a_text)

Name = Annotated[str, NAME]
NodeId = Annotated[str, _same(_a_node_id)]
"""The name of a node that is known."""
Names = Annotated[tuple[str, ...], Kind(lambda name, value: tuple(_names(name, value)), _names)]
Text = Annotated[str, TEXT]
Texts = Annotated[Mapping[str, str], by_name(TEXT)]
"""Texts by name."""
Counts = Annotated[Mapping[str, int], by_name(whole(1, MAX_NODES))]
"""Numbers of nodes by name."""
Shown = Annotated[str, Kind(a_text, lambda name, value: a_text(name, shown(value)))]
"""A text that is cut off where it gets too long to be shown."""
Address = Annotated[str, _same(_an_address)]
Port = Annotated[int, whole(1, _MAX_PORT)]
PortOrNone = Annotated[int, whole(0, _MAX_PORT)]
RoundNumber = Annotated[int, whole(0, 2 * MAX_ROUND)]
"""Of a round that may be formed."""
Claim = Annotated[int, clamped(MAX_EPOCH_CLAIM)]
"""An epoch, or a clock; no node believes a higher one."""
Epoch = Annotated[int, counted(MAX_EPOCH)]
RoundTrip = Annotated[int, clamped(10_000)]
"""Milliseconds. A node that is farther away than that has no time to answer."""
Ttl = Annotated[int, whole(1, _MAX_TTL_S)]
TtlOrNone = Annotated[int, whole(0, _MAX_TTL_S)]
LeaseId = Annotated[int, Kind(_read_lease, _write_lease)]
Data = Annotated[Mapping[str, object], data(MAX_DATA)]

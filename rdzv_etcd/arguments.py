"""Looks at what a program passes to the library's methods: what cannot be meant is a MisuseError.

Knows types and limits; does not know what the arguments are for.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import TypeAlias

from rdzv_etcd.errors import MisuseError
from rdzv_etcd.text import shown

Bytes: TypeAlias = "bytes | bytearray | memoryview"
"""What is taken for bytes."""
LONGEST_S = 10 * 365 * 86400
"""Ten years stand for every longer wait, which some timers could not count."""
_SHOWN = 80
"""Characters of an argument that a message repeats."""


def seconds(timeout_s: object) -> float:
    """Return a time limit; one below zero is zero. Raises MisuseError if it is no number."""
    if isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool):
        try:
            limit_s = float(timeout_s)
        except OverflowError:
            limit_s = math.inf if operator.gt(timeout_s, 0) else 0.0
        if not math.isnan(limit_s):
            return min(max(0.0, limit_s), LONGEST_S)
    raise MisuseError(f"the time limit is {_named(timeout_s)}; it must be a number of seconds")


def seconds_or_none(timeout_s: object) -> float | None:
    """Return a time limit; ``None`` is none. Raises as :func:`seconds`."""
    return None if timeout_s is None else seconds(timeout_s)


def whole(what: str, number: object) -> int:
    """Return a whole number, of whatever type that is one. Raises MisuseError."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise MisuseError(f"{what} is {_named(number)}; it must be a whole number") from None


def as_bytes(what: str, value: object) -> bytes:
    """Return a copy of the bytes in ``value``, which may change. Raises MisuseError."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise MisuseError(f"{what} is {_named(value)}; it must be bytes")


def store_key(key: object) -> str:
    """Return a key of a store. Raises MisuseError if it is no text, or none that UTF-8 can hold."""
    if not isinstance(key, str):
        raise MisuseError(f"the store key is {_named(key)}; it must be text")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise MisuseError(
            f"the store key {named_key(key)} cannot be written as UTF-8: it has a lone surrogate "
            f"at position {error.start}"
        ) from None
    return key


def store_keys(keys: object) -> list[str]:
    """Return several keys of a store. Raises MisuseError if they are none, or only one text."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise MisuseError(f"the store keys are {_named(keys)}; they must be a list of texts")
    return [store_key(key) for key in keys]


def named_key(key: str) -> str:
    """Return a key of a store as messages show it."""
    return repr(shown(key, _SHOWN))


def _named(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of 5,000 digits
        text = "too large"
    return f"{shown(text, _SHOWN)} ({type(value).__name__})"

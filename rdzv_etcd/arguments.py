"""Checks what a program passes to the library's methods; a value that cannot be meant is a
MisuseError.

Knows types and limits; does not know what the arguments are for.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
)
from typing import TypeAlias

from rdzv_etcd.errors import MisuseError
from rdzv_etcd.text import named, shown

Bytes: TypeAlias = "bytes | bytearray | memoryview"
"""What counts as bytes."""
LONGEST_S = 10 * 365 * 86400
"""Ten years stand for every longer wait, which some timers could not count."""
LONGEST_NAME = 1000
"""Characters of the name of a barrier: it is part of every key of that barrier."""
KEY_SHOWN = 80
"""Characters of a store's key, or of another argument, that a message repeats."""


def seconds(timeout_s: object) -> float:
    """Return a time limit; one below zero is zero. Raises MisuseError if it is no number."""
    if isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool):
        try:
            limit_s = float(timeout_s)
        except OverflowError:
            limit_s = math.inf if operator.gt(timeout_s, 0) else 0.0
        if not math.isnan(limit_s):
            return min(max(0.0, limit_s), LONGEST_S)
    raise MisuseError(f"the time limit is {named(timeout_s)}; it must be a number of seconds")


def seconds_or_none(timeout_s: object) -> float | None:
    """Return a time limit, or ``None`` for no limit. Raises as :func:`seconds`."""
    return None if timeout_s is None else seconds(timeout_s)


def check_name(what: str, name: object) -> None:
    """Raise MisuseError for what cannot be the name of a ``what``, such as a barrier."""
    if not isinstance(name, str):
        raise MisuseError(
            f"a {what}'s name must be text, not {type(name).__name__}: "
            f"{shown(repr(name), KEY_SHOWN)}"
        )
    if len(name) > LONGEST_NAME:
        raise MisuseError(
            f"the {what}'s name {shown(name, KEY_SHOWN)!r} has {len(name)} characters; it must "
            f"have at most {LONGEST_NAME}"
        )


def whole_or_none(number: object) -> int | None:
    """Return a whole number, of whatever type that is one; ``None`` for anything else."""
    if isinstance(number, bool):
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole(what: str, number: object) -> int:
    """Return a whole number, of whatever type that is one. Raises MisuseError."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise MisuseError(f"{what} is {named(number)}; it must be a whole number") from None


def int64(what: str, number: object) -> int:
    """Return a whole number of 64 bits, with a sign. Raises MisuseError."""
    found = whole(what, number)
    if not -(2**63) <= found < 2**63:
        raise MisuseError(
            f"{what} must be at least -2**63 and below 2**63"
        )  # its digits: thousands
    return found


def as_bytes(what: str, value: object) -> bytes:
    """Return a copy of the bytes in ``value``, which may change. Raises MisuseError."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise MisuseError(f"{what} is {named(value)}; it must be bytes")


def encoded_key(key: object) -> bytes:
    """Return a key of a store as UTF-8. Raises MisuseError if it is no text, or has a lone
    surrogate."""
    if not isinstance(key, str):
        raise MisuseError(f"the store key is {named(key)}; it must be text")
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise MisuseError(
            f"the store key {named_key(key)} cannot be written as UTF-8: at position {error.start} "
            "it has a lone surrogate"
        ) from None


def several_keys(keys: object) -> list[str]:
    """Return several keys of a store, whatever they come in. Raises MisuseError for one alone."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise MisuseError(f"the store keys are {named(keys)}; they must be a list of texts")
    return list(keys)


def several_items(values: object) -> list[tuple[str, bytes]]:
    """Return several keys of a store with their values. Raises MisuseError unless it is a
    mapping."""
    if not isinstance(values, Mapping):
        raise MisuseError(f"the store values are {named(values)}; they must be a dict by key")
    return list(values.items())


def value_of(key: str, value: object) -> bytes:
    """Return what is to be written to a key of a store. Raises MisuseError if it is no bytes."""
    if type(value) is bytes:
        return value
    return as_bytes(f"the value for store key {named_key(key)}", value)


def runs_later(function: object) -> bool:
    """Whether a call of it runs nothing of it: an async function, or one with ``yield``."""
    return any(
        inspect.iscoroutinefunction(one)
        or inspect.isgeneratorfunction(one)
        or inspect.isasyncgenfunction(one)
        for one in (function, getattr(function, "__call__", None))  # noqa: B004 - async def __call__
    )


def has_run(answer: object) -> bool:
    """Whether the function that has returned this is done, and not only begun: a coroutine, which
    is closed, or a generator."""
    if isinstance(answer, Coroutine):
        answer.close()  # or Python would warn that it was never awaited
    return not isinstance(answer, Awaitable | Generator | AsyncGenerator)


def named_key(key: object) -> str:
    """Return a key of a store as messages show it."""
    return repr(shown(key, KEY_SHOWN))

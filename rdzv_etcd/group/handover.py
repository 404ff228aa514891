"""Results on their way to the callers. Knows coroutines; knows nothing of what is decided.

What a call decides on the library's loop counts at once: an item is taken, a barrier passed. Its
caller may be cancelled or interrupted at that very moment, or while the result is on its way to
it, and then has not got it. So whoever works on the loop notes in a list what is decided, and the
list is given back if the call does not return.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def hand_over(call: Callable[[list[T]], R], not_got: Callable[[list[T]], object]) -> R:
    """Return what ``call`` returns, which notes in its list what it decides; if it raises,
    ``not_got`` is given the list, in the caller's thread. Work that outlasts its call may add to
    the list even then."""
    decided: list[T] = []
    try:
        return call(decided)
    except BaseException:  # from a signal handler, too
        not_got(decided)
        raise


async def hand_over_awaited(
    call: Callable[[list[T]], Awaitable[R]], not_got: Callable[[list[T]], object]
) -> R:
    """As :func:`hand_over`."""
    decided: list[T] = []
    try:
        return await call(decided)
    except BaseException:
        not_got(decided)
        raise

"""Results on their way to the callers. Knows coroutines; knows nothing of what is decided.

What a call decides on the library's loop counts at once: an item is taken, a barrier passed. Its
caller may be cancelled or interrupted at that very moment, or while the result is on its way to
it, and then has not got it. So whoever works on the loop notes what is decided, and is told if the
call does not return.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

R = TypeVar("R")


def hand_over(call: Callable[[], R], not_got: Callable[[], object]) -> R:
    """Return what ``call`` returns; if it raises, ``not_got`` is called, in the caller's thread.
    What the call has begun may come to its decision even after that."""
    try:
        return call()
    except BaseException:  # from a signal handler, too
        not_got()
        raise


async def hand_over_awaited(call: Callable[[], Awaitable[R]], not_got: Callable[[], object]) -> R:
    """As :func:`hand_over`."""
    try:
        return await call()
    except BaseException:
        not_got()
        raise

"""Coroutines that begin in their caller's thread and change to the event loop only to wait.

Knows coroutines, threads by their context and nothing else.

Sending a coroutine to another thread's loop and waking the caller again costs more than the single
request that most calls on a store are. So :func:`begin` runs one in the caller's thread; what can
be had there by a blocking call is. Before it awaits anything of asyncio, the coroutine awaits
:func:`to_loop`, which suspends it. A task on the loop then goes on from there: for a coroutine that
has been suspended, a task's first step is its next one.

(asyncio's eager tasks, since Python 3.12, begin at once too, but on the loop's own thread.)
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Which thread, not whether: a signal handler can start a task in the middle of a call, and the task
# gets a copy of the context.
_begun_in: ContextVar[int | None] = ContextVar("rdzv_etcd_begun_in", default=None)


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """A coroutine returned without having waited."""

    result: T


def begin(coro: Coroutine[Any, Any, T]) -> Ended[T] | None:
    """Run ``coro`` in this thread until it ends, or until it needs the loop: then ``None``.

    After ``None`` it is to be made a task. What it raises is raised. Raises
    :class:`RuntimeError` if it waits for something without :func:`to_loop` before.
    """
    token = _begun_in.set(threading.get_ident())
    try:
        waits_for = coro.send(None)
    except StopIteration as end:
        return Ended(end.value)
    finally:
        _begun_in.reset(token)
    if not isinstance(waits_for, _Change):
        coro.close()
        raise RuntimeError(f"a coroutine begun here waits for {waits_for!r}, but not on a loop")
    return None


def here() -> bool:
    """Tell whether the running coroutine is still in its caller's thread, where it may block."""
    return _begun_in.get() == threading.get_ident()


async def to_loop() -> None:
    """Go on on the event loop; nothing if the coroutine runs on one."""
    if here():
        await _Change()


class _Change:
    def __await__(self) -> Generator[Any, None, None]:
        yield self

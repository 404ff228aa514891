"""The time and the randomness that nodes, stores and clients go by; they get it as an argument.

A simulation passes its own :class:`Clock`, so it patches nothing. Names that must be unique and the
blocking start of an embedded etcd do not come from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Unlike ``time.monotonic``, Linux counts in it the time for which the machine was suspended, and
in that time leases run out. Elsewhere there is none."""


class Clock(Protocol):
    """Monotonic seconds for decisions, wall-clock seconds for people's eyes only.

    While a machine is suspended, the waits of its event loop stand still and end later by that
    much. So how long something took is decided by :meth:`now_s` after a wait, not by its length.
    """

    def now_s(self) -> float:
        """Return seconds on a clock that never goes back; its zero has no meaning. It counts the
        time for which the machine was suspended, where the system can tell."""

    def wall_s(self) -> float:
        """Return seconds since the epoch; shown to people, never compared between hosts."""

    def jitter(self, upto_s: float) -> float:
        """Return a random number of seconds in [0, upto_s)."""

    async def sleep(self, delay_s: float) -> None:
        """Suspend the calling task."""

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        """Await with a limit; raise :class:`TimeoutError` (builtin) when it has passed."""


class SystemClock:
    """The machine's clock and the running asyncio loop."""

    def __init__(self, seed: int | None = None) -> None:
        # The system's: never the same on two nodes or after a fork, and it needs no seeding.
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def now_s(self) -> float:
        return time.clock_gettime(_SINCE_BOOT)

    def wall_s(self) -> float:
        return time.time()

    def jitter(self, upto_s: float) -> float:
        return self._random.random() * upto_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float | None) -> T:
        return await wait_for(awaitable, timeout_s)


async def wait_for(awaitable: Awaitable[T], timeout_s: float | None) -> T:
    """Await with a limit in loop time; raise :class:`TimeoutError` when it has passed.

    Unlike ``asyncio.wait_for`` before Python 3.12 it never swallows a cancellation that comes
    together with the result (https://github.com/python/cpython/issues/86296).
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await abandon(task)
        raise
    if not task.done():
        await abandon(task)
        if task.cancelled():
            raise TimeoutError(f"not done within {timeout_s} s")
    return task.result()


async def abandon(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks whose results are no longer needed, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    running = {task for task in tasks if not task.done()}
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved: otherwise asyncio would report it


@contextlib.asynccontextmanager
async def beside(work: Awaitable[T]) -> AsyncIterator[asyncio.Future[T]]:
    """Run ``work`` as a task beside the block, and end it with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        await abandon(task)


async def race(*work: Awaitable[Any]) -> tuple[asyncio.Future[Any] | None, ...]:
    """Run all until one is done, and cancel the others; return in the same order the tasks that
    were done, and ``None`` for those that were not."""
    tasks = tuple(asyncio.ensure_future(each) for each in work)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await abandon(*tasks)
    return tuple(task if task in done else None for task in tasks)

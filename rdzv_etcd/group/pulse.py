"""Wakes whoever waits for "something changed". Knows nothing of what changed."""

from __future__ import annotations

import asyncio

from rdzv_etcd.clock import Clock


class Pulse:
    """A broadcast without content: waiters look again at the state they care about.

    All methods run on the event loop's thread. A beat between looking and waiting is not lost as
    long as there is no ``await`` between the two.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = asyncio.Event()

    def beat(self) -> None:
        current, self._next = self._next, asyncio.Event()
        current.set()

    async def wait(self, until_s: float | None = None) -> bool:
        """Wait for the next beat, at the latest until ``until_s`` on the clock; say if one came."""
        event = self._next
        if until_s is None:
            await event.wait()
            return True
        remaining_s = until_s - self._clock.now_s()
        if remaining_s <= 0:
            return event.is_set()
        try:
            await self._clock.wait_for(event.wait(), remaining_s)
        except TimeoutError:
            return False
        return True

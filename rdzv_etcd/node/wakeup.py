"""Wakes whoever waits for "something changed". Knows nothing of what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdzv_etcd.clock import Clock


class Wakeup:
    """A broadcast without content: waiters look again at the state they care about.

    All methods run on the event loop's thread. A :meth:`notify` between looking and waiting is not
    lost as long as there is no ``await`` between the two. Whoever changes the state notifies
    afterwards.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[asyncio.Future[None], Callable[[], bool] | None] = {}

    def notify(self) -> None:
        for waiter, wanted in tuple(self._waiting.items()):
            if not waiter.done() and (wanted is None or wanted()):
                waiter.set_result(None)

    async def wait(
        self, until_s: float | None = None, *, when: Callable[[], bool] | None = None
    ) -> bool:
        """Wait for the next :meth:`notify`, until ``until_s`` on the clock; say if it came.

        With ``when`` only one at which that holds counts, and none is needed if it holds already:
        there may have been an ``await`` since the waiter looked. So a task that has nothing to do
        at most of them is not woken. ``when`` is asked in the midst of others' work: it only looks.
        """
        if when is not None and when():
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = when
        try:
            if until_s is None:
                await waiter
                return True
            remaining_s = until_s - self._clock.now_s()
            if remaining_s <= 0:
                return False
            await self._clock.wait_for(waiter, remaining_s)
        except TimeoutError:
            return False
        finally:
            del self._waiting[waiter]
        return True

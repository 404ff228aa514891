"""Brings a client back to the endpoint it prefers, some time after it was driven away.

Knows when to try. Must not know endpoints, nor what it takes to move.

Otherwise upgrading the members of a cluster in turn would drive all clients to those upgraded
first, and leave the last one without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rdzv_etcd.clock import Clock

FAILBACK_AFTER_S = 300.0
"""The average time between tries; each is drawn, so that a fleet does not come back in step."""


class Failback:
    """A task of its own while the client is away; without tasks when it is at home."""

    def __init__(
        self, clock: Clock, after_s: float, go_home: Callable[[], Awaitable[bool]]
    ) -> None:
        """``go_home`` tries to move and tells whether the client is at home now."""
        self._clock = clock
        self._after_s = after_s
        self._fail_back = go_home
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The client is away; idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="rdzv-etcd failback")

    async def close(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            await self._pause()
            while not await self._fail_back():
                await self._pause()
        finally:
            self._task = None

    async def _pause(self) -> None:
        await self._clock.sleep(self._after_s / 2 + self._clock.jitter(self._after_s))

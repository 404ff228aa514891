"""The tasks of a node, and how they wait: for a change of what they look at, and before they ask
etcd again.

Knows nothing of what changed, and no clock but the one it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rdzv_etcd.clock import Clock, abandon
from rdzv_etcd.errors import EtcdRefusedError

RETRY_S = 0.5
"""How long to wait before the next try: after a request that got no answer, which has taken its
time already, after the first refusal, and where nothing says how long it will last."""


class Wakeup:
    """A broadcast without content: waiters look again at the state they care about.

    All methods run on the event loop's thread. A :meth:`notify` between looking and waiting is not
    lost as long as there is no ``await`` between the two. Code that changes the state notifies
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
        """Wait for the next :meth:`notify`, until ``until_s`` on the clock; return whether it came.

        With ``when`` only a notify at which that holds counts, and none is needed if it holds
        already: there may have been an ``await`` since the waiter looked. So a task that has
        nothing to do at most of them is not woken. ``when`` is called during others' work: it only
        looks.
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


class Tasks:
    """Tasks that run until they end or are stopped, all of them together."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        work: Coroutine[Any, Any, None],
        failed: Callable[[BaseException], None],
        name: str | None = None,
    ) -> asyncio.Task[None]:
        """Run ``work``; call ``failed`` if it ends with an error."""
        task = asyncio.create_task(work, name=name)
        self._running[task] = None

        def note_end(task: asyncio.Task[None]) -> None:
            del self._running[task]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task.add_done_callback(note_end)
        return task

    async def stop(self) -> None:
        """Cancel those that still run, and wait until they have ended."""
        await abandon(*self._running)


class Backoff:
    """The waits between tries; after refusals they grow to ``longest_s``.

    A refusal is quick, and each costs etcd something (out of space: a raft proposal), so a node
    must not repeat it much more often than it renews its lease.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = max(RETRY_S, longest_s)
        self.reset()

    def reset(self) -> None:
        """Note that etcd did what it was asked."""
        self._next_s = RETRY_S
        self._refusals: set[type[Exception]] = set()

    def is_news(self, error: Exception) -> bool:
        """Whether ``error`` is the first refusal of its kind, which is logged."""
        return isinstance(error, EtcdRefusedError) and type(error) not in self._refusals

    def after(self, error: Exception) -> float:
        """Return how many seconds to wait after ``error``."""
        if not isinstance(error, EtcdRefusedError):
            return RETRY_S
        self._refusals.add(type(error))
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._longest_s)
        return wait_s

"""The end of what holds the event loop. It comes, whatever becomes of those who wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.process import Latch
from rdzv_etcd.runtime.loop_thread import LoopHold

_log = logging.getLogger("rdzv_etcd")


class Ending:
    """Does the last work of a hold on the loop, once, and then gives up the hold.

    An exception that a signal's handler raises in a thread that waits ends its waiting, and one
    that comes before the work has begun leaves all as it was: whoever calls next begins.
    """

    def __init__(self, hold: LoopHold) -> None:
        self._hold = hold
        self._working: asyncio.Future[None] | None = None

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], then: Callable[[], None] | None = None
    ) -> None:
        """Do it, unless an earlier call does or has; do not wait. ``then`` is called in some
        thread when it is done, also if it was done before, and must not block.

        May be called anywhere, by the garbage collector in the midst of anything.
        """
        self._hold.release_after(partial(self._once, work), then)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it, unless an earlier call does or has, and block until it is done; on the loop's own
        thread, which cannot wait for itself, only begin. Raises what the work did."""
        if self._hold.is_current:
            self.begin(work)
            return
        done = Latch()
        self.begin(work, done.open)
        done.wait(None)
        self._hold.release()  # it is; if it was the last one, its thread ends
        if self._working is None:
            _log.warning("the library's thread had been stopped: what is left in etcd expires")
        elif self._working.done() and not self._working.cancelled():
            error = self._working.exception()
            if error is not None:
                raise error.copy() if isinstance(error, RdzvEtcdError) else error

    async def _once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._working is None:
            self._working = asyncio.ensure_future(work())
        await asyncio.shield(self._working)

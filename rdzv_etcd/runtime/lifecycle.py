"""What holds the event loop until it ends: calls into the loop, and the last work there.

The end comes whatever becomes of the threads that wait for it: an interruption, a garbage
collection, the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from rdzv_etcd.errors import EtcdError, RdzvEtcdError, RendezvousFailedError
from rdzv_etcd.process import Latch
from rdzv_etcd.runtime.loop_thread import LoopHold

T = TypeVar("T")

_log = logging.getLogger("rdzv_etcd")


class LastWork:
    """The last work of a hold on the loop: done once, and then the hold is given up.

    An exception that a signal's handler raises in a thread that waits ends its waiting, and one
    that comes before the work has begun leaves all as it was: the next caller begins.
    """

    def __init__(self, hold: LoopHold) -> None:
        self._hold = hold
        self._working: asyncio.Future[None] | None = None

    def begin(
        self, work: Callable[[], Coroutine[Any, Any, None]], then: Callable[[], None] | None = None
    ) -> None:
        """Do it, unless an earlier call does or has; do not wait. ``then`` is called in some
        thread when it is done, also if it was done before, and must not block.

        May be called anywhere, also by the garbage collector.
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


class Lifecycle:
    """Runs calls on the loop until it has ended, at the latest at the interpreter's exit."""

    ended = "this has ended"
    """Why a call failed that was under way at the end."""

    def __init__(self, loop_thread: LoopHold) -> None:
        self.loop_thread = loop_thread
        self.has_ended = False
        self.last_work = LastWork(loop_thread)
        atexit.register(self.at_exit)

    def at_exit(self) -> None:
        """End at the interpreter's exit, if nothing has before."""
        raise NotImplementedError

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that made it: what that has ended, or
        has not, is its own business."""
        return self.loop_thread.is_foreign

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run it on the loop and block until it has ended.

        Raises RendezvousFailedError if this has ended, or ends meanwhile, and TimeoutError.
        """
        try:
            with self.blocked():
                return self.loop_thread.run(work, timeout_s)
        except (RuntimeError, EtcdError) as error:
            self._check_not_ended(error)
            raise

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for a coroutine on another event loop, which awaits it; no time limit."""
        try:
            with self.awaited():
                return await self.loop_thread.call(work)
        except (RuntimeError, EtcdError) as error:
            self._check_not_ended(error)
            raise

    def begin(
        self, work: Coroutine[Any, Any, None], then: Callable[[], None] | None = None
    ) -> None:
        """Run it on the loop without waiting for it, unless this has ended, or is a parent's;
        ``then`` is called in any case."""
        self.loop_thread.begin(work, then)

    def blocked(self) -> AbstractContextManager[object]:
        """Entered while a thread blocks in a call."""
        return nullcontext()

    def awaited(self) -> AbstractContextManager[object]:
        """Entered while another event loop awaits a call."""
        return nullcontext()

    def _check_not_ended(self, error: Exception) -> None:
        """The connection to etcd, or the loop, may have ended under the call."""
        if self.has_ended and not self.is_foreign:
            raise RendezvousFailedError(self.ended) from error

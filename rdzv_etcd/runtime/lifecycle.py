"""What holds the event loop until it ends: calls into the loop, and the last work there.

The end comes whatever becomes of the threads that wait for it: an interruption, a garbage
collection, the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from rdzv_etcd.errors import EtcdError, RdzvEtcdError, RendezvousFailedError
from rdzv_etcd.process import Latch
from rdzv_etcd.runtime.loop_thread import LoopHold
from rdzv_etcd.runtime.threads import set_from_a_thread

T = TypeVar("T")

Work: TypeAlias = "Callable[[], Coroutine[Any, Any, None]]"

_log = logging.getLogger("rdzv_etcd")


class LastWork:
    """The last work of a hold on the loop: done once, and then the hold is given up.

    An exception that a signal's handler raises in a thread that waits ends its waiting, and one
    that comes before the work has begun leaves all as it was: the next caller begins.
    """

    def __init__(self, hold: LoopHold) -> None:
        self._hold = hold
        self._working: asyncio.Future[None] | None = None

    def begin(self, work: Work, then: Callable[[], None] | None = None) -> None:
        """Do it, unless an earlier call does or has; do not wait. ``then`` is called in some
        thread when it is done, also if it was done before, and must not block.

        May be called anywhere, also by the garbage collector.
        """
        self._hold.release_after(partial(self.once, work), then)

    def run(self, work: Work) -> None:
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

    async def once(self, work: Work) -> None:
        """Do it, unless an earlier call does or has, and wait until it is done; on the loop."""
        if self._working is None:
            self._working = asyncio.ensure_future(work())
        await asyncio.shield(self._working)


class Lifecycle:
    """Runs calls on the loop until it has ended, at the latest at the interpreter's exit.

    Each way to call, to begin and to end is here once for threads, which block, and once for event
    loops, which await.
    """

    ended = "this has ended"
    """Why a call failed that was under way at the end."""

    def __init__(self, loop_thread: LoopHold) -> None:
        self.loop_thread = loop_thread
        self.has_ended = False
        self.last_work = LastWork(loop_thread)
        atexit.register(self.at_exit)

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that made it, which alone ends it."""
        return self.loop_thread.is_foreign

    # -- what a subclass adds ---------------------------------------------------------------------

    def at_exit(self) -> None:
        """End at the interpreter's exit, if nothing has before."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise an error if no call may be made any more, and calls do not find that themselves."""

    def note_ending(self) -> None:
        """Do what does not wait, when this is about to end; also in a forked child."""

    def note_ended(self) -> None:
        """Do the same when the last work is done, or will not be, as the loop has failed."""

    # -- calls ------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run it on the loop and block until it has ended.

        Raises RendezvousFailedError if this has ended, or ends meanwhile, and TimeoutError.
        """
        with self._noting_the_end(work):
            return self.loop_thread.run(work, timeout_s)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the same for a coroutine on another event loop, which awaits it; no time limit."""
        with self._noting_the_end(work):
            return await self.loop_thread.call(work)

    def begin(
        self, work: Coroutine[Any, Any, None], then: Callable[[], None] | None = None
    ) -> None:
        """Run it on the loop without waiting for it, unless this has ended, or is a parent's;
        ``then`` is called in any case."""
        self.loop_thread.begin(work, then)

    @contextmanager
    def _noting_the_end(self, work: Coroutine[Any, Any, object]) -> Iterator[None]:
        """Let a call fail because of the end, not by what that did to the connection or the loop
        under it."""
        try:
            self.check_open()
        except BaseException:
            work.close()
            raise
        try:
            yield
        except (RuntimeError, EtcdError) as error:
            if self.has_ended and not self.is_foreign:
                raise RendezvousFailedError(self.ended) from error
            raise

    # -- the end ----------------------------------------------------------------------------------

    def end(self, work: Work) -> None:
        """Do the last work, unless it is done or under way, and block until it is done; on the
        loop's own thread, which cannot wait for itself, only begin. Raises what the work did."""
        if self._note_ending():
            self.last_work.run(work)
            self._note_if_the_loop_failed()

    async def end_awaited(self, work: Work) -> None:
        """Do the same from another event loop. It goes on if this is cancelled."""
        if self.is_foreign:  # and has no event loop to wait on
            self.note_ending()
            return
        done, then = set_from_a_thread()
        self.begin_to_end(work, then)
        await done

    async def end_here(self, work: Work) -> None:
        """Do the same within a call, which can still return or raise."""
        if self._note_ending():
            await self.last_work.once(work)
            self.last_work.begin(work)

    def begin_to_end(self, work: Work, then: Callable[[], None] | None = None) -> bool:
        """Begin the last work without waiting for it; ``then`` is called, in some thread, when it
        is done, also if it was done before. May be called anywhere, by the garbage collector in the
        middle of anything. ``False`` in a forked child, which has nothing to end: ``then`` is not
        called."""
        if not self._note_ending():
            return False
        self.last_work.begin(work, then)
        self._note_if_the_loop_failed()
        return True

    def _note_ending(self) -> bool:
        self.note_ending()
        self.has_ended = True
        return not self.is_foreign

    def _note_if_the_loop_failed(self) -> None:
        if self.loop_thread.has_failed:
            self.note_ended()

"""One call from any thread to the event-loop thread. Knows threads, asyncio and signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.process import Latch

T = TypeVar("T")

_log = logging.getLogger("rdzv_etcd")


class _Interruption:
    """Names the interruption of a call, if there was one."""

    def __init__(self) -> None:
        self.by = ""

    def note(self, by: str) -> None:
        self.by = by


_interruption: ContextVar[_Interruption] = ContextVar("_interruption")
"""The one of the call that runs. The cancellation's message is lost on its way through gRPC."""


def what_interrupted(error: BaseException) -> str:
    """Name the interruption of a call: the signal, if its handler's exception carries it, as
    torch's does in ``sigval``; for a cancellation the name that was given to the call, which may be
    empty."""
    if isinstance(error, asyncio.CancelledError):
        noted = _interruption.get(None)
        return (noted.by if noted else "") or str(error)
    number = getattr(error, "sigval", None)
    return number.name if isinstance(number, signal.Signals) else type(error).__name__


class LoopCall(Generic[T]):
    """One coroutine on its way through the loop, and a latch that opens when it has ended."""

    def __init__(
        self, coro: Coroutine[Any, Any, T], then: Callable[[], None] | None = None
    ) -> None:
        """``then`` is called on the loop's thread when the coroutine has ended."""
        self.coro = coro
        self._then = then
        self.task: asyncio.Task[T] | None = None
        self._interruption = _Interruption()
        self._latch = Latch()

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
        """Run the coroutine; called by the loop's thread."""

        def create() -> asyncio.Task[T]:
            _interruption.set(self._interruption)
            return loop.create_task(self.coro)

        self.task = copy_context().run(create)
        return self.task

    def interrupt(self, by: str) -> bool:
        """Cancel the coroutine, which can ask :func:`what_interrupted` it; ``False`` if it was not
        started. Called by the loop's thread."""
        if self.task is None:
            return False
        self._interruption.note(by)
        self.task.cancel()
        return True

    def open(self) -> None:
        """Let the waiter go; idempotent, called only by the loop's thread."""
        if not self._latch.is_open:
            self._latch.open()
            if self._then is not None:
                self._then()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the latch is open; return whether it is. Interruptible by signals."""
        return self._latch.wait(timeout_s)

    @property
    def has_outcome(self) -> bool:
        """Whether the coroutine returned or raised something of its own."""
        return self.task is not None and self.task.done() and not self.task.cancelled()

    def result(self) -> T:
        if self.task is None or not self.task.done() or self.task.cancelled():
            raise RuntimeError("the call was cancelled because its LoopHold was stopped")
        error = self.task.exception()
        if isinstance(error, RdzvEtcdError):
            # The original may be kept on the loop. With the caller's frames in its traceback it
            # would also keep the caller, such as a group that is dropped now and should leave.
            raise error.copy()
        return self.task.result()

    def log_failure(self) -> None:
        """Log the error of a coroutine whose caller no longer waits."""
        if not self.has_outcome or self.task is None:
            return
        error = self.task.exception()
        if error is not None:
            _log.error("the interrupted call %r failed", self.coro, exc_info=error)

"""Begins what blocks in a thread of its own. Knows nothing of the library."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin it in a thread that the interpreter does not wait for at its end, as it does for those
    of an executor. Nobody can cancel it."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_do, work, outcome), name=name, daemon=True).start()
    return outcome


def _do(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is the caller who gets it
        outcome.set_exception(error)
        # The error's traceback keeps this frame, which must not keep the error in its turn.
        del outcome
    else:
        outcome.set_result(result)

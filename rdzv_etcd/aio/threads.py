"""What blocks for a moment, off the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rdzv_etcd.etcd.forks import refuse_after_fork
from rdzv_etcd.group.loop_thread import refuse_green_threads

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what blocks for a moment in a thread of its own: those of the event loop may all be taken.

    If the caller is cancelled meanwhile, undo it when it is done, be that after the end of the
    caller's event loop; the interpreter does not wait for it. ``undo`` must not block. A forked
    child is refused here.
    """
    refuse_after_fork()
    refuse_green_threads()
    made: list[T] = []
    abandoned = threading.Event()

    def undo_it() -> None:
        with contextlib.suppress(IndexError):  # the other thread has done it
            undo(made.pop())

    def do_it() -> T:
        result = work()
        made.append(result)
        if abandoned.is_set():
            undo_it()
        return result

    try:
        return await asyncio.wrap_future(_begun(do_it))
    except asyncio.CancelledError:
        abandoned.set()
        undo_it()
        raise


def _begun(work: Callable[[], T]) -> Future[T]:
    """Begin it in a thread that the interpreter does not wait for at its end, as it does for those
    of an executor."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody can cancel it any more
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(_do, work, outcome), name="rdzv-etcd start", daemon=True
    ).start()
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

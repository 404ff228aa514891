"""What blocks for a moment, off the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rdzv_etcd.etcd.forks import refuse_after_fork

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what blocks for a moment in a thread of its own: those of the event loop may all be taken.

    If the caller is cancelled meanwhile, undo it when it is done, be that after the end of the
    caller's event loop. ``undo`` must not block. A forked child is refused here.
    """
    refuse_after_fork()
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

    pool = ThreadPoolExecutor(1, "rdzv-etcd start")
    context = contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, context.run, do_it)
    except asyncio.CancelledError:
        abandoned.set()
        undo_it()
        raise
    finally:
        pool.shutdown(wait=False)

"""What blocks for a moment, off the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from rdzv_etcd.process import begun_in_thread, refuse_after_fork
from rdzv_etcd.runtime.loop_thread import refuse_green_threads

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
        return await asyncio.wrap_future(begun_in_thread(do_it, "rdzv-etcd start"))
    except asyncio.CancelledError:
        abandoned.set()
        undo_it()
        raise

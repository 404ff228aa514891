"""What passes between the threads of this process and an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from rdzv_etcd.errors import MisuseError
from rdzv_etcd.process import begun_in_thread, refuse_after_fork

T = TypeVar("T")


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Do what blocks for a moment in a thread of its own: those of the event loop may all be busy.

    If the caller is cancelled meanwhile, undo it when it is done, even after the end of the
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


def set_from_a_thread() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Return a future of the running loop, and a function that sets it from any thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def set_it() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

    return future, set_it


def refuse_green_threads() -> None:
    """Raise :class:`~rdzv_etcd.errors.MisuseError` if gevent or eventlet have replaced what the
    loop's thread is made of: a thread that blocks would stop the loop it waits for."""
    monkey = sys.modules.get("gevent.monkey")
    ours = ("threading", "select", "subprocess")
    if monkey is not None and any(map(monkey.is_module_patched, ours)):
        instead = "gevent.monkey.patch_all(thread=False, select=False, subprocess=False)"
        raise _green_error("gevent", instead)
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise _green_error("eventlet", "eventlet.monkey_patch(thread=False)")


def _green_error(package: str, instead: str) -> MisuseError:
    return MisuseError(
        f"{package} has patched the threads or selectors of this process, on which this library's "
        f"event loop runs: call {instead}, or use the library in a process without {package}"
    )

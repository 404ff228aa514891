"""What signals mean while a command runs. Only in the main thread, as Python has it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rdzv_etcd.signals import has_default_action


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that it undoes what it has begun; not
    one that is ignored, as under ``nohup``."""
    defaults = [each for each in (signal.SIGTERM, signal.SIGHUP) if has_default_action(each)]
    for number in defaults:
        signal.signal(number, _like_ctrl_c)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _like_ctrl_c(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does just now: asyncio's handler cancels the task; an exception raised here could
    come while a callback of gRPC runs, which drops it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # it is ignored
        handler = signal.default_int_handler
    handler(number, frame)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end what blocks here: asyncio's handler would cancel the task that asks, which
    takes effect only after the answer."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

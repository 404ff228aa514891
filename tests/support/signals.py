"""A signal's handler for as long as a test needs it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call ``handler`` on the signal within the block, afterwards what was called before."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)

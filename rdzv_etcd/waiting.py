"""Blocking waits during which signals are handled. Knows threads; reads no clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

SIGNAL_DELAY_S = 0.5
"""The main thread, which alone runs Python's signal handlers, looks this often whether there was a
signal while it waits. One that comes just before the wait begins, or to another thread, does not
interrupt it; only then is its handler called this late."""


def wait_through_signals(wait: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Block in ``wait`` for at most ``timeout_s`` seconds (``None``: no limit); tell what it told.

    ``wait`` blocks for at most the seconds it is given and tells whether it is over. On the main
    thread it is called again and again, so that no signal's handler is called late. Raises what
    ``wait`` and handlers raise.
    """
    left_s = threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s)
    in_main_thread = threading.get_ident() == threading.main_thread().ident
    # Hundreds of other threads that looked as often would keep the interpreter to themselves.
    at_once_s = SIGNAL_DELAY_S if in_main_thread else threading.TIMEOUT_MAX
    while not wait(min(left_s, at_once_s)):
        left_s -= at_once_s
        if left_s <= 0:
            return False
    return True


class Latch:
    """Opens once; one thread waits for that, and a signal's handler may raise at any point of it.

    A ``threading.Event`` or a ``Future`` would not do: an exception that comes just when the
    waiting thread has taken their lock leaves it locked, and then nobody can set them.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = threading.Lock()  # a bare one: taken and waited for in one step
        self._lock.acquire()

    def open(self) -> None:
        """Let the waiter go. Idempotent; does not block."""
        self._is_open = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Block for at most ``timeout_s`` seconds (``None``: no limit); tell whether it is open."""
        return wait_through_signals(
            lambda limit_s: self._is_open or self._lock.acquire(timeout=limit_s), timeout_s
        )

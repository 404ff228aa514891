"""A blocking wait during which signals are handled. Knows threads; reads no clock."""

from __future__ import annotations

import contextlib
import threading

SIGNAL_DELAY_S = 0.5
"""The main thread, which alone runs Python's signal handlers, looks this often whether there was a
signal while it waits. One that comes just before the wait begins, or to another thread, does not
interrupt it; only then is its handler called this late."""


class Latch:
    """Opens once; one thread waits for that, and a signal's handler may raise at any point of it.

    A ``threading.Event`` or a ``Future`` would not do: an exception that comes just when the
    waiting thread has taken their lock leaves it locked, and then nobody can set them.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = threading.Lock()  # a bare one: taken and waited for in one step
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """Let the waiter go. Idempotent; does not block."""
        self._is_open = True
        with contextlib.suppress(RuntimeError):  # it was open
            self._lock.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Block for at most ``timeout_s`` seconds (``None``: no limit); tell whether it is open.

        Raises what signal handlers raise.
        """
        left_s = threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s)
        in_main_thread = threading.get_ident() == threading.main_thread().ident
        # Hundreds of other threads that looked as often would keep the interpreter to themselves.
        at_once_s = SIGNAL_DELAY_S if in_main_thread else threading.TIMEOUT_MAX
        while not (self._is_open or self._lock.acquire(timeout=min(left_s, at_once_s))):
            left_s -= at_once_s
            if left_s <= 0:
                return False
        return True

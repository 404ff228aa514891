"""Whose a signal is: Python knows only the handlers that were installed through it.

C code installs others past it, :mod:`faulthandler` among it, so the kernel is asked.
"""

from __future__ import annotations

import ctypes
import signal

_SIG_DFL = 0
_LARGEST_SIGACTION = 512


def has_default_action(number: int) -> bool:
    """Tell whether nothing in this process handles or ignores the signal."""
    return signal.getsignal(number) is signal.SIG_DFL and kernel_handler(number) in (_SIG_DFL, None)


def kernel_handler(number: int) -> int | None:
    """Return the address of the function that the kernel calls: the same one for all handlers in
    Python; 0 for the default action. ``None`` if it cannot be asked."""
    found = ctypes.create_string_buffer(_LARGEST_SIGACTION)
    try:
        if ctypes.CDLL(None).sigaction(number, None, found) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return ctypes.c_size_t.from_buffer(found).value  # struct sigaction begins with the handler

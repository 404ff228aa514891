"""The signals a supervisor waits for. Standard library only."""

from __future__ import annotations

import signal

_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
UNBLOCKED = _STOP | {signal.SIGCHLD}
"""Blocked in the supervisor, which asks for them; not so in its child."""


def wait_for_signal(timeout_s: float) -> int | None:
    """Sleep until a signal of ours (the child's end among them) or the timeout."""
    received = signal.sigtimedwait(UNBLOCKED, timeout_s)
    return None if received is None else received.si_signo


def is_told_to_stop(signal_number: int | None) -> bool:
    """Tell it of what was received. A hang-up that is ignored, as under ``nohup``, says nothing."""
    if signal_number == signal.SIGHUP:
        return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return signal_number in _STOP

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
    """Tell it of what was received. What is ignored says nothing: a hang-up under ``nohup``, Ctrl-C
    in what a shell has started in the background. It comes all the same, as it is blocked here."""
    return signal_number in _STOP and signal.getsignal(signal_number) is not signal.SIG_IGN

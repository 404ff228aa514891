"""The signals a supervisor waits for. Standard library only."""

from __future__ import annotations

import signal

UNBLOCKED = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
"""Blocked in the supervisor, which asks for them; not so in its child."""


def wait_for_signal(timeout_s: float) -> int | None:
    """Sleep until a signal of ours (the child's end among them) or the timeout."""
    received = signal.sigtimedwait(UNBLOCKED, timeout_s)
    return None if received is None else received.si_signo

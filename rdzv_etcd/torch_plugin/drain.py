"""``SIGUSR1`` to an agent: it leaves in good order. And when its workers stop for that.

torch's agent knows no commit point: it can stop its workers, and does so when it is told that nodes
wait. The other agents have to stop theirs first: workers whose peers are gone fail, and an agent
counts that against ``--max-restarts``, but not what it was told of before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType

from rdzv_etcd.errors import ForkedProcessError
from rdzv_etcd.group.group import Group

_log = logging.getLogger("rdzv_etcd")

SIGNAL = signal.SIGUSR1
OTHERS_FIRST_S = 1.0
"""After so long the drained node stops its workers: the other agents look ten times a second
whether nodes wait, and have been told by then."""


class Departure:
    """How one agent's node leaves when it is drained."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._left_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the node has left, or is about to, because it was drained."""
        return self._left_s is not None

    def is_due(self) -> bool:
        """Whether the workers have to stop; the node leaves when this is first asked after it was
        drained. From memory, does not block."""
        if self._left_s is None:
            reason = self._group.drain_reason
            if reason is None:
                return False
            self._left_s = time.monotonic()
            threading.Thread(
                target=self._group.leave, args=(reason,), name="rdzv-etcd drain"
            ).start()
        return time.monotonic() >= self._left_s + OTHERS_FIRST_S


class DrainSignal:
    """Drains a group when this process gets SIGUSR1, unless somebody else wants that signal.

    The process has one handler, for all its groups: one that was left behind by an interrupted
    launch keeps no other from being drained.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def install(self) -> None:
        """Handle the signal, if this is the main thread, nobody else handles it, and it is not
        ignored. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            signal.signal(SIGNAL, _drain_all)
        if signal.getsignal(SIGNAL) is _drain_all:
            _handled[id(self)] = weakref.ref(self._group)

    def restore(self) -> None:
        """Handle it no more for this group, and not at all after the last. Idempotent."""
        _handled.pop(id(self), None)
        if threading.current_thread() is not threading.main_thread():
            return
        if all(group.has_left for group in _groups()):
            _handle_no_more()


_handled: dict[int, weakref.ref[Group]] = {}
"""Those that are drained when the signal comes, by whose they are."""


def _groups() -> list[Group]:
    refs = list(_handled.values())  # in one step: other threads may shut handlers down
    return [group for group in (ref() for ref in refs) if group is not None]


def _drain_all(number: int, _: FrameType | None) -> None:
    groups = _groups()
    drained = [group for group in groups if _is_drained(group)]
    to_drain = [group for group in groups if group not in drained and not group.has_left]
    for group in to_drain:
        group.drain(signal.Signals(number).name)
    if not drained and not to_drain:  # as if nobody had ever handled it
        _handle_no_more()
        os.kill(os.getpid(), number)
    # One that leaves already is left alone: whoever asks again must not end its agent.


def _handle_no_more() -> None:
    if signal.getsignal(SIGNAL) is _drain_all:
        with contextlib.suppress(ValueError):  # the interpreter is going
            signal.signal(SIGNAL, signal.SIG_DFL)


def _is_drained(group: Group) -> bool:
    """Whether this process's node is drained; a forked child, which may have inherited the signal's
    handler, has none."""
    try:
        return group.drain_reason is not None
    except ForkedProcessError:
        return False

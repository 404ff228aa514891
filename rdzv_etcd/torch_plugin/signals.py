"""Signals to an agent: ``SIGUSR1`` drains its node; ``SIGTERM``, ``SIGHUP`` and ``SIGQUIT`` end the
process as ever, but let its node leave first.

torch handles the latter only from the start of its first workers on, and keeps doing so. Until then
an agent that waits would end without a goodbye, or, as the first process of a container, for which
the kernel has no default action, ignore them and take a seat that it cannot keep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from types import FrameType

from rdzv_etcd.process import Latch, has_default_action, kernel_handler
from rdzv_etcd.world.group import Group

DRAINS = signal.SIGUSR1
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_GOODBYE_S = 10.0
"""The process then ends all the same; etcd forgets the node when its lease has run out."""


class AgentSignals:
    """Handles the signals for one node, where nothing else in the process handles or ignores them.

    The process has one handler, for all its nodes: a node that an interrupted launch left behind
    keeps no other from being drained.
    """

    def __init__(self) -> None:
        self._group: weakref.ref[Group] | None = None
        """``None`` until the node exists."""
        self._drained_by: str | None = None
        """The signal that arrived to drain the node before it existed."""

    def install(self) -> None:
        """Handle the signals, if this is the main thread. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (DRAINS, *ENDS):
            if has_default_action(number):
                signal.signal(number, _handle)
                _installed[number] = kernel_handler(number)
        _handled[id(self)] = weakref.ref(self)

    @property
    def is_installed(self) -> bool:
        """Whether the signal that drains does so in this process."""
        return signal.getsignal(DRAINS) is _handle

    def be_of(self, group: Group) -> None:
        """Handle them for this node from now on."""
        self._group = weakref.ref(group)
        if self._drained_by is not None:
            group.drain(self._drained_by)

    @property
    def node(self) -> Group | None:
        """The node; ``None`` before it exists, and after it has left."""
        group = None if self._group is None else self._group()
        return None if group is None or group.has_left else group

    def drain(self, name: str) -> bool:
        """Drain the node, and return whether there is one that is drained, now or before: a second
        request must not end the agent of a node that is already leaving."""
        if self._group is None:
            self._drained_by = name
            return True
        if (node := self.node) is not None:
            node.drain(name)
            return True
        group = self._group()
        return group is not None and group.drain_reason is not None

    def restore(self) -> None:
        """Stop handling them for this node, and at all after the last one. Idempotent."""
        _handled.pop(id(self), None)
        if threading.current_thread() is not threading.main_thread():
            return
        if all(each._group is not None and each.node is None for each in _all()):
            for number in (DRAINS, *ENDS):
                _stop_handling(number)


_handled: dict[int, weakref.ref[AgentSignals]] = {}
os.register_at_fork(after_in_child=_handled.clear)  # a child has inherited the handler, but no node
_installed: dict[int, int | None] = {}
"""What the kernel called for a signal once it was handled here."""


def _all() -> list[AgentSignals]:
    refs = list(_handled.values())  # in one step: other threads may shut handlers down
    return [each for each in (ref() for ref in refs) if each is not None]


def _handle(number: int, _: FrameType | None) -> None:
    name = signal.Signals(number).name
    if number == DRAINS:
        drained = [each.drain(name) for each in _all()]
        if not any(drained):
            _stop_handling(number)
            os.kill(os.getpid(), number)
        return
    _stop_handling(number)  # the next one ends the process at once
    try:
        _leave_all(name)
    finally:
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # a container's first process: no default action


def _leave_all(why: str) -> None:
    leaving = []
    for node in [each.node for each in _all()]:
        left = Latch()
        if node is not None and node._begin_to_leave(why, left.open):
            leaving.append(left)
    until_s = time.monotonic() + _LONGEST_GOODBYE_S
    for left in leaving:
        left.wait(until_s - time.monotonic())


def _stop_handling(number: int) -> None:
    if signal.getsignal(number) is _handle and kernel_handler(number) == _installed.get(number):
        with contextlib.suppress(ValueError):  # the interpreter is exiting
            signal.signal(number, signal.SIG_DFL)

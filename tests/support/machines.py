"""Faults of a simulated node's machine: it stalls between two lines of code, or is suspended.

``MachineLoop`` and ``MachineClock`` are the loop and the clock of :mod:`rdzv_etcd.testing` with
these faults. Knows their inside; knows nothing of nodes.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rdzv_etcd.testing import SimClock, SimLoop
from rdzv_etcd.testing.simloop import _NODE, _Timer, run_on

T = TypeVar("T")


class _CrashedError(asyncio.CancelledError):
    """Ends code of a node that crashed while it was stalled."""


class MachineLoop(SimLoop):
    """A loop on which nodes may also be stalled, and their machines suspended."""

    def __init__(self, seed: int = 0, *, shuffle: bool = True) -> None:
        super().__init__(seed, shuffle=shuffle)
        self._asleep: dict[str, tuple[float, list[_Timer]]] = {}
        """Since when a machine has been suspended, and its timers."""
        self._crashed: set[str] = set()
        self._stalled: set[str] = set()

    def suspend(self, name: str) -> None:
        """Suspend a node's machine: nothing of it runs, and its timers stand still."""
        if name in self._asleep:
            return
        self.pause(name)
        theirs = [entry for entry in self._timers if entry[2] == name]
        self._timers = [entry for entry in self._timers if entry[2] != name]
        heapq.heapify(self._timers)
        self._asleep[name] = (self._now_s, theirs)

    def wake(self, name: str) -> float:
        """Wake a node's machine up; return for how many seconds it was suspended. Its timers have
        as long left as they had then."""
        since_s, theirs = self._asleep.pop(name, (self._now_s, []))
        slept_s = self._now_s - since_s
        for when_s, serial, node, timer in theirs:
            heapq.heappush(self._timers, (when_s + slept_s, serial, node, timer))
        self.resume(name)
        return slept_s

    def resume(self, name: str) -> None:
        """Continue a paused node, unless its machine is suspended."""
        if name not in self._asleep:
            super().resume(name)

    def crash(self, name: str) -> None:
        self._crashed.add(name)
        super().crash(name)

    def stall(self, duration_s: float) -> None:
        """Stop the running node between two lines of its code, while all others continue.

        If several are stalled at a time, they continue in reverse order, some later than asked.
        """
        node, task = _NODE.get(), asyncio.current_task(self)
        ends_s = self._now_s + duration_s
        self.call_at(ends_s, lambda: None, context=contextvars.Context())
        self._stalled.add(node)
        if task is not None:
            asyncio.tasks._leave_task(self, task)
        try:
            while not self._stopping and (  # type: ignore[attr-defined]
                self._now_s < ends_s or (node in self._stopped and node not in self._crashed)
            ):
                self._run_once()
        finally:
            if task is not None:
                asyncio.tasks._enter_task(self, task)
            self._stalled.discard(node)
        if node in self._crashed:
            raise _CrashedError(f"{node} crashed while it was stalled")
        if node not in self._stopped:
            self._ready_now += self._held.pop(node, [])

    def release(self) -> None:
        for name in list(self._asleep):
            self.wake(name)
        self._crashed.clear()
        super().release()

    def _halted(self) -> set[str]:
        return self._stopped | self._stalled if self._stalled else self._stopped

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), _CrashedError):
            super()._note_unhandled(loop, context)


class MachineClock(SimClock):
    """The clock of a machine. It counts the time for which this was suspended, as Linux's
    ``CLOCK_BOOTTIME``; without ``counts_suspension`` it stands still meanwhile, as
    ``CLOCK_MONOTONIC`` (see :meth:`woke`)."""

    def __init__(
        self,
        loop: MachineLoop,
        *,
        offset_s: float = 0.0,
        wall_skew_s: float = 0.0,
        seed: object = 0,
        counts_suspension: bool = True,
    ) -> None:
        super().__init__(loop, offset_s=offset_s, wall_skew_s=wall_skew_s, seed=seed)
        self.counts_suspension = counts_suspension
        self._machine = loop
        self._stall: tuple[int, float] | None = None

    def stall(self, at_reading: int, for_s: float) -> None:
        """Stall the node for ``for_s`` seconds just before its ``at_reading``-th look at this clock
        from now, counted from 1: a process may be stopped anywhere, also during a decision."""
        self._stall = (at_reading, for_s)

    def now_s(self) -> float:
        if self._stall is not None and _NODE.get():
            readings, for_s = self._stall
            self._stall = (readings - 1, for_s) if readings > 1 else None
            if self._stall is None:
                self._machine.stall(for_s)
        return super().now_s()

    def woke(self, slept_s: float) -> None:
        """Tell the clock for how long its machine was suspended (see :meth:`MachineLoop.wake`)."""
        if not self.counts_suspension:
            self._offset_s -= slept_s


def run_on_machines(
    scenario: Callable[[MachineLoop], Coroutine[Any, Any, T]],
    seed: int = 0,
    limit_s: float = 86_400.0,
) -> T:
    """As :func:`rdzv_etcd.testing.run_simulation`."""
    return run_on(MachineLoop(seed), scenario, limit_s)

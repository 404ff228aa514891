"""The waits in the making of a process group, which can be interrupted and given up.

Where torch's C++ code waits, no signal handler runs. And gloo waits for the connections of all
members for five times the group's timeout, and nothing ends that wait where one died that was to
connect (torch 2.13); nor does anything end that of a store's client for the first answer of a
server that is silent. So they wait in a thread of their own, which is left behind.

Knows threads; knows nothing of sockets or worlds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from rdzv_etcd.process import Latch
from rdzv_etcd.torch.stuck import LEFT_BEHIND, end_process

T = TypeVar("T")


class _Work(Generic[T]):
    """What is done in the other thread, and what has come of it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.made: list[T] = []
        self._error: BaseException | None = None

    def do(self) -> None:
        try:
            self.made.append(self._make())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._error = error

    def result(self) -> T:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self.made.pop()
        finally:
            del error  # its traceback would keep this frame, and with it all callers' values


class Connecting:
    """One such wait."""

    def __init__(self, if_late: Callable[[], object] = lambda: None) -> None:
        """``if_late`` is called in the thread that was left behind if this was given up and all
        went well after all."""
        self._if_late = if_late
        self._given_up: list[bool] = []
        """Whether it was that, or else has ended by itself: the first one counts. What came of it
        is not here: whoever may give it up keeps this for long."""
        self._decided = Latch()

    def run(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns. Blocks until it does, or is given up; signal handlers run
        meanwhile. If it is given up already, nothing is begun.

        Raises what ``make`` raises, and ``torch.distributed.DistNetworkError`` if it is given up.
        """
        work = _Work(make)
        if not self._decided.is_open:
            threading.Thread(target=self._run, args=(work,), name=LEFT_BEHIND, daemon=True).start()
        self._decided.wait(None)
        if self._given_up[0]:
            raise dist.DistNetworkError("a member was lost while it was connected to")
        return work.result()

    def give_up(self) -> None:
        """Let :meth:`run` raise. Does nothing if it has returned."""
        self._decide(given_up=True)

    def _run(self, work: _Work[object]) -> None:
        work.do()
        self._decide(given_up=False)
        if self._given_up[0] and work.made:
            self._if_late()

    def _decide(self, *, given_up: bool) -> None:
        self._given_up.append(given_up)
        self._decided.open()


def end_made_late() -> None:
    """For a process group: it is torch's default one now, in place of one that may be in use."""
    end_process(
        "a process group that was given up while gloo connected was made after all, by a member "
        "that was silent"
    )

"""The making of a process group, which can be given up while gloo connects.

gloo waits for the connections of all members for five times the group's timeout, and nothing ends
that wait where one died that was to connect (torch 2.13). So it waits in a thread of its own, which
is left behind.

Knows threads; knows nothing of sockets or worlds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait

import torch.distributed as dist

from rdzv_etcd.torch.stuck import LEFT_BEHIND, end_process
from rdzv_etcd.waiting import wait_through_signals


class Connecting:
    """One call of torch's ``init_process_group``."""

    def __init__(self) -> None:
        self._outcome: Future[None] = Future()

    def run(self, make: Callable[[], None]) -> None:
        """Make the process group. Blocks until it is made, cannot be, or is given up;
        signal handlers run meanwhile.

        Raises what ``make`` raises, and ``torch.distributed.DistNetworkError`` if it is given up.
        """
        threading.Thread(target=self._run, args=(make,), name=LEFT_BEHIND, daemon=True).start()
        wait_through_signals(lambda limit_s: bool(wait([self._outcome], limit_s).done), None)
        self._outcome.result()

    def give_up(self) -> None:
        """Let :meth:`run` raise. Does nothing if it has returned."""
        error = dist.DistNetworkError("a member was lost while gloo connected to it")
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_exception(error)

    def _run(self, make: Callable[[], None]) -> None:
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            with contextlib.suppress(InvalidStateError):
                self._outcome.set_exception(error)
            return
        try:
            self._outcome.set_result(None)
        except InvalidStateError:
            # It is torch's default process group now, in place of one that may be in use.
            end_process(
                "a process group that was given up while gloo connected was made after all, by a "
                "member that was silent"
            )

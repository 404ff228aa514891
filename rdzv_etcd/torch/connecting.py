"""The making of a process group, which can be given up while gloo connects.

gloo waits for the connections of all members for five times the group's timeout, and nothing ends
that wait where one died that was to connect (torch 2.13). So it waits in a thread of its own, which
is left behind.

Knows threads; knows nothing of sockets or worlds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from rdzv_etcd.latch import Latch
from rdzv_etcd.torch.stuck import LEFT_BEHIND, end_process


@dataclass(frozen=True, eq=False)
class _Outcome:
    error: BaseException | None


class Connecting:
    """One call of torch's ``init_process_group``."""

    def __init__(self) -> None:
        self._outcomes: list[_Outcome] = []
        """The first one counts."""
        self._decided = Latch()

    def run(self, make: Callable[[], None]) -> None:
        """Make the process group. Blocks until it is made, cannot be, or is given up;
        signal handlers run meanwhile.

        Raises what ``make`` raises, and ``torch.distributed.DistNetworkError`` if it is given up.
        """
        threading.Thread(target=self._run, args=(make,), name=LEFT_BEHIND, daemon=True).start()
        self._decided.wait(None)
        error = self._outcomes[0].error
        try:
            if error is not None:
                raise error
        finally:
            del error, self  # its traceback would keep this frame, and with it all callers' values

    def give_up(self) -> None:
        """Let :meth:`run` raise. Does nothing if it has returned."""
        self._decide(dist.DistNetworkError("a member was lost while gloo connected to it"))

    def _run(self, make: Callable[[], None]) -> None:
        try:
            make()
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            self._decide(error)
            return
        if not self._decide(None):
            # It is torch's default process group now, in place of one that may be in use.
            end_process(
                "a process group that was given up while gloo connected was made after all, by a "
                "member that was silent"
            )

    def _decide(self, error: BaseException | None) -> bool:
        """Tell whether this is what counts."""
        mine = _Outcome(error)
        self._outcomes.append(mine)
        self._decided.open()
        return self._outcomes[0] is mine

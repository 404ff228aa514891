"""Whether this process is in a collective, seen from outside of it.

A send of gloo's that waits for room on its connection is forgotten when the connection ends (its
``Pair::signalException`` tells those that have not begun, not those under way; torch 2.13). Who
waits for it then waits for the group's timeout, half an hour as a rule, and nothing frees it: so a
neighbour of a host that has fallen silent. All that is left is to see it.

Knows threads, ``/proc`` and where torch's files are; knows nothing of groups or worlds.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from torch.distributed import distributed_c10d

from rdzv_etcd.torch.connecting import THREAD

_GLOO = "pt_gloo_runloop"
"""The name of the threads in which gloo's collectives run."""

_COLLECTIVES = distributed_c10d.__file__
"""Where in Python torch's are, and wait."""

_TASKS = Path("/proc/self/task")

_LIMIT = 4
"""Where the pointer to its limit stands in a line of a thread that waits in futex(2)."""


def in_a_collective() -> bool:
    """Whether a thread is in one.

    Looks at what gloo's threads do, and where in Python each of the others is: a ``send`` waits in
    the caller's own thread, and a backward pass with DistributedDataParallel only for gloo's.
    """
    left_behind = {thread.ident for thread in threading.enumerate() if thread.name == THREAD}
    if any(
        frame.f_code.co_filename == _COLLECTIVES
        for thread, frame in sys._current_frames().items()
        if thread not in left_behind
    ):
        return True
    return any(_waits_with_limit(task) for task in _TASKS.iterdir())


def _waits_with_limit(task: Path) -> bool:
    """Whether a thread of gloo's waits for a peer. For work, it waits without a limit."""
    try:
        if (task / "comm").read_text().strip() != _GLOO:
            return False
        call = (task / "syscall").read_text().split()
    except OSError:  # it has ended, or this system does not tell
        return False
    # The number of the call and its arguments. These threads sleep in no other call; of one that
    # does not sleep it is only "running".
    return len(call) > _LIMIT and int(call[_LIMIT], 16) != 0

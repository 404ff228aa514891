"""Which of this process's threads are in a collective, and the end of a process that has one which
nothing frees.

A send of gloo's that waits for room on its connection is forgotten when the connection ends (its
``Pair::signalException`` tells those that have not begun, not those under way; torch 2.13). Who
waits for it then waits for the group's timeout, half an hour as a rule: so a neighbour of a host
that has fallen silent. All that is left is to see it.

Knows threads, ``/proc`` and where torch's files are; knows nothing of groups or worlds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from torch.distributed import distributed_c10d

_log = logging.getLogger("rdzv_etcd")

LEFT_BEHIND = "rdzv-etcd-connecting"
"""The name of threads that do not count: nobody waits for them any more."""

_GLOO = "pt_gloo_runloop"
"""The name of the threads in which gloo's collectives run."""

_COLLECTIVES = distributed_c10d.__file__
"""Where in Python torch's are, and wait."""

_TASKS = Path("/proc/self/task")

_LIMIT = 4
"""Where the pointer to its limit stands in a line of a thread that waits in futex(2)."""

Wait = tuple[int, str]
"""A thread, and how often it has slept before. The same one twice: it has not woken meanwhile."""


def collectives() -> frozenset[Wait]:
    """Return the threads that are in a collective, each with the wait that it is in.

    Looks at what gloo's threads do, and where in Python each of the others is: a ``send`` waits in
    the caller's own thread, and a backward pass with DistributedDataParallel only for gloo's.
    """
    frames = sys._current_frames()
    waiting = {
        str(thread.native_id)
        for thread in threading.enumerate()
        if thread.name != LEFT_BEHIND
        and (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code.co_filename == _COLLECTIVES
    }
    found = set()
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or this system does not tell
            if task.name in waiting or _waits_for_a_peer(task):
                found.add((int(task.name), _sleeps(task)))
    return frozenset(found)


def _waits_for_a_peer(task: Path) -> bool:
    """Whether it is a thread of gloo's that does. For work, these wait without a limit."""
    if (task / "comm").read_text().strip() != _GLOO:
        return False
    # The number of the call and its arguments. These threads sleep in no other call; of one that
    # does not sleep it is only "running".
    call = (task / "syscall").read_text().split()
    return len(call) > _LIMIT and int(call[_LIMIT], 16) != 0


def _sleeps(task: Path) -> str:
    return next(
        line
        for line in (task / "status").read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def end_process(why: str) -> NoReturn:
    """End this process at once, for its supervisor to start it again; say why at ERROR."""
    try:
        _log.error("%s: this process ends, with exit code %d. Start it again", why, os.EX_TEMPFAIL)
        faulthandler.dump_traceback()
        sys.stdout.flush()
    finally:  # whatever has become of the streams
        os._exit(os.EX_TEMPFAIL)

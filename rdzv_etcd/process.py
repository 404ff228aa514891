"""Which process this is: what a fork makes is another one, with all that its parent had in memory.

Asks the kernel once for each process, so that loops may ask here.
"""

from __future__ import annotations

import os

_id = os.getpid()


def process_id() -> int:
    """The id of this process, as :func:`os.getpid`."""
    return _id


def _note_fork() -> None:
    global _id  # noqa: PLW0603 - there is one process
    _id = os.getpid()


os.register_at_fork(after_in_child=_note_fork)

"""Which process this is: what a fork makes is another one, with all that its parent had in memory.

Asks the kernel once for each process, so that loops may ask here. gRPC's threads do not survive a
fork, and what it has set up crashes in the child (seen with grpcio 1.85;
``GRPC_ENABLE_FORK_SUPPORT`` is for its synchronous calls only).
"""

from __future__ import annotations

import os

from rdzv_etcd.errors import ForkedProcessError

_id = os.getpid()


def process_id() -> int:
    """The id of this process, as :func:`os.getpid`."""
    return _id


def _note_fork() -> None:
    global _id  # noqa: PLW0603 - there is one process
    _id = os.getpid()


os.register_at_fork(after_in_child=_note_fork)

_user: int | None = None
"""The process that used gRPC first, for this package."""


def note_use() -> None:
    """Call before gRPC opens anything. Raises :class:`ForkedProcessError`."""
    global _user  # noqa: PLW0603 - there is one gRPC in a process
    refuse_after_fork()
    _user = process_id()


def refuse_after_fork() -> None:
    """Raise :class:`ForkedProcessError` if this process was forked from one that has used gRPC."""
    if _user is not None and _user != process_id():
        raise ForkedProcessError(_user)

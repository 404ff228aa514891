"""Whether gRPC can be used in this process.

gRPC's threads do not survive a fork, and what it has set up crashes in the child (seen with grpcio
1.85; ``GRPC_ENABLE_FORK_SUPPORT`` is for its synchronous calls only).
Knows processes by their ids; does not load gRPC.
"""

from __future__ import annotations

from rdzv_etcd.errors import ForkedProcessError
from rdzv_etcd.process import process_id

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

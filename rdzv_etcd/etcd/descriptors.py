"""Makes sure that there are file descriptors left before gRPC and torch need them.

Knows the process's limit only. gRPC's core ends the process when it finds none at its start; later
it fails with an error that is worth a retry, and torch's TCPStore tries again for five minutes.
"""

from __future__ import annotations

import errno
import os

from rdzv_etcd.errors import EtcdError

FREE = 24
"""A client takes about ten; one agent's store, its listener and the pipes to a worker as many."""


def require_free() -> None:
    """Raise :class:`EtcdError` unless some descriptors can be had. Does not block."""
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(FREE - 1):
            taken.append(os.dup(taken[0]))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        whose = "this process has" if error.errno == errno.EMFILE else "this machine has"
        raise EtcdError(
            f"too many open files: {whose} fewer than {FREE} left, which a connection to etcd and "
            "a round's store need; raise ulimit -n"
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)

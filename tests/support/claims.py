"""Claims on what all test processes of a machine share, such as a port that is not bound yet.

A claim is an abstract Unix socket: it ends with the process that holds it, leaves no file, and like
ports and addresses it counts within one network namespace.
"""

from __future__ import annotations

import socket


def claim(name: str) -> int | None:
    """Return a descriptor that holds ``name`` until it is closed, ``None`` if it is held already.

    Holders are this process's earlier claims as well as those of other test processes.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
        try:
            holder.bind(f"\0rdzv-etcd-tests-{name}")
        except OSError:
            return None
        return holder.detach()

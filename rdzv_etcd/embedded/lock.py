"""Only one supervisor per port: an abstract Unix socket is the lock. Standard library only.

It belongs to the same network namespace as the port, and the kernel drops it with the process. It
listens, so that the kernel tells whoever asks whose it is; nothing is ever said over it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

_WAITING = 1024
"""How many may ask between two calls of :func:`dismiss`; more only hear that it is taken."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock; ``None`` where the kernel does not tell."""

    pid: int | None = None
    uid: int | None = None


def take(port: int) -> socket.socket:
    """Return the lock of ``port``, held until it is closed; raises OSError if it is taken."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_name(port))
        lock.listen(_WAITING)
        lock.setblocking(False)
    except OSError:
        lock.close()
        raise
    return lock


def dismiss(lock: socket.socket) -> None:
    """Let go of those who have asked: they know by now."""
    with contextlib.suppress(BlockingIOError):
        while True:
            lock.accept()[0].close()


def holder(port: int) -> Holder | None:
    """Return who holds the lock of ``port`` on this machine, ``None`` if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as question:
        question.setblocking(False)
        try:
            question.connect(_name(port))
        except BlockingIOError:
            return Holder()  # too many ask at once
        except OSError:
            return None
        form = struct.Struct("3i")  # struct ucred: pid, uid, gid of whoever began to listen
        pid, uid, _ = form.unpack(
            question.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        )
        return Holder(pid, uid)


def _name(port: int) -> str:
    return f"\0rdzv-etcd-embedded-{port}"

"""Imports gRPC so that it never writes to the console and takes no part in ``fork``.

Knows the environment variables that gRPC's C core reads, once, when it starts. Must not leave any
of them changed: training workers inherit this process's environment.

Everything in this package gets ``grpc`` from here, so that nothing starts the core earlier.

* ``GRPC_VERBOSITY``: the core prints refused connections and failed handshakes to stderr; our
  errors carry the same text to where it belongs.
* ``GRPC_ENABLE_FORK_SUPPORT``: agents start workers while channels live. The core's fork handlers
  print to stderr when other threads use gRPC, and children here never use an inherited channel.

A value that the user has set is kept. If the program has used gRPC before us, its settings stay.
Source: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md

The core ends the process if it finds no file descriptor at its start; later gRPC fails with an
error that is worth a retry, and torch's TCPStore tries again for five minutes. So it is checked
before that some are left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


_AT_START = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}


@contextmanager
def _environment_at_start() -> Iterator[None]:
    ours = {name: value for name, value in _AT_START.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


require_free()  # the core ends the process if it finds none

with _environment_at_start():
    import grpc
    import grpc.aio

    # The core reads its configuration when the first channel is made, not when it is imported.
    grpc.insecure_channel("127.0.0.1:1").close()

__all__ = ["grpc"]

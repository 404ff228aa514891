"""Starts the guard that ends a node's workers if the node's own process is gone without a word.

Knows how to start :mod:`rdzv_etcd.orphans.guard`, and how to say good-bye to it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from rdzv_etcd.errors import SettingsError
from rdzv_etcd.orphans import guard
from rdzv_etcd.settings.parse import NODE_ID_VARIABLE

_START_LIMIT_S = 60.0


class Guard:
    """A guard of this process, for what was started with one node's id in its environment."""

    def __init__(self, node_id: str) -> None:
        """Start it; blocks for some 20 ms. Raises SettingsError where it cannot be had."""
        me = os.getpid()
        reading, self._writing = os.pipe()  # closed in whatever is executed
        command = [sys.executable, "-I", "-S", guard.__file__, str(me)]
        command += [str(guard.start_time_of(me)), NODE_ID_VARIABLE, node_id]
        try:
            if not guard.start_time_of(me):
                raise SettingsError("orphans=kill needs Linux's /proc; use orphans=leave")
            subprocess.run(
                command,
                check=True,
                stdin=reading,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath},  # none of what workers are known by
                timeout=_START_LIMIT_S,
            )
        except BaseException as error:
            os.close(self._writing)
            if isinstance(error, OSError | subprocess.SubprocessError):
                raise SettingsError(f"orphans=kill: the guard did not start: {error}") from error
            raise
        finally:
            os.close(reading)

    def end(self) -> None:
        """Say good-bye: the guard ends, and ends nobody. Idempotent, does not block."""
        writing, self._writing = self._writing, -1
        if writing >= 0:
            with contextlib.suppress(OSError):  # somebody has ended the guard
                os.write(writing, b"bye")
            os.close(writing)

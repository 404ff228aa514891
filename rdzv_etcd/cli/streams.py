"""Makes standard input, output and error fit to be used, whatever the program was started with.

Knows nothing of the commands; imports nothing of the extra.
"""

from __future__ import annotations

import io
import os
import sys
from typing import cast


def prepare() -> None:
    """Open those that are closed, as under cron; what an encoding does not have is escaped.

    Before anything else opens a file: etcd's connection would become the standard output.
    """
    if sys.stdin is None:
        sys.stdin = _opened("r", os.O_RDONLY)
    if sys.stdout is None:
        # Every write fails, as at the end of a full disk: a result must not get lost in silence.
        sys.stdout = _opened("w", os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _opened("w", os.O_WRONLY)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python does it for stderr


def as_utf8(text: str) -> str:
    """Return the text of an argument or a variable, of which Python in an ASCII locale has kept the
    other bytes as surrogates."""
    try:
        return text.encode(sys.getfilesystemencoding(), "surrogateescape").decode()
    except UnicodeError:
        return text


def _opened(mode: str, flags: int) -> io.TextIOWrapper:
    """Open the null device in place of the first stream that is closed."""
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)  # as standard streams are
    stream = open(number, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
    return cast(io.TextIOWrapper, stream)

"""The command ``rdzv-etcd``: shows an operator the state of jobs, and changes it on request.

    app.py         the program: its commands, and the exit code of each error
    options.py     what torchrun is given as well: endpoint, options, job
    output.py      lines, tables, JSON, questions; text of others is escaped here
    jobs.py        reads and watches jobs
    report.py      the verdict on a job, and one row for each node; pure
    status.py, watch.py, history.py, doctor.py    only read
    admin.py (close), drain.py, evict.py          change a job, and ask first
    serve.py, demo.py                             an etcd, and a whole training job, on this machine

This module imports nothing of the extra ``cli``, so that it can report that it is missing.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import cast

NEEDS_EXTRA = 2
"""Exit code without the extra."""


def main() -> int:
    """Run the program with ``sys.argv`` and return its exit code."""
    _open_streams()
    try:
        import click  # noqa: F401, PLC0415 - see above
        import rich  # noqa: F401, PLC0415
    except ImportError as error:
        sys.stderr.write(
            f"rdzv-etcd needs the package {error.name}: pip install 'rdzv-etcd[cli]'\n"
        )
        return NEEDS_EXTRA
    from rdzv_etcd.cli.app import run  # noqa: PLC0415

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup one is ignored, and stays so
            signal.signal(number, end_as_ctrl_c_does)
    return run([as_utf8(argument) for argument in sys.argv[1:]])


def end_as_ctrl_c_does(number: int, frame: FrameType | None) -> None:
    """Handle a signal as SIGINT is handled at this moment: asyncio cancels the task. An exception
    raised here could come during a callback of gRPC, which drops it."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # it is ignored
        handler = signal.default_int_handler
    handler(number, frame)


def as_utf8(text: str) -> str:
    """Decode an argument or a variable of which Python, in an ASCII locale, has kept the other
    bytes as surrogates."""
    try:
        return text.encode(sys.getfilesystemencoding(), "surrogateescape").decode()
    except UnicodeError:
        return text


def _open_streams() -> None:
    """Open the standard streams that are closed, as under cron; escape what an encoding lacks.

    Before anything else opens a file: etcd's connection would become the standard output.
    """
    if sys.stdin is None:
        sys.stdin = _null("r", os.O_RDONLY)
    if sys.stdout is None:
        # Every write fails, as on a full disk: a result must not get lost silently.
        sys.stdout = _null("w", os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _null("w", os.O_WRONLY)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python does it for stderr


def _null(mode: str, flags: int) -> io.TextIOWrapper:
    """Open the null device in place of the first stream that is closed."""
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)  # as standard streams are
    stream = open(number, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
    return cast(io.TextIOWrapper, stream)

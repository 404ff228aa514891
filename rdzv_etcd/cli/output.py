"""Lines, tables and JSON. What others wrote is made harmless here, and only here.

Nothing is markup for rich: every cell is a :class:`rich.text.Text`, whose words are shown as they
are, and control characters and megabytes are dealt with by :func:`rdzv_etcd.text.shown`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rdzv_etcd.cli import signals
from rdzv_etcd.errors import RdzvEtcdError
from rdzv_etcd.text import LINE, shown

VERSION = 1
"""Of what ``--json`` prints: it rises when something is removed or gets another meaning."""

WORKS = DONE = 0
WAITS = FAILED = NOT_DONE = 1
CLOSED_OR_UNKNOWN = 2
CANNOT_ASK = 3
BAD_USAGE = 64
"""As in sysexits.h: 2 is taken."""

_WIDTH_OF_A_FILE = 200
_CELL = 120
"""Characters of one cell: a line is for people."""


class RefusedError(RdzvEtcdError):
    """The command did not do what it was asked to; the message says why."""


class _Lines(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the program with 1, which means something else here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console() -> Console:
    """Where lines and tables go. A file or pipe has no width: tables are not squeezed there."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Lines(
        markup=False,
        highlight=False,
        emoji=False,
        width=_WIDTH_OF_A_FILE if wide else None,
    )


def say(words: object, style: str = "") -> None:
    """Print one line of bounded length."""
    console().print(line(words, style), soft_wrap=True)


def warn(words: object) -> None:
    """Print one line where it does not get among the results."""
    click.echo(shown(words, LINE), err=True)


@contextmanager
def telling_if_slow(words: object, after_s: float = 5.0, again_s: float = 60.0) -> Iterator[None]:
    """Warn if the block takes longer, and now and then again. Only in the main thread.

    An alarm, not a thread: ``serve`` forks.
    """

    def tell(*_: object) -> None:
        warn(words)

    handler = signal.signal(signal.SIGALRM, tell)
    left = signal.setitimer(signal.ITIMER_REAL, after_s, again_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, handler)


def cell(value: object, style: str = "") -> Text:
    return Text(shown(value, _CELL), style)


def line(value: object, style: str = "") -> Text:
    """A line of its own: longer than a cell."""
    return Text(shown(value, LINE), style)


def table(columns: Sequence[str], rows: Sequence[Sequence[object | Text]]) -> Table:
    """Make a table; a cell that is no :class:`Text` is made one."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        made.add_row(*(item if isinstance(item, Text) else cell(item) for item in row))
    return made


def show_json(kind: str, fields: Mapping[str, object]) -> None:
    """Print one JSON object on a line: ``{"version": 1, "<kind>": …}``, in ASCII."""
    click.echo(json.dumps({"version": VERSION, kind: fields}, allow_nan=False))


def confirm(question: str, *, yes: bool) -> None:
    """Ask whether to go on. Raises :class:`RefusedError` if that is denied, or cannot be asked."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RefusedError(
            f"not done: {question} There is no terminal to ask on; add --yes to do it"
        )
    with signals.interruptible():
        confirmed = click.confirm(shown(question, LINE), default=False, err=True)
    if not confirmed:
        raise RefusedError("not done: it was not confirmed")


def ago(wall_s: float) -> str:
    """How long ago that is by this machine's clock."""
    return f"{duration(max(0.0, time.time() - wall_s))} ago"


def duration(seconds: float) -> str:
    """Write a duration in at most two units."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = int(min(seconds, 10.0**12))
    for size, unit, smaller, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"

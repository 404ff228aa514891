"""Lines, tables, JSON and questions. Text of others is made harmless here, and only here.

Nothing is markup for rich: every cell is a :class:`rich.text.Text`, whose words are shown as they
are, and control characters and megabytes are dealt with by :func:`rdzv_etcd.text.shown`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.text import Text

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
_GAP = "  "
_BELOW = "    "
_NARROWEST = 20


class RefusedError(RdzvEtcdError):
    """The command did not do what it was asked to; the message explains why."""


class _Lines(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the program with 1, which means something else here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _is_wide() -> bool:
    """Whether lines may be as long as they are: a file or pipe has no width."""
    return not sys.stdout.isatty() and "COLUMNS" not in os.environ


def console() -> Console:
    """Where lines and tables go."""
    return _Lines(
        markup=False,
        highlight=False,
        emoji=False,
        width=_WIDTH_OF_A_FILE if _is_wide() else None,
    )


def print_line(words: object, style: str = "") -> None:
    """Print one line of bounded length."""
    console().print(line(words, style), soft_wrap=True)


def warn(words: object) -> None:
    """Print one line on standard error, apart from the results."""
    click.echo(shown(words, LINE), err=True)


def cell(value: object, style: str = "") -> Text:
    return Text(shown(value, _CELL), style)


def line(value: object, style: str = "") -> Text:
    """A line of its own: longer than a cell."""
    return Text(shown(value, LINE), style)


def table(columns: Sequence[str], rows: Sequence[Sequence[object | Text]]) -> Text:
    """Lay out a table; print it with ``soft_wrap``. A cell that is not a :class:`Text` becomes one,
    and nothing becomes a dash.

    No column is squeezed. The last one is a sentence: where the terminal is too narrow for it, it
    is on lines of its own below its row, and so are the columns before it that do not fit.
    """
    width = None if _is_wide() else console().width
    cells = [
        [
            each if isinstance(each, Text) else cell("-" if each in (None, "") else each)
            for each in row[:-1]
        ]
        + [row[-1] if isinstance(row[-1], Text) else line(row[-1])]
        for row in rows
    ]
    widths = [
        max(each.cell_len for each in column)
        for column in zip(map(Text, columns), *cells, strict=True)
    ]
    ends = [sum(widths[: at + 1]) + len(_GAP) * at for at in range(len(columns))]
    kept = max(1, sum(width is None or end <= width for end in ends[:-1]))
    room = math.inf if width is None else width - ends[-2] - len(_GAP)
    with_last = kept == len(columns) - 1 and len(columns[-1]) <= room
    heads = [Text(each, "bold") for each in columns]
    lines = [_row(heads[: len(heads) if with_last else kept], widths)]
    for row in cells:
        is_inline = with_last and row[-1].cell_len <= room
        lines.append(_row(row[: len(row) if is_inline else kept], widths))
        below = [] if is_inline else list(zip(columns[kept:], row[kept:], strict=True))
        notes = [
            Text.assemble(f"{head.lower()}: " if head else "", each)
            for head, each in below
            if each.plain not in ("", "-")
        ]
        if notes and width is not None:
            text = Text("; ").join(notes)
            for part in text.wrap(console(), max(_NARROWEST, width - len(_BELOW))):
                part.rstrip()
                lines.append(Text.assemble(_BELOW, part))
    return Text("\n").join(lines)


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    row = Text()
    for at, each in enumerate(cells):
        row.append_text(each)
        if at + 1 < len(cells):
            row.append(" " * (widths[at] - each.cell_len) + _GAP)
    row.rstrip()
    return row


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object | Text]]) -> None:
    console().print(table(columns, rows), soft_wrap=True)


def show_json(kind: str, fields: Mapping[str, object]) -> None:
    """Print one JSON object on a line: ``{"version": 1, "<kind>": …}``, in ASCII."""
    click.echo(json.dumps({"version": VERSION, kind: fields}, allow_nan=False))


def show_result(kind: str, fields: Mapping[str, object], words: object, *, as_json: bool) -> None:
    """Print the result of a command, as JSON or as a line."""
    if as_json:
        show_json(kind, fields)
    else:
        print_line(words)


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation. Raises :class:`RefusedError` if that is denied, or cannot be asked."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RefusedError(
            f"not done: {question} There is no terminal to ask on; add --yes to do it"
        )
    with _interruptible():
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


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end a blocking question: asyncio's handler would cancel the task that asks, which
    takes effect only after the answer."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # it is ignored
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

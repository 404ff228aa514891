"""One run of a benchmark: its samples, how far it is, and what becomes of them at the end.

Knows the options every benchmark has; what is measured is the benchmark's own affair.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import options, results
from benchmarks.drawing import save
from benchmarks.plots import DRAW
from benchmarks.results import console

Document = dict[str, Any]


@dataclass
class Recording:
    """The samples so far."""

    advance: Callable[[str], None]
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    document: Document = field(default_factory=dict)
    """All of it, once the run has ended."""

    def add(self, part: str, *samples: Mapping[str, Any]) -> None:
        """Take what ``part`` of the run measured; it has ended."""
        self.samples += samples
        self.advance(part)


@contextlib.contextmanager
def recording(
    args: argparse.Namespace,
    benchmark: str,
    environment: Mapping[str, object],
    parts: int,
) -> Iterator[Recording]:
    """Show how many of ``parts`` are done; at the end write and plot what was recorded.

    If the run ends early, by Ctrl-C or an error, its samples are written to
    ``FILE.unfinished.json``, and the exception goes on.
    """
    with _progress(benchmark, parts) as advance:
        record = Recording(advance)
        path, finished = args.json, False
        try:
            yield record
            finished = True
        finally:
            if not finished and path is not None:
                path = path.with_suffix(".unfinished.json")
            if finished or record.samples:
                record.document = results.write(
                    path, benchmark, environment, options.as_json(args), record.samples
                )
    if args.plot is not None:
        save(DRAW[benchmark](record.document), args.plot)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of ``total`` parts with that part's name.

    It shows a bar on a terminal, a line for each part elsewhere.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(what, total=total)

        def advance(part: str) -> None:
            bar.update(task, advance=1, description=f"{what}: {part}")
            if not console.is_terminal:
                console.print(f"{what}: {bar.tasks[task].completed:g} of {total} done: {part}")

        yield advance

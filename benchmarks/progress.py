"""Shows how far a long run is: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.results import console


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of ``total`` parts with that part's name."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(what, total=total)

        def advance(part: str) -> None:
            bar.update(task, advance=1, description=f"{what}: {part}")
            if not console.is_terminal:
                console.print(f"{what}: {bar.tasks[task].completed:g} of {total} done: {part}")

        yield advance

"""Result files, statistics and tables. Knows no benchmark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

FORMAT = 1
BUSY = 0.5
"""A load average above this, before a run, means that something else ran as well."""
console = Console(width=None if sys.stdout.isatty() else 120)


def statistics(samples: Sequence[float]) -> dict[str, float]:
    """Return median, p99 and maximum. With fewer than 100 samples p99 is all but the maximum."""
    values = np.asarray(samples, dtype=float)
    return {
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def grouped(
    samples: Iterable[Mapping[str, Any]], *names: str
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the samples by what they say under ``names``, in the order of the file."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample.get(name) for name in names), []).append(sample)
    return groups


def medians(
    samples: Iterable[Mapping[str, Any]], value: str, *names: str
) -> dict[tuple[Any, ...], float]:
    """Return the median of ``value``, a number or a list of them, of the samples that have it."""
    found = {}
    for key, group in grouped(samples, *names).items():
        values: list[float] = []
        for sample in group:
            if "failed" not in sample and value in sample:
                seen = sample[value]
                values += seen if isinstance(seen, list) else [seen]
        if values:
            found[key] = statistics(values)["median"]
    return found


def write(
    path: Path | None,
    benchmark: str,
    environment: Mapping[str, object],
    settings: Mapping[str, object],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the document of one run; write it if ``path`` is given.

    Says so if the machine was busy before the run.
    """
    load = environment.get("load_before")
    if isinstance(load, float) and load > BUSY:
        console.print(f"the machine was busy before this run (load {load}): do not publish it")
    document = {
        "benchmark": benchmark,
        "format": FORMAT,
        "environment": dict(environment),
        "settings": dict(settings),
        "results": list(results),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, sort_keys=False) + "\n")
        console.print(f"written: {path}")
    return document


def read(path: Path) -> dict[str, Any]:
    """Return a result file's document; raises ``ValueError`` if it is none of this format."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result file of format {FORMAT}")
    return document


def failure(error: Exception) -> str:
    """Return what a result file says of a measurement that failed; print all that is known.

    Of an ended program's output the file keeps the last line: the rest is full of local paths.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if len(lines) == 1:
        return lines[0]
    console.print(str(error), highlight=False, markup=False)
    return f"{lines[0]}: {lines[-1].strip()}"


def seconds(value: float | None) -> str:
    """Format a duration for people: three digits, ms below a second."""
    if value is None:
        return "–"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

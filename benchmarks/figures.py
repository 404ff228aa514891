"""The README's one small table: a few of the committed results, beside torch's own backends.

Measures nothing; ``report`` writes what this returns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import latency, recovery, results, scale
from benchmarks.jobs import EMBEDDED, IN_PROCESS

BACKENDS = ("etcd3", "c10d", "etcd-v2")
JOINING = 64
MANY = 10_000
DEATHS = {
    "member": "training again after a node is killed",
    "silent": "… after a node's host goes silent",
    "store-host": "… after the host of the store, or of one of three embedded etcds, is lost",
    "store-silent": "… after such a host goes silent",
    "sigterm": "… after a node gets `SIGTERM`",
}
"""Cases of ``recovery``, and what the table calls them."""


def figures(folder: Path) -> list[list[str]]:
    """Return the table's rows, the header first, for the result files in ``folder``."""
    joined, _ = _summary(folder, latency.NAME, latency.summarize)
    recovered, settings = _summary(folder, recovery.NAME, recovery.summarize)
    formed, _ = _summary(folder, scale.NAME, scale.summarize)

    def joining(backend: str) -> str:
        return results.seconds(joined.get((backend, JOINING), {}).get("median"))

    def after(case: str, backend: str) -> str:
        is_ours_to_host = case in recovery.WITH_ITS_STORE and backend == BACKENDS[0]
        key = (case, EMBEDDED if is_ours_to_host else backend)
        return _recovered(recovered.get(key), settings)

    def in_process(backend: str) -> str:
        row = recovered.get(("member", IN_PROCESS)) if backend == BACKENDS[0] else None
        return _recovered(row, settings)

    def many(backend: str) -> str:
        ours = formed.get((scale.OURS, scale.FIRST, MANY), {}) if backend == BACKENDS[0] else {}
        return results.seconds(ours.get("seconds"))

    return [
        ["", *(f"`{backend}`" for backend in BACKENDS)],
        [f"{JOINING} nodes have their ranks", *map(joining, BACKENDS)],
        *([what, *(after(case, backend) for backend in BACKENDS)] for case, what in DEATHS.items()),
        ["… after a kill, with in-process recovery", *map(in_process, BACKENDS)],
        [f"{MANY:,} simulated nodes have their ranks", *map(many, BACKENDS)],
    ]


def _summary(
    folder: Path, name: str, summarize: Callable[[dict[str, Any]], Any]
) -> tuple[Any, dict[str, Any]]:
    """Return what a benchmark's file says and its settings; both are empty if there is none."""
    file = folder / f"{name}.json"
    if not file.exists():
        return {}, {}
    document = results.read(file)
    return summarize(document), document["settings"]


def _recovered(row: dict[str, Any] | None, settings: dict[str, Any]) -> str:
    if row is None:
        return "–"
    runs, failed = row["runs"], len(row["failures"])
    late = f"not within {settings['limit']:g} s"
    some = f"{late} in {failed} of {runs} runs"
    if failed > runs / 2:  # so is the median of all runs
        return late if failed == runs else some
    return results.seconds(row["total"]) + (f"; {some}" if failed else "")

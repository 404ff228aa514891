"""``report``: the documents' tables and plots, made from ``benchmarks/results/*.json``.

Times go to docs/comparison.md, costs to benchmarks/NOTES.md and a few figures to the README. Writes
between two markers and nowhere else, so the numbers there are always those of the committed files.
Measures nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    agent,
    false_alarms,
    figures,
    gpu,
    latency,
    peers,
    plots,
    recovery,
    results,
    scale,
    store,
)
from benchmarks.drawing import save
from benchmarks.jobs import EMBEDDED, IN_PROCESS, OWN_STORE, SUPERVISED

NAME = "report"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
ROOT = Path(__file__).parents[1]
Rows = list[list[str]]
Section = tuple[str, Callable[[dict[str, Any]], str]]
"""The benchmark, and what makes the text of its result file."""

LATENCY_ORDER = ("etcd3", "bare", "c10d", "etcd-v2", "etcd")
TIMED = [phase for phase in scale.PHASES if phase not in (scale.SETUP, scale.IDLE)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--document", type=Path, default=ROOT / "docs" / "comparison.md", help="where the times go"
    )
    parser.add_argument(
        "--notes", type=Path, default=ROOT / "benchmarks" / "NOTES.md", help="where the costs go"
    )
    parser.add_argument(
        "--readme", type=Path, default=ROOT / "README.md", help="where a few figures go"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="the result files"
    )
    parser.add_argument("--check", action="store_true", help="fail if one is out of date")


def run(args: argparse.Namespace) -> str:
    """Write the documents' parts and the plots next to the results; return the large parts.

    Raises ValueError if a document has no markers, or with ``--check`` if it is out of date.
    """
    header, *rows = figures.figures(args.results)
    _put(args.readme, table(header, rows), check=args.check)
    recovered = args.results / f"{recovery.NAME}.json"
    if recovered.exists() and not args.check:
        figure = plots.draw_beside_c10d(results.read(recovered))
        save(figure, args.results / f"{recovery.NAME}-beside-c10d.svg")
    parts = []
    for document, sections in ((args.document, TIMES), (args.notes, COSTS)):
        part = render(sections, args.results, document.parent, draw=not args.check)
        _put(document, part, check=args.check)
        parts.append(part)
    return "\n".join(parts)


def _put(document: Path, part: str, *, check: bool) -> None:
    before = document.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no {BEGIN} … {END}")
    after = f"{head}{BEGIN}\n{part}{END}{tail}"
    if check and after != before:
        raise ValueError(f"{document} is out of date: run python -m benchmarks report")
    if after != before:
        document.write_text(after, encoding="utf-8")
    results.console.print(f"{document.name}: {'up to date' if after == before else 'written'}")


def render(
    sections: Sequence[Section], folder: Path, document_folder: Path, *, draw: bool = True
) -> str:
    """Return a document's part for the files in ``folder``; draw its plots there."""
    parts = []
    for name, text in sections:
        file = folder / f"{name}.json"
        if not file.exists():
            parts.append(_missing(name))
            continue
        document = results.read(file)
        shown = ""
        if text not in WITHOUT_PICTURE:
            image = file.with_suffix(".svg")
            if draw:
                save(plots.DRAW[name](document), image)
            place = Path(os.path.relpath(image, document_folder)).as_posix()
            shown = f"![{plots.TITLES[name]}]({place})\n\n"
        parts.append(f"{text(document)}\n{shown}{_origin(document)}")
    return "\n".join(parts)


def _missing(name: str) -> str:
    if name == gpu.NAME:
        return "**GPU**: numbers from machines with GPUs are missing.\n"
    return f"**{name.capitalize()}**: not measured yet (`python -m benchmarks {name}`).\n"


def _origin(document: dict[str, Any]) -> str:
    seen = document["environment"]
    fsync = "fsync on" if seen["etcd_fsync"] else "fsync off"
    # Older files have neither.
    commit = f", commit {seen['commit']}" if seen.get("commit") else ""
    gpus = f", {', '.join(seen['gpus'])}" if seen.get("gpus") else ""
    additions_s = seen.get("million_additions_s")
    speed = f" (a million additions in {results.seconds(additions_s)})" if additions_s else ""
    return (
        f"<sub>{seen['date'][:10]}{commit}, {seen['cores']} cores{gpus}, "
        f"Python {seen['python']}{speed}, torch {seen['torch']}, grpcio {seen['grpcio']}, "
        f"etcd {seen['etcd']} ({fsync}, {seen.get('etcd_file_system', 'unknown')}); samples: "
        f"`benchmarks/results/{document['benchmark']}.json`</sub>\n"
    )


def table(header: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _latency(document: dict[str, Any]) -> str:
    summary = latency.summarize(document)
    sizes = sorted({nodes for _, nodes in summary})
    known = [name for name in LATENCY_ORDER if any(name == backend for backend, _ in summary)]
    rows = []
    for nodes in sizes:
        cells = [_spread(summary.get((name, nodes), {})) for name in known]
        rows.append([str(nodes), *cells, _times_faster(summary, nodes)])
    header = ["nodes", *(f"`{name}`" if name != latency.BARE else "bare calls" for name in known)]
    header.append("`etcd3` and the fastest of torch's")
    return (
        "**Forming a world**: from the last node's arrival until all nodes have their ranks; one "
        f"process per node; median (maximum).\n\n{table(header, rows)}"
    )


def _latency_costs(document: dict[str, Any]) -> str:
    summary = latency.summarize(document)
    sizes = sorted({nodes for _, nodes in summary})
    ours = [
        [
            str(nodes),
            *(
                results.number(summary.get(("etcd3", nodes), {}).get(cost))
                for cost in latency.COSTS
            ),
        ]
        for nodes in sizes
    ]
    header = ["nodes", "requests", "failed compares", "bytes in messages", "bytes on loopback"]
    return f"**A round of `etcd3`**, per node:\n\n{table(header, ours)}"


def _peers(document: dict[str, Any]) -> str:
    summary = peers.summarize(document)
    sizes = sorted({nodes for _, nodes in summary})
    versions = document["environment"]["peers"]
    rows = []
    for system in document["settings"]["systems"]:
        cells = [_spread(summary.get((system, nodes), {})) for nodes in sizes]
        version = versions.get(peers.PACKAGES.get(system))
        name = "bare calls to etcd" if system == latency.BARE else f"`{system}`"
        rows.append([f"{name} {version}" if version else name, *cells])
    failed = [
        f"`{sample['backend']}` with {sample['nodes']} nodes: {sample['failed']}"
        for sample in document["results"]
        if "failed" in sample
    ]
    note = f"\nFailed: {'; '.join(sorted(set(failed)))}.\n" if failed else ""
    return (
        "**Other systems**, measured the same way, at their defaults: a quorum of all at "
        "`torchft`'s lighthouse; for `lm-resiliency` and `nvidia-resiliency-ext` their agents' "
        "handlers, with the store in the first node. These three keep their state in the memory of "
        "one process, and lose it with that process; a round of `etcd3` is on disk.\n\n"
        f"{table(['', *(f'{nodes} nodes' for nodes in sizes)], rows)}{note}"
    )


def _times_faster(summary: dict[tuple[str, int], dict[str, Any]], nodes: int) -> str:
    """Return how many times torch's fastest backend takes as long as ours, by the medians."""
    medians = {
        backend: row["median"]
        for (backend, size), row in summary.items()
        if size == nodes and backend != latency.BARE and "median" in row
    }
    ours = medians.pop("etcd3", None)
    return f"1 : {min(medians.values()) / ours:.0f}" if ours and medians else "–"


def _spread(row: dict[str, Any]) -> str:
    if "median" not in row:
        return "failed" if row.get("failed") else "–"
    note = f", {row['failed']} failed" if row["failed"] else ""
    return f"{results.seconds(row['median'])} ({results.seconds(row['max'])}{note})"


def _recovery(document: dict[str, Any]) -> str:
    summary = recovery.summarize(document)
    known = [name for name in recovery.BACKENDS if any(name == b for _, b in summary)]
    rows = []
    for case in (each for each in recovery.CASES if any(each == case for case, _ in summary)):
        cells = [_recovered(summary.get((case, backend))) for backend in known]
        rows.append([recovery.CASES[case], *cells])
    ttl = document["settings"]["lease_ttl"]
    header = ["", *(f"`{name}`" for name in known)]
    runs = sorted({row["runs"] for row in summary.values()})
    most = f"{runs[-1]} runs" if runs[0] == runs[-1] else f"{runs[0]} to {runs[-1]} runs"
    in_process = (
        f" `{IN_PROCESS}` is [in-process recovery](library.md#training-in-the-same-processes), "
        "without torchrun: the training processes themselves continue."
        if IN_PROCESS in known
        else ""
    )
    if SUPERVISED in known:
        in_process += (
            f" `{SUPERVISED}` is the [same under torchrun](guide.md#without-restarts), two workers "
            "for each agent: the next step of the other hosts."
        )
    return (
        "**Recovery**: three `torchrun` agents (two before a node is added), one gloo worker "
        "each; from the fault until the new ranks are known / until the first step in the new "
        f"world. `lease_ttl={ttl}`, all other settings at their defaults; "
        f"{'one run' if runs == [1] else f'medians of {most}'} each, without those that did not "
        f"recover. `…{OWN_STORE}`: with "
        "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which workers may wait for each other "
        f"forever. “restarts” counts against `--max-restarts`.{in_process}\n\n"
        f"{table(header, rows)}"
    )


def _false_alarms(document: dict[str, Any]) -> str:
    rows = [
        [
            false_alarms.ROWS[sample["row"]].text,
            str(sample["disturbances"]),
            str(sample["restarts"]),
            str(sample["accusations"]),
            results.seconds(sample["longest_step_s"]),
        ]
        for sample in document["results"]
    ]
    settings = document["settings"]
    header = ["nobody is lost, but …", "times", "workers stopped", "wrong accusations"]
    header.append("longest step")
    return (
        f"**False alarms**: {settings['agents']} `torchrun` agents, each on a host of its own (a "
        f"network namespace), train for {settings['seconds']:,} s per row. What counts is that no "
        f"worker is stopped; a wrong accusation is answered.\n\n{table(header, rows)}"
    )


def _recovered(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if "total" not in row:
        return "not recovered"
    failed = f", {len(row['failures'])} of {row['runs']} not" if row["failures"] else ""
    used = {0: "", 1: ", 1 restart"}.get(row["most_restarts"], f", {row['most_restarts']} restarts")
    return f"{results.seconds(row['new_ranks'])} / {results.seconds(row['total'])}{used}{failed}"


def _scale(document: dict[str, Any]) -> str:
    times = _scale_table(document, "seconds", results.seconds, TIMED)
    failed = [sample for sample in document["results"] if "failed" in sample]
    note = f"\n{len(failed)} measurements failed; see the file.\n" if failed else ""
    return (
        "**Scale**: simulated nodes that use the library's decisions and transactions, led by a "
        "real node, on the same machine as etcd. From the last arrival, or from the end of the "
        "lost nodes' leases, until the last node has its rank; every world is checked. `bare "
        f"calls` are the same requests and events with nothing around them.\n\n{times}{note}"
    )


def _scale_costs(document: dict[str, Any]) -> str:
    """Two of the costs; the file has more."""
    requests, size = (
        _scale_table(document, name, results.number, scale.PHASES)
        for name in ("requests_per_node", "bytes_per_node")
    )
    return f"**Many nodes**, requests per node:\n\n{requests}\nBytes per node:\n\n{size}"


def _scale_table(
    document: dict[str, Any],
    name: str,
    show: Callable[[float | None], str],
    phases: Sequence[str],
) -> str:
    summary = scale.summarize(document)
    sizes = sorted({nodes for _, _, nodes in summary})
    rows = [
        [
            _scale_phase(kind, phase),
            *(show(summary.get((kind, phase, nodes), {}).get(name)) for nodes in sizes),
            _power(scale.fit(summary, kind, phase, name)),
        ]
        for kind, phase in scale.parts(document)
        if phase in phases
    ]
    return table(["", *(f"{nodes:,} nodes" for nodes in sizes), "grows as"], rows)


def _scale_phase(kind: str, phase: str) -> str:
    return phase if kind == scale.OURS else f"{phase}, bare calls"


def _power(exponent: float | None) -> str:
    if exponent is None:
        return "–"
    return "not at all" if abs(exponent) < 0.05 else f"N^{exponent:.2f}"


def _store(document: dict[str, Any]) -> str:
    stores = document["settings"]["stores"]
    rows = [
        [operation, *(results.seconds(row.get(name)) for name in stores)]
        for operation, row in store.summarize(document).items()
    ]
    reasons = sorted({s["failed"] for s in document["results"] if "failed" in s})
    note = f"\n–: {'; '.join(reasons)}.\n" if reasons else ""
    return "**Stores**, medians:\n\n" + table(["", *stores], rows) + note


def _agent(document: dict[str, Any]) -> str:
    names = ("rss_mb", "threads", "idle_cpu_percent", "idle_writes", *agent.MEMBER)
    titles = {
        "none": "no backend",
        agent.ALONE: "`etcd3`, `embed=1`, one host",
        EMBEDDED: "`etcd3`, `embed=1`, three hosts",
    }
    rows = [
        [
            titles.get(backend, f"`{backend}`"),
            results.seconds(row["import_s"] + row["handler_s"]),
            *(results.number(row.get(name)) for name in names),
        ]
        for backend, row in agent.summarize(document).items()
    ]
    header = ["above torchrun's own imports", "import and set-up", "MB", "threads"]
    header += ["CPU % idle", "etcd writes per node and minute, idle"]
    header += ["each embedded etcd, idle: CPU % with its supervisor", "MB", "its supervisor's MB"]
    workers = agent.summarize_workers(document)
    loaded = ", ".join(f"`{name}`" for name in workers[True]["modules"]) or "nothing"
    more_mb = workers[True]["rss_mb"] - workers[False]["rss_mb"]
    return (
        f"**Agent**:\n\n{table(header, rows)}\n"
        f"A worker that imports torch's rendezvous loads {loaded}: {more_mb:+.1f} MB.\n"
    )


def _gpu(document: dict[str, Any]) -> str:
    names = (*gpu.LAUNCH, "after_kill")
    rows = [
        [
            f"`{backend}`",
            f"{nodes} × {workers}",
            row["collectives"],
            *(results.seconds(row.get(name)) for name in names),
        ]
        for (nodes, workers, backend), row in gpu.summarize(document).items()
    ]
    header = ["", "nodes × workers", "collectives", *(name.replace("_", " ") for name in names)]
    on_gpu = any(sample["device"] == "cuda" for sample in document["results"])
    note = "" if on_gpu else "Numbers from machines with GPUs are missing; this was a CPU.\n\n"
    return f"**GPU**: from launch, and after a kill to the first allreduce.\n\n{note}" + table(
        header, rows
    )


TIMES: tuple[Section, ...] = (
    (recovery.NAME, _recovery),
    (latency.NAME, _latency),
    (peers.NAME, _peers),
    (scale.NAME, _scale),
)
"""What docs/comparison.md shows."""
COSTS: tuple[Section, ...] = (
    (latency.NAME, _latency_costs),
    (scale.NAME, _scale_costs),
    (store.NAME, _store),
    (agent.NAME, _agent),
    (false_alarms.NAME, _false_alarms),
    (gpu.NAME, _gpu),
)
"""What benchmarks/NOTES.md shows."""
WITHOUT_PICTURE = (_latency_costs, _scale_costs, _false_alarms)
"""There is none, or it is in the other document."""


def shown(benchmark: str, document: dict[str, Any]) -> str:
    """Return all texts that the documents have of one benchmark."""
    texts = [text for name, text in (*TIMES, *COSTS) if name == benchmark]
    return "\n".join(text(document) for text in texts)

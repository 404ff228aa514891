"""Pictures of result files. Knows the results' layout; measures nothing.

``draw_…`` makes a figure of a result file's document. How they look is in
:mod:`benchmarks.drawing`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from benchmarks import results
from benchmarks.drawing import (
    GREY,
    KEY_COLUMNS,
    Look,
    counts_axis,
    head,
    key_above,
    label_ends,
    look,
    new_figure,
    seconds_axis,
)
from benchmarks.jobs import EMBEDDED, IN_PROCESS, SUPERVISED
from benchmarks.timeline import FORMING, UNSPLIT, WAIT, middle_run, timeline

Document = Mapping[str, Any]
OURS, BARE = "etcd3", "bare"
"""Names in result files."""
_ALONE = (OURS, IN_PROCESS, SUPERVISED, EMBEDDED)
TITLES = {
    "latency": "Time to form a world, by number of nodes",
    "peers": "Time for the nodes of different systems to meet",
    "recovery": "Time from a fault to the next training step",
    "scale": "Time for many simulated nodes to form a world",
    "store": "Time of torch's rank exchange and exit barrier on each store",
    "agent": "Memory that a backend adds to torchrun's agent",
    "gpu": "Time from the launch, and from a kill, to the first allreduce",
}
"""By benchmark; also what a document says for a picture that is not shown."""


def draw_latency(document: Document) -> Figure:
    """Rounds over the number of nodes, a line per backend, a dot per round; both axes log."""
    return _draw_rounds(document, TITLES["latency"])


def draw_peers(document: Document) -> Figure:
    """The same, a line per system."""
    return _draw_rounds(document, TITLES["peers"])


def _draw_rounds(document: Document, title: str) -> Figure:
    figure, (axes,) = new_figure(
        title,
        "From the last node's arrival until all have their ranks; nodes are processes of one "
        "machine. Lines: medians, dots: rounds; both scales are logarithmic.",
        4.6,
    )
    samples = [s for s in document["results"] if "failed" not in s]
    medians = results.medians(samples, "seconds", "backend", "nodes")
    ends = []
    for place, backend in enumerate(dict.fromkeys(s["backend"] for s in samples)):
        seen = look(backend, place)
        sizes = {n: s for (name, n), s in sorted(medians.items()) if name == backend}
        rounds = [(s["nodes"], s["seconds"]) for s in samples if s["backend"] == backend]
        nodes, seconds = zip(*rounds, strict=True)
        axes.scatter(nodes, seconds, 7, color=seen.color, alpha=0.45, linewidths=0)
        _line(axes, sizes, seen)
        name = "bare calls to etcd" if backend == BARE else backend
        ends.append(_end(name, sizes, seen))
    axes.set_xlabel("nodes")
    _finish(figure, axes, ends, [sample["nodes"] for sample in document["results"]])
    return figure


def draw_scale(document: Document) -> Figure:
    """Time over the number of nodes, a line per phase; both axes log."""
    figure, (axes,) = new_figure(
        TITLES["scale"],
        "From the last arrival, or the end of the lost nodes' leases, until the last node has "
        "its rank. Simulated nodes on one machine; both scales are logarithmic.",
        4.6,
    )
    samples = [s for s in document["results"] if "seconds" in s]
    medians = results.medians(samples, "seconds", "kind", "phase", "nodes")
    looks = {
        "first round": look("etcd3"),
        "one lost": Look("#0072b2", "s", "--"),
        "leader lost": Look("#009e73", "^", "-."),
        "10 % lost": Look("#d98200", "D", ":"),
    }
    ends = []
    for kind, phase in dict.fromkeys((s["kind"], s["phase"]) for s in samples):
        bare = kind == BARE
        seen = look("bare") if bare else looks.get(phase, look(phase))
        sizes = {n: s for (k, p, n), s in sorted(medians.items()) if (k, p) == (kind, phase)}
        _line(axes, sizes, seen)
        ends.append(_end(f"{phase}, bare calls" if bare else phase, sizes, seen))
    axes.set_xlabel("nodes")
    _finish(figure, axes, ends, [sample["nodes"] for sample in document["results"]])
    return figure


def draw_store(document: Document) -> Figure:
    """What agents do, over their number: a line per store, for the exchange and the barrier."""
    about = {
        "exchange": "Rank exchange: from the last agent's call until the last one has all ranks. "
        "Agents are threads on one machine; both scales are logarithmic.",
        "barrier": "Exit barrier: until the last agent may end.",
    }
    samples = [s for s in document["results"] if "agents" in s]
    shown = [what for what in about if any(s["operation"] == what for s in samples)]
    if not shown:
        return new_figure(TITLES["store"], "Nothing was measured.", 1.5)[0]
    figure, panels = new_figure(
        TITLES["store"], about[shown[0]], 0.8 + 2.9 * len(shown), len(shown)
    )
    medians = results.medians(samples, "seconds", "operation", "store", "agents")
    counts = sorted({sample["agents"] for sample in samples})
    for axes, what in zip(panels, shown, strict=True):
        head(axes, about[what])
        ends = []
        for place, store in enumerate(dict.fromkeys(s["store"] for s in samples)):
            seen = look(store, place)
            sizes = {n: s for (w, k, n), s in sorted(medians.items()) if (w, k) == (what, store)}
            if sizes:
                _line(axes, sizes, seen)
                ends.append(_end(_STORES.get(store, store), sizes, seen))
        axes.set_xlim(counts[0] / 1.15, counts[-1] * 1.15)
        _finish(figure, axes, ends, counts)
    panels[-1].set_xlabel("agents")
    return figure


_STORES = {
    "EtcdStore": "our EtcdStore",
    "torch EtcdStore": "torch's EtcdStore",
    "TCPStore": "TCPStore (in memory)",
}
"""What people call the stores."""


def _line(axes: Axes, sizes: Mapping[int, float], seen: Look) -> None:
    axes.plot(
        list(sizes),
        list(sizes.values()),
        seen.dash,
        color=seen.color,
        marker=seen.marker,
        markersize=5,
        linewidth=seen.width,
        label="_",  # the label is at its end
    )


def _finish(figure: Figure, axes: Axes, ends: Sequence[Any], counts: Sequence[int]) -> None:
    """Make both scales logarithmic, and write at the lines' ends what they are."""
    axes.set_yscale("log")
    seconds_axis(axes.yaxis)
    counts_axis(axes, sorted(set(counts)))
    label_ends(figure, axes, ends)


def _end(name: str, sizes: Mapping[int, float], seen: Look) -> tuple[float, float, str, str]:
    last = max(sizes)
    return last, sizes[last], f"{name}  {results.seconds(sizes[last])}", seen.color


# --- bars -----------------------------------------------------------------------------------------

_STAGES = {
    "imported": "backend imported",
    "handler": "handler made",
    "round": "in a round",
    "idle": "idle",
}


def draw_agent(document: Document) -> Figure:
    """Memory beyond torchrun's imports, a group of bars for each stage of an agent's life."""
    figure, (axes,) = new_figure(
        TITLES["agent"],
        "MB of resident memory beyond torchrun's own imports, after each stage of an agent's life.",
        3.4,
    )
    memory = {
        backend: added
        for backend, added in _memory(document).items()
        if backend != "none" and not backend.startswith(EMBEDDED)
    }  # "none" is where the bars begin; an agent that starts an etcd is no larger
    stages = [stage for stage in _STAGES if any(stage in added for added in memory.values())]
    width = 0.84 / max(1, len(memory))
    for place, (backend, added) in enumerate(memory.items()):
        seen = look(backend, place)
        for group, stage in enumerate(stages):
            if stage not in added:
                continue
            x = group + (place - (len(memory) - 1) / 2) * width
            axes.bar(x, added[stage], 0.9 * width, **_filled(seen))
            axes.annotate(
                f"{results.number(added[stage])}\n{backend}",
                (x, max(0.0, added[stage])),
                (0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                size=8,
            )
    axes.set_xticks(range(len(stages)), [_STAGES[stage] for stage in stages])
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])
    axes.set_ylabel("MB")
    axes.grid(visible=False)  # the bars have their figures
    return figure


def _memory(document: Document) -> dict[str, dict[str, float]]:
    """Return how many MB the agents have at each stage beyond torchrun's imports, per backend."""
    found: dict[str, dict[str, list[float]]] = {}
    for sample in document["results"]:
        for process in sample.get("processes", []):
            for stage, seen in process.items():
                if stage != "before" and isinstance(seen, dict) and "rss_mb" in seen:
                    stages = found.setdefault(sample["backend"], {})
                    added = seen["rss_mb"] - process["before"]["rss_mb"]
                    stages.setdefault(stage, []).append(added)
    return {
        backend: {stage: results.statistics(mb)["median"] for stage, mb in stages.items()}
        for backend, stages in found.items()
    }


def _filled(seen: Look) -> dict[str, Any]:
    return {"color": seen.color, "hatch": seen.hatch, "edgecolor": "white", "linewidth": 0.4}


# --- timelines ------------------------------------------------------------------------------------

_Parts = Mapping[str, tuple[str, Look]]
"""What bars are made of, in order: what that is, and how it looks."""
_PARTS: _Parts = {
    "detection": ("the fault is noticed", Look("#10283f")),
    "worker_stop": ("workers stop", Look("#f0e442")),
    WAIT: ("wait until the loss is known", Look("#8c959f", hatch="////")),
    FORMING: ("the world is formed", Look("#d3276a")),
    UNSPLIT: ("waiting and forming, not told apart", Look("#d9a0b8", hatch="\\\\\\\\")),
    "worker_start": ("workers start", Look("#8ecdf0")),
    "first_step": ("first step", Look("#00553f")),
}
_LAUNCH: _Parts = {
    "rendezvous": ("Python, torch and the rendezvous", Look("#c2185b")),
    "process_group": ("the process group is made", Look("#8ecdf0")),
    "first_allreduce": ("first allreduce", Look("#00553f")),
}
_CASES = {
    "member": "a node is killed",
    "rank0": "rank 0's node is killed",
    "leader": "the leader's node is killed",
    "store-host": "the host of the store, or of one of three embedded etcds, is lost",
    "store-silent": "such a host falls silent",
    "silent": "a node falls silent",
    "sigterm": "a node gets SIGTERM",
    "node-added": "a node is added",
    "worker-crash": "a worker is killed",
}
_ROW = 0.16
"""Inches."""


@dataclass(frozen=True)
class _Bar:
    """One row of a picture: a timeline, and the text behind it. One without parts has no end: it
    runs to the edge, and is open there."""

    group: str
    name: str
    parts: Mapping[str, float]
    text: str


@dataclass(frozen=True)
class _Panel:
    """Bars on one scale."""

    about: str
    bars: Sequence[_Bar]
    parts: _Parts
    """What they are made of."""


def draw_recovery(document: Document) -> Figure:
    """Timelines made of parts, grouped by fault: of all backends, and of ours on a scale that
    shows the parts."""
    bars = _recovery_bars(document)
    ours = [key for key in bars if key[1] in _ALONE]
    with_others = {case for case, backend in bars if (case, backend) not in ours}
    panels = [
        _Panel(_RECOVERY, [bars[key] for key in bars if key[0] in with_others], _PARTS),
        _Panel("etcd3 alone, on a scale of its own.", [bars[key] for key in ours], _PARTS),
    ]
    return _timelines(TITLES["recovery"], panels)


def draw_beside_c10d(document: Document) -> Figure:
    """The faults for which there is a time of ours, and torch's default: what the README shows."""
    bars = _recovery_bars(document)
    shown = [
        bar
        for (case, backend), bar in bars.items()
        if backend in (OURS, "c10d") and {(case, OURS), (case, "c10d")} <= bars.keys()
    ]
    return _timelines(TITLES["recovery"], [_Panel(_RECOVERY, shown, _PARTS)])


_RECOVERY = "Seconds until the first step in the new world; each bar is the median run."


def _recovery_bars(document: Document) -> dict[tuple[str, str], _Bar]:
    """By fault and backend."""
    limit_s = document["settings"].get("limit")
    return {
        (case, backend): _recovery_bar(case, backend, samples, limit_s)
        for (case, backend), samples in results.grouped(
            document["results"], "case", "backend"
        ).items()
    }


def _recovery_bar(
    case: str, backend: str, samples: Sequence[Mapping[str, Any]], limit_s: float | None
) -> _Bar:
    run = middle_run(samples)
    failed = [sample["failed"] for sample in samples if "failed" in sample]
    if run is None:
        late = limit_s is not None and all(why.startswith("not within") for why in failed)
        return _Bar(
            _CASES.get(case, case),
            backend,
            {},
            f"not within {limit_s:g} s" if late else "did not recover",
        )
    note = f" ({len(failed)} of {len(samples)} runs did not recover)" if failed else ""
    text = f"{results.seconds(run['total'])}{note}"
    return _Bar(_CASES.get(case, case), backend, timeline(run), text)


def draw_gpu(document: Document) -> Figure:
    """Timelines from the launch, and from a kill, to the first allreduce, grouped by size."""
    launches, kills = [], []
    for (nodes, workers, backend), samples in results.grouped(
        document["results"], "nodes", "workers", "backend"
    ).items():
        size = f"nodes × workers: {nodes} × {workers}"
        launched = [
            {**s["launch"], "total": s["launch"]["first_allreduce"]}
            for s in samples
            if "launch" in s
        ]
        run = middle_run(launched)
        moments = [0.0, *(run[name] for name in _LAUNCH)] if run else []
        spans = [later - earlier for earlier, later in itertools.pairwise(moments)]
        text = results.seconds(run["total"]) if run else "failed"
        launches.append(_Bar(size, backend, dict(zip(_LAUNCH, spans, strict=False)), text))
        killed = [s["after_kill"] for s in samples if "after_kill" in s]
        if killed:
            case = "member" if nodes > 1 else "worker-crash"
            bar = _recovery_bar(size, backend, [{**one, "case": case} for one in killed], None)
            kills.append(bar)
    panels = [
        _Panel(
            "Seconds from the launch until the last rank's first allreduce; each bar is the run "
            "with the median of its times.",
            launches,
            _LAUNCH,
        ),
        _Panel(
            "Seconds from the kill of a node, or of the only node's worker, until the next "
            "allreduce.",
            kills,
            _PARTS,
        ),
    ]
    return _timelines(TITLES["gpu"], panels)


def _timelines(title: str, panels: Sequence[_Panel]) -> Figure:
    """Draw panels one above the other, and before each what its colours mean, unless they mean the
    same as in the one before."""
    panels = [panel for panel in panels if panel.bars]
    if not panels:
        return new_figure(title, "Nothing was measured.", 1.5)[0]
    drawn: list[tuple[float, Callable[[Axes], None]]] = []
    for place, panel in enumerate(panels):
        if place == 0 or panels[place - 1].parts is not panel.parts:
            drawn.append(_key([p for p in panels if p.parts is panel.parts], panel.parts))
        drawn.append(
            ((_rows(panel.bars)[-1][0] + 1.2) * _ROW, functools.partial(_draw_panel, panel))
        )
    heights = [height for height, _ in drawn]
    figure, axes = new_figure(title, "", sum(heights) + 0.5 + 0.6 * len(panels), heights)
    for one, (_, draw) in zip(axes, drawn, strict=True):
        draw(one)
    axes[-1].set_xlabel("s")
    return figure


def _key(panels: Sequence[_Panel], parts: _Parts) -> tuple[float, Callable[[Axes], None]]:
    """Return the height of a key of the parts that there are, and what draws it."""
    used = {p for panel in panels for bar in panel.bars for p, s in bar.parts.items() if s > 0}
    patches = [
        Patch(facecolor=seen.color, hatch=seen.hatch, edgecolor="white", label=text)
        for part, (text, seen) in parts.items()
        if part in used
    ]
    rows = max(1, math.ceil(len(patches) / KEY_COLUMNS))
    return 0.2 * rows, functools.partial(key_above, patches=patches)


def _rows(bars: Sequence[_Bar]) -> list[tuple[float, _Bar | str]]:
    """Return where each bar is, from the top down, and the name of each group before its bars."""
    rows: list[tuple[float, _Bar | str]] = []
    place = -_GROUP_GAP
    for group in dict.fromkeys(bar.group for bar in bars):
        place += _GROUP_GAP
        rows.append((place, group))
        for bar in bars:
            if bar.group == group:
                place += 1
                rows.append((place, bar))
        place += 1
    return rows


_GROUP_GAP = 0.35


def _draw_panel(panel: _Panel, axes: Axes) -> None:
    head(axes, panel.about)
    rows = _rows(panel.bars)
    longest = max(sum(bar.parts.values()) for bar in panel.bars)
    axes.set_xlim(0, longest * 1.02 or 1.0)
    axes.set_ylim(rows[-1][0] + 0.6, -0.6)
    names = {place: row.name for place, row in rows if isinstance(row, _Bar)}
    axes.set_yticks(list(names), list(names.values()), size=8)
    for label, name in zip(axes.get_yticklabels(), names.values(), strict=True):
        label.set_fontweight("bold" if name.startswith(OURS) else "normal")
    for place, row in rows:
        if isinstance(row, str):
            axes.annotate(row, (0, place), (2, 0), textcoords="offset points", **_GROUP_TEXT)
            continue
        left = 0.0
        if not row.parts:
            edge = axes.get_xlim()[1]
            axes.barh(place, edge, 0.78, color=_ENDLESS)
            axes.hlines((place - 0.39, place + 0.39), 0, edge, GREY, "--", linewidth=0.6)
        for part, seconds in row.parts.items():
            axes.barh(place, seconds, 0.78, left, **_filled(panel.parts[part][1]))
            left += seconds
        axes.annotate(row.text, (left, place), (4, 0), textcoords="offset points", **_BAR_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


_ENDLESS = "#eaeef2"
_BAR_TEXT: dict[str, Any] = {"va": "center_baseline", "size": 8, "annotation_clip": False}
_GROUP_TEXT: dict[str, Any] = {**_BAR_TEXT, "size": 8.5, "color": GREY, "style": "italic"}


DRAW: dict[str, Callable[[Document], Figure]] = {
    "latency": draw_latency,
    "peers": draw_peers,
    "recovery": draw_recovery,
    "scale": draw_scale,
    "store": draw_store,
    "agent": draw_agent,
    "gpu": draw_gpu,
}
"""By benchmark."""

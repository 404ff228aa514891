"""Plots of result files. Knows matplotlib and the results' layout; measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "rdzv-etcd"  # the same numbers make the same file

COLORS = {
    "etcd3": "#c2185b",
    "bare": "#9e9e9e",
    "c10d": "#1976d2",
    "etcd-v2": "#ef6c00",
    "etcd": "#6d4c41",
    "torch EtcdStore": "#ef6c00",
    "TCPStore": "#1976d2",
    "EtcdStore": "#c2185b",
}


def plot_latency(document: dict[str, Any], path: Path) -> None:
    """Rounds over the number of nodes, a line per backend, a dot per round; both axes log."""
    figure, axes = plt.subplots(layout="constrained", figsize=(7, 4.5))
    grouped: dict[str, dict[int, list[float]]] = {}
    for sample in document["results"]:
        if "failed" not in sample:
            sizes = grouped.setdefault(sample["backend"], {})
            sizes.setdefault(sample["nodes"], []).append(sample["seconds"])
    for backend, sizes in grouped.items():
        color = COLORS.get(backend)
        nodes = sorted(sizes)
        medians = [sorted(sizes[n])[len(sizes[n]) // 2] for n in nodes]
        axes.plot(nodes, medians, color=color, label=backend, linewidth=2)
        for n in nodes:
            axes.scatter([n] * len(sizes[n]), sizes[n], color=color, s=10, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({sample["nodes"] for sample in document["results"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("nodes (a process each)")
    axes.set_ylabel("last arrival to all returned, s")
    _finish(figure, axes, path)


def plot_agent(document: dict[str, Any], path: Path) -> None:
    """Memory added by each stage, a group of bars per backend."""
    figure, axes = plt.subplots(layout="constrained", figsize=(6, 3.5))
    stages = ("imported", "handler", "round", "idle")
    seen = [s for s in document["results"] if s["what"] == "agent" and "failed" not in s]
    backends = list(dict.fromkeys(sample["backend"] for sample in seen))
    for position, backend in enumerate(backends):
        processes = [p for s in seen if s["backend"] == backend for p in s["processes"]]
        heights = []
        for stage in stages:
            added = [p[stage]["rss_mb"] - p["before"]["rss_mb"] for p in processes if stage in p]
            heights.append(sum(added) / len(added) if added else 0.0)
        places = [index + position * 0.8 / len(backends) for index in range(len(stages))]
        color = COLORS.get(backend)
        axes.bar(places, heights, width=0.8 / len(backends), color=color, label=backend)
    axes.set_xticks(range(len(stages)), stages)
    axes.set_ylabel("MB above torchrun's imports")
    _finish(figure, axes, path)


def plot_store(document: dict[str, Any], path: Path) -> None:
    """What agents do, over their number: a line per store, solid exchange, dashed barrier."""
    figure, axes = plt.subplots(layout="constrained", figsize=(7, 4.5))
    styles = {"exchange": "-", "barrier": "--"}
    medians: dict[tuple[str, str], dict[int, list[float]]] = {}
    for sample in document["results"]:
        if "agents" in sample and "failed" not in sample:
            sizes = medians.setdefault((sample["store"], sample["operation"]), {})
            sizes.setdefault(sample["agents"], []).extend(sample["seconds"])
    for (store, operation), sizes in medians.items():
        agents = sorted(sizes)
        middle = [sorted(sizes[n])[len(sizes[n]) // 2] for n in agents]
        label = f"{store}, {'rank exchange' if operation == 'exchange' else 'exit barrier'}"
        style = styles[operation]
        axes.plot(agents, middle, style, marker="o", color=COLORS.get(store), label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("agents")
    axes.set_ylabel("s")
    _finish(figure, axes, path)


def plot_recovery(document: dict[str, Any], path: Path) -> None:
    """A bar per case and backend, made of the phases; a cross where a run did not recover."""
    names = ("detection", "worker_stop", "re_forming", "worker_start", "first_step")
    shades = ("#455a64", "#ffb300", "#c2185b", "#1976d2", "#26a69a")
    keys = list(dict.fromkeys((s["case"], s["backend"]) for s in document["results"]))
    figure, axes = plt.subplots(layout="constrained", figsize=(8, 1.8 + 0.28 * len(keys)))
    for place, key in enumerate(keys):
        samples = [s for s in document["results"] if (s["case"], s["backend"]) == key]
        good = [sample for sample in samples if "failed" not in sample]
        left = 0.0
        for name, shade in zip(names, shades, strict=True):
            width = sorted(s[name] for s in good)[len(good) // 2] if good else 0.0
            label = name.replace("_", " ") if place == 0 else None
            axes.barh(place, width, left=left, color=shade, label=label)
            left += width
        if len(good) < len(samples):
            axes.plot(left + 1, place, "x", color="black")
    axes.set_yticks(range(len(keys)), [f"{case}: {backend}" for case, backend in keys])
    axes.invert_yaxis()
    axes.set_xlabel("s until the first step in the new world (x: a run did not recover)")
    _finish(figure, axes, path)


def plot_gpu(document: dict[str, Any], path: Path) -> None:
    """Launch to first allreduce, and kill to first allreduce, a pair of bars per case."""
    figure, axes = plt.subplots(layout="constrained", figsize=(8, 4))
    keys = [(s["backend"], s["nodes"], s["workers"]) for s in document["results"]]
    keys = list(dict.fromkeys(keys))
    for offset, (part, name) in enumerate((("launch", "first_allreduce"), ("after_kill", "total"))):
        heights = []
        for key in keys:
            values = [
                sample[part][name]
                for sample in document["results"]
                if (sample["backend"], sample["nodes"], sample["workers"]) == key
                and name in sample.get(part, {})
            ]
            heights.append(sorted(values)[len(values) // 2] if values else 0.0)
        places = [place + 0.4 * offset for place in range(len(keys))]
        axes.bar(places, heights, width=0.4, label=part.replace("_", " "))
    labels = [f"{backend}\n{nodes} × {workers}" for backend, nodes, workers in keys]
    axes.set_xticks(range(len(keys)), labels)
    axes.set_ylabel("s to the first allreduce")
    _finish(figure, axes, path)


def plot_scale(document: dict[str, Any], path: Path) -> None:
    """Time over the number of nodes, a line per phase; both axes log."""
    figure, axes = plt.subplots(layout="constrained", figsize=(7, 4.5))
    grouped: dict[str, dict[int, list[float]]] = {}
    for sample in document["results"]:
        if "seconds" in sample:
            bare = ", bare" if sample["kind"] == "bare" else ""
            sizes = grouped.setdefault(sample["phase"] + bare, {})
            sizes.setdefault(sample["nodes"], []).append(sample["seconds"])
    for label, sizes in grouped.items():
        color = COLORS["bare"] if label.endswith("bare") else None
        nodes = sorted(sizes)
        medians = [sorted(sizes[n])[len(sizes[n]) // 2] for n in nodes]
        axes.plot(nodes, medians, marker="o", color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({sample["nodes"] for sample in document["results"]})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("simulated nodes")
    axes.set_ylabel("until the last node holds its rank, s")
    _finish(figure, axes, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(visible=True, which="major", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)

"""How the pictures look: colours, titles, labels at the lines instead of legends.

Knows matplotlib; knows no benchmark. A picture has a white card of its own, so that it can be read
on a dark page as in print, and is as wide as a README shows it. Colours are those of Okabe and Ito,
which colour-blind people can tell apart; markers and dashes, or hatches, do it in grey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import blended_transform_factory

from benchmarks import results

WIDTH = 8.6
"""Inches: 826 pixels as browsers show an SVG."""
KEY_COLUMNS = 4
INK, GREY, LINE = "#1f2328", "#59636e", "#d0d7de"
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "rdzv-etcd",  # the same numbers make the same file
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "hatch.linewidth": 0.6,
    }
)


@dataclass(frozen=True)
class Look:
    """How a line or a bar is told from others, also in grey."""

    color: str
    marker: str = "o"
    dash: str = "-"
    hatch: str = ""
    width: float = 1.6


_OURS = Look("#c2185b", "o", "-", "", 2.6)
LOOKS = {
    "etcd3": _OURS,
    "etcd3 in process": Look("#f06292", "o", "-", "..."),
    "etcd3 in process under torchrun": Look("#ad1457", "o", "-", ".."),
    "etcd3 embedded": Look("#880e4f", "o", "--", "xx"),
    "bare": Look("#6e7781", "x", (":")),
    "none": Look("#afb8c1"),
    "c10d": Look("#0072b2", "s", "--", "///"),
    "c10d-own-store": Look("#56b4e9", "s", "--", "///"),
    "etcd-v2": Look("#d98200", "^", "-.", "\\\\\\"),
    "etcd-v2-own-store": Look("#e8b04a", "^", "-.", "\\\\\\"),
    "etcd": Look("#6d4c41", "D", "--", "xxx"),
    "torchft": Look("#d98200", "^", "-."),
    "lm-resiliency": Look("#009e73", "v", "--"),
    "nvidia-resiliency-ext": Look("#6d4c41", "D", ":"),
    "EtcdStore": _OURS,
    "TCPStore": Look("#0072b2", "s", "--", "///"),
    "torch EtcdStore": Look("#d98200", "^", "-.", "\\\\\\"),
}
_OTHERS = (Look("#009e73", "v", "--", "ooo"), Look("#56b4e9", "P", ":", "++"))


def look(name: str, position: int = 0) -> Look:
    """Return how what has this name is drawn; ``position``: among others that have no look."""
    return LOOKS.get(name, _OTHERS[position % len(_OTHERS)])


def new_figure(title: str, about: str, height: float, rows: Any = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure with its title; ``about`` says what is shown, above the first of its axes.

    ``rows``: the heights of its axes, one above the other.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(WIDTH, height), layout=layout)
    FigureCanvasAgg(figure)
    figure.patch.set(edgecolor=LINE, linewidth=1.5)
    figure.suptitle(title, x=0.015, ha="left", size=11, weight="bold", linespacing=1.25)
    heights = rows if isinstance(rows, Sequence) else [1] * rows
    grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=list(heights))
    axes = [row[0] for row in grid]
    for one in axes:
        one.tick_params(length=0)
    head(axes[0], about)
    return figure, axes


def head(axes: Axes, about: str) -> None:
    """Say above some axes what they show."""
    axes.set_title(textwrap.fill(about, 115), loc="left", size=9, color=GREY, pad=8)


def key_above(axes: Axes, patches: Sequence[Patch]) -> None:
    """Fill otherwise empty axes with what the colours mean, to be read row by row."""
    axes.axis("off")
    by_column = [patch for first in range(KEY_COLUMNS) for patch in patches[first::KEY_COLUMNS]]
    figure_and_axes = blended_transform_factory(axes.figure.transFigure, axes.transAxes)
    key = axes.legend(
        handles=by_column,
        loc="upper left",
        bbox_to_anchor=(0.015, 1),
        bbox_transform=figure_and_axes,
        borderaxespad=0,
        borderpad=0,
        ncols=KEY_COLUMNS,
        frameon=False,
        fontsize=8.5,
        handlelength=1.6,
        columnspacing=1.4,
    )
    key.set_in_layout(False)


def seconds_axis(axis: Any) -> None:
    """Give a log axis ticks in s, ms and µs."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: results.seconds(value)))
    axis.set_minor_locator(NullLocator())


def counts_axis(axes: Axes, counts: Sequence[int]) -> None:
    """Give a log x axis a tick for each number that was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())


def label_ends(figure: Figure, axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write a label right of the end of each line: x, y, text, colour.

    Where labels would lie upon each other they are moved apart, and a thin line leads to them. Call
    this last: it goes by the axes' limits.
    """
    figure.draw_without_rendering()  # lays the axes out: what follows is in pixels
    gap = 1.35 * 8.5 * figure.dpi / 72
    for x in sorted({end[0] for end in ends}):
        here = sorted((end for end in ends if end[0] == x), key=lambda end: end[1])
        at = [float(axes.transData.transform((x, y))[1]) for _, y, _, _ in here]
        for (_, y, text, color), own, place in zip(here, at, _apart(at, gap), strict=True):
            offset = (place - own) * 72 / figure.dpi
            line = {"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 0, "shrinkB": 3}
            axes.annotate(
                text,
                (x, y),
                (14, offset),
                textcoords="offset points",
                color=color,
                size=8.5,
                va="center",
                annotation_clip=False,
                arrowprops=line if abs(offset) > 2 else None,
            )


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places until each is at least ``gap`` above the one before, as little as it
    takes: those that touch are spread around their mean."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _top(groups[-2], gap) + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + index * gap for group in groups for index in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)


def save(figure: Figure, path: Path) -> None:
    """Write it, in the format that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)

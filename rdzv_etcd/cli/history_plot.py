"""``history --plot``: a job's rounds as a picture, and below it what ended each.

Draws what :mod:`rdzv_etcd.cli.history` has read, and reads nothing. The only module that knows
matplotlib, which the extra ``plot`` brings. What others wrote is shown as text, and is no markup.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.dates
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from rdzv_etcd.cli import output
from rdzv_etcd.cli.history import Note, what_ended, when
from rdzv_etcd.protocol.model import Closure
from rdzv_etcd.text import shown

FORMATS = (".svg", ".png", ".pdf")
_WIDTH = 8.6
"""Inches: 826 pixels as browsers show an SVG."""
_LISTED = 20
"""Rounds that are told in words; of a longer history the last ones."""
_LATEST_S = 4e9
"""A clock that says more is wrong."""
_CLOCKS_S = 60.0
"""How far the clocks of two leaders may be apart, so that less time seems to be between them."""
_INK, _GREY, _LINE = "#1f2328", "#59636e", "#d0d7de"
_WORLD, _EDGE, _GAP = "#9fd0ee", "#0b4f7c", "#c0392b"
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.edgecolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "rdzv-etcd",
}
_NUMBER: dict[str, Any] = {"ha": "center", "size": 8.5, "weight": "bold"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time of one world, by the clocks of the leaders."""

    note: Note
    begin_s: float
    open_s: float
    """For how long there was no world before it; 0 before the first one of a run."""
    end_s: float | None = None
    """When it was over; ``None``: nobody has said so yet, or nobody could."""
    closure: Closure | None = None
    """If its run ended with it: how."""
    is_told_wrong: bool = False
    """Its leader says that there was no world for longer than can be: that is left out."""

    def until_s(self, last_s: float) -> float:
        return max(self.begin_s, last_s if self.end_s is None else self.end_s)


def stretches(notes: Sequence[Note], ended: Mapping[str, Closure]) -> list[Stretch]:
    """Say when each world was there; ``ended``: how runs ended, by their names.

    Rounds without a size, or a time that can be, are left out. Leaders' clocks may differ: a world
    is never drawn before the one before it.
    """
    known = [note for note in notes if note.size is not None and _can_be(note.wall_s)]
    found: list[Stretch] = []
    for place, note in enumerate(known):
        before = found[-1] if found else None
        begin_s = max(note.wall_s or 0.0, before.begin_s if before else 0.0)
        open_s, is_told_wrong = 0.0, False
        if before is not None and before.closure is None:
            open_s, room_s = note.open_s or 0.0, begin_s - before.begin_s
            is_told_wrong = not 0 <= open_s <= room_s + _CLOCKS_S
            open_s = 0.0 if is_told_wrong else min(open_s, room_s)
        if before is not None and before.end_s is None:
            found[-1] = replace(before, end_s=begin_s - open_s)
        last_of_run = all(later.run != note.run for later in known[place + 1 :])
        closure = ended.get(note.run) if last_of_run else None
        end_s = max(begin_s, closure.wall_s) if closure and _can_be(closure.wall_s) else None
        found.append(Stretch(note, begin_s, open_s, end_s, closure, is_told_wrong))
    return found


def _can_be(wall_s: float | None) -> bool:
    return wall_s is not None and 0 <= wall_s < _LATEST_S


def finding(job: str, found: Sequence[Stretch], last_s: float) -> str:
    """Say what the picture shows."""
    if not found:
        return f"{shown(job, 60)}: no round has a time that can be drawn"
    lasted = output.duration(found[-1].until_s(last_s) - found[0].begin_s)
    kinds = [_kind(one.note) for one in found]
    ends = [
        f"{kinds.count(kind)} by {kind}"
        for kind in ("losses", "nodes that left", "nodes that came")
        if kind in kinds
    ]
    open_s = sum(one.open_s for one in found)
    parts = [f"{_many(len(found), 'world')} in {lasted}"]
    parts += [f"ended {', '.join(ends)}"] if ends else []
    parts += [f"{output.duration(open_s)} without a world"] if open_s > 0 else []
    return f"{shown(job, 60)}: {'; '.join(parts)}"


def _kind(note: Note) -> str | None:
    """What ended the world before; a round that lost several nodes may name but one of them."""
    if note.lost:
        return "losses"
    if note.left:
        return "nodes that left"
    return "nodes that came" if note.back else None


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def save(
    path: Path,
    job: str,
    notes: Sequence[Note],
    ended: Mapping[str, Closure],
    now_s: float,
    *,
    goes_on: bool,
) -> None:
    """Write the picture; the last world is drawn until ``now_s`` if it ``goes_on``.

    Raises OSError.
    """
    with styled():
        figure = draw(job, notes, ended, now_s, goes_on=goes_on)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, not in the user's, which might read others' words as TeX."""
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # of another script than the font's: a box stands for each of its letters
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        yield


def draw(
    job: str,
    notes: Sequence[Note],
    ended: Mapping[str, Closure],
    now_s: float,
    *,
    goes_on: bool,
    zone: tzinfo | None = None,
) -> Figure:
    """Make the picture; ``zone``: of the times that it shows, or else this machine's."""
    found = stretches(notes, ended)
    last_s = _last_s(found, now_s if goes_on else None)
    told = found[-_LISTED:]
    words = _lines(told, now_s, skipped=len(found) - len(told), unknown=len(notes) - len(found))
    wrong = [one.note.number for one in found if one.is_told_wrong]
    if wrong:
        which = f"{_many(len(wrong), 'round')}, the first of them {wrong[0]}"
        words.append(("", f"left out: an open_s that cannot be ({which})"))
    if found and found[-1].end_s is None:
        words.append(("", "this world goes on" if goes_on else "its end is not known"))
    heights = [2.2, 0.185 * (len(words) + 1)]
    figure = Figure(
        figsize=(_WIDTH, sum(heights) + 1.1),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
    )
    FigureCanvasAgg(figure)
    figure.patch.set(edgecolor=_LINE, linewidth=1.5)
    _title(figure, finding(job, found, last_s))
    grid = figure.subplots(2, 1, squeeze=False, height_ratios=heights)
    axes, below = grid[0][0], grid[1][0]
    if found:
        here = zone or datetime.now(timezone.utc).astimezone().tzinfo
        boxes = _draw_worlds(axes, found, last_s, here)
        _number(figure, axes, found, last_s, boxes)
    else:
        axes.axis("off")
    _write(figure, below, words)
    return figure


def _title(figure: Figure, text: str) -> None:
    """Write it in as many lines as it takes."""
    letters = 88
    while letters > 10:
        lines = textwrap.fill(text, letters, break_on_hyphens=False)
        title = figure.suptitle(lines, x=0.015, ha="left", size=11, weight="bold")
        if title.get_window_extent().x1 < 0.985 * figure.bbox.x1:
            return
        letters -= 8


def _last_s(found: Sequence[Stretch], now_s: float | None) -> float:
    """Until when the picture goes. A world of which no end is known gets a little more room."""
    if not found:
        return 0.0
    last = found[-1]
    if last.end_s is not None:
        return last.until_s(0.0)
    if now_s is not None and now_s > last.begin_s:
        return now_s
    return last.begin_s + max(1.0, 0.06 * (last.begin_s - found[0].begin_s))


def _draw_worlds(
    axes: Axes, found: Sequence[Stretch], last_s: float, zone: tzinfo | None
) -> list[_Box]:
    """Return the boxes that were drawn."""
    span_s = max(1.0, last_s - found[0].begin_s)
    sizes = [one.note.size or 0 for one in found]
    known: list[_Box] = []
    unknown: list[_Box] = []
    long: list[_Box] = []
    short: list[_Box] = []
    for one, before in zip(found, [found[0], *found], strict=False):
        begin_s, size = one.begin_s, one.note.size or 0
        worlds = unknown if one.end_s is None else known
        worlds.append(_Box(_at(begin_s), _at(one.until_s(last_s)), size))
        if one.open_s > 0:
            # However short, one sees it; but not so that the world before it is hidden.
            width_s = max(one.open_s, min(span_s / 400, (begin_s - before.begin_s) / 3))
            gaps = long if one.open_s > span_s / 100 else short
            height = max(before.note.size or 0, size)
            gaps.append(_Box(_at(begin_s - width_s), _at(begin_s), height))
    edge = min(0.8, 100 / len(found))  # points; a world of hundreds is one or two wide
    world = {"facecolor": _WORLD, "edgecolor": _EDGE, "linewidth": edge}
    _draw_boxes(axes, known, **world)
    _draw_boxes(axes, unknown, **world, linestyle=":")
    gap = {"facecolor": "white", "edgecolor": _GAP, "linewidth": 0.8, "hatch": "//////"}
    _draw_boxes(axes, long, **gap)
    _draw_boxes(axes, short, facecolor=_GAP, linewidth=0)
    axes.set_xlim(_at(found[0].begin_s - span_s / 100), _at(last_s + span_s / 100))
    axes.set_ylim(0, 1.22 * max(1, *sizes))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("nodes")
    dates: Any = matplotlib.dates  # untyped
    locator = dates.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
    axes.tick_params(length=0)
    axes.tick_params(axis="x", pad=7)
    axes.grid(visible=True, axis="y", color=_LINE, linewidth=0.6)
    axes.set_title(
        "Nodes in the world, by the leaders' clocks; red, and wide enough to be seen: no world.",
        loc="left",
        size=9,
        color=_GREY,
        pad=8,
    )
    return [*known, *unknown, *long, *short]


class _Box(NamedTuple):
    """From the ground up; its sides in matplotlib's days."""

    left: float
    right: float
    height: float


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], **look: Any) -> None:
    """Draw them as one artist: with one for each, hundreds of rounds take half a minute."""
    corners = [
        [(box.left, 0), (box.left, box.height), (box.right, box.height), (box.right, 0)]
        for box in boxes
    ]
    axes.add_collection(PolyCollection(corners, zorder=1, **look), autolim=False)


def _number(
    figure: Figure, axes: Axes, found: Sequence[Stretch], last_s: float, boxes: Sequence[_Box]
) -> None:
    """Write each round's number above it, where there is room."""
    figure.draw_without_rendering()
    to_pixels, point = axes.transData.transform, figure.dpi / 72
    corners = [to_pixels([(box.left, 0), (box.right, box.height)]).ravel() for box in boxes]
    taken = np.array(corners)
    sizes: dict[int, Bbox] = {}
    for one in found:
        number, height = f"{one.note.number}", one.note.size or 0
        middle = (_at(one.begin_s) + _at(one.until_s(last_s))) / 2
        if len(number) not in sizes:  # its digits are all as wide
            sizes[len(number)] = _extent(figure, number)
        size = sizes[len(number)]
        x, y = to_pixels((middle, height))
        half, bottom = size.width / 2 + 3, y + 3 * point
        box = np.array([x - half, bottom, x + half, bottom + size.height])
        if np.any(np.all((taken[:, :2] <= box[2:]) & (taken[:, 2:] >= box[:2]), axis=1)):
            continue
        taken = np.vstack([taken, box])
        axes.annotate(
            number, (middle, height), (0, 3), textcoords="offset points", va="bottom", **_NUMBER
        )


def _extent(figure: Figure, number: str) -> Bbox:
    probe = figure.text(0.5, 0.5, number, **_NUMBER)
    extent = probe.get_window_extent()
    probe.remove()
    return extent


def _at(wall_s: float) -> float:
    return wall_s / 86400  # matplotlib counts days


def _lines(
    found: Sequence[Stretch], now_s: float, *, skipped: int, unknown: int
) -> list[tuple[str, str]]:
    """Say of each round when it was formed and why; the number comes first."""
    lines = []
    if skipped:
        lines.append(("", f"… {_many(skipped, 'round')} before these"))
    for one in found:
        note, why = one.note, what_ended(one.note)
        because = f": {why}" if why != "-" else ""
        took = f" after {output.duration(one.open_s)}" if one.open_s > 0 else ""
        size = _many(note.size or 0, "node")
        text = f"{when(one.begin_s, now_s)}  {size}{took}{because}"
        lines.append((str(note.number), text))
        if one.closure is not None:
            how = "finished" if one.closure.succeeded else "failed"
            at = f"{when(one.end_s, now_s)}  " if one.end_s is not None else ""
            lines.append(("", f"{at}the job {how}: {shown(one.closure.reason)}"))
    if unknown:
        lines.append(("", f"{_many(unknown, 'round')} without a time or size that can be drawn"))
    return lines


def _write(figure: Figure, axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(len(lines) + 0.5, -0.5)
    figure.draw_without_rendering()
    for place, (number, text) in enumerate(lines):
        axes.text(0.025, place, number, weight="bold", ha="right", va="center", size=8.5)
        words = axes.text(0.04, place, text, va="center", size=8.5, in_layout=False)
        room, taken = 0.985 * figure.bbox.x1 - words.get_window_extent().x0, len(text)
        while words.get_window_extent().width > room:
            taken = min(taken - 1, int(taken * room / words.get_window_extent().width))
            words.set_text(f"{text[:taken]}…")

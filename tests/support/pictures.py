"""Whether a picture can be read: nothing in it lies upon anything else. Needs matplotlib."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def check_layout(figure: Figure, least: int = 10) -> None:
    """No words, of which there are so many at least, lie upon others, bars, lines or the edge."""
    figure.draw_without_rendering()
    words = list(words_of(figure))
    assert len(words) >= least
    for text, box in words:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, box), (other, beside) in itertools.combinations(words, 2):
        assert not overlap(box, beside), f"{one!r} lies upon {other!r}"
    for (text, box), (mark, place) in itertools.product(words, marks_of(figure)):
        assert not overlap(box, place), f"{text!r} lies upon {mark}"


def words_of(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    hidden = {id(label) for axes in figure.axes for label in hidden_labels(axes)}
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text().strip() and text.get_visible() and id(text) not in hidden:
            # without the line that leads from a label to its place
            yield text.get_text(), Text.get_window_extent(text)


def hidden_labels(axes: Axes) -> Iterator[Text]:
    """A tick beyond the limits of its axis has a label that is not drawn."""
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in (*axis.majorTicks, *axis.minorTicks):
            yield tick.label2
            if not (axes.axison and min(limits) <= tick.get_loc() <= max(limits)):
                yield tick.label1


def marks_of(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Where bars are, and the points and courses of lines, in pieces as long as they are wide."""
    for axes in figure.axes:
        for patch in axes.patches:
            box = patch.get_window_extent()
            if box.width > 0 and box.height > 0:
                yield "a bar", box
        for boxes in axes.collections:
            if isinstance(boxes, PolyCollection):
                for path in boxes.get_paths():
                    yield "a bar", path.get_extents(axes.transData)
        for line in axes.lines:
            yield from _pieces(axes, line)


def _pieces(axes: Axes, line: Line2D) -> Iterator[tuple[str, Bbox]]:
    points = axes.transData.transform(line.get_xydata())
    for begin, end in itertools.pairwise(points):
        count = max(1, math.ceil(math.dist(begin, end) / 4))
        for number in range(count + 1):
            x, y = begin + (end - begin) * number / count
            yield f"the line at {x:.0f}, {y:.0f}", Bbox.from_bounds(x - 1, y - 1, 2, 2)


def overlap(one: Bbox, other: Bbox) -> bool:
    """Whether they share more than the rim that a box of words has around its letters."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(width > 0.5 and height > 1.5)

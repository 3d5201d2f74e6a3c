"""Charts as SVG: in the page they take its colours, so that they follow light, dark and print.

Each function draws at a given width; a :data:`Chart` is such a function with its data, and is drawn for wide and for
narrow screens, or by :func:`standalone` as a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from torchfil.report.formats import number, rate
from torchfil.run.statistics import round_step
from torchfil.utils.text import visible

FULL, WIDE, HALF, NARROW = 1060, 680, 500, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 44
MULTIPLES = (1, 0.5, 10, 100, 0.1, 1000, 2, 0.25, 5, 1e4, 0.01, 1e5, 1e6)  # of a blind guess's error, as room allows
STEPS = (0.2, 0.4, 0.6, 0.8, 1.0)  # of a map, where they end; from 1 on an estimate errs more than a blind guess
_COLOUR = "#b35806"
_OPACITY = (1.0, 0.78, 0.56, 0.36, 0.18, 0.0)
_MOST_CELLS, _GAP, _TITLE, _LINE = 32, 16, 20, 20


Chart = Callable[..., Markup]  # draws at ``width=``: one of the functions below with its data, by functools.partial


def _tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element; texts are escaped, ``class_`` is class, ``text_anchor`` is text-anchor, None is left out."""

    def safe(value: Any) -> Markup:
        if isinstance(value, Markup):
            return value
        return escape(f"{value:.1f}" if isinstance(value, float) else visible(str(value)))

    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    written = "".join(f' {key}="{safe(value)}"' for key, value in pairs)
    inside = "".join(safe(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>" if children else f"<{name}{written}/>")


def standalone(chart: Chart, style: str, label: str) -> str:
    """A chart as a file of its own: with its style, on paper, and below it a line that says who may see it."""
    drawn = chart(width=WIDE)
    height = float(drawn.split('height="')[1].split('"')[0])
    ground = _tag("rect", width="100%", height="100%", style="fill: var(--paper)")
    below = _text(WIDE - 2, height + 14, label, "axis", anchor="end")
    return _svg(WIDE, height + 20, [Markup(f"<style>{style}</style>"), ground, drawn, below])


@dataclass(frozen=True)
class Row:
    """A point with an interval, beside its name.

    ``tone`` is the class of its colour: "", "exposed", "quiet" or "estimate".
    """

    name: str
    value: float
    low: float
    high: float
    tone: str = ""
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A series over x; with ``dots``, one for each point, the first of them large."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


@dataclass(frozen=True)
class Scale:
    """From values to places on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """The place of a value; what lies outside is drawn at the edge."""
        low, high = self._shown(self.low), self._shown(self.high)
        share = (self._shown(value) - low) / (high - low)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def _shown(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    def ticks(self, most: int) -> list[float]:
        """At most about ``most`` round values within the scale."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                step = max(1, math.ceil((last - first) / max(most - 1, 1)))
                return [10.0**power for power in range(first, last + 1, step)]
            fine = [f * 10.0**p for p in range(first - 1, last + 1) for f in (1, 2, 5)]
            inside = [value for value in fine if self.low <= value <= self.high]
            if len(inside) >= 2:
                return inside[:: math.ceil(len(inside) / most)]
        width = round_step((self.high - self.low) / max(most, 1))
        first = math.ceil(self.low / width - 1e-9)
        return [i * width for i in range(first, math.floor(self.high / width + 1e-9) + 1)]


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    width: int,
    axis: str,
    log: bool = True,
    mark: tuple[float, str] | None = None,
    tones: Sequence[str] = (),
    multiples: bool = False,
    what: str = "examples",
) -> Markup:
    """Bars between edges. A bar's area is its count, so that merged bins do not look larger than they are.

    The scale at the right counts examples in a bar of the narrowest width: of bars that are equally wide, their counts.

    Args:
        edges: [k + 1].
        counts: [k].
        width: Of the drawing.
        axis: The name of the values; after a | the name where there is little room.
        log: Whether x is logarithmic.
        mark: A vertical line at a value, with its name; outside the edges it widens the axis.
        tones: The class of every bar, [k].
        multiples: Whether values are multiples of a blind guess's error, whose ticks are ¼, ½, 1×, 2× and so on.
        what: What is counted.
    """
    height, right = 214, width - 46
    points = [*edges, *([mark[0]] if mark else [])]
    low, high = min(points), max(points)
    pad = (high / low) ** 0.03 if log else 0.03 * (high - low)
    x = Scale(low / pad if log else low - pad, high * pad if log else high + pad, 6, right, log)
    spans = [x(b) - x(a) for a, b in pairwise(edges)]
    heights = [c * min(spans) / span for c, span in zip(counts, spans, strict=True)]
    floor, below = height - BOTTOM, 16 * (width == NARROW)  # where the mark's name stands below the scale's
    y = Scale(0, max(heights) or 1.0, floor, 30 + below, False)

    parts = [_text(width - 2, 14, what, "axis", anchor="end")]
    for count in filter(None, y.ticks(4)):
        parts.append(_line(6, right, y(count), y(count), "guide"))
        parts.append(_text(right + 6, y(count) + 4, number(count), "tick"))
    for i, (count, tall) in enumerate(zip(counts, heights, strict=True)):
        a, b = edges[i], edges[i + 1]
        top = min(y(tall), floor - 1.0)
        place = {"x": x(a) + 0.5, "y": top, "width": max(x(b) - x(a) - 1, 0.7), "height": floor - top}
        if count:
            bar = _tag("rect", **place, class_=f"bar {tones[i]}" if tones else "bar")
            parts.append(_tag("g", _tag("title", f"{number(a)} to {number(b)}: {count:,}"), bar))
    parts += _x_axis(x, floor, axis, start=6, named=_multiples(x) if multiples else None)
    if mark:
        at, right_of = x(mark[0]), x(mark[0]) < width / 2  # its name stands on the side that has room
        anchor = None if right_of else "end"
        named = _text(at + (6 if right_of else -6), 15 + below, mark[1], "marked", anchor=anchor)
        parts += [_line(at, at, 4 + below, floor, "mark"), named]
    return _svg(width, height, parts)


def _multiples(x: Scale) -> list[tuple[float, str]]:
    """Ticks in units of a blind guess's error, those that matter first, as many as there is room for."""
    words, shown = {0.25: "¼", 0.5: "½"}, list[float]()
    for value in MULTIPLES:
        if x.low <= value <= x.high and all(abs(x(value) - x(other)) >= 38 for other in shown):
            shown.append(value)
    return [(value, words.get(value, f"{number(value)}×")) for value in shown]


@dataclass(frozen=True)
class Answer:
    """How often a question is answered correctly: without the model, with it at most, and what a policy allows."""

    name: str
    without: float
    most: float
    limit: float | None = None

    @property
    def tone(self) -> str:
        """Its colour: beyond the limit, within it, or without one."""
        return "quiet" if self.limit is None else "half" if self.most > self.limit else "beyond"


def answers(rows: Sequence[Answer], *, width: int) -> Markup:
    """One line per question from 0 to 100 %: ○ without the model, ● with it at most, │ the limit, and both in words."""
    above = width == NARROW
    letters = min(max(len(row.name) for row in rows), 26)
    left, step, top = (8.0, 50, 22) if above else (18 + 7.6 * letters, 34, 4)
    x = Scale(0, 1, left, width - (10 if above else 112), False)
    floor, parts = top + step * len(rows) - (8 if above else 0), list[Markup]()
    for i, row in enumerate(rows):
        y = top + step * i + 14
        name = row.name if above or len(row.name) <= letters else row.name[: letters - 1] + "…"
        told = f"{rate(row.without)} → {rate(row.most)}"
        drawn = [
            _tag("title", f"{row.name}: {told}"),
            _text(0, y - 14 if above else y + 4, name, "row"),
            _line(x(row.without), x(row.most), y, y, "span"),
            _tag("circle", cx=x(row.without), cy=float(y), r=5, class_="prior"),
            _tag("circle", cx=x(row.most), cy=float(y), r=6, class_=f"dot {row.tone}"),
        ]
        if row.limit is not None:
            drawn.append(_line(x(row.limit), x(row.limit), y - 10, y + 10, "limit"))
        drawn.append(_text(width - 2, y - 14 if above else y + 4, told, "value", anchor="end"))
        parts.append(_tag("g", *drawn))
    parts += [_text(x(s), floor + 18, f"{100 * s:.0f} %", "tick", anchor="middle") for s in (0, 0.25, 0.5, 0.75, 1)]
    return _svg(width, floor + 24, parts)


def intervals(rows: Sequence[Row], *, width: int, axis: str | None) -> Markup:
    """One line per row: a dot, its interval, its name and note beside it, or above it where there is little room.

    Values stand on a logarithmic axis; without an axis, between 0 and 1.
    """
    # room for names and notes, at seven units a letter
    longest = max((len(row.name) for row in rows), default=0)
    notes = max((len(row.note) for row in rows), default=0)
    above = width == NARROW and longest > 12
    letters = 44 - notes if above else min(longest, 34)
    left = 6.0 if above else 10 + 7.0 * letters
    right = 12 + 7.0 * notes if width != NARROW else RIGHT

    # the axis spans what can be drawn: an interval may be infinite, and 0 has no logarithm
    finite = [v for row in rows for v in (row.value, row.low, row.high) if 0 < v < math.inf]
    low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
    if low == high:
        low, high = low / 2, high * 2
    pad = (high / low) ** 0.04
    step = 42 if above else 26
    floor = 4 + step * len(rows) + 4
    low, high = (0.0, 1.0) if axis is None else (low / pad, high * pad)
    x = Scale(low, high, left, width - right, axis is not None)

    parts = [] if axis is None else _x_axis(x, floor, axis, start=left)
    for i, row in enumerate(rows):
        y = 4 + step * (i + (0.8 if above else 0.5))
        at = (left, y - 13) if above else (left - 10, y + 4)
        note = (width - RIGHT, y - 13) if above else (width - 2, y + 4)
        shown = row.name if len(row.name) <= letters else row.name[: letters - 1] + "…"
        drawn = [
            _tag("title", f"{row.name}: {row.note}"),
            _text(*at, shown, "name", anchor=None if above else "end"),
            _line(left, width - right, y, y, "guide"),
        ]
        if row.low != row.high:
            start, end = (v if math.isfinite(v) else side for v, side in ((row.low, x.low), (row.high, x.high)))
            drawn.append(_line(x(start), x(end), y, y, f"interval {row.tone}".rstrip()))
        radius = 4 if row.tone == "estimate" else 5
        drawn.append(_tag("circle", cx=x(row.value), cy=y, r=radius, class_=f"dot {row.tone}".rstrip()))
        if row.note and (above or width != NARROW):
            drawn.append(_text(*note, row.note, "note", anchor="end"))
        parts.append(_tag("g", *drawn))
    return _svg(width, floor + (BOTTOM if axis else 0), parts)


def lines(series: Sequence[Line], *, width: int, title: str, axis: str) -> Markup:
    """Curves over x, each named at its right end."""
    height = 240
    right = 16 + 7 * max(len(line.name) for line in series)
    xs = [v for line in series for v in line.x if math.isfinite(v)]
    ys = [v for line in series for v in line.y if math.isfinite(v)]
    if not xs or not ys:
        return _svg(width, 30, [_text(14, 18, "nothing to draw", "axis")])

    # y starts at 0 where it can, and a constant gets some room around it
    low, high = min(*ys, 0.0), max(ys)
    if low == high:
        low, high = low - 1, high + 1
    start, end = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 1, max(xs) + 1)
    x = Scale(start, end, LEFT, width - right, False)
    y = Scale(low, high * 1.04, height - BOTTOM, TOP + 4, False)

    parts = _axes(x, y, axis, title)
    ends: list[tuple[float, int, str]] = []
    for i, line in enumerate(series):
        points = [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b)]
        if not points:
            continue
        way = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(_tag("path", d=way, class_=f"curve tone{i % 4}{' dashed' if line.dots else ''}"))
        for j, (a, b) in enumerate(points if line.dots else []):
            parts.append(_tag("circle", cx=a, cy=b, r=4 if j else 6, class_="dot" if j else "dot exposed"))
        ends.append((points[-1][1], i, line.name))

    # names that would lie on each other move down
    lowest = -math.inf
    for place, i, name in sorted(ends):
        lowest = max(place, lowest + 15)
        parts.append(_text(width - right + 8, lowest + 4, name, f"end tone{i % 4}"))
    return _svg(width, height, parts)


def scatter(points: Sequence[tuple[float, float, bool]], *, width: int, title: str, axis: str) -> Markup:
    """Points (x, y, emphasised) on logarithmic axes of the same range, with the diagonal."""
    height = min(width, 420)
    drawn = [(a, b, c) for a, b, c in points if 0 < a < math.inf and 0 < b < math.inf]
    if not drawn:
        return _svg(width, 30, [_text(14, 18, "no pair of positive, finite values to draw", "axis")])
    values = [v for a, b, _ in drawn for v in (a, b)]
    low, high = min(values) / 1.3, max(values) * 1.3
    x = Scale(low, high, LEFT, min(width - RIGHT, LEFT + height - BOTTOM - TOP + 120), True)
    y = Scale(low, high, height - BOTTOM, TOP + 4, True)
    parts = [
        *_axes(x, y, axis, title),
        _line(x(low), x(high), y(low), y(high), "mark"),
        *(_tag("circle", cx=x(a), cy=y(b), r=3.5, class_="dot exposed" if c else "dot") for a, b, c in drawn),
    ]
    return _svg(width, height, parts)


def step_of(share: float) -> int:
    """Which of the six steps a ratio has: 0 below 0.2, … 4 below 1, 5 beyond a blind guess's error; −1: not known.

    Example:
        >>> [step_of(share) for share in (0.05, 0.2, 0.99, 1.0, float("nan"))]
        [0, 1, 4, 5, -1]
    """
    return -1 if math.isnan(share) else sum(share >= end for end in STEPS)


def grid_of_shares(pixels: Sequence[tuple[int, int]], shares: Sequence[float]) -> np.ndarray:
    """Shares laid out as the picture around the given pixels, [H, W], NaN where there is none.

    Of several values of a pixel (its channels) the smallest counts; so it does of blocks, where a picture has more than
    32 pixels a side.

    Example:
        >>> grid_of_shares([(2, 3), (2, 4), (2, 3)], [0.5, 1.0, 0.25]).tolist()
        [[0.25, 1.0]]
    """
    places = np.asarray(pixels, dtype=np.int64)
    places = places - places.min(axis=0)
    places //= -(-int(places.max() + 1) // _MOST_CELLS)
    grid = np.full(tuple((places.max(axis=0) + 1).tolist()), math.nan)
    np.fmin.at(grid, tuple(places.T), np.asarray(shares, dtype=np.float64))
    return grid


def maps_of_shares(grids: Mapping[str, np.ndarray], *, width: int) -> Markup:
    """One picture a grid, side by side under their names, and a legend below.

    Args:
        grids: By name, shares [H, W] each, of one shape.
        width: Of the drawing.
    """
    columns, per_row = (3, 6) if width > NARROW else (2, 3)
    side = (width - _GAP * (columns - 1)) / columns
    rows, cols = next(iter(grids.values())).shape
    cell = side / max(rows, cols)
    tall = _TITLE + rows * cell + _GAP / 2

    parts = list[Markup]()
    for place, (name, grid) in enumerate(grids.items()):
        left, top = place % columns * (side + _GAP), place // columns * tall + _TITLE
        frame = {"x": left, "y": top, "width": cols * cell, "height": rows * cell}
        parts += [
            _text(left, top - 6, name, "axis"),
            _cells(grid, left, top, cell),
            _tag("rect", **frame, fill="none", stroke="currentColor", stroke_opacity="0.4"),
        ]
    below = -(-len(grids) // columns) * tall
    height = round(below + _LINE * (-(-len(_OPACITY) // per_row)) + 6)
    return _svg(width, height, [*parts, *_legend(width, below, per_row)])


def _cells(grid: np.ndarray, left: float, top: float, cell: float) -> Markup:
    """One path a step; cells of one step beside each other are one rectangle."""
    ways: dict[int, list[str]] = {}
    for row, values in enumerate(grid):
        column = 0
        for step, same in groupby(step_of(float(value)) for value in values):
            wide = len(list(same))
            if 0 <= step < len(STEPS):
                start = f"M{left + column * cell:.1f} {top + row * cell:.1f}"
                ways.setdefault(step, []).append(f"{start}h{wide * cell:.1f}v{cell:.1f}h{-wide * cell:.1f}z")
            column += wide
    paths = [
        _tag("path", d="".join(ways[step]), fill=_COLOUR, fill_opacity=str(_OPACITY[step]), data_step=step)
        for step in sorted(ways)
    ]
    return _tag("g", *paths, shape_rendering="crispEdges")


def _legend(width: int, top: float, per_row: int) -> list[Markup]:
    """The six steps, darkest first."""
    names = [f"below {STEPS[0]:g}×", *(f"to {end:g}×" for end in STEPS[1:]), "beyond"]
    parts = []
    for step, (name, opacity) in enumerate(zip(names, _OPACITY, strict=True)):
        left, line = step % per_row * width / per_row, top + _LINE * (step // per_row + 0.6)
        box = {"x": left + 1, "y": line - 9, "width": 10, "height": 10, "fill": _COLOUR, "fill_opacity": str(opacity)}
        parts.append(_tag("rect", **box, stroke="currentColor", stroke_opacity="0.4"))
        parts.append(_text(left + 16, line, name, "tick"))
    return parts


def _svg(width: float, height: float, parts: Iterable[Markup]) -> Markup:
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return _tag("svg", *parts, **size, xmlns="http://www.w3.org/2000/svg")


def _text(x: float, y: float, text: str, class_: str, *, anchor: str | None = None) -> Markup:
    return _tag("text", text, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Markup:
    return _tag("line", x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2), class_=class_)


def _x_axis(
    x: Scale, floor: float, name: str, *, start: float = 14, named: list[tuple[float, str]] | None = None
) -> list[Markup]:
    shown = next((text for text in name.split("|") if 6.8 * len(text) < x.end), name.rpartition("|")[2])
    parts = [_line(start, x.end, floor, floor, "base"), _text(x.end, floor + 37, shown, "axis", anchor="end")]
    if named is None:
        named = [(t, number(t)) for t in x.ticks(max(2, round((x.end - x.start) / 90)))]
    for value, text in named:
        tick = _text(x(value), floor + 18, text, "tick", anchor="middle")
        parts += [_line(x(value), x(value), floor, floor + 4, "base"), tick]
    return parts


def _axes(x: Scale, y: Scale, name: str, title: str) -> list[Markup]:
    """Both of a chart of points or curves, with its title above."""
    guides = [_line(LEFT, x.end, y(t), y(t), "guide") for t in y.ticks(5)]
    ticks = [_text(LEFT - 7, y(t) + 4, number(t), "tick", anchor="end") for t in y.ticks(5)]
    return [_text(6, 14, title, "axis"), *_x_axis(x, y.start, name, start=LEFT), *guides, *ticks]

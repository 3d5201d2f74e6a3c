"""Charts as inline SVG: they take the page's colours, so that they follow light, dark and print.

Each function draws at a given width; :func:`figure` draws twice, for wide and for narrow screens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchfil.report.page.html import Markup, join, number, tag
from torchfil.report.page.scale import Scale

__all__ = ["Line", "Mark", "Row", "figure", "histogram", "intervals", "lines", "scatter"]

WIDE, NARROW = 680, 350
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 44
TONES = ("", " exposed", " quiet")


@dataclass(frozen=True)
class Mark:
    """A vertical line at a value, with its name."""

    value: float
    name: str


@dataclass(frozen=True)
class Row:
    """A point with an interval, beside its name; ``tone`` picks the colour (0: plain, 1: emphasised, 2: quiet)."""

    name: str
    value: float
    low: float
    high: float
    tone: int = 0
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A series over x."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def figure(draw: Callable[[int], Markup], caption: object, *, label: str) -> Markup:
    """A figure with its caption, drawn for wide and for narrow screens."""
    pair = [
        tag("div", draw(width), class_=name, role="img", aria_label=label)
        for width, name in ((WIDE, "wide"), (NARROW, "narrow"))
    ]
    return tag("figure", pair, tag("figcaption", caption))


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    width: int,
    title: str,
    axis: str,
    log: bool = True,
    marks: Sequence[Mark] = (),
    emphasis_below: float | None = None,
) -> Markup:
    """Bars between edges; height is count per width, so that merged bins do not look larger than they are.

    Args:
        edges: [k + 1].
        counts: [k].
        width: Of the drawing.
        title: What a bar's height means.
        axis: The name of the values.
        log: Whether x is logarithmic.
        marks: Vertical lines; those outside the edges widen the axis.
        emphasis_below: Bars left of it have the colour of exposure.
    """
    height = 260
    points = [*edges, *(mark.value for mark in marks)]
    low, high = min(points), max(points)
    pad = (high / low) ** 0.03 if log else 0.03 * (high - low)
    x = Scale(low / pad if log else low - pad, high * pad if log else high + pad, 14, width - RIGHT, log)

    # heights leave room above for the names of the marks, one line each
    spans = [x(b) - x(a) for a, b in pairwise(edges)]
    density = [c / span for c, span in zip(counts, spans, strict=True)]
    top = max(density) or 1.0
    floor, ceiling = height - BOTTOM, TOP + 16 * len(marks) + 6
    bars = []
    for a, b, count, dense in zip(edges[:-1], edges[1:], counts, density, strict=True):
        if not count:
            continue
        tall = max((floor - ceiling) * dense / top, 1.0)
        exposed = emphasis_below is not None and b <= emphasis_below * (1 + 1e-9)
        bar = tag(
            "rect",
            x=f"{x(a) + 0.5:.1f}",
            y=f"{floor - tall:.1f}",
            width=f"{max(x(b) - x(a) - 1, 0.7):.1f}",
            height=f"{tall:.1f}",
            class_="bar exposed" if exposed else "bar",
        )
        bars.append(tag("g", tag("title", f"{number(a)} to {number(b)}: {count:,}"), bar))

    drawn = [
        _marked(x(mark.value), floor, TOP + 16 * i + 4, width, mark.name)
        for i, mark in enumerate(sorted(marks, key=lambda mark: -mark.value))
    ]
    parts = [_text(14, 14, title, "axis"), bars, _x_axis(x, floor, width, axis), drawn]
    return _svg(width, height, parts)


def intervals(rows: Sequence[Row], *, width: int, axis: str, log: bool = True, mark: Mark | None = None) -> Markup:
    """One line per row: a dot, its interval, its name and note beside it, or above it where there is little room."""
    # room for names and notes, at seven units a letter
    longest = max((len(row.name) for row in rows), default=0)
    notes = max((len(row.note) for row in rows), default=0)
    above = width == NARROW and longest > 12
    letters = 40 - notes if above else min(longest, 34)
    left = 6.0 if above else 10 + 7.0 * letters
    right = 12 + 7.0 * notes if width == WIDE else RIGHT

    # the axis spans what can be drawn: an interval may be infinite, and 0 has no logarithm
    finite = [v for row in rows for v in (row.value, row.low, row.high) if math.isfinite(v) and (v > 0 or not log)]
    finite += [mark.value] if mark and math.isfinite(mark.value) else []
    low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
    pad = (high / low) ** 0.04 if log else 0.04 * (high - low)
    step, top = 42 if above else 26, 26 if mark else 4
    floor = top + step * len(rows) + 4
    x = Scale(low / pad if log else low - pad, high * pad if log else high + pad, left, width - right, log)

    parts = [_x_axis(x, floor, width, axis, start=left)]
    if mark:
        parts.append(_marked(x(mark.value), floor, 14, width, mark.name))
    for i, row in enumerate(rows):
        y = top + step * (i + (0.8 if above else 0.5))
        at = (left, y - 13) if above else (left - 10, y + 4)
        note = (width - RIGHT, y - 13) if above else (width - 2, y + 4)
        shown = row.name if len(row.name) <= letters else row.name[: letters - 1] + "…"
        parts.append(
            tag(
                "g",
                tag("title", _told(row)),
                _text(*at, shown, "name", anchor=None if above else "end"),
                _line(left, width - right, y, y, "guide"),
                _interval(row, x, y),
                tag("circle", cx=f"{x(row.value):.1f}", cy=f"{y:.1f}", r=5, class_=f"dot{TONES[row.tone]}"),
                _text(*note, row.note, "note", anchor="end") if row.note and (above or width == WIDE) else None,
            )
        )
    return _svg(width, floor + BOTTOM, parts)


def _told(row: Row) -> str:
    between = f", {number(row.low)} to {number(row.high)}" if row.low != row.high else ""
    return f"{row.name}: {number(row.value)}{between}{', ' + row.note if row.note else ''}"


def _interval(row: Row, x: Scale, y: float) -> Markup | None:
    if row.low == row.high:
        return None
    start, end = (v if math.isfinite(v) else side for v, side in ((row.low, x.low), (row.high, x.high)))
    return _line(x(start), x(end), y, y, f"interval{TONES[row.tone]}")


def lines(
    series: Sequence[Line], *, width: int, title: str, axis: str, log: bool = False, diagonal: bool = False
) -> Markup:
    """Curves over x, each named at its right end; ``diagonal`` adds y = x."""
    height = 270
    longest = max(len(line.name) for line in series)
    right = 16 + 7 * longest
    xs = [v for line in series for v in line.x if math.isfinite(v)]
    ys = [v for line in series for v in line.y if math.isfinite(v) and (v > 0 or not log)]
    if not xs or not ys:
        return _svg(width, 30, [_text(14, 18, "nothing to draw", "axis")])

    # y starts at 0 where it can, and a constant gets some room around it
    low, high = min(ys), max(ys)
    low = low if log else min(low, 0.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 1, high + 1)
    start, end = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 1, max(xs) + 1)
    x = Scale(start, end, LEFT, width - right, False)
    y = Scale(low / 1.1 if log else low, high * 1.1 if log else high * 1.04, height - BOTTOM, TOP + 4, log)

    parts = [
        _text(6, 14, title, "axis"),
        _x_axis(x, height - BOTTOM, width, axis, start=LEFT),
        _y_axis(y, width - right),
    ]
    if diagonal:
        a, b = max(start, low), min(end, high)
        parts.append(_line(x(a), x(b), y(a), y(b), "mark"))
    ends: list[tuple[float, int, str]] = []
    for i, line in enumerate(series):
        points = [(x(a), y(b)) for a, b in zip(line.x, line.y, strict=True) if math.isfinite(b) and (b > 0 or not log)]
        if not points:
            continue
        way = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(tag("path", d=way, class_=f"curve tone{i % 4}{' dashed' if line.dashed else ''}"))
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
        _text(6, 14, title, "axis"),
        _x_axis(x, height - BOTTOM, width, axis, start=LEFT),
        _y_axis(y, x.end),
        _line(x(low), x(high), y(low), y(high), "mark"),
        [
            tag("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r=3.5, class_="dot exposed" if c else "dot")
            for a, b, c in drawn
        ],
    ]
    return _svg(width, height, parts)


def _svg(width: float, height: float, parts: object) -> Markup:
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        xmlns="http://www.w3.org/2000/svg",
    )


def _text(x: float, y: float, text: str, class_: str, *, anchor: str | None = None) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_, text_anchor=anchor)


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=f"{x1:.1f}", x2=f"{x2:.1f}", y1=f"{y1:.1f}", y2=f"{y2:.1f}", class_=class_)


def _x_axis(x: Scale, floor: float, width: float, name: str, *, start: float = 14) -> Markup:
    ticks = x.ticks(max(2, round((x.end - x.start) / 90)))
    return join(
        _line(start, x.end, floor, floor, "base"),
        [
            (
                _line(x(t), x(t), floor, floor + 4, "base"),
                _text(x(t), floor + 18, number(t), "tick", anchor="middle"),
            )
            for t in ticks
        ],
        _text(x.end, floor + 37, name, "axis", anchor="end"),
    )


def _y_axis(y: Scale, end: float) -> Markup:
    return join(
        [
            (_line(LEFT, end, y(t), y(t), "guide"), _text(LEFT - 7, y(t) + 4, number(t), "tick", anchor="end"))
            for t in y.ticks(5)
        ]
    )


def _marked(x: float, floor: float, y: float, width: float, name: str) -> Markup:
    """A vertical line and its name, on the side that has room."""
    right = x < width / 2
    return join(
        _line(x, x, y - 8, floor, "mark"),
        _text(x + (6 if right else -6), y + 3, name, "marked", anchor=None if right else "end"),
    )

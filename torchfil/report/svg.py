"""Charts as SVG: in the page they take its colours, so that they follow light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from torchfil.report.formats import number
from torchfil.run.disclosure import Histogram
from torchfil.utils.text import visible

FULL, HALF = 1060, 500  # widths
# of a blind guess's error, as room allows
MULTIPLES = (1, 0.5, 10, 100, 0.1, 1000, 2, 0.25, 5, 1e4, 0.01, 1e5, 1e6)
_MOST_LETTERS = 34  # of a name


def _tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """An element; texts are escaped, ``class_`` is class, ``text_anchor`` is text-anchor, None is
    left out.
    """

    def safe(value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        return escape(f"{value:.1f}" if isinstance(value, float) else visible(str(value)))

    pairs = [
        (key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    ]
    written = "".join(f' {key}="{safe(value)}"' for key, value in pairs)
    inside = "".join(safe(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>" if children else f"<{name}{written}/>")


def round_step(step: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    if not step > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-12))


@dataclass(frozen=True)
class Row:
    """A point with an interval, beside its name.

    ``tone`` is the class of its colour: "", "exposed" or "quiet"; ``limit`` is a mark on its line.
    """

    name: str
    value: float
    low: float
    high: float
    tone: str = ""
    note: str = ""
    limit: float | None = None


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
            first, last = (
                math.ceil(math.log10(self.low) - 1e-9),
                math.floor(math.log10(self.high) + 1e-9),
            )
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
    bins: Histogram,
    *,
    what: str,
    axis: str,
    mark: tuple[float, str] | None = None,
    tones: Sequence[str] = (),
) -> Markup:
    """Bars between edges, on a logarithmic axis.

    A bar's area is its count, so that merged bins do not look larger than they are.

    The scale at the right counts examples in a bar of the narrowest width: of bars that are equally
    wide, their counts.

    Args:
        bins: k bins.
        what: What is counted.
        axis: The name of the values.
        mark: A vertical line at a value, with its name; outside the edges it widens the axis.
        tones: The class of every bar, [k]; the values then are multiples of a blind guess's error,
            whose ticks are ¼, ½, 1×, 2× and so on.
    """
    height, floor, right = 214, 170, FULL - 46
    points = [*bins.edges, *([mark[0]] if mark else [])]
    low, high = min(points), max(points)
    pad = (high / low) ** 0.03
    x = Scale(low / pad, high * pad, 6, right, True)
    spans = [x(b) - x(a) for a, b in pairwise(bins.edges)]
    heights = [count * min(spans) / span for count, span in zip(bins.counts, spans, strict=True)]
    y = Scale(0, max(heights) or 1.0, floor, 30, False)

    parts = [_text(FULL - 2, 14, what, "axis", anchor="end")]
    for count in filter(None, y.ticks(4)):
        parts.append(_line(6, right, y(count), y(count), "guide"))
        parts.append(_text(right + 6, y(count) + 4, number(count), "tick"))
    for place, (count, tall) in enumerate(zip(bins.counts, heights, strict=True)):
        if count:
            a, b = bins.edges[place : place + 2]
            top = min(y(tall), floor - 1.0)
            bar = _tag(
                "rect",
                x=x(a) + 0.5,
                y=top,
                width=max(x(b) - x(a) - 1, 0.7),
                height=floor - top,
                class_=f"bar {tones[place]}" if tones else "bar",
            )
            parts.append(_tag("g", _tag("title", f"{number(a)} to {number(b)}: {count:,}"), bar))
    parts += _x_axis(x, floor, axis, _multiples(x) if tones else _numbers(x))
    if mark:
        at = x(mark[0])
        parts.append(_line(at, at, 4, floor, "mark"))
        if at < FULL / 2:  # its name stands on the side that has room
            parts.append(_text(at + 6, 15, mark[1], "marked"))
        else:
            parts.append(_text(at - 6, 15, mark[1], "marked", anchor="end"))
    return _svg(FULL, height, parts)


def intervals(rows: Sequence[Row], *, axis: str, shares: bool = False) -> Markup:
    """One line per row: its name, a dot on its interval, a mark at its limit, and a note.

    Values stand on a logarithmic axis; shares between 0 and 100 %.
    """
    left = 18 + 7.6 * min(max(len(row.name) for row in rows), _MOST_LETTERS)
    right = HALF - 12 - 7.0 * max(len(row.note) for row in rows)
    floor = 8 + 26 * len(rows)
    if shares:
        x = Scale(0, 1, left, right, False)
        named = [(share, f"{100 * share:.0f} %") for share in (0, 0.5, 1)]
    else:  # an interval may be infinite, and 0 has no logarithm
        finite = [v for row in rows for v in (row.value, row.low, row.high) if 0 < v < math.inf]
        low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
        pad = (high / low) ** 0.04 if low < high else 2
        x = Scale(low / pad, high * pad, left, right, True)
        named = _numbers(x)

    parts = _x_axis(x, floor, axis, named)
    for place, row in enumerate(rows):
        y = 17 + 26 * place
        shown = row.name if len(row.name) <= _MOST_LETTERS else row.name[: _MOST_LETTERS - 1] + "…"
        drawn = [
            _tag("title", f"{row.name}: {row.note}"),
            _text(left - 10, y + 4, shown, "name", anchor="end"),
            _line(left, right, y, y, "guide"),
            _line(x(max(row.low, x.low)), x(min(row.high, x.high)), y, y, f"interval {row.tone}"),
            _tag("circle", cx=x(row.value), cy=float(y), r=5, class_=f"dot {row.tone}"),
            _text(HALF - 2, y + 4, row.note, "note", anchor="end"),
        ]
        if row.limit is not None:
            drawn.append(_line(x(row.limit), x(row.limit), y - 10, y + 10, "limit"))
        parts.append(_tag("g", *drawn))
    return _svg(HALF, floor + 44, parts)


def _multiples(x: Scale) -> list[tuple[float, str]]:
    """Ticks in units of a blind guess's error, those that matter first, as many as there is room
    for.
    """
    words, shown = {0.25: "¼", 0.5: "½"}, list[float]()
    for value in MULTIPLES:
        if x.low <= value <= x.high and all(abs(x(value) - x(other)) >= 38 for other in shown):
            shown.append(value)
    return [(value, words.get(value, f"{number(value)}×")) for value in shown]


def _numbers(x: Scale) -> list[tuple[float, str]]:
    return [(value, number(value)) for value in x.ticks(max(2, round((x.end - x.start) / 90)))]


def _x_axis(x: Scale, floor: float, name: str, ticks: Iterable[tuple[float, str]]) -> list[Markup]:
    parts = [
        _line(x.start, x.end, floor, floor, "base"),
        _text(x.end, floor + 37, name, "axis", anchor="end"),
    ]
    for value, text in ticks:
        parts.append(_line(x(value), x(value), floor, floor + 4, "base"))
        parts.append(_text(x(value), floor + 18, text, "tick", anchor="middle"))
    return parts


def _svg(width: float, height: float, parts: Iterable[Markup]) -> Markup:
    return _tag(
        "svg", *parts, viewBox=f"0 0 {width:g} {height:g}", width=f"{width:g}", height=f"{height:g}"
    )


def _text(x: float, y: float, text: str, class_: str, *, anchor: str | None = None) -> Markup:
    return _tag("text", text, x=float(x), y=float(y), class_=class_, text_anchor=anchor)


def _line(x1: float, x2: float, y1: float, y2: float, class_: str) -> Markup:
    return _tag("line", x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2), class_=class_)

"""Charts: where things stand in them. ``templates/charts.html`` draws them as SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from torchfil.report.formats import number, templates
from torchfil.run.disclosure import Histogram

FULL, HALF = 1060, 500  # widths
# of a blind guess's error, as room allows
MULTIPLES = (1, 0.5, 10, 100, 0.1, 1000, 2, 0.25, 5, 1e4, 0.01, 1e5, 1e6)
_MOST_LETTERS = 34  # of a name


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
    points = [*bins.edges, *([mark[0]] if mark else [])]
    low, high = min(points), max(points)
    pad = (high / low) ** 0.03
    x = Scale(low / pad, high * pad, 6, FULL - 46, True)
    spans = [(a, b) for a, b in pairwise(bins.edges)]
    widths = [x(b) - x(a) for a, b in spans]
    heights = [
        count * min(widths) / width for count, width in zip(bins.counts, widths, strict=True)
    ]
    return _drawn(
        "histogram",
        width=FULL,
        x=x,
        y=Scale(0, max(heights) or 1.0, 170, 30, False),
        bars=list(zip(spans, bins.counts, heights, tones or [""] * len(spans), strict=True)),
        what=what,
        axis=axis,
        ticks=_multiples(x) if tones else _numbers(x),
        mark=mark,
    )


def intervals(rows: Sequence[Row], *, axis: str, shares: bool = False) -> Markup:
    """One line per row: its name, a dot on its interval, a mark at its limit, and a note.

    Values stand on a logarithmic axis; shares between 0 and 100 %.
    """
    left = 18 + 7.6 * min(max(len(row.name) for row in rows), _MOST_LETTERS)
    right = HALF - 12 - 7.0 * max(len(row.note) for row in rows)
    if shares:
        x = Scale(0, 1, left, right, False)
        ticks = [(share, f"{100 * share:.0f} %") for share in (0, 0.5, 1)]
    else:  # an interval may be infinite, and 0 has no logarithm
        finite = [v for row in rows for v in (row.value, row.low, row.high) if 0 < v < math.inf]
        low, high = (min(finite), max(finite)) if finite else (0.1, 1.0)
        pad = (high / low) ** 0.04 if low < high else 2
        x = Scale(low / pad, high * pad, left, right, True)
        ticks = _numbers(x)
    return _drawn(
        "intervals", width=HALF, x=x, rows=rows, axis=axis, ticks=ticks, letters=_MOST_LETTERS
    )


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


def _drawn(chart: str, **context: object) -> Markup:
    """A chart of ``templates/charts.html``, in one line."""
    drawn = getattr(templates().get_template("charts.html").module, chart)(**context)
    return Markup(re.sub(r"\s*\n\s*", "", drawn))

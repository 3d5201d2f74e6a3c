"""Pictures of how closely each pixel can be guessed, as shares of a blind guess's error.

They are drawn as SVG from numbers of the summary: nothing of one image is in them, and a colour is one of six steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from torchfil.report.page.html import Markup, join, tag

__all__ = ["STEPS", "grid_of_shares", "maps_of_shares", "step_of"]

STEPS = (0.2, 0.4, 0.6, 0.8, 1.0)  # where steps end; from 1 on nothing is told beyond a blind guess
_COLOUR = "#b35806"
_OPACITY = (1.0, 0.78, 0.56, 0.36, 0.18, 0.0)
_MOST_CELLS, _NARROW, _GAP, _TITLE, _LINE = 32, 500, 16, 20, 20


def step_of(share: float) -> int:
    """Which of the six steps a share has: 0 below 20 %, … 4 below 100 %, 5 no better than guessing; −1: not known.

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
    block = -(-int(places.max() + 1) // _MOST_CELLS)
    places //= block
    grid = np.full(tuple((places.max(axis=0) + 1).tolist()), math.nan)
    np.fmin.at(grid, tuple(places.T), np.asarray(shares, dtype=np.float64))
    return grid


def maps_of_shares(grids: Mapping[str, np.ndarray], *, width: int) -> Markup:
    """One picture a grid, side by side under their names, and a legend below.

    Args:
        grids: By name, shares [H, W] each, of one shape.
        width: Of the drawing.
    """
    columns, per_row = (3, 6) if width > _NARROW else (2, 3)
    side = (width - _GAP * (columns - 1)) / columns
    rows, cols = next(iter(grids.values())).shape
    cell = side / max(rows, cols)
    tall = _TITLE + rows * cell + _GAP / 2

    parts = []
    for place, (name, grid) in enumerate(grids.items()):
        left, top = place % columns * (side + _GAP), place // columns * tall + _TITLE
        frame = {"x": f"{left:.1f}", "y": f"{top:.1f}", "width": f"{cols * cell:.1f}", "height": f"{rows * cell:.1f}"}
        parts.append(tag("text", name, x=f"{left:.1f}", y=f"{top - 6:.1f}", class_="axis"))
        parts.append(_cells(grid, left, top, cell))
        parts.append(tag("rect", **frame, fill="none", stroke="currentColor", stroke_opacity="0.4"))
    below = -(-len(grids) // columns) * tall
    height = below + _LINE * (-(-len(_OPACITY) // per_row)) + 6
    parts.append(_legend(width, below, per_row))
    size = {"viewBox": f"0 0 {width} {height:.0f}", "width": width, "height": f"{height:.0f}"}
    return tag("svg", parts, **size, xmlns="http://www.w3.org/2000/svg")


def _cells(grid: np.ndarray, left: float, top: float, cell: float) -> Markup:
    """One path a step; cells of one step beside each other are one rectangle."""
    ways: dict[int, list[str]] = {}
    for row, values in enumerate(grid):
        column = 0
        for step, same in groupby(step_of(float(value)) for value in values):
            number = len(list(same))
            if 0 <= step < len(STEPS):
                start = f"M{left + column * cell:.1f} {top + row * cell:.1f}"
                ways.setdefault(step, []).append(f"{start}h{number * cell:.1f}v{cell:.1f}h{-number * cell:.1f}z")
            column += number
    paths = [
        tag("path", d="".join(ways[step]), fill=_COLOUR, fill_opacity=_OPACITY[step], data_step=step)
        for step in sorted(ways)
    ]
    return tag("g", paths, shape_rendering="crispEdges")


def _legend(width: int, top: float, per_row: int) -> Markup:
    """The six steps, darkest first."""
    apart = width / per_row
    names = [f"below {100 * end:.0f} %" for end in STEPS[:1]] + [f"to {100 * end:.0f} %" for end in STEPS[1:]]
    parts = []
    for step, (name, opacity) in enumerate(zip([*names, "guessing"], _OPACITY, strict=True)):
        left, line = step % per_row * apart, top + _LINE * (step // per_row + 0.6)
        box = {"x": f"{left + 1:.1f}", "y": f"{line - 9:.1f}", "width": 10, "height": 10}
        filled = {"fill": _COLOUR, "fill_opacity": opacity, "stroke": "currentColor", "stroke_opacity": "0.4"}
        parts += [tag("rect", **box, **filled), tag("text", name, x=f"{left + 16:.1f}", y=f"{line:.1f}", class_="tick")]
    return join(parts)

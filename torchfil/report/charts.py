"""The charts of a page by name: drawn in the page for wide and narrow screens, written as files by ``--pictures``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from torchfil.report import svg
from torchfil.report.comparison import Moves
from torchfil.report.formats import count, number
from torchfil.report.summary import AttributeSummary, Report, Summary, named_level
from torchfil.run.baselines import share_in_words, share_of_blind_guess
from torchfil.run.saved_run import AttackRecord

FEWEST_PIXELS = 16
MOST_POINTS = 1000  # of an attack
MOST_COMPARED = 2000  # of two runs
SERIES = {"fil_max": "largest", "fil_q95": "95 % quantile", "fil_median": "median"}
READINGS = {"replace-one": "from ε, proven", "replace_one": "from ε, proven", "paper": "from ε, as in the paper"}


def charts_of(report: Report) -> dict[str, svg.Chart]:
    """Every chart that the report has data for; of a public report, from the summary alone."""
    summary = report.summary
    charts: dict[str, svg.Chart] = {}
    axes: dict[str, Any]

    # what an unbiased attacker achieves, and other attackers
    bins = summary.mse_histogram
    if bins is not None:
        marks = [svg.Mark(summary.guess, f"blind guess, {number(summary.guess)}")] if summary.guess else []
        axis = "bound on the mean squared error per input (MSE)"
        drawn = partial(svg.histogram, bins.edges, bins.counts, title="examples", axis=axis, marks=marks)
        charts["mse_bounds"] = partial(drawn, emphasis_below=summary.guess)
    if rdp_bounds(summary):
        charts["other_bounds"] = _other_bounds(report)
    rero = rero_points(summary)
    if len(rero) > 2:
        line = svg.Line("with model", [a for a, _ in rero], [b for _, b in rero])
        axes = {"title": "success with the model, at most", "axis": "success without the model"}
        charts["rero"] = partial(svg.lines, [line], diagonal=True, **axes)

    # who and what leaks more than others
    pixels = pixels_of(summary)
    if pixels:
        charts["pixels"] = _maps(pixels, summary)
    charts |= _groups(summary)
    bins, epsilon = summary.epsilon_histogram, report.about("epsilon")
    if bins is not None:
        marks = [svg.Mark(float(epsilon), f"ε for everybody, {number(epsilon)}")] if epsilon is not None else []
        axes = {"title": "examples", "axis": "individual ε"}
        charts["individual_epsilon"] = partial(svg.histogram, bins.edges, bins.counts, log=False, marks=marks, **axes)

    # the course of training, and attacks, which a public report does not show
    charts |= _history(summary.history)
    for place, attack in enumerate([] if report.run is None else report.run.attacks, start=1):
        axes = {"title": f"error achieved by {attack.name}", "axis": "bound on the error"}
        charts[f"attack_{place}"] = partial(svg.scatter, attack_points(attack), **axes)
    return charts


def rdp_bounds(summary: Summary) -> dict[str, float]:
    """The MSE bounds that follow from Rényi divergence, by name."""
    bounds = summary.bounds.get("rdp_mse_bound")
    readings: Mapping[str, Any] = bounds if isinstance(bounds, dict) else {"replace-one": bounds}
    return {text: float(readings[key]) for key, text in READINGS.items() if isinstance(readings.get(key), int | float)}


def _other_bounds(report: Report) -> svg.Chart:
    """Bounds from ε, and beside them a few examples, from the most exposed to the median."""
    guess, unit = report.summary.guess, report.about("unit_of_inputs")

    def row(name: str, bound: float, tone: int) -> svg.Row:
        note = number(bound)
        if guess is not None:
            share = float(share_of_blind_guess(bound**0.5, guess**0.5))
            note = "guessing" if share >= 1 else share_in_words(share).split(" of a ")[0]
        return svg.Row(name, bound, bound, bound, tone, note)

    rows = [row(name, bound, 2) for name, bound in rdp_bounds(report.summary).items()]
    for each in report.summary.exposure:
        if each.level in (0.0, 0.05, 0.5):
            rows.append(row(f"FIL, {named_level(each.level, report.summary)}", each.mse_bound, int(each.level == 0)))
    axis = "MSE bound" + (f" ({unit}, squared)" if unit else ", per input")
    return partial(svg.intervals, rows, axis=axis, mark=None if guess is None else svg.Mark(guess, "blind guess"))


def rero_points(summary: Summary) -> list[tuple[float, float]]:
    """Success without the model and, at most, with it, ascending; none where the run holds none."""
    curve = summary.bounds.get("rero")
    if not isinstance(curve, dict) or not curve.get("prior") or len(curve["prior"]) != len(curve.get("success", [])):
        return []
    return sorted(zip(curve["prior"], curve["success"], strict=True))


def pixels_of(summary: Summary) -> list[AttributeSummary]:
    """The attributes where all of them are pixels beside a blind guess, and enough for a map; otherwise none."""
    tracked = summary.tracked
    return tracked if len(tracked) >= FEWEST_PIXELS and all(a.pixel and a.share for a in tracked) else []


def _maps(pixels: list[AttributeSummary], summary: Summary) -> svg.Chart:
    """One picture a level of exposure: the stronger the colour, the more closely a pixel can be guessed."""
    grids = {
        named_level(float(level), summary): svg.grid_of_shares(
            [a.pixel for a in pixels if a.pixel], [a.share.get(level, 1.0) for a in pixels]
        )
        for level in ("0", "0.05", "0.5")
        if any(level in {**a.error, **a.share} for a in pixels)
    }
    return partial(svg.maps_of_shares, grids)


def _groups(summary: Summary) -> dict[str, svg.Chart]:
    charts: dict[str, svg.Chart] = {}
    tones = {"more": 1, "less": 2}
    for place, grouping in enumerate(summary.groupings, start=1):
        rows = [
            svg.Row(g.name, g.fil, g.low, g.high, tones.get(g.compared, 0), f"n = {count(g.examples)}")
            for g in grouping.groups
        ]
        if rows:
            mark = svg.Mark(grouping.fil, "all examples")
            axis = "Fisher information loss η̄ (right: more exposed)"
            charts[f"groups_{place}"] = partial(svg.intervals, rows, axis=axis, mark=mark)
    return charts


def _history(history: dict[str, list[float]]) -> dict[str, svg.Chart]:
    """Curves over steps; none where no history was kept."""
    charts: dict[str, svg.Chart] = {}
    steps = history.get("step", [])
    if len(steps) < 2:
        return charts
    fil = [svg.Line(text, steps, history[name]) for name, text in SERIES.items() if name in history]
    if fil:
        charts["fil_over_training"] = partial(svg.lines, fil, title="Fisher information loss η̄", axis="step")
    if "epsilon" in history:
        spent = [svg.Line("ε", steps, history["epsilon"])]
        charts["epsilon_over_training"] = partial(svg.lines, spent, title="ε for everybody", axis="step")
    return charts


def attack_points(attack: AttackRecord) -> list[tuple[float, float, bool]]:
    """Bound and achieved error of up to 1,000 targets, all violations among them."""
    step = max(1, -(-len(attack.rows) // MOST_POINTS))
    points = zip(attack.predicted.tolist(), attack.achieved.tolist(), attack.violated.tolist(), strict=True)
    return [(a, b, bool(c)) for place, (a, b, c) in enumerate(points) if place % step == 0 or c]


def comparison_chart(moves: Moves) -> tuple[svg.Chart, int]:
    """MSE bounds after against before, and of how many examples: those that clearly moved before the others."""
    order = np.argsort(-np.abs(moves.clearly), kind="stable")[:MOST_COMPARED]
    points = [(float(moves.before[row]), float(moves.after[row]), bool(moves.clearly[row] < 0)) for row in order]
    return partial(svg.scatter, points, title="MSE bound after", axis="MSE bound before"), len(points)

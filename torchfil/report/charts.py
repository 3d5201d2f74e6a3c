"""The charts of a page by name: drawn in the page for wide and narrow screens, written as files by ``--pictures``."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np

from torchfil.report import svg
from torchfil.report.comparison import Moves
from torchfil.report.formats import count, number
from torchfil.report.groups import GroupSummary
from torchfil.report.leaks import prior_guess
from torchfil.report.options import Options
from torchfil.report.summary import FALSE_POSITIVE_RATE, Report, Summary, named_level
from torchfil.run.baselines import BELOW, BEYOND, HALF, UNTOLD, classes_of_ratios, is_told
from torchfil.run.saved_run import AttackRecord
from torchfil.run.unit import unit_of

TONES = {HALF: "half", BELOW: "below", BEYOND: "beyond", UNTOLD: "untold"}

FEWEST_PIXELS = 16
MOST_POINTS = 1000  # of an attack
MOST_COMPARED = 2000  # of two runs
SERIES = {"fil_max": "largest", "fil_q95": "95 % quantile", "fil_median": "median"}


def charts_of(report: Report) -> dict[str, svg.Chart]:
    """Every chart that the report has data for; of a public report, from the summary alone."""
    summary, bars = report.summary, partial(svg.histogram, what=unit_of(report.about("mechanism") or {}).many)
    charts: dict[str, svg.Chart] = {}
    mark: tuple[float, str] | None

    # how close an unbiased attacker comes, and what any attacker learns
    bins = summary.ratio_histogram
    if bins is not None:
        axis = "closer ← an attacker’s error, as a multiple of a blind guess’s (log scale) → farther|"
        axis += "error over a blind guess’s (log scale)"
        tones = [TONES[int(each)] for each in classes_of_ratios([math.sqrt(a * b) for a, b in pairwise(bins.edges)])]
        drawn = partial(bars, bins.edges, bins.counts, axis=axis, tones=tones, multiples=True)
        charts["closeness"] = partial(drawn, mark=(1.0, "as good as a blind guess"))
    bins = summary.mse_histogram
    if bins is not None:
        square = None if summary.blind is None else summary.blind**2
        mark = None if square is None else (square, f"blind guess, {number(square)}")
        axis = "bound on the mean squared error per input (MSE)|MSE bound per input"
        charts["mse_bounds"] = partial(bars, bins.edges, bins.counts, axis=axis, mark=mark)
    answers = answers_of(report)
    if answers:
        charts["questions"] = partial(svg.answers, answers)

    # who and what leaks more than others
    charts |= _pixels(summary) | _groups(summary)
    bins, epsilon = summary.epsilon_histogram, report.about("epsilon")
    if bins is not None:
        mark = None if epsilon is None else (float(epsilon), f"ε for everybody, {number(epsilon)}")
        drawn = partial(bars, bins.edges, bins.counts, axis="individual ε", log=False)
        charts["individual_epsilon"] = partial(drawn, mark=mark)

    # the course of training, and attacks, which a public report does not show
    charts |= _history(summary.history)
    for place, attack in enumerate([] if report.run is None else report.run.attacks, start=1):
        points, title = attack_points(attack), f"error achieved by {attack.name}"
        charts[f"attack_{place}"] = partial(svg.scatter, points, title=title, axis="bound on the error")
    return charts


def answers_of(report: Report) -> list[svg.Answer]:
    """Each question without the model and with it; of a public page at 1 % false alarms, and the most exposed together.

    Between two equally likely answers, beside the policy's limit, as the gate judges it; and, where the run tells how
    common all possible answers are, among all of them. Without a question, what ε allows for membership: for every
    (ε, δ) both ways, a guess between two equally likely cases is right in (e^ε + δ)/(1 + e^ε) of them at most.
    """
    summary, run = report.summary, report.run
    if run is None:
        return [svg.Answer(q.name, FALSE_POSITIVE_RATE, q.rate["0"]) for q in summary.questions if "0" in q.rate]
    told, gain = is_told(run), None if report.policy is None else report.policy.max_gain_over_guessing
    rows = list[svg.Answer]()
    for question in run.questions:
        most = float(np.max(question.success()[told], initial=0.5))
        rows.append(svg.Answer(question.name, 0.5, most, None if gain is None else 0.5 + gain))
        prior = prior_guess(question, told)
        if prior is not None:
            rows.append(svg.Answer(f"{question.name}, all answers", prior.blind, prior.most))
    epsilon, delta = report.about("epsilon"), report.about("delta")
    if not rows and epsilon is not None and delta is not None and epsilon < 700:
        allowed = (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))
        rows.append(svg.Answer("member (ε alone)", 0.5, min(allowed, 1.0)))
    return rows


def _pixels(summary: Summary) -> dict[str, svg.Chart]:
    """One picture a level of exposure, where all attributes are pixels beside a blind guess, and enough for a map.

    The stronger the colour, the more closely a pixel can be guessed.
    """
    tracked = summary.tracked
    if len(tracked) < FEWEST_PIXELS or not all(a.pixel and a.ratio for a in tracked):
        return {}
    places = [a.pixel for a in tracked if a.pixel]
    grids = {
        named_level(float(level), summary).removesuffix(" together"): svg.grid_of_shares(
            places, [a.ratio.get(level, 1.0) for a in tracked]
        )
        for level in ("0", "0.05", "0.5")
        if any(level in {**a.error, **a.ratio} for a in tracked)
    }
    return {"pixels": partial(svg.maps_of_shares, grids)}


def _groups(summary: Summary) -> dict[str, svg.Chart]:
    """Typical FIL by group, as multiples of the least exposed group's where that is a number to divide by."""
    charts: dict[str, svg.Chart] = {}
    tones = {"more": "exposed", "less": "quiet"}

    def note(group: GroupSummary, unit: float) -> str:
        return f"{number(group.fil / unit, 2 if summary.redacted else 3)}× ({count(group.examples)})"

    for place, grouping in enumerate(summary.groupings, start=1):
        least = min((g.fil for g in grouping.groups), default=0.0)
        unit = least if 0 < least < math.inf else 1.0
        rows = [
            svg.Row(g.name, g.fil / unit, g.low / unit, g.high / unit, tones.get(g.compared, ""), note(g, unit))
            for g in grouping.groups
        ]
        if rows:
            axis = "typical FIL, as a multiple of the least exposed group’s|times the least exposed group’s"
            charts[f"groups_{place}"] = partial(svg.intervals, rows, axis=axis)
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


def options_chart(options: Options) -> svg.Chart:
    """The smallest error against noise beside what the policy asks for; the first point was measured."""
    noises = [sigma for sigma, _, _ in options.curve]
    series = [svg.Line("smallest", noises, [ratio for _, ratio, _ in options.curve], dots=True)]
    if options.limit:
        series.append(svg.Line("policy", [noises[0], noises[-1]], [options.limit] * 2))
    return partial(svg.lines, series, title="error, as a multiple of a blind guess’s", axis="noise σ")


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

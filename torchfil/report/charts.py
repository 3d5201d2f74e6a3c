"""The charts of a page by name."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from torchfil.report import svg
from torchfil.report.examples import Measures
from torchfil.report.formats import count, number, rate
from torchfil.report.groups import Grouping
from torchfil.report.leaks import prior_guess
from torchfil.report.summary import FALSE_POSITIVE_RATE, Report
from torchfil.run.baselines import BELOW, BEYOND, HALF, UNTOLD, classes_of_ratios
from torchfil.run.unit import unit_of

TONES = {HALF: "half", BELOW: "below", BEYOND: "beyond", UNTOLD: "untold"}


def charts_of(report: Report, answers: list[svg.Row]) -> dict[str, Markup]:
    """Every chart that the report has data for; of a public report, from the summary alone.

    Args:
        report: The material.
        answers: What :func:`answers_of` gave.
    """
    summary, many = report.summary, unit_of(report.about("mechanism") or {}).many
    charts: dict[str, Markup] = {}
    if bins := summary.ratio_histogram:
        axis = (
            "closer ← an attacker’s error, as a multiple of a blind guess’s (log scale) → farther"
        )
        tones = [
            TONES[int(each)]
            for each in classes_of_ratios([math.sqrt(a * b) for a, b in pairwise(bins.edges)])
        ]
        mark: tuple[float, str] | None = (1.0, "as good as a blind guess")
        charts["closeness"] = svg.histogram(bins, what=many, axis=axis, tones=tones, mark=mark)
    if bins := summary.mse_histogram:
        mark = (
            None
            if summary.blind is None
            else (summary.blind**2, f"blind guess, {number(summary.blind**2)}")
        )
        axis = "bound on the mean squared error per input (MSE)"
        charts["mse_bounds"] = svg.histogram(bins, what=many, axis=axis, mark=mark)
    if answers:
        charts["questions"] = svg.intervals(answers, axis="answered correctly", shares=True)
    for place, grouping in enumerate(summary.groupings, start=1):
        if grouping.groups:
            charts[f"groups_{place}"] = _by_group(grouping, 2 if summary.redacted else 3)
    return charts


def answers_of(report: Report, measures: Measures | None) -> list[svg.Row]:
    """Each question without the model and with it.

    Of a public page at 1 % false alarms, and the most exposed together.

    Between two equally likely answers, beside the policy's limit, as the gate judges it; and, where
    the run tells how common all possible answers are, among all of them. Without a question, what ε
    allows for membership: for every (ε, δ) both ways, a guess between two equally likely cases is
    right in (e^ε + δ)/(1 + e^ε) of them at most.
    """
    if measures is None:
        return [
            _answer(q.name, FALSE_POSITIVE_RATE, q.rate["0"])
            for q in report.summary.questions
            if "0" in q.rate
        ]
    gain = measures.policy.max_gain_over_guessing
    rows = list[svg.Row]()
    for question in measures.run.questions:
        success = measures.success[question.name][measures.told]
        most = float(np.max(success, initial=0.5))
        rows.append(_answer(question.name, 0.5, most, None if gain is None else 0.5 + gain))
        prior = prior_guess(question, measures.told)
        if prior is not None:
            rows.append(_answer(f"{question.name}, all answers", prior.blind, prior.most))
    epsilon, delta = report.about("epsilon"), report.about("delta")
    if not rows and epsilon is not None and delta is not None and epsilon < 700:
        allowed = (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))
        rows.append(_answer("member (ε alone)", 0.5, min(allowed, 1.0)))
    return rows


def _answer(name: str, without: float, most: float, limit: float | None = None) -> svg.Row:
    """How often a question is answered correctly: without the model, with it at most, and what a
    policy allows.
    """
    tone = "exposed" if limit is not None and most > limit else "quiet"
    return svg.Row(name, most, without, most, tone, f"{rate(without)} → {rate(most)}", limit)


def _by_group(grouping: Grouping, digits: int) -> Markup:
    """Typical FIL by group, as multiples of the least exposed group's where that is a number to
    divide by.
    """
    least = min(group.fil for group in grouping.groups)
    unit = least if 0 < least < math.inf else 1.0
    tones = {"more": "exposed", "less": "quiet", "": ""}
    rows = [
        svg.Row(
            group.name,
            group.fil / unit,
            group.low / unit,
            group.high / unit,
            tones[group.compared],
            f"{number(group.fil / unit, digits)}× ({count(group.examples)})",
        )
        for group in grouping.groups
    ]
    return svg.intervals(rows, axis="times the least exposed group’s typical FIL")

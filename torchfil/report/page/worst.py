"""Who is exposed, and which questions and attributes are worst, for the first screen.

Exposed is whose MSE bound, at its lower end, lies below the squared error of a blind guess. An attribute is not
protected where the least error of an unbiased guess lies below a blind guess's, and a question where any attacker tells
the true answer from another, equally likely one, in more than the allowed share of cases above one half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from torchfil.guessing import divergence_of_rate, largest_success
from torchfil.report.page.context import Report
from torchfil.report.page.html import count, percent, plus_minus
from torchfil.report.page.remedies import divergence_of_gain
from torchfil.report.saved_run import QuestionRecord, SavedRun
from torchfil.report.status import NOT_MEASURED, status_of
from torchfil.report.summary import FALSE_POSITIVE_RATE
from torchfil.report.verdict import told_apart

__all__ = ["Leaks", "blind_error", "exposed_count", "is_exposed", "success_of", "unprotected"]

GAIN = 0.1  # above one half: what the template of a policy allows


@dataclass(frozen=True)
class Leaks:
    """What is not protected.

    Attributes:
        number: How many questions were asked and attributes tracked.
        asked: The same in words; "" where there were none.
        sentences: One for each that is not protected, the worst first, questions before attributes.
        unknown: What cannot be said, and why.
        factor: By how much σ² would have to grow, at fixed gradients, until all of it were protected; 1: it is.
    """

    number: int
    asked: str
    sentences: list[str]
    unknown: list[str]
    factor: float = 1.0


def blind_error(report: Report) -> float | None:
    """What a blind guess of an input is off by: as the policy says, or half the inputs' range; None: not known."""
    if report.policy is not None and report.policy.blind_error is not None:
        return report.policy.blind_error
    return None if report.summary.guess is None else math.sqrt(report.summary.guess)


def is_exposed(run: SavedRun, blind: float) -> np.ndarray:
    """Whose inputs an unbiased attacker may guess better than blindly, [n] booleans."""
    low = np.asarray(run.columns.get("mse_bound_low", run.columns["mse_bound"]), dtype=np.float64)
    return (status_of(run) != NOT_MEASURED) & ~(low >= blind**2)


def exposed_count(report: Report) -> tuple[int | str | None, int]:
    """How many are exposed, and of how many that were measured; rounded or in words in the public version."""
    summary, blind = report.summary, blind_error(report)
    unmeasured = summary.not_measured
    everyone = summary.examples - (unmeasured if isinstance(unmeasured, int) else 0)
    if report.run is None:
        return (summary.below_guess if summary.low_below_guess is None else summary.low_below_guess), everyone
    return None if blind is None else int(is_exposed(report.run, blind).sum()), everyone


def unprotected(report: Report) -> Leaks:
    """The questions and attributes that are not protected, in words."""
    questions, attributes = report.summary.questions, [a for a in report.summary.attributes if a.error]
    parts = [
        f"{len(some):,} {name}{'s' if len(some) != 1 else ''}"
        for name, some in (("question", questions), ("attribute", attributes))
        if some
    ]
    of_attributes, unknown = _attributes(report)
    found = [*_questions(report), *of_attributes]
    return Leaks(
        len(questions) + len(attributes),
        " and ".join(parts),
        [sentence for _, sentence in found],
        unknown,
        max((factor for factor, _ in found), default=1.0),
    )


def _questions(report: Report) -> list[tuple[float, str]]:
    """Of each question that is not protected, the factor on σ² that it needs and a sentence, the worst first."""
    if report.run is None:
        return _public_questions(report)
    limit = GAIN
    if report.policy is not None and report.policy.max_gain_over_guessing is not None:
        limit = report.policy.max_gain_over_guessing
    measured = status_of(report.run) != NOT_MEASURED
    ranked = []
    for question in report.run.questions:
        success = success_of(question)[measured]
        wrong = int((~(success <= 0.5 + limit)).sum())
        if wrong:
            most = float(np.nanmax(success))
            told = f"guessed right up to {percent(most)} of the time instead of 50 %"
            of = f"{wrong:,} of {int(measured.sum()):,} examples"
            needed = float(np.nanmax(np.asarray(question.divergence_high)[measured])) / divergence_of_gain(limit)
            ranked.append((needed, f"“{question.name}” of {of} is not protected: {told}, by any attacker."))
    return sorted(ranked, key=lambda pair: -pair[0])


def success_of(question: QuestionRecord) -> np.ndarray:
    """How often any attacker picks each example's true answer of two that are equally likely, at the upper end, [n]."""
    worst = np.asarray(question.divergence_high, dtype=np.float64).max(axis=1)
    success = np.full(len(worst), math.nan)
    known = ~np.isnan(worst)
    success[known] = largest_success(torch.from_numpy(worst[known]), 0.5).numpy()
    return success


def _public_questions(report: Report) -> list[tuple[float, str]]:
    """From the published levels alone; a rate of 5 % at 1 % false alarms is taken for protected."""
    found = []
    for question in sorted(report.summary.questions, key=lambda q: -q.rate.get("0", 0.0)):
        above = question.above["0.05"]
        if above != 0 and "0" in question.rate:
            some = f"{'about ' * isinstance(above, int)}{count(above)} of {report.summary.examples:,} examples"
            rate = min(question.rate["0"], 1.0)
            sentence = (
                f"“{question.name}” of {some} is not protected: any attacker may tell it rightly in up to "
                f"{percent(rate)} of the runs instead of 1 % (the {report.summary.smallest} most exposed together)."
            )
            high = divergence_of_rate(rate, FALSE_POSITIVE_RATE) if rate < 1 else math.inf
            found.append((high / divergence_of_rate(0.05, FALSE_POSITIVE_RATE), sentence))
    return found


def _attributes(report: Report) -> tuple[list[tuple[float, str]], list[str]]:
    """As for questions, of each attribute whose blind guess is known and beaten; and one sentence on all others."""
    ranked, unknown = [], []
    for place, attribute in enumerate(report.summary.attributes):
        if not attribute.error:
            continue
        blind, least = _blind_error_of(report, place), min(attribute.error.values())
        if blind is None:
            unknown.append((attribute.name, plus_minus(least, attribute.unit)))
        elif least < blind:
            whose, (usual, close) = _how_many(report, place, blind), told_apart(blind, least)
            off = f"an unbiased guess may be off by as little as {close} instead of {usual} {attribute.unit}".strip()
            needed = (blind / least) ** 2 if least > 0 else math.inf
            ranked.append((needed, f"“{attribute.name}” {whose} is not protected: {off}."))
    ranked.sort(key=lambda pair: -pair[0])
    if not unknown:
        return ranked, []

    names = ", ".join(f"“{name}” ({error})" for name, error in unknown[:3]) + (" …" if len(unknown) > 3 else "")
    return ranked, [
        f"How far off a blind guess is was not saved for {len(unknown):,} attribute{'s' if len(unknown) != 1 else ''}, "
        f"so that the closest unbiased guesses say little by themselves: {names}."
    ]


def _blind_error_of(report: Report, place: int) -> float | None:
    """What a blind guess of an attribute is off by, in its unit; that of inputs holds where there is no unit."""
    attribute = report.summary.attributes[place]
    if report.policy is not None and attribute.name in report.policy.attribute_spread:
        return report.policy.attribute_spread[attribute.name]
    same_unit = attribute.unit in ("", report.about("unit_of_inputs"))
    return blind_error(report) if same_unit else None


def _how_many(report: Report, place: int, blind: float) -> str:
    """Whose attribute may be guessed better than blindly."""
    if report.run is None or report.run.attributes is None:
        return f"of the {report.summary.smallest} most exposed examples together"
    measured = status_of(report.run) != NOT_MEASURED
    errors = np.asarray(report.run.attributes.shown[:, place], dtype=np.float64)[measured]
    return f"of {int((errors < blind).sum()):,} of {len(errors):,} examples"

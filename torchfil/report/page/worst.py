"""Who is exposed, and which questions and attributes are worst, for the first screen.

Everything is measured as the gate measures it (:mod:`torchfil.run.baselines`): exposed is whose least error, at the
lower end, lies below a blind guess's, of all inputs or of an attribute; a question is not protected where any attacker
tells the true answer from another, equally likely one, in more than the allowed share of cases above one half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torchfil.gate.rules import divergence_of_gain, told_apart, worst_divergence
from torchfil.guessing import divergence_of_rate
from torchfil.report.attribute_summary import AttributeSummary
from torchfil.report.page.context import Report
from torchfil.report.page.html import count, percent, plus_minus
from torchfil.report.prior_guesses import PriorGuess, prior_guess
from torchfil.report.summary import FALSE_POSITIVE_RATE
from torchfil.run.baselines import (
    NOT_MEASURED,
    attribute_exposure,
    blind_error_of_inputs,
    blind_errors,
    exposed_examples,
    gain_over_guessing,
    share_in_words,
    status_of,
)

__all__ = ["Leaks", "blind_error", "exposed_count", "unprotected"]

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
    """What a blind guess of an input is off by; None: not known, or private and this is the public version."""
    if report.run is None:
        return None if report.summary.guess is None else math.sqrt(report.summary.guess)
    return blind_error_of_inputs(report.run, None if report.policy is None else report.policy.blind_error)


def exposed_count(report: Report) -> tuple[int | str | None, int]:
    """How many are exposed, and of how many that were measured; rounded or in words in the public version."""
    unmeasured = report.summary.not_measured
    everyone = report.summary.examples - (unmeasured if isinstance(unmeasured, int) else 0)
    if report.run is None:
        return report.summary.exposed, everyone
    exposed = exposed_examples(report.run, blind_error(report))
    return None if exposed is None else int(exposed.sum()), everyone


def unprotected(report: Report) -> Leaks:
    """The questions and attributes that are not protected, in words."""
    questions, attributes = report.summary.questions, [a for a in report.summary.attributes if a.error or a.share]
    parts = [
        f"{len(some):,} {name}{'s' if len(some) != 1 else ''}"
        for name, some in (("question", questions), ("attribute", attributes))
        if some
    ]
    found = [*_questions(report), *_attributes(report)]
    return Leaks(
        len(questions) + len(attributes),
        " and ".join(parts),
        [sentence for _, sentence in found],
        _without_yardstick(report),
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
        gains = gain_over_guessing(question)[measured]
        wrong = int((~(gains <= limit)).sum())
        if wrong:
            told = _guessed(float(np.nanmax(gains)), prior_guess(question, measured))
            of = f"{wrong:,} of {len(gains):,} examples"
            target = divergence_of_gain(limit, question.law)
            needed = (worst_divergence(report.run, question.name) or 0.0) / target if target > 0 else math.inf
            ranked.append((needed, f"“{question.name}” of {of} is not protected: {told}, by any attacker."))
    return sorted(ranked, key=lambda pair: -pair[0])


def _guessed(gain: float, beside: PriorGuess | None) -> str:
    """How often the most exposed example's answer is named rightly, beside what was likely before."""
    even = percent(0.5 + gain)
    if beside is None:
        return f"guessed right up to {even} of the time instead of 50 % (between two equally likely answers)"
    return (
        f"guessed right up to {percent(beside.most)} of the time instead of {percent(beside.blind)} (always naming the "
        f"commonest answer); between two equally likely answers, up to {even} instead of 50 %"
    )


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


def _attributes(report: Report) -> list[tuple[float, str]]:
    """As for questions, of each attribute whose blind guess is known and beaten."""
    if report.run is None:
        found = [_public_attribute(attribute, report) for attribute in report.summary.attributes]
        return sorted((pair for pair in found if pair is not None), key=lambda pair: -pair[0])
    run, policy, ranked = report.run, report.policy, []
    if run.attributes is None:
        return []
    blind = blind_errors(run, *((None, None) if policy is None else (policy.attribute_spread, policy.blind_error)))
    for place, (name, unit) in enumerate(zip(run.attributes.names, run.attributes.units, strict=True)):
        exposed = attribute_exposure(run, place, float(blind[place]))
        if not exposed.any():
            continue

        # the closest that a guess of somebody's may come; NaN is not known, and counted as exposed
        errors = np.asarray(run.attributes.shown[:, place], dtype=np.float64)[exposed]
        least = float(np.nanmin(errors)) if not np.isnan(errors).all() else 0.0
        usual, close = told_apart(float(blind[place]), least)
        share = share_in_words(least / float(blind[place]))
        off = f"an unbiased guess may be off by {close} instead of {usual} {unit}".strip()
        whose = f"of {int(exposed.sum()):,} of {int((status_of(run) != NOT_MEASURED).sum()):,} examples"
        needed = (float(blind[place]) / least) ** 2 if least > 0 else math.inf
        ranked.append((needed, f"“{name}” {whose} is not protected: {off}, {share}."))
    return sorted(ranked, key=lambda pair: -pair[0])


def _public_attribute(attribute: AttributeSummary, report: Report) -> tuple[float, str] | None:
    """From the published shares alone; None where it is protected or nothing is published."""
    share = min(attribute.share.values(), default=1.0)
    if share >= 1 or attribute.exposed == 0:
        return None
    above = attribute.exposed
    some = "" if above is None else f"of {'about ' * isinstance(above, int)}{count(above)} examples "
    sentence = (
        f"“{attribute.name}” {some}is not protected: an unbiased guess of the {report.summary.smallest} most exposed "
        f"together may have {share_in_words(share)}."
    )
    return share**-2 if share > 0 else math.inf, sentence


def _without_yardstick(report: Report) -> list[str]:
    """One sentence on all attributes whose error cannot be held against anything."""
    stated = {} if report.policy is None else report.policy.attribute_spread
    unknown = [a for a in report.summary.attributes if a.error and not a.share and a.name not in stated]
    if not unknown or (report.policy is not None and report.policy.blind_error is not None):
        return []
    names = ", ".join(f"“{a.name}” ({plus_minus(min(a.error.values()), a.unit)})" for a in unknown[:3])
    return [
        f"How far off a blind guess is was not saved for {len(unknown):,} attribute{'s' if len(unknown) != 1 else ''}, "
        f"so that the closest unbiased guesses say little by themselves: {names}{' …' * (len(unknown) > 3)}."
    ]

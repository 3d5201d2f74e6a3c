"""What to do: more noise, fewer steps, or sparing a few, with a σ and what it would give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from torchfil.gate.gate import concerned, factor_for_all
from torchfil.gate.rules import RULES, Verdict, lower_ends, rounded_up, worst_divergence
from torchfil.report.page.context import Report
from torchfil.report.page.html import Markup, join, number, percent, tag
from torchfil.report.page.wording import is_linear
from torchfil.report.page.worst import blind_error, exposed_count, unprotected
from torchfil.run.baselines import NOT_MEASURED, exposed_examples, is_exposed, status_of

__all__ = ["Advice", "advice"]

FEW = 0.1  # up to this share of the examples, sparing them is better than noise for all
EXTRAPOLATED = (
    "An extrapolation at the gradients of this run (bounds grow as σ²), for the attackers named beside: train again "
    "and measure."
)
EXACT = "The noise is added once, to the fitted weights: bounds grow as σ², for the attackers named beside."
NOTHING = "It says what the measured numbers ask for, no more: unbiased attackers, or every attacker where said so."


@dataclass(frozen=True)
class Advice:
    """What the card says: in large letters, in sentences, and for whom it holds."""

    figure: str
    lines: list[Markup]
    bound: str


def advice(report: Report) -> Advice:
    """What would keep the policy where it is broken; otherwise what could be better, or that nothing need be done."""
    verdicts = report.verdicts
    if verdicts is not None and not all(v.passed for v in verdicts):
        factor, others = factor_for_all(verdicts)
        return _for_policy(report, [v for v in verdicts if not v.passed], factor, others)

    exposed, _ = exposed_count(report)
    kept = "By the policy nothing need be done." if verdicts is not None else ""
    leaks = unprotected(report)
    if exposed is None and leaks.factor <= 1:
        text = "Save the run with save_run(input_range=(a, b)), so that it can be held against a blind guess."
        return Advice(
            "Nothing" if kept else "First a yardstick", [join(kept or text), *_in_general(report)], _basis(report)
        )
    if exposed == 0 and leaks.factor <= 1:
        text = "No example is exposed. A policy would say what else the run has to keep." * (verdicts is None)
        return Advice("Nothing", [join(kept or text)], NOTHING)
    return _for_everybody(report, leaks.factor, kept)


def _for_policy(report: Report, broken: list[Verdict], factor: float | None, others: list[Verdict]) -> Advice:
    """The σ that would keep the rules that noise helps with, and what helps with the others."""
    lines, figure = list[Markup](), "Not noise alone" if factor is None else "More noise"
    sigma = _sigma(report)
    if factor is not None:
        helped = len(broken) - len(others)
        which = "the policy would be kept" if not others else f"{helped} of the broken rules would be kept"
        if sigma is not None:
            sigma_then = rounded_up(sigma * math.sqrt(factor))
            figure, factor = f"σ = {number(sigma_then)}", (sigma_then / sigma) ** 2
        lines.append(join(_noise(report, factor), f", {which}", _given(report, factor), "."))
        lines += _sparing(report, broken, factor)
    remedies = dict.fromkeys(RULES[verdict.key].remedy(verdict) for verdict in others)  # one may serve several rules
    lines += [join(remedy) for remedy in remedies]
    return Advice(figure, lines, _basis(report) if factor is not None else NOTHING)


def _for_everybody(report: Report, factor: float, kept: str) -> Advice:
    """The σ at which a blind guess would be as good as any estimate; of a public page, from what it publishes.

    Args:
        report: The report.
        factor: What questions and attributes need.
        kept: That the policy is kept; "" where there is none.
    """
    summary, sigma, blind = report.summary, _sigma(report), blind_error(report)
    end = summary.exposure[0].mse_bound if summary.exposure else math.inf
    end = end if summary.lowest_end is None else summary.lowest_end
    needed = 1.0 if blind is None else blind**2 / end if end > 0 else math.inf
    factor = max(factor, needed)
    unpublished = report.run is None and needed < math.inf and factor == math.inf  # a rate that is rounded to 100 %
    if not factor < math.inf and not unpublished:
        text = "Measure more (every step, more probes, a longer run): of some examples one run does not tell enough."
        return Advice("Nothing" if kept else "Measure more", [join(kept, " ", text)], NOTHING)
    if factor <= 1 or unpublished:
        # in public, where too few are exposed to tell how much, or a blind guess is made from private data
        steps = "" if is_linear(report) else " or fewer steps"
        text = f"More noise{steps} would expose fewer; how much it takes rests on numbers that are not published."
        return Advice("More noise", [join(text)], NOTHING)

    figure = "More noise"
    if sigma is not None:
        sigma_then = rounded_up(sigma * math.sqrt(factor))
        figure, factor = f"σ = {number(sigma_then)}", (sigma_then / sigma) ** 2
    goal = "nothing that was measured could be estimated much better than by a blind guess"
    if blind is None:
        goal = "the questions and attributes named here could not be estimated much better than by a blind guess"
    line = join(_noise(report, factor), f", {goal}", _given(report, factor), ".")
    if kept:
        figure, line = "Nothing", join(kept, " Better still: ", line)
    return Advice(figure, [line, *_sparing(report, [], factor)], _basis(report))


def _noise(report: Report, factor: float) -> Markup:
    """More noise, or fewer steps, in half a sentence."""
    sigma, steps = _sigma(report), report.about("mechanism", "steps")
    if sigma is None:
        noise = f"With {number(math.sqrt(factor))} times the noise"
    else:
        noise = f"With noise σ = {number(sigma * math.sqrt(factor))} instead of {number(sigma)}"
    fewer = math.floor(steps / factor) if isinstance(steps, int) and steps > 1 else 0
    return join(noise, f", or about {fewer:,} of the {steps:,} steps" if fewer else "")


def _given(report: Report, factor: float) -> str:
    """What f = (σ'/σ)² would give: the smallest bound, how many are exposed, the worst question."""
    run, blind = report.run, blind_error(report)
    if run is None:
        return ""
    parts, low = [], lower_ends(run)
    if len(low) and 0 < low[0] < math.inf:
        parts.append(f"smallest MSE bound {number(low[0])} → {number(factor * low[0])}")
    if blind is not None:
        now, then = int(_exposed(report).sum()), int(is_exposed(np.sqrt(factor * low), blind).sum())
        if now:
            parts.append(f"exposed {now:,} → {then:,}")
    if run.questions:
        worst = max(run.questions, key=lambda question: worst_divergence(run, question.name) or 0.0)
        high = np.asarray(worst.divergence_high, dtype=np.float64)[status_of(run) != NOT_MEASURED]
        before, after = (float(np.nanmax(replace(worst, divergence_high=high / f).success())) for f in (1.0, factor))
        parts.append(f"“{worst.name}” guessed {percent(before)} → {percent(after)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _sparing(report: Report, broken: list[Verdict], factor: float) -> list[Markup]:
    """Where few need it: spare these instead of adding noise for all. Nothing in the public version."""
    run = report.run
    if run is None:
        return []
    some = len(concerned(broken)) if broken else int(_exposed(report).sum())
    if not 0 < some <= FEW * len(run):
        return []

    # bounds and questions can be spared by name; attributes only as part of their example
    aims = {RULES[verdict.key].equalise for verdict in broken}
    questions = {verdict.key: verdict.subject for verdict in broken if RULES[verdict.key].equalise == "question"}
    if is_linear(report):
        codes = ["torchfil.glm.iteratively_reweighted_fil(…)"]
    else:
        target = number(float(f"{factor * lower_ends(run)[0]:.2g}"))
        codes = [f"torchfil.equalise(target={target})"] * (not broken or "bound" in aims)
        codes += [f'torchfil.equalise(question="{name}", target=…)' for name in questions.values()]
    if not codes:
        return []
    who = "one example needs" if some == 1 else f"{some:,} examples need"
    listed = [[" and " * (place > 0), tag("code", code)] for place, code in enumerate(codes)]
    return [join(f"Or spare the few: only {who} it. ", listed, ".")]


def _in_general(report: Report) -> list[Markup]:
    sigma, steps = _sigma(report), report.about("mechanism", "steps")
    told = "" if sigma is None else f", σ = {number(2 * sigma)} instead of {number(sigma)},"
    as_well = "" if steps is None else "; a quarter of the steps as well"
    return [join(f"Twice the noise{told} would give four times every MSE bound{as_well}.")]


def _exposed(report: Report) -> np.ndarray:
    """Who is exposed, [n] booleans; nobody where no blind guess is known."""
    assert report.run is not None
    exposed = exposed_examples(report.run, blind_error(report))
    return np.zeros(len(report.run), dtype=bool) if exposed is None else exposed


def _basis(report: Report) -> str:
    """What a number for another σ stands on."""
    return EXACT if is_linear(report) else EXTRAPOLATED


def _sigma(report: Report) -> float | None:
    """The noise that the run was trained with; None where it is not known or there was none."""
    for name in ("noise_multiplier", "sigma"):
        sigma = report.about("mechanism", name)
        if isinstance(sigma, int | float) and 0 < sigma < math.inf:
            return float(sigma)
    return None

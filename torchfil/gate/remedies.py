"""How much more noise would keep the rules that a run broke, and what it would give.

At fixed gradients the Fisher information of a Gaussian release is proportional to 1/σ². With σ' for σ and
f = (σ'/σ)², an MSE bound b becomes f·b, the error of a guess √f times as large, and a question's divergence D/f
(exactly where batches are known; about, where they are drawn in secret). T/f of T steps that leak alike do the same.
This is an **extrapolation**: another training takes other gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from torchfil.gate.policy import Policy
from torchfil.gate.verdict import Verdict
from torchfil.gate.wording import kind_and_subject
from torchfil.guessing import divergence_of_rate
from torchfil.run.saved_run import SavedRun
from torchfil.run.status import NOT_MEASURED, status_of

__all__ = ["divergence_of_gain", "factor_for", "factor_for_all", "lower_ends", "rounded_up", "worst_divergence"]


def rounded_up(value: float, digits: int = 3) -> float:
    """The least number of so many significant digits that is not smaller.

    Example:
        >>> rounded_up(1.2301), rounded_up(2.0), rounded_up(0.010001, 2)
        (1.24, 2.0, 0.011)
    """
    if not 0 < value < math.inf:
        return value
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    return float(f"{math.ceil(value / step - 1e-9) * step:.{digits + 2}g}")


def lower_ends(run: SavedRun) -> np.ndarray:
    """The lower ends of the measured examples' MSE bounds, ascending; the bounds where ends are not known."""
    low = np.asarray(run.columns.get("mse_bound_low", run.columns["mse_bound"]), dtype=np.float64)
    return np.sort(low[status_of(run) != NOT_MEASURED])


def worst_divergence(run: SavedRun, name: str) -> float | None:
    """The largest D (upper end) of a question over measured examples and answers; None where there is none."""
    for question in run.questions:
        if question.name == name:
            high = np.asarray(question.divergence_high, dtype=np.float64)[status_of(run) != NOT_MEASURED]
            return float(np.max(high, initial=0.0))
    return None


def factor_for(verdict: Verdict, run: SavedRun, policy: Policy, blind: float | None) -> float | None:
    """f = (σ'/σ)² at which a broken rule would be kept; None where noise does not help, or nobody knows how much.

    Args:
        verdict: What the rule found.
        run: The run.
        policy: The policy.
        blind: What a blind guess of an input is off by; None: not known.
    """
    kind, subject = kind_and_subject(verdict.rule)
    found, limit = verdict.found, verdict.limit
    factor: float | None = None
    if found is None:
        return None
    if kind in ("min_error_share", "min_attribute_error_share", "min_attribute_error"):
        factor = _quotient(limit, found) ** 2
    elif kind == "min_mse_bound":
        factor = _quotient(limit, found)
    elif kind == "max_share_exposed" and blind is not None:
        factor = _quotient(blind**2, _spared_rank(run, limit))
    elif kind == "max_share_of_concern" and policy.mse_bound_of_concern is not None:
        factor = _quotient(policy.mse_bound_of_concern, _spared_rank(run, limit))
    elif kind == "max_gain_over_guessing" and limit > 0:
        factor = _quotient(worst_divergence(run, subject), divergence_of_gain(limit, _law(run, subject)))
    elif kind == "max_true_positive_rate" and policy.at_false_positive_rate < limit < 1:
        alpha = policy.at_false_positive_rate
        normal = _law(run, subject) == "normal"
        most = (ndtri(limit) - ndtri(alpha)) ** 2 / 2 if normal else divergence_of_rate(limit, alpha)
        factor = _quotient(worst_divergence(run, subject), float(most))
    return factor if factor is not None and 0 < factor < math.inf else None


def factor_for_all(
    verdicts: Sequence[Verdict], run: SavedRun, policy: Policy, blind: float | None
) -> tuple[float | None, list[Verdict]]:
    """The largest f that a broken rule needs, and the broken rules that more noise is not known to keep."""
    factors, others = list[float](), list[Verdict]()
    for verdict in verdicts:
        if verdict.passed:
            continue
        factor = factor_for(verdict, run, policy, blind)
        if factor is None:
            others.append(verdict)
        else:
            factors.append(factor)
    return max(factors, default=None), others


def _quotient(a: float | None, b: float) -> float:
    """a / b; NaN where one is not known, infinite for b = 0."""
    if a is None or math.isnan(b):
        return math.nan
    return a / b if b > 0 else math.inf


def _spared_rank(run: SavedRun, share: float) -> float:
    """The lower end that has to reach the threshold so that at most this share of the examples stays below."""
    low = lower_ends(run)
    place = math.floor(share * len(low) + 1e-9)
    return float(low[place]) if place < len(low) else math.inf


def _law(run: SavedRun, name: str) -> str:
    """What is known of a question's likelihoods: "normal", or "any"."""
    return next((question.law for question in run.questions if question.name == name), "any")


def divergence_of_gain(gain: float, law: str = "any") -> float:
    """The D at which any attacker tells two equally likely answers apart in 1/2 + gain of the cases at most.

    The inverse of :meth:`QuestionRecord.success`: of :func:`torchfil.guessing.largest_success` at a prior of 1/2, total
    variation 2·gain, or of Φ(sqrt(D/2)) between normal laws.

    Example:
        >>> from torchfil.guessing import largest_success
        >>> largest_success([divergence_of_gain(0.1), divergence_of_gain(0.4)], 0.5)
        tensor([0.6000, 0.9000], dtype=torch.float64)
    """
    if law == "normal":
        return float(2 * ndtri(min(0.5 + gain, 1.0)) ** 2)
    variation = min(2 * gain, 1.0)
    return max(2 * variation**2, -math.log1p(-(variation**2)) if variation < 1 else math.inf)

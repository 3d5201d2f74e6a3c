"""The goal of a run: every example's exposure, and the largest exposure that a target allows.

The exposure e of an example is 1/bound = tr(I)/d (unbiased attackers), or the D of a question's worst answer (every
attacker). Both scale as the square of a clip weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate

__all__ = ["Exposure", "Goal", "read_exposure"]

_DEFAULT_SHARE = 0.01


@dataclass(frozen=True)
class Exposure:
    """How exposed every example was in one run; it scales as the square of a clip weight.

    Attributes:
        value: e, [n], float64: 1/bound, or D of a question's worst answer.
        high: The upper end of e, [n], one-sided at a confidence; e itself without a confidence, and if the probes give
            no error.
        measured: Whether the run says anything about the example, bool [n].
        without_interval: How many measured examples have no interval.
        power: 1/2 if groups are compared by mean e^(1/2) (which is FIL), 1 if by mean e (D).
    """

    value: Tensor
    high: Tensor
    measured: Tensor
    without_interval: int = 0
    power: float = 0.5

    @property
    def spread(self) -> float:
        """The standard deviation of sqrt(e) over examples (of FIL η̄, or sqrt(D)), over its mean; 0: all alike."""
        root = self.value[self.measured].sqrt()
        return float(root.std(correction=0) / root.mean()) if bool((root > 0).any()) else 0.0

    def largest(self) -> tuple[float, float]:
        """The largest estimate and the largest upper end of the measured examples."""
        return float(self.value[self.measured].max()), float(self.high[self.measured].max())


@dataclass(frozen=True)
class Goal:
    """What a run should reach; checked when it is made.

    Attributes:
        target: The bound that every example should reach, or with a question the largest true-positive rate that any
            attacker may reach; None: ``share`` sets it, or there is none.
        question: Its name; None: Fisher information.
        false_positive_rate: The false-positive rate for the true-positive rate.
        share: The share of examples to bring down to the level at which the others begin.
        confidence: The one-sided confidence of the ends (from the probes' errors) that must meet the target; None: use
            estimates.
        group_ratio: The largest over the smallest of the groups' means that counts as equal.
        has_groups: Whether there are groups; then no share is assumed.

    Example:
        >>> Goal(target=2.0).most
        0.5
        >>> Goal(target=0.25, question="member").shown(Goal(target=0.25, question="member").most)
        0.25
    """

    target: float | None = None
    question: str | None = None
    false_positive_rate: float = 0.01
    share: float | None = None
    confidence: float | None = None
    group_ratio: float = 1.05
    has_groups: bool = False

    def __post_init__(self) -> None:
        target, alpha = self.target, self.false_positive_rate
        if self.question is not None and not 0 < alpha < 1:
            raise ValueError(f"false_positive_rate={alpha} must lie strictly between 0 and 1")
        if target is not None and self.question is None and not 0 < target < math.inf:
            raise ValueError(f"target={target} must be a positive, finite MSE bound")
        if target is not None and self.question is not None and not alpha < target < 1:
            raise ValueError(
                f"target={target} must lie between false_positive_rate={alpha} and 1: with question= it is the largest "
                "true-positive rate of any attacker, and a blind guess already reaches the false-positive rate"
            )
        if target is not None and self.share is not None:
            raise ValueError(f"target={target} and share={self.share} both say whom to spare; give one of them")
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"share={self.share} must lie strictly between 0 and 1: the share of examples to spare")
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            raise ValueError(
                f"confidence={self.confidence} must lie strictly between 0.5 and 1, or be None for estimates"
            )
        if not 1 < self.group_ratio < math.inf:
            raise ValueError(f"group_ratio={self.group_ratio} must be above 1: no finite run has equal means")

    @property
    def most(self) -> float:
        """e*, the largest exposure that meets the target; infinite if there is none."""
        if self.target is None:
            return math.inf
        return 1 / self.target if self.question is None else divergence_of_rate(self.target, self.false_positive_rate)

    def shown(self, exposure: float) -> float:
        """An exposure in the form that users read: the bound, or the true-positive rate."""
        if self.question is None:
            return 1 / exposure if exposure > 0 else math.inf
        return round(float(largest_true_positive_rate(exposure, self.false_positive_rate)), 12)

    def settled(self, exposure: Exposure) -> Goal:
        """The goal with the target that its share implies; unchanged if it has a target, or only groups."""
        share = self.share if self.share is not None or self.has_groups else _DEFAULT_SHARE
        if self.target is not None or share is None:
            return self
        ordered = exposure.high[exposure.measured].sort().values
        most = float(ordered[max(0, math.ceil((1 - share) * len(ordered)) - 1)])
        if most <= 0:
            raise ValueError(
                f"share={share}: only {int((ordered > 0).sum())} of {len(ordered)} examples leak anything, fewer than "
                "should be spared; give target="
            )
        return replace(self, target=self.shown(most), share=None)

    def missing(self, exposure: Exposure, ratio: float | None) -> float:
        """The worst exposure, or the groups' ratio, divided by what is allowed; ≤ 1: the goal is met."""
        return max(exposure.largest()[1] / self.most, 0.0 if ratio is None else ratio / self.group_ratio)


def read_exposure(leakage: Leakage, question: str | None, confidence: float | None) -> Exposure:
    """Every example's exposure in a run.

    Args:
        leakage: The run's results; they must include the question, if one is named.
        question: None: e = 1/bound = tr(I)/d, unbiased attackers. A name: D of its worst answer, every attacker.
        confidence: The one-sided confidence of the upper end, from the probes' errors; None: the estimate.

    Raises:
        ValueError: Nobody was measured, somebody's leakage is infinite (steps without noise), or a confidence was asked
            for and nobody has an interval.
    """
    quantity = leakage.get_mse_bound().raised(-1.0) if question is None else leakage.get_guess(question).divergence
    value = _worst(quantity.value)
    measured = leakage.was_measured().cpu()
    if not bool(measured.any()):
        raise ValueError("the run that train() returned measured nobody: take private steps before returning it")
    if bool(value[measured].isinf().any()):
        raise ValueError(
            f"{int(value[measured].isinf().sum())} examples leak without limit, because steps were taken without "
            "noise, and no clip weight can compensate for that; train with noise_multiplier > 0"
        )
    power = 0.5 if question is None else 1.0
    if confidence is None:
        return Exposure(value, value, measured, power=power)

    # Only the probes' errors count here. Another run could differ far more if one step decides, but this does not tell
    # whom to spare; the margin of the weights allows for it.
    high = _worst(quantity.interval(2 * confidence - 1, "probes")[1])
    told = high.isfinite()
    if not bool(told[measured].any()):
        raise ValueError(
            "the probes give nobody an error, so there are no lower ends to use: train longer, measure with "
            "num_probes=2 or more, or pass confidence=None to use the estimates of single runs"
        )
    return Exposure(value, torch.where(told, high, value), measured, int((measured & ~told).sum()), power)


def _worst(values: Tensor) -> Tensor:
    """The largest over answers, [n], float64 on the CPU."""
    return values.detach().double().cpu().reshape(len(values), -1).amax(dim=1).clamp(min=0)

"""Whose clip weight falls, and how far: weights ω in (0, 1] from what a run leaked about each example.

The exposure e of an example is 1/bound = tr(I)/d (unbiased attackers), or the D of a question's worst answer (every
attacker). If the clipped gradient of example i is multiplied by ω_i, its exposure is nearly multiplied by ω_i². For a
target exposure e*, one round computes (with the weights of the previous round on the right):

    ω_i ← ω_i · min(1, sqrt(e* / e_i))

rounded **down** to a grid of powers of 2^(−1/4), so that ω is constant for almost every small change of the data.
Weights of groups equalise means instead: one factor for all members, 1 for the least exposed group.

Plain functions of tensors; :func:`torchfil.equalise` repeats them over rounds of training.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import plain_key
from torchfil.accounting.leakage import Leakage
from torchfil.guessing import divergence_of_rate, largest_true_positive_rate
from torchfil.utils.errors import require

_DEFAULT_SHARE = 0.01
_GRID = 4  # steps per octave: coarse, so that weights are constant for almost every change of the data
_GRID_OF_GROUPS = 8 * _GRID  # a group's factor depends on many examples, so its grid may be finer
_CAUTION = 0.8  # damps a group's step: means fell by ω^1.3 on Adult (secret batches hide who pulls less), else by ω


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
        target, alpha, share = self.target, self.false_positive_rate, self.share
        if self.question is not None:
            require(0 < alpha < 1, f"false_positive_rate={alpha} must lie strictly between 0 and 1")
            rate = f"target={target} must lie between false_positive_rate={alpha} and 1: with question= it is a rate"
            require(target is None or alpha < target < 1, rate)
        else:
            require(target is None or 0 < target < math.inf, f"target={target} must be a positive, finite MSE bound")
        require(None in (target, share), f"target={target} and share={share} both say who is exposed; give one of them")
        require(share is None or 0 < share < 1, f"share={share} must lie strictly between 0 and 1")
        known = self.confidence is None or 0.5 < self.confidence < 1
        require(known, f"confidence={self.confidence} must lie strictly between 0.5 and 1, or be None for estimates")
        ratio = f"group_ratio={self.group_ratio} must be above 1: no finite run has equal means"
        require(1 < self.group_ratio < math.inf, ratio)

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
        leaking = f"share={share}: only {int((ordered > 0).sum())} of {len(ordered)} examples leak anything"
        require(most > 0, f"{leaking}, fewer than the share; give target=")
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

    def worst(values: Tensor) -> Tensor:  # over answers, [n]
        return values.detach().double().cpu().reshape(len(values), -1).amax(dim=1).clamp(min=0)

    quantity = leakage.get_mse_bound().raised(-1.0) if question is None else leakage.get_guess(question).divergence
    value, measured = worst(quantity.value), leakage.was_measured().cpu()
    require(bool(measured.any()), "the run that train() returned measured nobody: take private steps before that")
    infinite = int(value[measured].isinf().sum())
    require(not infinite, f"{infinite} examples leak without limit: train with noise_multiplier > 0 at every step")
    power = 0.5 if question is None else 1.0
    if confidence is None:
        return Exposure(value, value, measured, power=power)

    # Only the probes' errors count here. Another run could differ far more if one step decides, but this does not tell
    # whose weight should fall; the margin of the weights allows for it.
    high = worst(quantity.interval(2 * confidence - 1, "probes")[1])
    known = high.isfinite()
    none = "the probes give nobody an error: train longer, with num_probes=2 or more, or pass confidence=None"
    require(bool(known[measured].any()), none)
    return Exposure(value, torch.where(known, high, value), measured, int((measured & ~known).sum()), power)


def rounded_down(weights: Tensor) -> Tensor:
    """The largest 2^(−k/4), k = 0, 1, …, that is not above each weight.

    Example:
        >>> rounded_down(torch.tensor([1.0, 0.9, 0.5, 0.4]))
        tensor([1.0000, 0.8409, 0.5000, 0.3536])
    """
    steps = torch.ceil(-_GRID * weights.log2() - 1e-6)  # values on the grid stay there despite rounding errors
    return torch.exp2(-steps / _GRID).clamp(max=1.0)


def lowered_weights(weights: Tensor, exposure: Exposure, most: float, margin: float = 1.0) -> Tensor:
    """ω_i · min(1, sqrt(e* / (margin · e_i))), rounded down to the grid; no weight rises.

    A weight never rises again, because one run cannot distinguish safe examples from lucky ones.

    Args:
        weights: ω of the run that the exposure comes from, [n].
        exposure: The exposure of that run; its upper ends count.
        most: e*.
        margin: Aim at e*/margin. Examples below that keep their weight.

    Example:
        >>> e = torch.tensor([0.5, 4.0])
        >>> lowered_weights(torch.ones(2), Exposure(e, e, torch.tensor([True, True])), 1.0)
        tensor([1.0000, 0.5000])
    """
    aim = most / margin
    exposed = exposure.measured & (exposure.high > aim)
    factor = (aim / exposure.high.clamp(min=aim)).sqrt().to(weights)
    return torch.where(exposed, rounded_down(weights * factor), weights)


def smallest_in_cell(weights: Tensor, cells: Tensor) -> Tensor:
    """The smallest weight of each example's cell, [n]: a function of the cell alone.

    Example:
        >>> smallest_in_cell(torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0, 0, 1]))
        tensor([0.5000, 0.5000, 1.0000])
    """
    smallest = weights.new_ones(int(cells.max()) + 1).scatter_reduce(0, cells, weights, "amin")
    return smallest[cells]


def group_levels(exposure: Exposure, weights_ratio: Tensor | None, groups: Tensor) -> Tensor:
    """Every group's mean FIL (of a question: mean D), [groups]; NaN if no member was measured.

    Args:
        exposure: The exposure of a run.
        weights_ratio: Factors for the weights, [n]: the levels are then predictions. None: as measured.
        groups: The number of every example's group, [n].
    """
    scaled = exposure.value if weights_ratio is None else exposure.value * weights_ratio.square()
    count = int(groups.max()) + 1
    own = groups[exposure.measured]
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, own, scaled[exposure.measured] ** exposure.power)
    return sums / torch.bincount(own, minlength=count)


def group_factors(factors: Tensor, levels: Tensor, *, power: float, ratio: float) -> Tensor:
    """One common weight for each group, [groups], 1 for the least exposed: mean exposures become nearly equal.

    If a group's level L is above (1 + ratio)/2 times the smallest level L₀, its factor is multiplied by
    (L₀/L)^(0.8/(2 power)). Then all are divided by the largest, and rounded to the nearest 2^(−k/32).

    Args:
        factors: The factors of the run that the levels come from, [groups].
        levels: See :func:`group_levels`.
        power: See :class:`Exposure`.
        ratio: The largest level over the smallest that counts as equal.

    Example:
        >>> group_factors(torch.ones(2), torch.tensor([0.5, 1.0]), power=0.5, ratio=1.0)
        tensor([1.0000, 0.5694])
    """
    known = levels.isfinite() & (levels > 0)
    least = levels[known].min()
    above = known & (levels > least * (1 + ratio) / 2)
    changed = factors * torch.where(above, (least / levels) ** (0.5 * _CAUTION / power), 1.0).to(factors)
    steps = (-_GRID_OF_GROUPS * (changed / changed.max()).log2()).round()
    return torch.exp2(-steps / _GRID_OF_GROUPS)


def members_of(labels: Any, ids: Sequence[Hashable], name: str) -> tuple[Tensor, tuple[Hashable, ...]]:
    """The number of every example's group, [n], and the groups' labels.

    Args:
        labels: One label per example, in the order of the data set (a sequence, an array, a tensor), or a mapping
            id ↦ label that has every id.
        ids: All ids, in the order of the data set.
        name: The argument's name, for errors.
    """
    if isinstance(labels, Mapping):
        missing = [each for each in ids if each not in labels]
        require(
            not missing, f"{name} has no label for {len(missing)} of {len(ids)} ids, {missing[:1]} among them; map all"
        )
        labels = [labels[each] for each in ids]
    listed = [plain_key(label) for label in (labels.tolist() if hasattr(labels, "tolist") else list(labels))]
    require(len(listed) == len(ids), f"{name} has {len(listed)} labels for {len(ids)} examples; give one for each")
    require(all(label == label for label in listed), f"{name} has NaN as a label; use a label such as 'not known'")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(listed))}
    return torch.tensor([numbers[label] for label in listed]), tuple(numbers)


@dataclass(frozen=True)
class RoundWeights:
    """The weights of one round: one for each example, times one for each group.

    Attributes:
        own: [n].
        factors: The groups' factors, [groups], the largest is 1; None: no groups.
        groups: The number of every example's group, [n].
        labels: The groups' labels.
        cells: The number of every example's public cell, [n]; None: every example is a cell.
        floor: No weight falls below it.
        margin: As in :func:`lowered_weights`.
    """

    own: Tensor
    factors: Tensor | None = None
    groups: Tensor | None = None
    labels: tuple[Hashable, ...] = ()
    cells: Tensor | None = None
    floor: float = 1 / 16
    margin: float = 1.0

    @classmethod
    def starting(
        cls, weights: Tensor | None, ids: Sequence[Hashable], groups: Any, by: Any, **options: Any
    ) -> RoundWeights:
        """The weights of the first round: the given ones, or 1; checks groups and cells against the examples' ids.

        Args:
            weights: [n]; None: 1 for everybody.
            ids: All ids, in the order of the data set.
            groups: Labels as :func:`members_of` takes them, or None.
            by: Public cells, in the same way, or None.
            **options: ``floor`` and ``margin``.
        """
        own = torch.ones(len(ids), dtype=torch.float64) if weights is None else weights
        require(own.shape == (len(ids),), f"weights has shape {tuple(own.shape)} for {len(ids)} examples; give [n]")
        cells = None if by is None else members_of(by, ids, "by")[0]
        if groups is None:
            return cls(own, cells=cells, **options)
        numbers, labels = members_of(groups, ids, "groups")

        # only if groups consist of whole cells do weights depend on the cell alone
        if cells is not None and len(torch.unique(torch.stack([numbers, cells]), dim=1).T) > int(cells.max()) + 1:
            raise ValueError(
                "groups cut through the cells of by=: the weights would reveal a member's group; add the groups' "
                "labels to the cells if they are public, or leave groups out"
            )
        return cls(own, torch.ones(len(labels), dtype=torch.float64), numbers, labels, cells, **options)

    @property
    def values(self) -> Tensor:
        """ω, [n]."""
        if self.factors is None or self.groups is None:
            return self.own
        return (self.own * self.factors[self.groups]).clamp(min=self.floor)

    def means(self, exposure: Exposure) -> dict[Hashable, float]:
        """Every group's mean FIL (of a question: mean D); empty without groups."""
        if self.groups is None:
            return {}
        return dict(zip(self.labels, group_levels(exposure, None, self.groups).tolist(), strict=True))

    def ratio(self, exposure: Exposure) -> float | None:
        """The largest of these means over the smallest; None without groups."""
        known = [mean for mean in self.means(exposure).values() if mean > 0]
        return max(known) / min(known) if known else None

    def after(self, exposure: Exposure, goal: Goal) -> RoundWeights:
        """The weights of the next round."""
        own = lowered_weights(self.own, exposure, goal.most, self.margin).clamp(min=self.floor)
        if self.cells is not None:
            own = smallest_in_cell(own, self.cells)
        if self.factors is None or self.groups is None:
            return replace(self, own=own)

        # groups are compared as they will be once single examples pull less
        levels = group_levels(exposure, own / self.own, self.groups)
        factors = group_factors(self.factors, levels, power=exposure.power, ratio=goal.group_ratio)
        return replace(self, own=own, factors=factors)

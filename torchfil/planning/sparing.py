"""Whom to spare, and how much: clip weights ω in (0, 1] from what a run leaked about each example.

If the clipped gradient of example i is multiplied by ω_i, its Fisher information and the D of its questions are nearly
multiplied by ω_i². For a target exposure e*, one round computes (with the weights of the previous round on the right):

    ω_i ← ω_i · min(1, sqrt(e* / e_i)),   e_i = tr I_i / d_i = 1/bound_i, or D_i of a question's worst answer,

rounded **down** to a grid of powers of 2^(−1/grid), so that ω is constant for almost every small change of the data.
Weights of groups equalise means instead: one factor for all members, 1 for the least exposed group.

Plain functions of tensors; :func:`torchfil.equalise` repeats them over rounds of training.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import plain_key
from torchfil.planning.goal import Exposure, Goal

__all__ = [
    "RoundWeights",
    "group_factors",
    "group_levels",
    "lowered_weights",
    "members_of",
    "rounded_down",
    "smallest_in_cell",
]

_STEPS_OF_GROUPS = 8  # a group's factor depends on many examples, so its grid may be finer
_CAUTION = 0.8  # damps a group's step: means fell by ω^1.3 on Adult (secret batches hide who pulls less), else by ω


def rounded_down(weights: Tensor, grid: int) -> Tensor:
    """The largest 2^(−k/grid), k = 0, 1, …, that is not above each weight.

    Example:
        >>> rounded_down(torch.tensor([1.0, 0.9, 0.5, 0.3]), 2)
        tensor([1.0000, 0.7071, 0.5000, 0.2500])
    """
    steps = torch.ceil(-grid * weights.log2() - 1e-6)  # values on the grid stay there despite rounding errors
    return torch.exp2(-steps / grid).clamp(max=1.0)


def lowered_weights(weights: Tensor, exposure: Exposure, most: float, *, margin: float = 1.0, grid: int = 4) -> Tensor:
    """ω_i · min(1, sqrt(e* / (margin · e_i))), rounded down to the grid; no weight rises.

    A weight never rises again, because one run cannot distinguish safe examples from lucky ones.

    Args:
        weights: ω of the run that the exposure comes from, [n].
        exposure: The exposure of that run; its upper ends count.
        most: e*.
        margin: Aim at e*/margin. Examples below that keep their weight.
        grid: Steps per octave.

    Example:
        >>> e = torch.tensor([0.5, 4.0])
        >>> lowered_weights(torch.ones(2), Exposure(e, e, torch.tensor([True, True])), 1.0)
        tensor([1.0000, 0.5000])
    """
    aim = most / margin
    exposed = exposure.measured & (exposure.high > aim)
    factor = (aim / exposure.high.clamp(min=aim)).sqrt().to(weights)
    return torch.where(exposed, rounded_down(weights * factor, grid), weights)


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


def group_factors(factors: Tensor, levels: Tensor, *, power: float, ratio: float, grid: int) -> Tensor:
    """One common weight for each group, [groups], 1 for the least exposed: mean exposures become nearly equal.

    If a group's level L is above (1 + ratio)/2 times the smallest level L₀, its factor is multiplied by
    (L₀/L)^(0.8/(2 power)). Then all are divided by the largest, and rounded to the nearest 2^(−k/(8 grid)).

    Args:
        factors: The factors of the run that the levels come from, [groups].
        levels: See :func:`group_levels`.
        power: See :class:`Exposure`.
        ratio: The largest level over the smallest that counts as equal.
        grid: Steps per octave of single weights.

    Example:
        >>> group_factors(torch.ones(2), torch.tensor([0.5, 1.0]), power=0.5, ratio=1.0, grid=4)
        tensor([1.0000, 0.5694])
    """
    known = levels.isfinite() & (levels > 0)
    least = levels[known].min()
    above = known & (levels > least * (1 + ratio) / 2)
    change = torch.where(above, (least / levels) ** (0.5 * _CAUTION / power), 1.0).to(factors)
    changed = factors * change
    steps = (-_STEPS_OF_GROUPS * grid * (changed / changed.max()).log2()).round()
    return torch.exp2(-steps / (_STEPS_OF_GROUPS * grid))


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
        if missing:
            raise ValueError(
                f"{name} has no label for {len(missing)} of {len(ids)} ids, {missing[0]!r} among them; map every id, "
                "if need be to a label for 'not known'"
            )
        labels = [labels[each] for each in ids]
    listed = [plain_key(label) for label in (labels.tolist() if hasattr(labels, "tolist") else list(labels))]
    if len(listed) != len(ids):
        raise ValueError(
            f"{name} has {len(listed)} labels for {len(ids)} examples; give one for each, in the order of the data"
        )
    if any(label != label for label in listed):
        raise ValueError(f"{name} has NaN as a label; use a label such as 'not known' instead")
    distinct = tuple(dict.fromkeys(listed))
    numbers = {label: number for number, label in enumerate(distinct)}
    return torch.tensor([numbers[label] for label in listed]), distinct


@dataclass(frozen=True)
class RoundWeights:
    """The weights of one round: one for each example, times one for each group.

    Attributes:
        own: [n], powers of 2^(−1/grid).
        factors: The groups' factors, [groups], the largest is 1; None: no groups.
        groups: The number of every example's group, [n].
        labels: The groups' labels.
        cells: The number of every example's public cell, [n]; None: every example is a cell.
        floor: No weight falls below it.
        margin: As in :func:`lowered_weights`.
        grid: Steps per octave.
    """

    own: Tensor
    factors: Tensor | None = None
    groups: Tensor | None = None
    labels: tuple[Hashable, ...] = ()
    cells: Tensor | None = None
    floor: float = 1 / 16
    margin: float = 1.0
    grid: int = 4

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
            **options: ``floor``, ``margin`` and ``grid``.
        """
        own = torch.ones(len(ids), dtype=torch.float64) if weights is None else weights
        if own.shape != (len(ids),):
            raise ValueError(f"weights has shape {tuple(own.shape)} for {len(ids)} examples; give one weight for each")
        started = cls(own, **options)
        if by is not None:
            started = replace(started, cells=members_of(by, ids, "by")[0])
        if groups is None:
            return started
        numbers, labels = members_of(groups, ids, "groups")
        if started.cells is not None:
            _check_whole_cells(numbers, started.cells)
        factors = torch.ones(len(labels), dtype=torch.float64)
        return replace(started, factors=factors, groups=numbers, labels=labels)

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
        own = lowered_weights(self.own, exposure, goal.most, margin=self.margin, grid=self.grid).clamp(min=self.floor)
        if self.cells is not None:
            own = smallest_in_cell(own, self.cells)
        if self.factors is None or self.groups is None:
            return replace(self, own=own)

        # groups are compared as they will be once single examples are spared
        levels = group_levels(exposure, own / self.own, self.groups)
        factors = group_factors(self.factors, levels, power=exposure.power, ratio=goal.group_ratio, grid=self.grid)
        return replace(self, own=own, factors=factors)


def _check_whole_cells(groups: Tensor, cells: Tensor) -> None:
    """Raise unless groups consist of whole cells: only then do weights depend on the cell alone."""
    pairs = len(torch.unique(torch.stack([groups, cells]), dim=1).T)
    if pairs > int(cells.max()) + 1:
        raise ValueError(
            "groups cut through the cells of by=: the weights would reveal a member's group, which is not public; add "
            "the groups' labels to the cells if they are public, or leave groups out"
        )

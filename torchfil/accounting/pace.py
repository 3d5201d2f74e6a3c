r"""How much to measure: probes and the share of steps for a target accuracy, and who deserves more
probes.

One participation of an example, measured with probability π by k probes of relative variance v
each, adds X² w to the variance of its sum, w = (1 + v/k)/π − 1. Suppose m participations have the
relative variance e², and R more follow, each c times the mean of the past ones (most examples leak
less and less). The target r² is reached at the end if

    r² (m + cR)² = e² m² + h c² R w,

where h = m Σx²/(Σx)² shows how unevenly an example's sum is made up (1: equal parts). This gives w.
The cheapest way to spend it is few probes on few steps: k = 2 (one probe says nothing about its
error) and π = (1 + v/k)/(1 + w), with more probes only if π would exceed 1. The choice depends only
on the past, and the training does not depend on it, so every sum stays unbiased.

A few examples determine the lower end that holds for all examples together, in two ways. First, the
most exposed must be known closely; these have the largest sums so far. Second, if an example hardly
leaks until one step makes up most of its sum, its number depends on that step's probe alone; in
such a step the clipped gradient is large compared with what the example has leaked so far. The
step's addition is predicted as x = κ‖g̃‖², where κ is the batch's ratio of Σ tr I to Σ‖g̃‖² so far,
and x²/(Σ tr I + x) is large for such steps.

Both criteria depend on the past and on the weights, never on the probes of the step. So measuring
these examples again, with more probes that replace the first, keeps every sum unbiased. Nothing
waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ledger import Contribution, Ledger

_PROBES = (2, 3, 4, 6, 9, 13)
_LOWEST_RATE = 1 / 32
_SLACK = 0.03  # share of the final variance below which more probes are not worth their cost
_AIM = 0.9  # of the target, a margin for what the trend does not show
_MOST_UNEVEN = 4.0  # the largest h that is believed
_USUAL_SPREAD = 0.1  # v of a tanh network, until it is measured
_CHANGING = ("num_probes", "rate", "spread", "level", "noted")
_PASSES_AHEAD = 8.0  # passes over the data that are expected to follow, if nobody says


def choose(
    target: float,
    relative_variance: float,
    passes: float,
    remaining: float,
    spread: float,
    trend: float = 1.0,
    unevenness: float = 1.0,
) -> tuple[int, float]:
    """k and π by the formulas above.

    Args:
        target: r.
        relative_variance: e².
        passes: m.
        remaining: R.
        spread: v.
        trend: c.
        unevenness: h.
    """
    final = target**2 * (passes + trend * remaining) ** 2
    allowed = max(final - relative_variance * passes**2, _SLACK * final) / (
        unevenness * trend**2 * remaining
    )
    probes = next((k for k in _PROBES if spread / k <= allowed), _PROBES[-1])
    return probes, min(1.0, max(_LOWEST_RATE, (1 + spread / probes) / (1 + allowed)))


@dataclass
class Pace:
    """The probes and the rate of the current step, fixed or steered towards a target.

    Attributes:
        num_probes: k.
        rate: π.
        target: r, the target for the relative standard error of the median example's tr I; None: k
            and π are fixed.
        epochs: The planned number of passes over the data; None: at least eight more from any
            point.
        spread: The recent v.
        level: The recent mean tr I of a participation; 0: not known yet.
        noted: tr I and its variance in the last batch measured at this pace, [batch] each, on the
            device on which they were computed, so that nothing waits for a GPU; None: no batch yet.
    """

    num_probes: int
    rate: float
    target: float | None = None
    epochs: float | None = None
    spread: float = _USUAL_SPREAD
    level: float = 0.0
    noted: tuple[Tensor, Tensor] | None = None

    @classmethod
    def steered(cls, target: float, epochs: float | None) -> Pace:
        """Towards a target, from two probes at every step."""
        return cls(_PROBES[0], 1.0, target, epochs)

    def note(self, contributions: Iterable[Contribution]) -> None:
        """Note what was measured at the current pace.

        Do nothing for batches that were not measured.
        """
        for each in contributions:
            if each.columns:
                trace = each.columns["trace"]
                self.noted = trace["value"], trace["variance"]

    def update(self, ledger: Ledger, passes: float) -> None:
        """Adjust the pace to the target, the sums so far and what was noted.

        Args:
            ledger: The sums.
            passes: Steps times sampling rate: the expected number of participations of an example.
        """
        assert self.target is not None

        # follow the last batch; a step without noise says nothing about usual steps
        if self.noted is not None:
            values, variances = self.noted
            self.noted = None
            square, variance, mean = torch.stack(
                [values.square().sum(), variances.sum(), values.mean()]
            ).tolist()
            if 0 < square < math.inf:
                spread = self.num_probes * variance / square
                self.spread = min(2.0, max(1e-4, 0.7 * self.spread + 0.3 * spread))
                self.level = 0.7 * self.level + 0.3 * mean if self.level else mean

        # the median example's error so far, and what is still to come
        trace = ledger.sums["trace"]
        seen = (trace > 0) & trace.isfinite()
        if not seen.any():
            return
        relative = float((ledger.sums["variance"][seen] / trace[seen].square()).median())
        ahead = (
            max(_PASSES_AHEAD, passes / 4)
            if self.epochs is None
            else max(0.5, self.epochs - passes)
        )

        usual = float(trace[trace.isfinite()].mean()) / passes
        trend = min(1.0, max(0.1, self.level / usual)) if self.level else 1.0
        uneven = (
            ledger.sums["participations"][seen]
            * ledger.sums["trace_square"][seen]
            / trace[seen].square()
        )
        unevenness = min(_MOST_UNEVEN, max(1.0, float(uneven.median())))
        self.num_probes, self.rate = choose(
            _AIM * self.target, relative, max(passes, 1.0), ahead, self.spread, trend, unevenness
        )

    def state_dict(self) -> dict[str, Any]:
        """What changes."""
        return {name: getattr(self, name) for name in _CHANGING}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name in _CHANGING:
            setattr(self, name, state[name])


def exposed_rows(trace: Tensor, squared_norm: Tensor, present: Tensor, count: int) -> Tensor:
    """The rows of a batch to measure with more probes, [count] or all: half the most exposed, half
    sudden steps.

    Args:
        trace: Σ tr I of the batch's examples so far, [batch].
        squared_norm: Σ‖g̃‖² of them so far, [batch].
        present: ‖g̃‖² at this step, [batch].
        count: The number of rows.

    Example:
        >>> trace, squares = torch.tensor([9.0, 1.0, 0.1, 0.1]), torch.tensor([9.0, 1.0, 0.1, 0.1])
        >>> exposed_rows(trace, squares, torch.tensor([0.1, 0.1, 0.1, 0.5]), 2).tolist()
        [0, 3]
    """
    if count >= len(trace):
        return torch.arange(len(trace), device=trace.device)
    largest = trace.topk(-(-count // 2)).indices
    ahead = (
        present * trace.sum() / squared_norm.sum().clamp(min=torch.finfo(squared_norm.dtype).tiny)
    )
    sudden = ahead.square() / (trace + ahead).clamp(min=torch.finfo(trace.dtype).tiny)
    sudden = sudden.index_fill(0, largest, -1.0)
    return torch.cat([largest, sudden.topk(count // 2).indices])

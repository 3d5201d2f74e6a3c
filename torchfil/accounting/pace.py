r"""How much to measure: probes and the share of steps.

What counts is the error of the most exposed 5 %. A draw of theirs, measured with probability π by k
probes of relative variance v each and predicted with the relative squared error ε², adds X² w to
the variance of Ŝ (:mod:`torchfil.accounting.prediction`),

    w = v/(kπ) + ε² (1−π)/π.

Suppose m draws have the relative variance e², and R more follow, each c times the mean of the past
ones (most examples leak less and less). The target r² is reached at the end if

    r² (m + cR)² = e² m² + h c² R w,

where h, the mean of X² over the squared mean, shows how unevenly a sum is made up. This gives w. Of
all k with a π ≤ 1 that spends it, the one with the smallest cost π(k + ½) is taken (one probe says
nothing about its own error, so k ≥ 2). If no target is given, r² is a tenth of what batches and
path leave open anyway: measuring then adds 5 % to the error of measuring every draw exactly.

The first pass over the data is measured throughout. The choice depends only on the past, and the
training does not depend on it, so every sum stays unbiased.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ledger import Contribution, Ledger
from torchfil.accounting.sums import path_spread, run_variance

_PROBES = (2, 3, 4, 6, 9, 13)
_OF_A_PASS = 0.5  # what measuring costs besides its probes, in probes
_LOWEST_RATE = 1 / 32
_SLACK = 0.03  # share of the final variance below which more probes are not worth their cost
_AIM = 0.9  # of the target, a margin for what the trend does not show
_MOST_UNEVEN = 4.0  # the largest h that is believed
_USUAL_SPREAD = 0.1  # v of a tanh network, until it is measured
_CHANGING = ("num_probes", "rate", "spread", "level", "noted")
_PASSES_AHEAD = 8.0  # passes over the data that are expected to follow, if nobody says
_FIRST_PASSES = 1.0  # that are measured throughout
_EXPOSED = 0.05  # of the examples: whose error counts
_ADDED = 1.05  # the error, relative to that of measuring every draw exactly, if nobody says

logger = logging.getLogger(__name__)


def choose(
    target: float,
    relative_variance: float,
    passes: float,
    remaining: float,
    spread: float,
    missed: float,
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
        missed: ε².
        trend: c.
        unevenness: h.

    Example:
        >>> choose(0.1, 0.0, 1.0, 19.0, spread=0.1, missed=0.1)
        (2, 0.48...)
    """
    final = target**2 * (passes + trend * remaining) ** 2
    allowed = max(final - relative_variance * passes**2, _SLACK * final) / (
        unevenness * trend**2 * remaining
    )
    rates = {k: (spread / k + missed) / (allowed + missed) for k in _PROBES}
    enough = [k for k in _PROBES if rates[k] <= 1] or [_PROBES[-1]]
    probes = min(enough, key=lambda k: max(rates[k], _LOWEST_RATE) * (k + _OF_A_PASS))
    return probes, min(1.0, max(_LOWEST_RATE, rates[probes]))


@dataclass
class Pace:
    """The probes and the rate of the current step, fixed or planned.

    Attributes:
        num_probes: k.
        rate: π.
        is_planned: Whether k and π are chosen during the run.
        target: r, the target for the relative standard error of tr I of the most exposed 5 %; None:
            a twentieth more than the error of measuring every draw exactly.
        epochs: The planned number of passes over the data; None: at least eight more from any
            point.
        spread: The recent v.
        level: The recent mean tr I of a draw; 0: not known yet.
        error: The relative error of the most exposed 5 % so far, of batches, path and measuring;
            NaN: not known yet.
        added: The part of it that comes from measuring.
        noted: tr I and its variance in the last batch measured at this pace, [batch] each, on the
            device on which they were computed, so that nothing waits for a GPU; None: no batch yet.
    """

    num_probes: int
    rate: float
    is_planned: bool = False
    target: float | None = None
    epochs: float | None = None
    spread: float = _USUAL_SPREAD
    level: float = 0.0
    error: float = math.nan
    added: float = math.nan
    noted: tuple[Tensor, Tensor] | None = None

    @classmethod
    def planned(cls, target: float | None, epochs: float | None) -> Pace:
        """From two probes at every step."""
        return cls(_PROBES[0], 1.0, True, target, epochs)

    def __str__(self) -> str:
        words = f"{100 * self.rate:.3g} % of the steps with {self.num_probes} probes"
        if math.isnan(self.error):
            return words
        return (
            f"{words}; the most exposed 5 % are known to ± {100 * self.error:.2g} %, of which "
            f"measuring makes up {100 * self.added:.2g} %"
        )

    def note(self, contributions: Iterable[Contribution]) -> None:
        """Note what was measured at the current pace.

        Do nothing for batches that were not measured.
        """
        for each in contributions:
            if "trace" in each.columns:
                trace = each.columns["trace"]
                self.noted = trace["value"], trace["variance"]

    def update(self, ledger: Ledger, passes: float) -> None:
        """Adjust the pace to the sums so far and what was noted.

        Args:
            ledger: The sums.
            passes: Steps times sampling rate: the expected number of draws of an example.
        """
        self._follow_last_batch()
        top = ledger.exposed(_EXPOSED)
        if passes < _FIRST_PASSES or top is None:
            return
        spread = path_spread("trace", top)
        batches, every = run_variance("trace", "variance", top, spread, ledger.draw_rate is None)
        square = top["trace"].square()
        usual = every.isfinite() & batches.isfinite()
        numbers = [
            top["variance"].double() / square,
            batches.clamp(min=0) / square,
            torch.where(usual, every, batches.clamp(min=0) + top["variance"]) / square,
        ]
        weighing = [top["trace_missed_by"].double().sum(), top["trace_missed_of"].double().sum()]
        measuring, drawing, whole, missed_by, missed_of, mean, near = torch.stack(
            [
                *(each.mean() for each in numbers),
                *weighing,
                ledger.traces().nan_to_num(posinf=0.0).mean(),
                spread.values["near"].nan_to_num(posinf=0.0).mean(),
            ]
        ).tolist()
        if not math.isfinite(whole):  # steps without noise
            return
        self.error, self.added = math.sqrt(whole), math.sqrt(measuring)

        # what is still to come
        ahead = (
            max(_PASSES_AHEAD, passes / 4)
            if self.epochs is None
            else max(0.5, self.epochs - passes)
        )
        target = self.target
        if target is None:
            exactly = max(whole - measuring - drawing, 0.0) + drawing * passes / (passes + ahead)
            target = math.sqrt((_ADDED**2 - 1) * exactly)
        usual_level = max(mean, 1e-300) / passes
        trend = min(1.0, max(0.1, self.level / usual_level)) if self.level else 1.0
        missed = missed_by / missed_of if missed_of > 0 else 1.0
        missed = min(2.0, max(0.01, missed - self.spread / self.num_probes))
        uneven = min(_MOST_UNEVEN, 1 + near / 2)
        before = self.num_probes, self.rate
        self.num_probes, self.rate = choose(
            _AIM * target, measuring, passes, ahead, self.spread, missed, trend, uneven
        )
        if before != (self.num_probes, self.rate):
            logger.info("from now on measuring %s", self)

    def _follow_last_batch(self) -> None:
        """v and the mean of the last batch; a step without noise says nothing about usual steps."""
        if self.noted is None:
            return
        values, variances = self.noted
        self.noted = None
        square, variance, mean = torch.stack(
            [values.square().sum(), variances.sum(), values.mean()]
        ).tolist()
        if 0 < square < math.inf:
            spread = self.num_probes * variance / square
            self.spread = min(2.0, max(1e-4, 0.7 * self.spread + 0.3 * spread))
            self.level = 0.7 * self.level + 0.3 * mean if self.level else mean

    def state_dict(self) -> dict[str, Any]:
        """What changes."""
        return {name: getattr(self, name) for name in _CHANGING}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name in _CHANGING:
            setattr(self, name, state[name])

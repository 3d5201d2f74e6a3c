r"""How what steps add is summed: columns in, sums by name out.

A step measures one column for each tracked quantity and question: X of every example of
the batch, with what is known about the error of X. Measured with probability π, it counts as X/π,
with the variance X²(1−π)/π² + v/π, where v is that of X. :class:`Summed` says which sums are kept
of a column; nothing else knows.

How far one run can be off. The bounds are about E[S], S = Σ_t B_t X_t: X_t is what a step would
add, B_t whether it draws the example. One run gives one S. Besides probes and skipped steps, two
things change it:

* the batches: Var = Σ_t q(1−q) X_t², of which (1−q) Σ B_t X_t² is an unbiased estimate; 0 if
  batches are known;
* the path: X_t depends on the weights, and so on all noise before t. Runs diverge for good, and
  momentum and Adam make the weights move smoothly: consecutive participations are much alike
  although runs differ. So the distance at which they are compared grows with the run: X is compared
  at the participations 0, 4, 8, 12, 16, 24, 32, 48, 64, … (:func:`compared`). With γ the mean
  square of its changes from each to the next, weighted by their distance and beyond the probes'
  noise, X has the variance γ/2, and that of S is taken as m²γ/2, whatever the length m of the run:
  as if all its participations were off together. Runs that forget their past vary less, and an
  example whose leakage falls as it is learned adds to γ: both make it too large. Averages over runs
  need no such rule.

γ of one example comes from few changes, and is too small just where its sum is too small. So all
examples of a run share the mean of γ, each relative to the square of its mean. Fewer than five
measured participations say nothing: the error is infinite. ``benchmarks/coverage.py --simulate``
measures how often lower ends are too high, by optimizer and sample rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST_PARTICIPATIONS = 5
_OF_CHANGES = 0.5  # of the mean squared change, to the mean's variance


# X of one tracked quantity or question, as one step measured it: "value", [batch, …]. "variance":
# v, of its sampling error. "noise": the same or less, to be subtracted from squares of X. For the
# trace also "freedom", the degrees of freedom of v; "certain", the part of X that was not sampled;
# "limit", a variance that on average is not too small, whatever the probes. What is missing is 0.
Column = dict[str, Tensor]
Columns = Mapping[str, Column]  # by the names of quantities and questions


class Sum(NamedTuple):
    """The shape of a sum for one example, and its dtype.

    Values are summed in float64, so that they keep a precision of 1e-6 however many steps there
    are. Sums that only describe the error of a value are in float32 (``ERROR``): 1e-4 after 10⁵
    participations.
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64


ERROR = torch.float32
COUNT = Sum(dtype=torch.int32)
OWN_SUMS = {
    "squared_norm": Sum(),
    "participations": COUNT,
    "missed": COUNT,
    "num_coordinates": COUNT,
}


# ------------------------------------------------------------------ how far one run can be off


def path_sums(name: str) -> tuple[str, ...]:
    """The names of the sums: X², the last compared X, Σ distance · change², and how often it was
    measured.

    Example:
        >>> path_sums("trace")
        ('trace_square', 'trace_last', 'trace_changes', 'trace_measured')
    """
    return f"{name}_square", f"{name}_last", f"{name}_changes", f"{name}_measured"


def path_layout(name: str, shape: tuple[int, ...] = ()) -> dict[str, Sum]:
    """The sums of :func:`path_sums`: three that describe errors, and a count."""
    *errors, measured = path_sums(name)
    return {**{error: Sum(shape, ERROR) for error in errors}, measured: Sum(shape, torch.int32)}


def compared(measured: Tensor) -> Tensor:
    """Which of so many measured participations, numbered from 0, is the last whose X is compared,
    in float64.

    Number i is compared if max(4, 2^(⌊log₂ i⌋ − 1)) divides it: distances are 4, and later a
    quarter to a half of i.

    Example:
        >>> compared(torch.tensor([0, 1, 4, 5, 16, 17, 24, 25, 70]))
        tensor([ 0.,  0.,  0.,  4., 12., 16., 16., 24., 64.], dtype=torch.float64)
    """
    last = (measured - 1).clamp(min=0).double()
    return last - last % (1 << (torch.frexp(last).exponent - 2).clamp(min=2))


def relative_change(
    name: str, sums: Mapping[str, Tensor], participations: Tensor
) -> tuple[Tensor, Tensor]:
    """γ relative to the squared mean (0 if unknown), and for which examples it is known, [n, …]
    each.

    Args:
        name: The sum's name.
        sums: The sums of some examples.
        participations: [n].
    """
    total, changes, measured = (
        sums[each].double() for each in (name, f"{name}_changes", f"{name}_measured")
    )
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))

    # sums that are 0 or infinite have no uncertainty
    leaks = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() & (total > 0)
    mean = total / drawn.clamp(min=1)
    relative = (changes / compared(measured).clamp(min=1)).clamp(min=0) / mean.square()
    return torch.where(leaks, relative, 0.0), leaks


def run_variance(
    name: str,
    sums: Mapping[str, Tensor],
    participations: Tensor,
    sample_rate: float | None,
    typical: Tensor,
) -> tuple[Tensor, Tensor]:
    """The variance of the sum due to the batches, and that due to the path, [n, …] each.

    Infinite if unknown.

    Args:
        name: The sum's name.
        sums: The sums of the examples.
        participations: [n].
        sample_rate: q; None: batches are known.
        typical: The mean of γ, relative to the squared mean, over all examples, […].
    """
    total, square, measured = (
        sums[each].double() for each in (name, f"{name}_square", f"{name}_measured")
    )
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))
    batches = torch.zeros_like(total) if sample_rate is None else (1 - sample_rate) * square
    batches = torch.where(drawn > 0, batches, math.inf if sample_rate is not None else 0.0)

    path = torch.where(
        relative_change(name, sums, participations)[1], _OF_CHANGES * typical * total.square(), 0.0
    )
    told = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() | total.isinf() | (drawn == 0)
    return batches, torch.where(told, path, math.inf)


# ------------------------------------------------------------------ columns


@dataclass(frozen=True)
class Summed:
    """Which sums are kept of a column.

    Attributes:
        name: The column's name, and that of Σ X/π.
        shape: That of X of one example.
        variance: The name of the sum of its variance; None: not kept.
        followed: Whether its path is followed (:func:`path_sums`).
        is_trace: Whether everything about its error is kept: ``variance_spread`` = variance² / its
            degrees of freedom, which gives those of the total (Welch and Satterthwaite);
            ``variance_limit``, infinite once a step has none; ``certain``.
    """

    name: str
    shape: tuple[int, ...] = ()
    variance: str | None = None
    followed: bool = False
    is_trace: bool = False

    @property
    def layout(self) -> dict[str, Sum]:
        """The sums of one example."""
        layout = {self.name: Sum(self.shape)}
        if self.is_trace:
            # the square of a variance exceeds the range of float32
            layout |= {"variance_spread": Sum(), "certain": Sum()}
        if self.variance is not None:
            layout[self.variance] = Sum(self.shape, ERROR)
        if self.is_trace:
            layout["variance_limit"] = Sum(dtype=ERROR)
        return {**layout, **(path_layout(self.name, self.shape) if self.followed else {})}

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the fields of the column that matter, by name."""
        used = {"value": True, "variance": self.variance is not None, "noise": self.followed}
        fields = {name: self.shape for name, is_used in used.items() if is_used}
        return {
            **fields,
            **(dict.fromkeys(("freedom", "certain", "limit"), ()) if self.is_trace else {}),
        }

    def additions(self, column: Column, rate: Tensor, told: Tensor) -> dict[str, Tensor]:
        """What is added to the sums, [entries, …] each, in float64.

        Args:
            column: All of its :attr:`fields`, [entries, …] each.
            rate: π, [entries].
            told: 1 where X was measured, and 0 where the step was skipped or paused, with 0 for
                every field (``limit``: infinite if it was skipped), [entries].
        """
        value = column["value"]
        each = rate.view(-1, *(1,) * (value.ndim - 1))
        skipping = each < 1
        added = {self.name: value / each}
        if self.variance is not None:
            chance = value.square() * ((1 - each) / each**2)
            # without the case of an infinite X, which has no variance
            variance = torch.where(skipping, chance, 0.0) + column["variance"] / each
            added[self.variance] = variance
        if self.is_trace:
            # if steps are skipped, everything counted is random
            freedom = torch.where(skipping, 1.0, column["freedom"])
            added |= {
                "variance_spread": torch.where(variance > 0, variance.square() / freedom, 0.0),
                "certain": torch.where(skipping, 0.0, column["certain"]),
                "variance_limit": torch.where(skipping, math.inf, column["limit"]),
            }
        if self.followed:
            noise = column["noise"]
            square, last, changes, measured = path_sums(self.name)
            added |= {
                square: (value.square() - noise).clamp(min=0) / each,
                last: value,
                changes: -2 * noise,
                measured: told.view_as(each).expand_as(value),
            }
        return added

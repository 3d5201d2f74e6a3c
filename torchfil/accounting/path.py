r"""How far one run can be off: the draw of the batches, and the path that the noise makes the weights take.

The bounds are about E[S], S = Σ_t B_t X_t: X_t is what a step would add, B_t whether it draws the example. One run
gives one S. Besides probes and skipped steps, two things change it:

* the batches: Var = Σ_t q(1−q) X_t², of which (1−q) Σ B_t X_t² is an unbiased estimate; 0 if batches are known;
* the path: X_t depends on the weights, and so on all noise before t. Runs diverge for good, and momentum and Adam make
  the weights move smoothly: consecutive participations are much alike although runs differ. So the distance at which
  they are compared grows with the run: X is compared at the participations 0, 4, 8, 12, 16, 24, 32, 48, 64, …
  (:func:`compared`). With γ the mean square of its changes from each to the next, weighted by their distance and beyond
  the probes' noise, X has the variance γ/2, and that of S is taken as m²γ/2, whatever the length m of the run: as if
  all its participations were off together. Runs that forget their past vary less, and an example whose leakage falls as
  it is learned adds to γ: both make it too large. Averages over runs need no such rule.

γ of one example comes from few changes, and is too small just where its sum is too small. So all examples of a run
share the mean of γ, each relative to the square of its mean. Fewer than five measured participations say nothing: the
error is infinite. ``benchmarks/coverage.py --simulate`` measures how often lower ends are too high, by optimizer and
sample rate.

A quantity summed over participations keeps the sums of :func:`path_sums` besides its own, adds
:func:`path_additions` at each step and names itself in ``TrackedQuantity.followed``; its readings then include this
error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FEWEST_PARTICIPATIONS = 5
_OF_CHANGES = 0.5  # of the mean squared change, to the mean's variance


def path_sums(name: str) -> tuple[str, ...]:
    """The names of the sums: X², the last compared X, Σ distance · change², and how often it was measured.

    Example:
        >>> path_sums("trace")
        ('trace_square', 'trace_last', 'trace_changes', 'trace_measured')
    """
    return f"{name}_square", f"{name}_last", f"{name}_changes", f"{name}_measured"


def path_additions(name: str, value: Tensor, noise: Tensor, rate: float | Tensor) -> dict[str, Tensor]:
    """What a measured step adds, [batch, …] each.

    Args:
        name: The sum's name.
        value: X, not weighted by 1/π.
        noise: The variance of its sampling error, or less.
        rate: π.
    """
    square, last, changes, measured = path_sums(name)
    return {
        square: (value.square() - noise).clamp(min=0) / rate,
        last: value,
        changes: -2 * noise,
        measured: torch.ones_like(value),
    }


def compared(measured: Tensor) -> Tensor:
    """Which of so many measured participations, numbered from 0, is the last whose X is compared, in float64.

    Number i is compared if max(4, 2^(⌊log₂ i⌋ − 1)) divides it: distances are 4, and later a quarter to a half of i.

    Example:
        >>> compared(torch.tensor([0, 1, 4, 5, 16, 17, 24, 25, 70]))
        tensor([ 0.,  0.,  0.,  4., 12., 16., 16., 24., 64.], dtype=torch.float64)
    """
    last = (measured - 1).clamp(min=0).double()
    return last - last % (1 << (torch.frexp(last).exponent - 2).clamp(min=2))


def due_comparisons(measured: Tensor) -> tuple[Tensor, Tensor]:
    """Whether X is compared at the participation after so many measured ones, and its distance, 0 for the first."""
    return compared(measured + 1) == measured, measured - compared(measured)


def note_changes(last: Tensor, changes: Tensor, value: Tensor, noise: Tensor, is_due: Tensor, distance: Tensor) -> None:
    """Note the change of X since the last compared participation, where a comparison is due; [examples, …] each.

    Args:
        last: The last compared X, changed in place.
        changes: Σ distance · change², changed in place.
        value: X now.
        noise: −2 times the variance of its sampling error; see :func:`path_additions`.
        is_due: Whether X is compared now.
        distance: From the last compared participation.
    """
    change = ((value - last).square() + noise) * distance
    changes.add_(torch.where(is_due & (distance > 0), change, 0.0).to(changes.dtype))
    last.copy_(torch.where(is_due, value.to(last.dtype), last))


def typical_change(name: str, sums: Mapping[str, Tensor], participations: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of γ relative to the squared mean, over the examples for which it is known, and their number, […] each.

    Args:
        name: The sum's name.
        sums: The sums of some examples.
        participations: [n].
    """
    relative, leaks = _relative_change(name, sums, participations)
    return relative.sum(dim=0), leaks.sum(dim=0)


def run_variance(
    name: str, sums: Mapping[str, Tensor], participations: Tensor, sample_rate: float | None, typical: Tensor
) -> tuple[Tensor, Tensor]:
    """The variance of the sum due to the batches, and that due to the path, [n, …] each; infinite if unknown.

    Args:
        name: The sum's name.
        sums: The sums of the examples.
        participations: [n].
        sample_rate: q; None: batches are known.
        typical: The mean of γ, relative to the squared mean, over all examples, […].
    """
    total, square, measured = (sums[each].double() for each in (name, f"{name}_square", f"{name}_measured"))
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))
    batches = torch.zeros_like(total) if sample_rate is None else (1 - sample_rate) * square
    batches = torch.where(drawn > 0, batches, math.inf if sample_rate is not None else 0.0)

    leaks = _relative_change(name, sums, participations)[1]
    path = torch.where(leaks, _OF_CHANGES * typical * total.square(), 0.0)
    told = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() | total.isinf() | (drawn == 0)
    return batches, torch.where(told, path, math.inf)


def _relative_change(name: str, sums: Mapping[str, Tensor], participations: Tensor) -> tuple[Tensor, Tensor]:
    """γ relative to the squared mean (0 if unknown), and for which examples it is known, [n, …] each."""
    total, changes, measured = (sums[each].double() for each in (name, f"{name}_changes", f"{name}_measured"))
    drawn = participations.reshape(-1, *(1,) * (total.ndim - 1))

    # sums that are 0 or infinite have no uncertainty
    leaks = (measured >= FEWEST_PARTICIPATIONS) & total.isfinite() & (total > 0)
    mean = total / drawn.clamp(min=1)
    relative = (changes / compared(measured).clamp(min=1)).clamp(min=0) / mean.square()
    return torch.where(leaks, relative, 0.0), leaks

"""The mean of random samples, with what is known about its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfil.fisher.results import Estimate

__all__ = ["Moments", "RunningMoments"]


@dataclass(frozen=True)
class Moments:
    """A mean over draws and the variance of that mean, with the degrees of freedom of the variance.

    ``limit`` is another variance, which on average is not too small, whatever is sampled; None if unknown. ``certain``
    is the part of the mean that was not sampled; None: 0.
    """

    mean: Tensor
    variance: Tensor
    degrees_of_freedom: float
    exact: bool = False
    limit: Tensor | None = None
    certain: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """The moments of several chunks of a batch, concatenated."""
        limits = [part.limit for part in parts if part.limit is not None]
        certain = [part.certain for part in parts if part.certain is not None]
        return cls(
            torch.cat([part.mean for part in parts]),
            torch.cat([part.variance for part in parts]),
            parts[0].degrees_of_freedom,
            exact=all(part.exact for part in parts),
            limit=torch.cat(limits) if limits else None,
            certain=torch.cat(certain) if certain else None,
        )

    def estimate(self, *, positive: bool) -> Estimate:
        """The mean, with everything known about its error."""
        if self.exact:
            return Estimate.exact(self.mean)
        error = self.variance.clamp(min=0).sqrt()
        return Estimate(self.mean, error, "estimate", self.degrees_of_freedom, positive, self.certain, self.limit)


class RunningMoments:
    """The mean of samples and its variance (Welford), in memory independent of their number.

    ``spread`` is M, where Var X ≤ M (EX)².
    """

    def __init__(self, spread: float | None) -> None:
        self.spread = spread
        self.chi_square = False
        self.count = 0
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())

    def add(self, sample: Tensor) -> None:
        """One more sample."""
        self.count += 1
        if self.count == 1:
            self.mean, self.squares = sample, torch.zeros_like(sample)
            return
        delta = sample - self.mean
        self.mean = self.mean + delta / self.count
        self.squares = self.squares + delta * (sample - self.mean)

    def result(self) -> Moments:
        """The mean of the samples and its variance, from their spread or, for a single sample, from its limit."""
        limit = None
        if self.spread is not None:
            largest = self.spread / self.count
            limit = (largest if self.chi_square else largest / (1 + largest)) * self.mean.square()
        if self.count == 1 and self.spread is not None:
            return Moments(self.mean, self.spread / (1 + self.spread) * self.mean.square(), 1.0, limit=limit)
        return Moments(self.mean, self.squares / (self.count * (self.count - 1)), self.count - 1.0, limit=limit)

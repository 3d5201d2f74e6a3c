"""A number that says what it is: exact, an unbiased estimate with its error, or a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy import special, stats
from torch import Tensor

__all__ = ["Estimate", "Kind"]

Kind = Literal["exact", "estimate", "lower bound", "upper bound"]


@dataclass(frozen=True)
class Estimate:
    """A value per example (or per coordinate), its standard error, and what it is.

    Attributes:
        value: The number; its first dimension runs over examples.
        standard_error: Its sampling standard deviation, same shape; 0 where nothing was sampled.
        kind: "exact", "estimate" (unbiased), "lower bound" or "upper bound".
        degrees_of_freedom: Of the standard error (probes − 1), one number or one per example; infinite where it is
            not itself estimated from a few probes.
        positive: Whether the quantity cannot be negative (a trace, a diagonal); its interval is then
            multiplicative.
        certain: The part of the value that was not sampled, same shape; None: 0.
        variance_limit: A variance that is not too small in the mean, whatever was sampled, same shape; None: not known.
        source: (estimate, exponent, unit) where this one is (estimate/unit)^exponent.

    Example:
        >>> e = Estimate(torch.tensor([2.0]), torch.tensor([0.1]), "estimate")
        >>> low, high = e.interval(0.95)
        >>> round(low.item(), 3), round(high.item(), 3)
        (1.804, 2.196)
    """

    value: Tensor
    standard_error: Tensor
    kind: Kind
    degrees_of_freedom: float | Tensor = float("inf")
    positive: bool = False
    certain: Tensor | None = None
    variance_limit: Tensor | None = None
    source: tuple[Estimate, float, float] | None = None

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """A value without sampling error."""
        return cls(value, torch.zeros_like(value), "exact")

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """An interval that covers the truth with that probability, approximately.

        With t the Student quantile for the degrees of freedom: value ± t·standard_error, or for a positive quantity
        certain + sampled · exp(± t·standard_error/sampled), which covers better for the skewed distribution of a
        squared probe. Few probes say little of their own spread (t = 12.7 for two), so that such a factor is cut to
        (ν/χ²)^(±1) where the largest variance, 2 sampled²/ν, is known, χ² being the lower quantile of χ²_ν.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")
        if self.source is not None:
            estimate, exponent, unit = self.source
            low, high = (_raised(end, exponent, unit) for end in estimate.interval(confidence))
            return (low, high) if exponent > 0 else (high, low)
        width = self._quantile(0.5 + confidence / 2) * self.standard_error
        if not self.positive:
            return self.value - width, self.value + width
        certain = torch.zeros_like(self.value) if self.certain is None else self.certain
        sampled = self.value - certain
        width = width / sampled.where(sampled > 0, torch.ones_like(sampled))
        if self.variance_limit is not None:
            freedom = 2 * sampled.square() / self.variance_limit
            width = torch.minimum(width, _log_ratio(freedom, 0.5 - confidence / 2).to(width))
        return certain + sampled / width.exp(), certain + sampled * width.exp()

    def raised(self, exponent: float, unit: float = 1.0) -> Estimate:
        """(value/unit)^exponent of a positive estimate; a negative exponent turns a bound round."""
        value = _raised(self.value, exponent, unit)
        relative = torch.where(self.value > 0, self.standard_error / self.value, torch.zeros_like(self.value))
        error = torch.where(self.value > 0, abs(exponent) * value * relative, relative)
        turned: dict[Kind, Kind] = {"lower bound": "upper bound", "upper bound": "lower bound"}
        return replace(
            self,
            value=value,
            standard_error=error,
            kind=turned.get(self.kind, self.kind) if exponent < 0 else self.kind,
            positive=True,
            certain=None,
            variance_limit=None,
            source=(replace(self, positive=True), exponent, unit),
        )

    def _quantile(self, level: float) -> float | Tensor:
        """Student's quantile, one number or one per example in a shape that broadcasts to the value's."""
        freedom = self.degrees_of_freedom
        if not isinstance(freedom, Tensor):
            return float(stats.t.ppf(level, freedom))
        quantile = torch.from_numpy(stats.t.ppf(level, freedom.cpu().numpy())).to(self.value)
        return quantile.reshape(-1, *(1,) * (self.value.ndim - 1))


def _raised(value: Tensor, exponent: float, unit: float) -> Tensor:
    """(value/unit)^exponent."""
    return (value.clamp(min=0) / unit) ** exponent


def _log_ratio(freedom: Tensor, level: float) -> Tensor:
    """Log(ν/χ²_ν(level)), in float64 on the CPU; 0 for infinite ν, infinite where there is none."""
    half = freedom.double().cpu() / 2
    known = torch.where(half.isfinite() & (half > 0), half, 1.0)
    ratio = torch.log(known / torch.from_numpy(special.gammaincinv(known.numpy(), level)))
    return torch.where(half.isinf(), 0.0, torch.where(half > 0, ratio, torch.inf))

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
        chi_square: ν, of the value's shape: whatever was sampled, the value over the truth spreads no more than about
            (χ²_ν/ν)^exponent. None: no such limit is known.
        exponent: 1, or what such a value was raised to.

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
    chi_square: Tensor | None = None
    exponent: float = 1.0

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """A value without sampling error."""
        return cls(value, torch.zeros_like(value), "exact")

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """An interval that covers the truth with that probability, approximately.

        With t the Student quantile for the degrees of freedom: value ± t·standard_error, or for a positive
        quantity value · exp(± t·standard_error/value), which covers better for the skewed distribution of a
        squared probe. Few probes say little of their own spread (t = 12.7 for two), so that such an interval is cut to
        value · (ν/χ²)^(± exponent) where the largest spread is known, χ² being the lower quantile.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")
        width = self._quantile(0.5 + confidence / 2) * self.standard_error
        if not self.positive:
            return self.value - width, self.value + width
        width = width / self.value.where(self.value > 0, torch.ones_like(self.value))
        if self.chi_square is not None:
            largest = abs(self.exponent) * _log_ratio(self.chi_square, 0.5 - confidence / 2).to(self.value)
            width = torch.minimum(width, largest)
        return self.value / width.exp(), self.value * width.exp()

    def raised(self, exponent: float, unit: float = 1.0) -> Estimate:
        """(value/unit)^exponent of a positive estimate; a negative exponent turns a bound round."""
        value = (self.value.clamp(min=0) / unit) ** exponent
        relative = torch.where(self.value > 0, self.standard_error / self.value, torch.zeros_like(self.value))
        error = torch.where(self.value > 0, abs(exponent) * value * relative, relative)
        turned: dict[Kind, Kind] = {"lower bound": "upper bound", "upper bound": "lower bound"}
        return replace(
            self,
            value=value,
            standard_error=error,
            kind=turned.get(self.kind, self.kind) if exponent < 0 else self.kind,
            positive=True,
            exponent=self.exponent * exponent,
        )

    def _quantile(self, level: float) -> float | Tensor:
        """Student's quantile, one number or one per example in a shape that broadcasts to the value's."""
        freedom = self.degrees_of_freedom
        if not isinstance(freedom, Tensor):
            return float(stats.t.ppf(level, freedom))
        quantile = torch.from_numpy(stats.t.ppf(level, freedom.cpu().numpy())).to(self.value)
        return quantile.reshape(-1, *(1,) * (self.value.ndim - 1))


def _log_ratio(freedom: Tensor, level: float) -> Tensor:
    """Log(ν/χ²_ν(level)), in float64 on the CPU; 0 for infinite ν, infinite where there is none."""
    half = freedom.double().cpu() / 2
    known = torch.where(half.isfinite() & (half > 0), half, 1.0)
    ratio = torch.log(known / torch.from_numpy(special.gammaincinv(known.numpy(), level)))
    return torch.where(half.isinf(), 0.0, torch.where(half > 0, ratio, torch.inf))

"""A number that says what it is: exact, an unbiased estimate with its error, or a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from torchfil.utils.text import html_table

Kind = Literal["exact", "estimate", "lower bound", "upper bound"]
Part = Literal["run", "probes"]
_SHOWN = 4  # entries, in a text
_ROWS = 10  # of a table in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Estimate:
    """A value per example (or per coordinate), its standard error, and what it is.

    It can be used in place of its value: ``numpy.asarray(e)``, ``torch.as_tensor(e)``, ``len(e)``,
    ``float(e)`` of a single number. Indexing and iterating give estimates of the chosen entries.

    Guarantees:
        * An infinite value has no width: the interval of ∞ is [∞, ∞], and that of its inverse [0,
          0].

    Attributes:
        value: The number; its first dimension runs over examples.
        standard_error: Its sampling standard deviation, same shape; 0 if nothing was sampled.
        kind: "exact", "estimate" (unbiased), "lower bound" or "upper bound".
        degrees_of_freedom: The degrees of freedom of the standard error (probes − 1), one number or
            one per example; infinite if it is not itself estimated from a few probes.
        positive: Whether the quantity cannot be negative (a trace, a diagonal); its interval is
            then multiplicative.
        certain: The part of the value that was not sampled, same shape; None: 0.
        variance_limit: A variance that is not too small on average, whatever was sampled, same
            shape; None: unknown.
        run_error: The standard deviation due to everything that is random in a run (probes, batches
            and the noise, which changes the path of its weights), same shape; infinite if one run
            cannot show it; None: nothing but the standard error.
        source: (estimate, exponent, unit) if this one is (estimate/unit)^exponent.

    Example:
        >>> e = Estimate(torch.tensor([2.0]), torch.tensor([0.1]), "estimate")
        >>> low, high = e.interval(0.95)
        >>> round(low.item(), 3), round(high.item(), 3)
        (1.804, 2.196)
        >>> e
        Estimate([2 ± 0.1], estimate)
        >>> np.asarray(e), float(e[0])
        (array([2.], dtype=float32), 2.0)
    """

    value: Tensor
    standard_error: Tensor
    kind: Kind
    degrees_of_freedom: float | Tensor = float("inf")
    positive: bool = False
    certain: Tensor | None = None
    variance_limit: Tensor | None = None
    run_error: Tensor | None = None
    source: tuple[Estimate, float, float | Tensor] | None = None

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """A value without sampling error."""
        return cls(value, torch.zeros_like(value), "exact")

    def interval(self, confidence: float = 0.95, of: Part = "run") -> tuple[Tensor, Tensor]:
        """An interval that covers the truth with that probability, approximately.

        With t the Student quantile for the degrees of freedom: value ± t·standard_error, or for a
        positive quantity certain + sampled · exp(± x(1 + min(x, 1)/3)), x =
        t·standard_error/sampled. The latter covers better because squared probes have a skewed
        distribution: if they come out low, so does their spread. A few probes say little about
        their own spread (t = 12.7 for two). If the largest variance, 2 sampled²/ν, is known, the
        factor is therefore cut to (ν/χ²)^(±1), where χ² is the lower quantile of χ²_ν.

        Of a run, the interval is value ± z·run_error, or value · f^(±1) for a positive quantity,
        with z the normal quantile, x = z·run_error/value and f = exp(x(1 + min(x, 1)/3)) up to
        x = 1.5, and e²(4x/3 − 1) beyond: a sum that happens to be near 0 is off by a few errors.
        If one run cannot show how far off it is, or if its estimate is not positive because too few
        draws were made to tell, the ends of a positive quantity are 0 and ∞, of the probes too: no
        interval is claimed.

        Args:
            confidence: The probability.
            of: "run": the truth is the mean over everything that is random. "probes": it is what
                this run would have given if every step had been measured exactly; its batches and
                noise are taken as they were.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence} must lie strictly between 0 and 1")
        if of not in ("run", "probes"):
            raise ValueError(
                f"of={of!r} must be 'run' (everything that is random in it) or 'probes' (only the "
                "measurement)"
            )
        if self.source is not None:
            estimate, exponent, unit = self.source
            low, high = (_raised(end, exponent, unit) for end in estimate.interval(confidence, of))
            return (low, high) if exponent > 0 else (high, low)
        if of == "probes" or self.run_error is None:
            return self._interval_of_probes(confidence)
        width = float(stats.norm.ppf(0.5 + confidence / 2)) * self.run_error
        if not self.positive:
            return self.value - width, self.value + width
        usual = (self.value > 0) & self.value.isfinite()
        unknown = torch.where(width > 0, torch.inf, 0.0).to(self.value)
        width = width / self.value.where(usual, torch.ones_like(self.value))
        factor = _stretched(width.clamp(max=1.5)).exp() * (1 + 4 / 3 * (width - 1.5).clamp(min=0))
        low, high = self.value.clamp(min=0), self.value.where(self.value > 0, unknown)
        return (low / factor).where(usual, low), (high * factor).where(usual, high)

    def _interval_of_probes(self, confidence: float) -> tuple[Tensor, Tensor]:
        freedom = torch.as_tensor(self._freedom(), dtype=torch.float64).cpu()
        quantile = torch.as_tensor(stats.t.ppf(0.5 + confidence / 2, freedom.numpy()))  # Student's
        width = quantile.to(self.value) * self.standard_error
        if not self.positive:
            return self.value - width, self.value + width

        # certain parts and infinite values have no width
        certain = torch.zeros_like(self.value) if self.certain is None else self.certain
        certain = torch.where(self.value.isinf(), self.value, certain)
        sampled = torch.where(self.value.isinf(), 0.0, self.value - certain)
        usual = sampled > 0
        unknown = torch.where((width > 0) | (sampled < 0), torch.inf, 0.0).to(sampled)
        width = _stretched(width / sampled.where(usual, torch.ones_like(sampled)))
        if self.variance_limit is not None:
            freedom = 2 * sampled.square() / self.variance_limit
            width = torch.minimum(width, _log_ratio(freedom, 0.5 - confidence / 2).to(width))
        low, high = sampled / width.exp(), sampled * width.exp()
        return certain + low.where(usual, 0.0), certain + high.where(usual, unknown)

    def raised(self, exponent: float, unit: float | Tensor = 1.0) -> Estimate:
        """(value/unit)^exponent of a positive estimate, with one unit for all or one for each
        entry.

        A negative exponent turns an upper bound into a lower bound, and vice versa.

        Example:
            >>> Estimate.exact(torch.tensor([8.0, 8.0])).raised(0.5, torch.tensor([2.0, 8.0]))
            Estimate([2, 1], exact)
        """
        value = _raised(self.value, exponent, unit)
        usual = (self.value > 0) & self.value.isfinite()
        scale = abs(exponent) * value / self.value
        turned: dict[Kind, Kind] = {"lower bound": "upper bound", "upper bound": "lower bound"}
        return replace(
            self,
            value=value,
            standard_error=torch.where(usual, scale * self.standard_error, 0.0),
            kind=turned.get(self.kind, self.kind) if exponent < 0 else self.kind,
            positive=True,
            certain=None,
            variance_limit=None,
            run_error=None
            if self.run_error is None
            else torch.where(usual, scale * self.run_error, self.run_error),
            source=(replace(self, positive=True), exponent, unit),
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.value.detach().cpu().numpy()
        return np.asarray(value, dtype) if copy is None else np.array(value, dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:  # torch.as_tensor, torch.tensor
        return self.value.detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Estimate]:
        return (self[place] for place in range(len(self)))

    def __float__(self) -> float:
        return float(self.value)

    def __getitem__(self, index: Any) -> Estimate:
        """The estimate of the chosen entries: an index, a slice, a list, a mask, or a tuple of
        these.
        """

        def part(value: object) -> Any:
            return value[index] if isinstance(value, Tensor | Estimate) else value

        source = None if self.source is None else tuple(map(part, self.source))
        whole = vars(self) | {"degrees_of_freedom": self._freedom(), "source": source}
        return Estimate(**{name: part(value) for name, value in whole.items()})

    def __repr__(self) -> str:
        values, errors = self.value.flatten(), self.standard_error.expand_as(self.value).flatten()
        pairs = zip(values[:_SHOWN].tolist(), errors[:_SHOWN].tolist(), strict=True)
        entries = [
            f"{value:.4g}" if error == 0 else f"{value:.4g} ± {error:.2g}" for value, error in pairs
        ]
        if values.numel() > _SHOWN:
            entries.append("…")
        text = ", ".join(entries) if self.value.ndim == 0 else f"[{', '.join(entries)}]"
        shape = (
            f", shape {tuple(self.value.shape)}"
            if values.numel() > _SHOWN or self.value.ndim > 1
            else ""
        )
        return f"Estimate({text}, {self.kind}{shape})"

    def _repr_html_(self) -> str:
        if self.value.ndim != 1:
            return html_table(repr(self), [])
        pairs = zip(self.value[:_ROWS].tolist(), self.standard_error[:_ROWS].tolist(), strict=True)
        rows = [
            (str(place), f"{value:.4g}", f"± {error:.2g}")
            for place, (value, error) in enumerate(pairs)
        ]
        if len(self) > _ROWS:
            rows.append(("…", f"{len(self):,} in all", ""))
        return html_table(f"Estimate ({self.kind})", rows, ("", "value", "standard error"))

    def _freedom(self) -> float | Tensor:
        """The degrees of freedom, one number or one per entry of the value."""
        freedom = self.degrees_of_freedom
        if not isinstance(freedom, Tensor):
            return freedom
        return freedom.reshape(freedom.shape + (1,) * (self.value.ndim - freedom.ndim)).expand(
            self.value.shape
        )


def _raised(value: Tensor, exponent: float, unit: float | Tensor) -> Tensor:
    """(value/unit)^exponent."""
    return (value.clamp(min=0) / unit) ** exponent


def _stretched(width: Tensor) -> Tensor:
    """x(1 + min(x, 1)/3): a sum that came out low by chance reports a small spread, too."""
    return width * (1 + width.clamp(max=1) / 3)


def _log_ratio(freedom: Tensor, level: float) -> Tensor:
    """log(ν/χ²_ν(level)), in float64 on the CPU; 0 for infinite ν, infinite if there is none."""
    half = freedom.double().cpu() / 2
    usual = torch.where(half.isfinite() & (half > 0), half, 1.0)
    ratio = torch.log(
        usual / torch.from_numpy(np.asarray(special.gammaincinv(usual.numpy(), level)))
    )
    return torch.where(half.isinf(), 0.0, torch.where(half > 0, ratio, torch.inf))

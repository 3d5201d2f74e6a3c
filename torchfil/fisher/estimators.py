"""Estimators of the Fisher information I = J̃ᵀMJ̃/s², M = κ⊥P + κ∥ĝĝᵀ: its trace, its diagonal, itself.

With A = φJᵀP, so that J̃ᵀMJ̃ = κ⊥ A Aᵀ + κ∥ a aᵀ:

    "exact"          every column of J
    "coordinates"    d·‖Aᵀe_i‖² for coordinates i drawn without replacement (Guo et al. 2022)
    "input-probes"   ‖Aᵀv‖²  for v ∈ {±1}^d, one Jv each; relative variance at most 2 per probe
    "weight-probes"  ‖Au‖² and (Au)⊙(Au) for u ∈ {±1}^p, one Jᵀu each, u shared by the batch: the trace and
                     the diagonal at once; relative variance at most 2 per probe

Only A Aᵀ is sampled: a aᵀ is known exactly once ∇n is (:mod:`torchfil.fisher.operator`), and after some training it is
half of the trace. A single weight probe saves that derivative and samples both, r = J̃ᵀM^{1/2}u/s.

Because u is shared, the errors of two examples of one batch are correlated; across draws they are not.

The standard error comes from the spread of the probes. A single probe has no spread; from Var X ≤ M (EX)²
follows E[M/(1+M) X²] ≥ Var X, so its standard error is reported as sqrt(M/(1+M))·X, which is conservative. The mean of
k probes has the limit M/k instead of M, which tells more than a spread of two or three of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian
from torchfil.fisher.results import Estimate

__all__ = ["ESTIMATORS", "Draws", "GivenDraws", "Moments", "Quantity", "available_estimators", "register_estimator"]

Quantity = Literal["trace", "diagonal", "matrix"]
_PROBE_SPREAD = 2.0  # Var X ≤ 2 (EX)² for X = ‖Au‖², u ∈ {±1}^p


@dataclass(frozen=True)
class Moments:
    """A mean over draws and the variance of that mean, with the degrees of freedom of the variance.

    ``limit`` is another variance, which is not too small in the mean whatever is sampled; None where none is known.
    ``certain`` is the part of the mean that was not sampled; None: 0.
    """

    mean: Tensor
    variance: Tensor
    degrees_of_freedom: float
    exact: bool = False
    limit: Tensor | None = None
    certain: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Those of several chunks of a batch, one after the other."""
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
        """The mean, with all that is known of its error."""
        if self.exact:
            return Estimate.exact(self.mean)
        error = self.variance.clamp(min=0).sqrt()
        return Estimate(self.mean, error, "estimate", self.degrees_of_freedom, positive, self.certain, self.limit)


class Estimator(Protocol):
    """Estimates quantities of I for the examples of one chunk, all from the same draws."""

    def __call__(
        self, jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
    ) -> dict[Quantity, Moments]:
        """For each quantity the mean over the draws and its variance."""
        ...


@dataclass(frozen=True)
class Draws:
    """The randomness of one call: the same for every way of cutting the batch into chunks.

    Attributes:
        seeds: One seed per probe.
        rows: Which examples of the batch the present chunk holds.
        batch: The number of examples of the whole batch.
        columns_at_once: How many columns of J the exact estimator may hold.
        probes_at_once: How many weight probes may be worked at together, where the Jacobian can.
    """

    seeds: tuple[int, ...]
    rows: slice
    batch: int
    columns_at_once: int
    probes_at_once: int = 1

    @classmethod
    def seeds_from(cls, num_probes: int, generator: torch.Generator | None) -> tuple[int, ...]:
        """Seeds for ``num_probes`` probes from a generator (None: torch's global one)."""
        device = generator.device if generator is not None else torch.device("cpu")
        return tuple(torch.randint(2**62, (num_probes,), generator=generator, device=device).tolist())

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """For each probe a tensor of ±1 of that shape, of ``like``'s dtype and device."""
        for seed in self.seeds:
            yield signs_of(draw_bits(seed, torch.empty(shape, dtype=torch.int8, device=like.device)), like.dtype)


def draw_bits(seed: int, bits: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Fill ``bits`` with the zeros and ones of that seed; on a CPU 64 of them from each random number.

    ``source`` is seeded anew; None: a new one.
    """
    source = (source or torch.Generator(device=bits.device)).manual_seed(seed)
    if bits.device.type != "cpu":
        return bits.random_(0, 2, generator=source)
    words = torch.empty(-(-bits.numel() // 64), dtype=torch.int64).random_(-(2**63), None, generator=source)
    drawn = np.unpackbits(words.numpy().view(np.uint8), count=bits.numel())
    return bits.copy_(torch.from_numpy(drawn).reshape(bits.shape))


def signs_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """±1 for ones and zeros."""
    return bits.to(dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class GivenDraws(Draws):
    """Draws whose probes were made before, of the right shape; for passes that are recorded once and replayed."""

    probes: tuple[Tensor, ...] = ()

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """The probes."""
        return iter(self.probes)


def exact(
    jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> dict[Quantity, Moments]:
    """All columns of J; no sampling."""
    values: dict[Quantity, Tensor] = {}
    if "matrix" in quantities:
        values["matrix"] = jacobian.perpendicular_gram(draws.columns_at_once)
        values["diagonal"] = values["matrix"].diagonal(dim1=1, dim2=2)
    else:
        values["diagonal"] = jacobian.perpendicular_diagonal(draws.columns_at_once)
    values["trace"] = values["diagonal"].sum(dim=1)
    found = {
        name: Moments(values[name], torch.zeros_like(values[name]), float("inf"), exact=True) for name in quantities
    }
    return _with_parallel_part(jacobian, mechanism, found)


def coordinates(
    jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> dict[Quantity, Moments]:
    """Columns of J at coordinates drawn without replacement, each example its own."""
    _trace_only("coordinates", quantities)
    d = jacobian.gradients.num_coordinates
    count = min(len(draws.seeds), d)
    z = jacobian.gradients.examples.z
    source = torch.Generator(device=z.device).manual_seed(draws.seeds[0])
    order = torch.rand(draws.batch, d, generator=source, device=z.device).argsort(dim=1)
    chosen = order[draws.rows, :count]  # [batch, count]
    total = _RunningMoments(spread=d - 1.0)
    for k in range(count):
        direction = torch.zeros_like(z).scatter(1, chosen[:, k : k + 1], 1.0)
        total.add(d * jacobian.perpendicular_squared_norm(direction))
    moments = total.result()
    correction = 1 - count / d if count > 1 else 1.0
    found = replace(moments, variance=moments.variance * correction, exact=count == d)
    return _with_parallel_part(jacobian, mechanism, {"trace": found})


def input_probes(
    jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> dict[Quantity, Moments]:
    """‖φPJv‖² for random signs v, each example its own."""
    _trace_only("input-probes", quantities)
    z = jacobian.gradients.examples.z
    total = _RunningMoments(spread=_PROBE_SPREAD)
    for v in draws.signs(draws.batch, z.shape[1], like=z):
        total.add(jacobian.perpendicular_squared_norm(v[draws.rows]))
    return _with_parallel_part(jacobian, mechanism, {"trace": total.result()})


def weight_probes(
    jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> dict[Quantity, Moments]:
    """‖r‖², r⊙r and r rᵀ for r = φJᵀPu, or J̃ᵀM^{1/2}u/s of a single probe; signs u are shared by the batch."""
    like = torch.empty(0, dtype=jacobian.gradients.dtype, device=jacobian.gradients.device)
    probes = draws.signs(jacobian.gradients.num_parameters, like=like)
    if len(draws.seeds) == 1:
        return _probe_moments([jacobian.folded_row(mechanism, next(probes))], quantities, 1)
    rows = jacobian.perpendicular_rows(probes, draws.probes_at_once)
    return _with_parallel_part(jacobian, mechanism, _probe_moments(rows, quantities, len(draws.seeds)))


def _with_parallel_part(
    jacobian: ClippedJacobian, mechanism: Mechanism, perpendicular: dict[Quantity, Moments]
) -> dict[Quantity, Moments]:
    """(κ⊥ φ²JᵀPJ + κ∥ a aᵀ)/s² from estimates of φ²JᵀPJ."""
    perp, par = mechanism.weights(jacobian.clipped_norm)
    a = jacobian.clipped_norm_gradient
    read: dict[Quantity, Callable[[], Tensor]] = {
        "trace": lambda: a.square().sum(dim=1),
        "diagonal": lambda: a.square(),
        "matrix": lambda: a[:, :, None] * a[:, None, :],
    }
    result: dict[Quantity, Moments] = {}
    for name, moments in perpendicular.items():
        parallel = read[name]()
        shape = (-1,) + (1,) * (parallel.ndim - 1)
        certain = par.reshape(shape) * parallel
        mean = perp.reshape(shape) * moments.mean + certain
        factor = perp.reshape(shape).square()
        limit = factor * moments.limit if moments.limit is not None else None
        result[name] = replace(moments, mean=mean, variance=factor * moments.variance, limit=limit, certain=certain)
    return result


def _probe_moments(
    rows: Iterable[Tensor], quantities: Sequence[Quantity], num_probes: int = 1
) -> dict[Quantity, Moments]:
    """The moments of ‖r‖², r⊙r and r rᵀ over rows r, [batch, d] each, one per probe."""
    if "matrix" in quantities and num_probes == 1:
        raise ValueError("num_probes=1 gives a full matrix no error bar (its entries change sign); use 2 or more")
    read: dict[Quantity, Callable[[Tensor], Tensor]] = {
        "trace": lambda r: r.square().sum(dim=1),
        "diagonal": torch.square,
        "matrix": lambda r: r[:, :, None] * r[:, None, :],
    }
    totals = {name: _RunningMoments(None if name == "matrix" else _PROBE_SPREAD) for name in quantities}
    for r in rows:
        for name, total in totals.items():
            total.chi_square = name == "diagonal" or r.shape[1] == 1  # one squared number per probe, no sum of many
            total.add(read[name](r))
    return {name: total.result() for name, total in totals.items()}


ESTIMATORS: dict[str, Estimator] = {
    "exact": exact,
    "coordinates": coordinates,
    "input-probes": input_probes,
    "weight-probes": weight_probes,
}


def available_estimators() -> tuple[str, ...]:
    """The names of all registered estimators."""
    return tuple(sorted(ESTIMATORS))


def register_estimator(name: str, estimator: Estimator, *, overwrite: bool = False) -> None:
    """Register an estimator under a name, for every function that takes ``estimator=``."""
    if name in ESTIMATORS and not overwrite:
        raise ValueError(f"estimator {name!r} is registered already; pass overwrite=True to replace it")
    ESTIMATORS[name] = estimator


def get_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    if name not in ESTIMATORS:
        raise ValueError(f"estimator={name!r} is not known; use one of {', '.join(available_estimators())}")
    return ESTIMATORS[name]


def _trace_only(name: str, quantities: Sequence[Quantity]) -> None:
    for quantity in quantities:
        if quantity != "trace":
            raise ValueError(
                f"estimator={name!r} gives the trace only, not the {quantity}; use 'weight-probes' or 'exact'"
            )


class _RunningMoments:
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
        self.count += 1
        if self.count == 1:
            self.mean, self.squares = sample, torch.zeros_like(sample)
            return
        delta = sample - self.mean
        self.mean = self.mean + delta / self.count
        self.squares = self.squares + delta * (sample - self.mean)

    def result(self) -> Moments:
        limit = None
        if self.spread is not None:
            largest = self.spread / self.count
            limit = (largest if self.chi_square else largest / (1 + largest)) * self.mean.square()
        if self.count == 1 and self.spread is not None:
            return Moments(self.mean, self.spread / (1 + self.spread) * self.mean.square(), 1.0, limit=limit)
        return Moments(self.mean, self.squares / (self.count * (self.count - 1)), self.count - 1.0, limit=limit)


for _f, _q, _e, _o in (
    (exact, ("trace", "diagonal", "matrix"), True, False),
    (coordinates, ("trace",), False, False),
    (input_probes, ("trace",), False, False),
    (weight_probes, ("trace", "diagonal", "matrix"), False, True),
):
    _f.quantities, _f.exact, _f.one_pass = _q, _e, _o  # TEMP

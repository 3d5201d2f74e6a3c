"""Estimators of the perpendicular Gram matrix φ²JᵀPJ: its trace, its diagonal, itself.

The part along the gradient, a aᵀ, is known exactly once ∇n is, so only the perpendicular part is ever
sampled (see :mod:`torchfil.fisher.operator`). With A = φJᵀP, so that A Aᵀ = φ²JᵀPJ:

    "exact"          every column of J
    "coordinates"    d·‖Aᵀe_i‖² for coordinates i drawn without replacement (Guo et al. 2022)
    "input-probes"   ‖Aᵀv‖²  for v ∈ {±1}^d, one Jv each; relative variance at most 2 per probe
    "weight-probes"  ‖Au‖² and (Au)⊙(Au) for u ∈ {±1}^p, one Jᵀu each, u shared by the batch: the trace and
                     the diagonal at once; relative variance at most 2 per probe

Because u is shared, the errors of two examples of one batch are correlated; across draws they are not.

The standard error comes from the spread of the probes. A single probe has no spread; from Var X ≤ M (EX)²
follows E[M/(1+M) X²] ≥ Var X, so its standard error is reported as sqrt(M/(1+M))·X, which is conservative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchfil.fisher.operator import ClippedJacobian

__all__ = ["ESTIMATORS", "Draws", "Moments", "Quantity", "available_estimators", "register_estimator"]

Quantity = Literal["trace", "diagonal", "matrix"]
_PROBE_SPREAD = 2.0  # Var X ≤ 2 (EX)² for X = ‖Au‖², u ∈ {±1}^p


@dataclass(frozen=True)
class Moments:
    """A mean over draws and the variance of that mean, with the degrees of freedom of the variance."""

    mean: Tensor
    variance: Tensor
    degrees_of_freedom: float
    exact: bool = False


class Estimator(Protocol):
    """Estimates a quantity of φ²JᵀPJ for the examples of one chunk."""

    def __call__(self, jacobian: ClippedJacobian, quantity: Quantity, draws: Draws) -> Moments:
        """The mean over the draws and its variance."""
        ...


@dataclass(frozen=True)
class Draws:
    """The randomness of one call: the same for every way of cutting the batch into chunks.

    Attributes:
        seeds: One seed per probe.
        rows: Which examples of the batch the present chunk holds.
        batch: The number of examples of the whole batch.
        columns_at_once: How many columns of J the exact estimator may hold.
    """

    seeds: tuple[int, ...]
    rows: slice
    batch: int
    columns_at_once: int

    @classmethod
    def seeds_from(cls, num_probes: int, generator: torch.Generator | None) -> tuple[int, ...]:
        """Seeds for ``num_probes`` probes from a generator (None: torch's global one)."""
        device = generator.device if generator is not None else torch.device("cpu")
        return tuple(torch.randint(2**62, (num_probes,), generator=generator, device=device).tolist())

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """For each probe a tensor of ±1 of that shape, of ``like``'s dtype and device."""
        for seed in self.seeds:
            source = torch.Generator(device=like.device).manual_seed(seed)
            bits = torch.randint(2, shape, generator=source, device=like.device, dtype=torch.int8)
            yield bits.to(like.dtype) * 2 - 1


def exact(jacobian: ClippedJacobian, quantity: Quantity, draws: Draws) -> Moments:
    """All columns of J; no sampling."""
    if quantity == "matrix":
        value = jacobian.perpendicular_gram(draws.columns_at_once)
    else:
        value = jacobian.perpendicular_diagonal(draws.columns_at_once)
        value = value.sum(dim=1) if quantity == "trace" else value
    return Moments(value, torch.zeros_like(value), float("inf"), exact=True)


def coordinates(jacobian: ClippedJacobian, quantity: Quantity, draws: Draws) -> Moments:
    """Columns of J at coordinates drawn without replacement, each example its own."""
    _only("coordinates", quantity, ("trace",))
    d = jacobian.gradients.num_coordinates
    count = min(len(draws.seeds), d)
    z = jacobian.gradients.examples.z
    source = torch.Generator(device=z.device).manual_seed(draws.seeds[0])
    order = torch.rand(draws.batch, d, generator=source, device=z.device).argsort(dim=1)
    chosen = order[draws.rows, :count]  # [batch, count]
    samples = (
        d * jacobian.perpendicular_squared_norm(torch.zeros_like(z).scatter(1, chosen[:, k : k + 1], 1.0))
        for k in range(count)
    )
    moments = _accumulate(samples, count, spread=d - 1.0)
    correction = 1 - count / d if count > 1 else 1.0
    return Moments(moments.mean, moments.variance * correction, moments.degrees_of_freedom, exact=count == d)


def input_probes(jacobian: ClippedJacobian, quantity: Quantity, draws: Draws) -> Moments:
    """‖φPJv‖² for random signs v, each example its own."""
    _only("input-probes", quantity, ("trace",))
    z = jacobian.gradients.examples.z
    samples = (jacobian.perpendicular_squared_norm(v[draws.rows]) for v in draws.signs(draws.batch, z.shape[1], like=z))
    return _accumulate(samples, len(draws.seeds), spread=_PROBE_SPREAD)


def weight_probes(jacobian: ClippedJacobian, quantity: Quantity, draws: Draws) -> Moments:
    """R = φJᵀPu for random signs u shared by the batch: ‖r‖², r⊙r or r rᵀ."""
    rows = (
        jacobian.perpendicular_rmatvec(u)
        for u in draws.signs(jacobian.gradients.num_parameters, like=jacobian.gradient)
    )
    read: Callable[[Tensor], Tensor] = {
        "trace": lambda r: r.square().sum(dim=1),
        "diagonal": torch.square,
        "matrix": lambda r: r[:, :, None] * r[:, None, :],
    }[quantity]
    if quantity == "matrix" and len(draws.seeds) == 1:
        raise ValueError("num_probes=1 gives a full matrix no error bar (its entries change sign); use 2 or more")
    return _accumulate((read(r) for r in rows), len(draws.seeds), spread=_PROBE_SPREAD)


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


def _only(name: str, quantity: Quantity, allowed: tuple[Quantity, ...]) -> None:
    if quantity not in allowed:
        raise ValueError(
            f"estimator={name!r} gives the {' and the '.join(allowed)} only, not the {quantity}; "
            "use 'weight-probes' or 'exact'"
        )


def _accumulate(samples: Iterator[Tensor], count: int, *, spread: float) -> Moments:
    """The mean and its variance in one pass (Welford), in memory independent of the number of samples."""
    mean = next(samples)
    squares = torch.zeros_like(mean)
    for k, sample in enumerate(samples, start=2):
        delta = sample - mean
        mean = mean + delta / k
        squares = squares + delta * (sample - mean)
    if count == 1:
        return Moments(mean, spread / (1 + spread) * mean.square(), float("inf"))
    return Moments(mean, squares / (count * (count - 1)), count - 1.0)

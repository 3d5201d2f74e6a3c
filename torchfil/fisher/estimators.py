"""Estimators of the Fisher information I = J̃ᵀMJ̃/s², M = κ⊥P + κ∥ĝĝᵀ: its trace, its diagonal,
itself.

With A = φJᵀP, so that J̃ᵀMJ̃ = κ⊥ A Aᵀ + κ∥ a aᵀ:

    "exact"          every column of J
    "weight-probes"  ‖Au‖² and (Au)⊙(Au) for u ∈ {±1}^p, one Jᵀu each, u shared by the batch: the
                     trace and the diagonal at once; relative variance at most 2 per probe

Only A Aᵀ is sampled: a aᵀ is known exactly once ∇n is (:mod:`torchfil.fisher.operator`), and after
some training it is half of the trace. A single weight probe saves that derivative: in r =
J̃ᵀM^{1/2}(Pu + ĝ)/s = (sqrt(κ⊥)Au + sqrt(κ∥)a)/s only Au is random, and ‖r‖² has a relative
variance of at most 2, like any probe.

Because u is shared, the errors of two examples of one batch are correlated; errors of different
draws are not.

The standard error comes from the spread of the probes. A single probe has no spread; from Var X ≤ M
(EX)² follows E[M/(1+M) X²] ≥ Var X, so its standard error is reported as sqrt(M/(1+M))·X, which is
conservative. The mean of k probes has the limit M/k instead of M, which says more than the spread
of two or three probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, Jacobian
from torchfil.fisher.results import Estimate

Quantity = Literal["trace", "diagonal", "matrix"]
EXACT = "exact"
_PROBE_SPREAD = 2.0  # Var X ≤ 2 (EX)² for X = ‖Au‖², u ∈ {±1}^p

_OF_ROW: dict[Quantity, Callable[[Tensor], Tensor]] = {  # of r rᵀ, for rows r, [batch, d]
    "trace": lambda r: r.square().sum(dim=1),
    "diagonal": torch.square,
    "matrix": lambda r: r[:, :, None] * r[:, None, :],
}


@dataclass(frozen=True)
class Draws:
    """The randomness of one call; it does not depend on how the batch is cut into chunks.

    Attributes:
        seeds: One seed per probe.
        columns_at_once: How many columns of J the exact estimator may hold.
        probes_at_once: How many weight probes may be processed together, if the Jacobian supports
            it.
        probes: The probes themselves, if they exist already: in passes that are captured once and
            replayed.
    """

    seeds: tuple[int, ...]
    columns_at_once: int
    probes_at_once: int = 1
    probes: tuple[Tensor, ...] = ()

    @classmethod
    def seeds_from(cls, num_probes: int, generator: torch.Generator | None) -> tuple[int, ...]:
        """Seeds for ``num_probes`` probes from a generator (None: torch's global one)."""
        device = generator.device if generator is not None else torch.device("cpu")
        return tuple(
            torch.randint(2**62, (num_probes,), generator=generator, device=device).tolist()
        )

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """For each probe, a tensor of ±1 of that shape, with ``like``'s dtype and device."""
        yield from self.probes
        for seed in () if self.probes else self.seeds:
            yield signs_of(
                draw_bits(seed, torch.empty(shape, dtype=torch.int8, device=like.device)),
                like.dtype,
            )


def draw_bits(seed: int, bits: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Fill ``bits`` with the zeros and ones of that seed.

    On a CPU, each random number gives 64 of them.

    ``source`` is seeded again; None: a new generator.
    """
    source = (source or torch.Generator(device=bits.device)).manual_seed(seed)
    if bits.device.type != "cpu":
        return bits.random_(0, 2, generator=source)
    words = torch.empty(-(-bits.numel() // 64), dtype=torch.int64).random_(
        -(2**63), None, generator=source
    )
    drawn = np.unpackbits(words.numpy().view(np.uint8), count=bits.numel())
    return bits.copy_(torch.from_numpy(drawn).reshape(bits.shape))


def signs_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """±1 for ones and zeros."""
    return bits.to(dtype).mul_(2).sub_(1)


class RunningMoments:
    """The mean of samples and its variance (Welford), in memory independent of their number.

    ``spread`` is M, where Var X ≤ M (EX)²; None: unknown.
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

    def variance(self) -> Tensor:
        """The variance of the mean, from the spread of the samples or, for a single sample, from
        its limit.
        """
        if self.count == 1 and self.spread is not None:
            return self.spread / (1 + self.spread) * self.mean.square()
        return self.squares / (self.count * (self.count - 1))

    def limit(self) -> Tensor | None:
        """Another variance, which on average is not too small, whatever is sampled.

        None if unknown.
        """
        if self.spread is None:
            return None
        largest = self.spread / self.count
        return (largest if self.chi_square else largest / (1 + largest)) * self.mean.square()

    def result(self, factor: Tensor | float = 1.0, certain: Tensor | None = None) -> Estimate:
        """The estimate ``factor`` · mean + ``certain``, where only the mean was sampled.

        None: 0.
        """
        mean, limit = factor * self.mean, self.limit()
        return Estimate(
            mean if certain is None else mean + certain,
            (factor * factor * self.variance()).clamp(min=0).sqrt(),
            "estimate",
            max(self.count - 1.0, 1.0),
            positive=self.spread is not None,
            certain=certain,
            variance_limit=None if limit is None else factor * factor * limit,
        )


Results = dict[Quantity, Estimate]

# Estimates quantities of I for the examples of one chunk, all from the same draws. "exact" needs a
# ClippedJacobian and draws nothing; any other takes any Jacobian, which has norms and products with
# vectors of length p only.
EstimatorFunction = Callable[[Any, Mechanism, Sequence[Quantity], Draws], Results]


def exact(
    jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> Results:
    """All columns of J; no sampling."""
    perp, par = mechanism.weights(jacobian.clipped_norm)
    a = jacobian.clipped_norm_gradient()
    values: dict[Quantity, Tensor] = {}
    if "matrix" in quantities:
        gram = jacobian.perpendicular_gram(draws.columns_at_once)
        values["matrix"] = perp[:, None, None] * gram + par[:, None, None] * _OF_ROW["matrix"](a)
        values["diagonal"] = values["matrix"].diagonal(dim1=1, dim2=2)
    else:
        across = jacobian.perpendicular_diagonal(draws.columns_at_once)
        values["diagonal"] = perp[:, None] * across + par[:, None] * a.square()
    values["trace"] = values["diagonal"].sum(dim=1)
    return {name: Estimate.exact(values[name]) for name in quantities}


def weight_probes(
    jacobian: Jacobian, mechanism: Mechanism, quantities: Sequence[Quantity], draws: Draws
) -> Results:
    """‖r‖², r⊙r and r rᵀ for r = φJᵀPu, or J̃ᵀM^{1/2}(Pu + ĝ)/s for a single probe.

    The batch shares the signs u.
    """
    single = len(draws.seeds) == 1
    if single and "matrix" in quantities:
        raise ValueError(
            "num_probes=1 gives a full matrix no error bar (its entries change sign); use 2 or more"
        )
    like = torch.empty(0, dtype=jacobian.gradients.dtype, device=jacobian.gradients.device)
    probes = draws.signs(jacobian.gradients.num_parameters, like=like)
    rows: Iterable[Tensor]
    if single:
        rows = [jacobian.folded_row(mechanism, next(probes))]
    else:
        rows = jacobian.perpendicular_rows(probes, draws.probes_at_once)

    totals = {
        name: RunningMoments(None if name == "matrix" else _PROBE_SPREAD) for name in quantities
    }
    for r in rows:
        for name, total in totals.items():
            # one squared number per probe, no sum of many
            total.chi_square = name == "diagonal" or r.shape[1] == 1
            total.add(_OF_ROW[name](r))
    if single:
        return {name: total.result() for name, total in totals.items()}

    # (κ⊥ φ²JᵀPJ + κ∥ a aᵀ)/s²; the first part was sampled
    perp, par = mechanism.weights(jacobian.clipped_norm)
    a = jacobian.clipped_norm_gradient()
    results: Results = {}
    for name, total in totals.items():
        parallel = _OF_ROW[name](a)
        shape = (-1,) + (1,) * (parallel.ndim - 1)
        results[name] = total.result(perp.reshape(shape), par.reshape(shape) * parallel)
    return results


ESTIMATORS: dict[str, EstimatorFunction] = {EXACT: exact, "weight-probes": weight_probes}


def check_estimator(name: str) -> None:
    """Raise unless there is an estimator of that name."""
    if name not in ESTIMATORS:
        raise ValueError(f"estimator={name!r} is unknown; use one of {', '.join(ESTIMATORS)}")

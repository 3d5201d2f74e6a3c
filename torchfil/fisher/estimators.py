"""Estimators of the Fisher information I = J̃ᵀMJ̃/s², M = κ⊥P + κ∥ĝĝᵀ: its trace, its diagonal, itself.

With A = φJᵀP, so that J̃ᵀMJ̃ = κ⊥ A Aᵀ + κ∥ a aᵀ:

    "exact"          every column of J
    "coordinates"    d·‖Aᵀe_i‖² for coordinates i drawn without replacement (Guo et al. 2022)
    "input-probes"   ‖Aᵀv‖²  for v ∈ {±1}^d, one Jv each; relative variance at most 2 per probe
    "weight-probes"  ‖Au‖² and (Au)⊙(Au) for u ∈ {±1}^p, one Jᵀu each, u shared by the batch: the trace and
                     the diagonal at once; relative variance at most 2 per probe

Only A Aᵀ is sampled: a aᵀ is known exactly once ∇n is (:mod:`torchfil.fisher.operator`), and after some training it is
half of the trace. A single weight probe saves that derivative: in r = J̃ᵀM^{1/2}(Pu + ĝ)/s = (sqrt(κ⊥)Au + sqrt(κ∥)a)/s
only Au is random, and ‖r‖² has a relative variance of at most 2, like any probe.

Because u is shared, the errors of two examples of one batch are correlated; errors of different draws are not.

The standard error comes from the spread of the probes. A single probe has no spread; from Var X ≤ M (EX)²
follows E[M/(1+M) X²] ≥ Var X, so its standard error is reported as sqrt(M/(1+M))·X, which is conservative. The mean of
k probes has the limit M/k instead of M, which says more than the spread of two or three probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.mechanism import Mechanism
from torchfil.fisher.operator import ClippedJacobian, Jacobian
from torchfil.fisher.results import Estimate
from torchfil.utils.errors import require

Quantity = Literal["trace", "diagonal", "matrix"]
_PROBE_SPREAD = 2.0  # Var X ≤ 2 (EX)² for X = ‖Au‖², u ∈ {±1}^p

_OF_ROW: dict[Quantity, Callable[[Tensor], Tensor]] = {  # of r rᵀ, for rows r, [batch, d]
    "trace": lambda r: r.square().sum(dim=1),
    "diagonal": torch.square,
    "matrix": lambda r: r[:, :, None] * r[:, None, :],
}


def shape_of(quantity: Quantity, batch: int, num_coordinates: int) -> tuple[int, ...]:
    """The shape of a quantity: [batch] for the trace, [batch, d] for the diagonal, [batch, d, d] for the matrix."""
    return (batch, *(num_coordinates,) * get_args(Quantity).index(quantity))


@dataclass(frozen=True)
class Draws:
    """The randomness of one call; it does not depend on how the batch is cut into chunks.

    Attributes:
        seeds: One seed per probe.
        rows: Which examples of the batch the current chunk holds.
        batch: The number of examples of the whole batch.
        columns_at_once: How many columns of J the exact estimator may hold.
        probes_at_once: How many weight probes may be processed together, if the Jacobian supports it.
        probes: The probes themselves, if they exist already: in passes that are captured once and replayed.
    """

    seeds: tuple[int, ...]
    rows: slice
    batch: int
    columns_at_once: int
    probes_at_once: int = 1
    probes: tuple[Tensor, ...] = ()

    @classmethod
    def seeds_from(cls, num_probes: int, generator: torch.Generator | None) -> tuple[int, ...]:
        """Seeds for ``num_probes`` probes from a generator (None: torch's global one)."""
        device = generator.device if generator is not None else torch.device("cpu")
        return tuple(torch.randint(2**62, (num_probes,), generator=generator, device=device).tolist())

    def signs(self, *shape: int, like: Tensor) -> Iterator[Tensor]:
        """For each probe, a tensor of ±1 of that shape, with ``like``'s dtype and device."""
        yield from self.probes
        for seed in () if self.probes else self.seeds:
            yield signs_of(draw_bits(seed, torch.empty(shape, dtype=torch.int8, device=like.device)), like.dtype)


def draw_bits(seed: int, bits: Tensor, source: torch.Generator | None = None) -> Tensor:
    """Fill ``bits`` with the zeros and ones of that seed; on a CPU, each random number gives 64 of them.

    ``source`` is seeded again; None: a new generator.
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


Quantities = Sequence[Quantity]
Results = dict[Quantity, Moments]

# Estimates quantities of I for the examples of one chunk, all from the same draws: the mean over the draws and its
# variance for each quantity. The first argument is a ClippedJacobian; with ``one_pass``, any Jacobian, which has norms
# and products with vectors of length p only.
EstimatorFunction = Callable[[Any, Mechanism, Quantities, Draws], Results]


@dataclass(frozen=True)
class Estimator:
    """A way to estimate quantities of I, and what it can do.

    Guarantees:
        * Its results have the shapes of :func:`shape_of`; other shapes are refused when it is called.
        * Results of an exact estimator are labelled "exact".

    Attributes:
        function: The function that estimates.
        quantities: The quantities that it can estimate.
        exact: Whether nothing is sampled: it draws no probes, and may hold ``draws.columns_at_once`` columns of J.
        one_pass: Whether the recorded pass serves it: it needs only norms of the Jacobian and its products with vectors
            of length p, and draws only such vectors.
        name: The name under which it is registered.
    """

    function: EstimatorFunction
    quantities: tuple[Quantity, ...]
    exact: bool = False
    one_pass: bool = False
    name: str = ""

    def checked(self, given: Any, jacobian: Jacobian, quantities: Sequence[Quantity]) -> dict[Quantity, Moments]:
        """What the function gave, if it is as it must be.

        Raises:
            ValueError: A quantity is missing, or has another shape than :func:`shape_of` says.
        """
        for quantity in quantities:
            moments = given.get(quantity) if isinstance(given, dict) else None
            found = [moments.mean.shape, moments.variance.shape] if isinstance(moments, Moments) else None
            shape = shape_of(quantity, *jacobian.gradients.examples.z.shape)
            if found != [shape, shape]:
                got = type(moments).__name__ if found is None else f"a mean and a variance of shapes {found}"
                raise ValueError(
                    f"estimator {self.name!r} was asked for the {quantity} and gave {got}; it must return a dict with "
                    f"a torchfil.fisher.estimators.Moments of shape {list(shape)} for each of its quantities"
                )
        return {name: replace(given[name], exact=self.exact or given[name].exact) for name in quantities}

    def check_gives(self, quantities: Iterable[Quantity], wish: str = "") -> None:
        """Raise if it cannot estimate a requested quantity; the message names estimators that can.

        Args:
            quantities: The requested quantities.
            wish: The option that requests them, for the error's text.
        """
        missing = [quantity for quantity in quantities if quantity not in self.quantities]
        if missing:
            able = names_of_estimators(lambda other: set(quantities) <= set(other.quantities))
            raise ValueError(
                f"{f'{wish} needs the {missing[0]}, and ' if wish else ''}estimator={self.name!r} gives the "
                f"{' and the '.join(self.quantities)} only, not the {missing[0]}; use estimator={able}"
            )


def exact(jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Quantities, draws: Draws) -> Results:
    """All columns of J; no sampling."""
    values: dict[Quantity, Tensor] = {}
    if "matrix" in quantities:
        values["matrix"] = jacobian.perpendicular_gram(draws.columns_at_once)
        values["diagonal"] = values["matrix"].diagonal(dim1=1, dim2=2)
    else:
        values["diagonal"] = jacobian.perpendicular_diagonal(draws.columns_at_once)
    values["trace"] = values["diagonal"].sum(dim=1)
    none = {name: torch.zeros_like(values[name]) for name in quantities}
    perpendicular = {name: Moments(values[name], none[name], torch.inf, exact=True) for name in quantities}
    return _with_parallel_part(jacobian, mechanism, perpendicular)


def coordinates(jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Quantities, draws: Draws) -> Results:
    """Columns of J at coordinates drawn without replacement, separately for each example."""
    d = jacobian.gradients.num_coordinates
    count = min(len(draws.seeds), d)
    z = jacobian.gradients.examples.z
    source = torch.Generator(device=z.device).manual_seed(draws.seeds[0])
    order = torch.rand(draws.batch, d, generator=source, device=z.device).argsort(dim=1)
    chosen = order[draws.rows, :count]  # [batch, count]
    total = RunningMoments(spread=d - 1.0)
    for k in range(count):
        direction = torch.zeros_like(z).scatter(1, chosen[:, k : k + 1], 1.0)
        total.add(d * jacobian.perpendicular_squared_norm(direction))
    moments = total.result()
    correction = 1 - count / d if count > 1 else 1.0
    corrected = replace(moments, variance=moments.variance * correction, exact=count == d)
    return _with_parallel_part(jacobian, mechanism, {"trace": corrected})


def input_probes(jacobian: ClippedJacobian, mechanism: Mechanism, quantities: Quantities, draws: Draws) -> Results:
    """‖φPJv‖² for random signs v, drawn separately for each example."""
    z = jacobian.gradients.examples.z
    total = RunningMoments(spread=_PROBE_SPREAD)
    for v in draws.signs(draws.batch, z.shape[1], like=z):
        total.add(jacobian.perpendicular_squared_norm(v[draws.rows]))
    return _with_parallel_part(jacobian, mechanism, {"trace": total.result()})


def weight_probes(jacobian: Jacobian, mechanism: Mechanism, quantities: Quantities, draws: Draws) -> Results:
    """‖r‖², r⊙r and r rᵀ for r = φJᵀPu, or J̃ᵀM^{1/2}(Pu + ĝ)/s for a single probe; the batch shares the signs u."""
    single = len(draws.seeds) == 1
    if single and "matrix" in quantities:
        raise ValueError("num_probes=1 gives a full matrix no error bar (its entries change sign); use 2 or more")
    like = torch.empty(0, dtype=jacobian.gradients.dtype, device=jacobian.gradients.device)
    probes = draws.signs(jacobian.gradients.num_parameters, like=like)
    rows: Iterable[Tensor]
    if single:
        rows = [jacobian.folded_row(mechanism, next(probes))]
    else:
        rows = jacobian.perpendicular_rows(probes, draws.probes_at_once)

    totals = {name: RunningMoments(None if name == "matrix" else _PROBE_SPREAD) for name in quantities}
    for r in rows:
        for name, total in totals.items():
            total.chi_square = name == "diagonal" or r.shape[1] == 1  # one squared number per probe, no sum of many
            total.add(_OF_ROW[name](r))
    moments = {name: total.result() for name, total in totals.items()}
    return moments if single else _with_parallel_part(jacobian, mechanism, moments)


def _with_parallel_part(jacobian: Jacobian, mechanism: Mechanism, perpendicular: Results) -> Results:
    """(κ⊥ φ²JᵀPJ + κ∥ a aᵀ)/s² from estimates of φ²JᵀPJ."""
    perp, par = mechanism.weights(jacobian.clipped_norm)
    a = jacobian.clipped_norm_gradient()
    result: Results = {}
    for name, moments in perpendicular.items():
        parallel = _OF_ROW[name](a)
        shape = (-1,) + (1,) * (parallel.ndim - 1)
        certain = par.reshape(shape) * parallel
        mean = perp.reshape(shape) * moments.mean + certain
        factor = perp.reshape(shape).square()
        limit = factor * moments.limit if moments.limit is not None else None
        result[name] = replace(moments, mean=mean, variance=factor * moments.variance, limit=limit, certain=certain)
    return result


_REGISTRY: dict[str, Estimator] = {}


def available_estimators() -> tuple[str, ...]:
    """The names of all registered estimators."""
    return tuple(sorted(_REGISTRY))


def names_of_estimators(able: Callable[[Estimator], bool]) -> str:
    """The names of estimators with a capability, for an error's text.

    Example:
        >>> names_of_estimators(lambda estimator: estimator.exact)
        "'exact'"
    """
    return " or ".join(repr(name) for name, estimator in sorted(_REGISTRY.items()) if able(estimator))


def get_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    require(name in _REGISTRY, f"estimator={name!r} is unknown; use one of {', '.join(available_estimators())}")
    return _REGISTRY[name]


def register_estimator(
    name: str,
    function: EstimatorFunction,
    *,
    quantities: Sequence[Quantity] = ("trace",),
    exact: bool = False,
    one_pass: bool = False,
    overwrite: bool = False,
) -> Estimator:
    """Register an estimator under a name, for everything that takes ``estimator=``.

    Args:
        name: The name by which callers choose it.
        function: Estimates quantities for the examples of one chunk: ``function(jacobian, mechanism, quantities,
            draws)`` returns a dict of :class:`torchfil.fisher.estimators.Moments` by quantity.
        quantities: The quantities that it estimates, from "trace", "diagonal" and "matrix"; the trace is required.
        exact: Whether nothing is sampled.
        one_pass: Whether the recorded pass serves it; see :class:`Estimator`.
        overwrite: Whether an estimator of that name may be replaced.
    """
    taken = name in _REGISTRY and not overwrite
    require(not taken, f"estimator {name!r} is already registered; pass overwrite=True to replace it")
    choice = f"choose from {', '.join(get_args(Quantity))}, and the trace must be among them"
    known = {"trace"} <= set(quantities) <= set(get_args(Quantity))
    require(known, f"estimator {name!r} was registered for {list(quantities)}; {choice}")
    _REGISTRY[name] = estimator = Estimator(function, tuple(quantities), exact, one_pass, name)
    return estimator


register_estimator("exact", exact, quantities=("trace", "diagonal", "matrix"), exact=True)
register_estimator("coordinates", coordinates)
register_estimator("input-probes", input_probes)
register_estimator("weight-probes", weight_probes, quantities=("trace", "diagonal", "matrix"), one_pass=True)

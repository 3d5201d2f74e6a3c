"""Every attacker, on average over people: the van Trees inequality.

Let people's values z have the density π, with Fisher information J = E ∇log π ∇log πᵀ. For **every** attacker, biased
or not, who knows π, the model and all other examples,

    E ‖ẑ − z‖² ≥ tr((E_π I + J)⁻¹),

where E is over people, batches and noise. It says nothing about a single record: for some, an attacker may do better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.results import Estimate

__all__ = ["PopulationBound", "Prior", "mse_van_trees", "population_mse_bound"]

_FEW = 10  # distinct values of a column that is not continuous


@dataclass(frozen=True, eq=False)
class Prior:
    """How people's private values are distributed, as the attacker knows it.

    Attributes:
        information: J of the density: its d eigenvalues, or only its trace, which gives a looser bound. Infinite in a
            direction in which all people agree.
        variance: The mean variance of a coordinate: the MSE of the best guess without the model.
        description: Describes the spread; it follows "people whose values are spread like".

    Example:
        >>> Prior.box(0.0, 1.0, num_coordinates=2).information  # π²/r², r = ½
        tensor([39.4784, 39.4784], dtype=torch.float64)
    """

    information: Tensor
    variance: float
    description: str

    def __post_init__(self) -> None:
        information = torch.as_tensor(self.information, dtype=torch.float64)
        object.__setattr__(self, "information", information)
        if information.ndim > 1 or not bool((information > 0).all()):
            raise ValueError("information must be tr J, or the eigenvalues of J, [d], and positive")
        if not bool(information.isfinite().any()):
            raise ValueError(
                "the prior's information is infinite: its values are discrete, and an attacker may name them exactly. "
                "Ask a question about them instead: torchfil.questions"
            )

    @classmethod
    def gaussian(cls, values: Any, *, allow_discrete: bool = False) -> Prior:
        """The normal distribution with the mean and covariance of the data; J = Σ⁻¹, by its eigenvalues.

        It is not regularised: the bound is a concave function of Σ, so chance in the covariance lowers it on average,
        and directions without variance count as known to everybody. Of all densities with covariance Σ, the normal one
        has the least information, so the bound relies on people being distributed like that.

        Args:
            values: The private coordinates, [n, d], in the order of ``Private``; any further dimensions are flattened.
            allow_discrete: Whether to accept columns of few values (≤ 10) as readings of a continuous quantity.
        """
        given = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
        if not given.is_floating_point() and not allow_discrete:
            raise ValueError(_discrete(f"values of dtype {given.dtype}"))
        table = given.double()
        if table.ndim < 2 or len(table) < 2 or not bool(table.isfinite().all()):
            raise ValueError(f"values must be [n, d], finite, n ≥ 2; got shape {tuple(table.shape)}")
        table = table.reshape(len(table), -1)
        if not allow_discrete:
            _check_continuous(table)

        # eigenvalues of the covariance, through the smaller of XᵀX and XXᵀ
        centred = table - table.mean(dim=0)
        n, d = centred.shape
        square = centred.T @ centred if d <= n else centred @ centred.T
        squares = torch.linalg.eigvalsh(square)
        squares = torch.where(squares > squares[-1] * d * torch.finfo(squares.dtype).eps, squares, 0.0)
        variances = torch.zeros(d, dtype=torch.float64, device=squares.device)
        variances[: len(squares)] = squares / (n - 1)
        name = f"a normal law with the mean and covariance of {n:,} examples"
        return cls(variances.reciprocal(), float(variances.mean()), name)

    @classmethod
    def box(
        cls, low: float | Sequence[float] | Tensor, high: float | Sequence[float] | Tensor, *, num_coordinates: int
    ) -> Prior:
        """The smoothest density between two values, cos² of the distance from the middle: J = π²/r², r half the width.

        Args:
            low: The smallest value, one for all coordinates or one for each, [d].
            high: The largest value, likewise.
            num_coordinates: d.
        """
        ends = [torch.as_tensor(end, dtype=torch.float64).expand(num_coordinates) for end in (low, high)]
        half = (ends[1] - ends[0]) / 2
        if not bool(((half > 0) & half.isfinite()).all()):
            raise ValueError(f"low={low} must lie below high={high} in every coordinate, both finite")
        one = bool((ends[0] == ends[0][0]).all()) and bool((ends[1] == ends[1][0]).all())
        between = f"between {float(ends[0][0]):g} and {float(ends[1][0]):g}" if one else "between their ends"
        variance = half.square().mean() * (1 / 3 - 2 / math.pi**2)
        return cls(math.pi**2 / half.square(), float(variance), f"the smoothest density {between} (a squared cosine)")


@dataclass(frozen=True, eq=False)
class PopulationBound:
    """The MSE that no attacker gets below on average over people; ``str`` gives a sentence to quote.

    Attributes:
        bound: Per coordinate, a scalar, in the squared unit of the data; an estimate, because E_π tr I is one.
        prior_variance: The MSE of the best guess without the model; never below the bound.
        description: Describes the people.
    """

    bound: Estimate
    prior_variance: float
    description: str

    def __str__(self) -> str:
        low = float(self.bound.interval(0.95)[0])
        return (
            f"On average over people whose values are spread like {self.description}, every attacker, biased or not, "
            f"errs by at least {float(self.bound):.3g} (mean squared error per coordinate; an estimate, whose 95 % "
            f"interval over people and probes begins at {low:.3g}); the best guess without the model errs by "
            f"{self.prior_variance:.3g}. This is about the population, not about any one record."
        )


def mse_van_trees(
    mean_trace: Tensor | float, num_coordinates: int, prior_information: Tensor | Sequence[float] | float
) -> Tensor:
    """MSE per coordinate ≥ d / (E_π tr I + tr J), for every attacker, on average over people.

    With the eigenvalues j of J, the bound is as tight as the trace of I allows: an attacker learns most if the trace t
    is spent on the directions that vary most. As in reverse water-filling,

        MSE ≥ (1/d) Σ_k min(θ, 1/j_k),   Σ_k (1/θ − j_k)₊ = t.

    Without leakage (t = 0) this is the prior's variance (for a normal distribution).

    Args:
        mean_trace: t = E_π tr I, any shape.
        num_coordinates: d.
        prior_information: tr J, or the eigenvalues of J, [d].

    Returns:
        The bound, in the shape of ``mean_trace``, float64; 0 if the trace is infinite.

    Example:
        Two coordinates of variance 4 and 0.25:

        >>> mse_van_trees(torch.tensor([0.0, 0.5]), 2, [1 / 4, 4.0])
        tensor([2.1250, 0.7917], dtype=torch.float64)
        >>> mse_van_trees(0.5, 2, 4.25)
        tensor(0.4211, dtype=torch.float64)
    """
    return _water_filled(mean_trace, num_coordinates, prior_information)[0]


def population_mse_bound(trace: Estimate, num_coordinates: int, prior: Prior) -> PopulationBound:
    """The van Trees bound from every example's trace; examples count as independent draws from the prior.

    Args:
        trace: tr I of every example, [n], from :meth:`Leakage.get_trace`; examples that were not drawn count as 0.
        num_coordinates: d.
        prior: How people's values are spread.

    Returns:
        The bound; its standard error covers the draw of the examples (and of their batches) and, as if all examples had
        the same error, the trace's own error. It does not cover the path of the weights in one run: pass traces
        averaged over runs (``FILPrivacyEngine.merge(…).get_trace()``), whose error comes from the spread between runs.

    Example:
        >>> bound = population_mse_bound(Estimate.exact(torch.full((50,), 4.0)), 1, Prior.box(-1, 1, num_coordinates=1))
        >>> bound.bound
        Estimate(0.0721, estimate)
    """
    if prior.information.ndim == 1 and len(prior.information) != num_coordinates:
        raise ValueError(
            f"the prior has {len(prior.information)} coordinates, and {num_coordinates} are private; give a prior for "
            "these"
        )
    values = trace.value.double().cpu()
    mean = values.mean()
    value, slope = _water_filled(mean, num_coordinates, prior.information)

    # of the mean trace: between people, and shared by all
    of_people = values.var() / len(values) if len(values) > 1 and bool(mean.isfinite()) else torch.zeros_like(mean)
    error = slope * (of_people + trace.standard_error.double().cpu().mean().square()).sqrt()
    kind = "upper bound" if trace.kind == "lower bound" else "estimate"
    bound = Estimate(value, error, kind, positive=True)  # type: ignore[arg-type]
    return PopulationBound(bound, prior.variance, prior.description)


def _water_filled(
    mean_trace: Tensor | float, num_coordinates: int, prior_information: Tensor | Sequence[float] | float
) -> tuple[Tensor, Tensor]:
    """The bound and how fast it falls with the mean trace, both in its shape."""
    trace = torch.as_tensor(mean_trace, dtype=torch.float64)
    if bool((trace < 0).any()) or num_coordinates < 1:
        raise ValueError(f"mean_trace={mean_trace} must be ≥ 0 and num_coordinates={num_coordinates} at least 1")
    information = Prior(torch.as_tensor(prior_information, dtype=torch.float64), math.nan, "").information.cpu()
    if information.ndim == 0:  # the trace alone
        bound = num_coordinates / (trace + information)
        return bound, bound.square() / num_coordinates
    if len(information) != num_coordinates:
        raise ValueError(f"prior_information has {len(information)} entries for {num_coordinates} coordinates")

    # with the m least informed directions under water, the level is (t + Σ j)/m; take the last m with j below it
    sorted_information = information.sort().values
    count = torch.arange(1, num_coordinates + 1, dtype=torch.float64)
    levels = (trace[..., None].cpu() + sorted_information.cumsum(0)) / count
    under = (
        ((sorted_information <= levels) & sorted_information.isfinite())
        .long()
        .cumprod(dim=-1)
        .sum(dim=-1, keepdim=True)
    )
    level = levels.gather(-1, (under - 1).clamp(min=0)).squeeze(-1)  # 1/θ
    theta = level.reciprocal()
    bound = torch.minimum(theta[..., None], information.reciprocal()).mean(dim=-1)
    return bound.to(trace.device), (theta.square() / num_coordinates).to(trace.device)


def _check_continuous(table: Tensor) -> None:
    """Refuse columns whose values repeat so much that they have no density; a constant column is fine."""
    ordered = table.sort(dim=0).values
    distinct = 1 + (ordered[1:] != ordered[:-1]).sum(dim=0)
    few = ((distinct > 1) & (distinct <= _FEW) & (2 * distinct < len(table))).nonzero().flatten().tolist()
    if few:
        shown = ", ".join(map(str, few[:5])) + (", …" if len(few) > 5 else "")
        raise ValueError(_discrete(f"coordinates {shown} with {int(distinct[few[0]])} distinct values"))


def _discrete(what: str) -> str:
    return (
        f"{what}: discrete values have no density, the prior's information is infinite, and an attacker may name them "
        "exactly. Ask questions about them instead (torchfil.questions); leave them out of what is private "
        "(Private(coordinates=…)); or, for rounded readings of something continuous, pass Prior.gaussian(values, "
        "allow_discrete=True)"
    )

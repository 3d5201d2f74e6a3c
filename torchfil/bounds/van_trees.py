"""Every attacker, on average over people: the van Trees inequality.

Let people's values z have the density π **given everything that is public** about them (their labels, known columns),
with Fisher information J = E ∇log π ∇log πᵀ. For **every** attacker, biased or not, who knows π, the model and all
other examples,

    E ‖ẑ − z‖² ≥ tr((E_π I + J)⁻¹),

where E is over people with the same public values, batches and noise; the mean over those values holds for everybody.
It says nothing about a single example: for some, an attacker may do better.

π is assumed. A normal density has the least information of all with its covariance, and a squared cosine of all on an
interval, so with either the bound claims too much unless people are distributed exactly like that. No rule of the gate
uses it.
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

_FEW = 10  # distinct values of a column that is not continuous


@dataclass(frozen=True, eq=False)
class Prior:
    """How people's private values are distributed, given what is public, as the attacker knows it.

    Attributes:
        information: J of the density: its d eigenvalues, or only its trace, which gives a looser bound; with
            ``groups``, the eigenvalues in each group, [groups, d]. Infinite in a direction in which all people agree.
        variance: The mean variance of a coordinate given what is public: the MSE of the best guess without the model.
        description: Describes the spread; it follows "people whose values are spread like".
        groups: The group of every example, [n]: those with the same public values; None: all are alike.
        assumed: Whether another density with the same covariance or range has more information, so that the bound
            claims too much for it.

    Example:
        >>> Prior.box(0.0, 1.0, num_coordinates=2).information  # π²/r², r = ½
        tensor([39.4784, 39.4784], dtype=torch.float64)
    """

    information: Tensor
    variance: float
    description: str
    groups: Tensor | None = None
    assumed: bool = False

    def __post_init__(self) -> None:
        information = torch.as_tensor(self.information, dtype=torch.float64)
        object.__setattr__(self, "information", information)
        if information.ndim > 1 + (self.groups is not None) or not bool((information > 0).all()):
            raise ValueError("information must be tr J, or the eigenvalues of J, [d], and positive")
        if not bool(information.isfinite().any()):
            raise ValueError(
                "the prior's information is infinite: its values are discrete, and an attacker may name them exactly. "
                "Ask a question about them instead: torchfil.questions"
            )

    @classmethod
    def gaussian(cls, values: Any, known: Sequence[Tensor] = (), *, allow_discrete: bool = False) -> Prior:
        """The normal distribution with the mean and covariance of the data, given what is known; J = Σ⁻¹.

        Examples with equal labels are fitted separately, each with the residuals of its values after a linear
        regression on the known columns. A label with one example counts as known values.

        It is not regularised: the bound is a concave function of Σ, so chance in the covariance lowers it on average,
        and directions without variance count as known to everybody. Of all densities with covariance Σ, the normal one
        has the least information: the bound assumes that people are distributed like that, or claims too much.

        Args:
            values: The private coordinates, [n, d], in the order of ``Private``; any further dimensions are flattened.
            known: What is public about the same examples, [n, …] each: integers, and columns of few values (≤ 10), are
                labels; others are columns.
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

        # by label, and beyond what the known columns explain
        labels, columns = _labels_and_columns(known, table)
        groups = labels.unique(dim=0, return_inverse=True)[1]
        parts = [groups == group for group in range(int(groups.max()) + 1)]
        variances = torch.stack([_unexplained(table[part], columns[part]) for part in parts])
        if not bool((variances > 0).any()):
            raise ValueError(
                "what is public leaves nothing unknown: every label belongs to one example, or the known columns "
                "explain all values, so no bound can be given. Ask questions instead: torchfil.questions"
            )
        name = f"a normal law (assumed: the bound claims too much for any other) fitted to {len(table):,} examples"
        if not known:
            return cls(variances[0].reciprocal(), float(variances.mean()), name, assumed=True)
        name += f", given what is public ({len(parts):,} labels, {columns.shape[1]:,} columns)"
        return cls(variances.reciprocal(), float(variances[groups].mean()), name, groups, assumed=True)

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
        name = f"the smoothest density {between} (a squared cosine, assumed: the bound claims too much for any other)"
        return cls(math.pi**2 / half.square(), float(variance), name, assumed=True)


@dataclass(frozen=True, eq=False)
class PopulationBound:
    """The MSE that no attacker gets below on average over people; ``str`` gives a sentence to quote.

    Attributes:
        bound: Per coordinate, a scalar, in the squared unit of the data; an estimate, because E_π tr I is one. For an
            assumed density its kind is "upper bound": for any other, less can be claimed.
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
            f"{self.prior_variance:.3g}. This is about the population, not about any one example."
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
        prior: How people's values are spread, given what is public; its groups are those of the same examples.

    Returns:
        The bound; its standard error covers the draw of the examples (and of their batches) and, as if all examples had
        the same error, the trace's own error. It does not cover the path of the weights in one run: pass traces
        averaged over runs (``FILPrivacyEngine.merge(…).get_trace()``), whose error comes from the spread between runs.

    Example:
        >>> bound = population_mse_bound(Estimate.exact(torch.full((50,), 4.0)), 1, Prior.box(-1, 1, num_coordinates=1))
        >>> bound.bound
        Estimate(0.0721, upper bound)
    """
    if prior.information.ndim > 0 and prior.information.shape[-1] != num_coordinates:
        raise ValueError(
            f"the prior has {prior.information.shape[-1]} coordinates, and {num_coordinates} are private; give a prior "
            "for these"
        )
    values = trace.value.double().cpu()
    groups = torch.zeros(len(values)).long() if prior.groups is None else prior.groups.cpu()
    if len(groups) != len(values):
        raise ValueError(f"the prior is of {len(groups)} examples, and there are {len(values)} traces; give the same")

    # of the mean trace: between people with the same public values, and shared by all
    information = prior.information if prior.groups is not None else prior.information[None]
    value = of_people = shared = torch.zeros((), dtype=torch.float64)
    for group, own in enumerate(information.unbind()):
        people = values[groups == group]
        if not len(people) or not bool(own.isfinite().any()):
            continue  # nothing is unknown about these: their bound is 0
        found, slope = (each * len(people) / len(values) for each in _water_filled(people.mean(), num_coordinates, own))
        value, shared = value + found, shared + slope
        if len(people) > 1 and bool(people.isfinite().all()):
            of_people = of_people + slope.square() * people.var() / len(people)
    error = (of_people + (shared * trace.standard_error.double().cpu().mean()).square()).sqrt()

    kind = "upper bound" if prior.assumed or trace.kind == "lower bound" else "estimate"
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
    reached = (sorted_information <= levels) & sorted_information.isfinite()
    under = reached.long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
    level = levels.gather(-1, (under - 1).clamp(min=0)).squeeze(-1)  # 1/θ
    theta = level.reciprocal()
    bound = torch.minimum(theta[..., None], information.reciprocal()).mean(dim=-1)
    return bound.to(trace.device), (theta.square() / num_coordinates).to(trace.device)


def _distinct(table: Tensor) -> Tensor:
    """How many values each column has, [columns]."""
    ordered = table.sort(dim=0).values
    return 1 + (ordered[1:] != ordered[:-1]).sum(dim=0)


def _labels_and_columns(known: Sequence[Tensor], table: Tensor) -> tuple[Tensor, Tensor]:
    """Public values as labels and as columns, [n, any number] each, in float64."""
    labels, columns = [torch.zeros_like(table[:, :1])], [table[:, :0]]
    for given in known:
        if len(given) != len(table) or not bool(given.isfinite().all()):
            raise ValueError(f"known must be finite, [{len(table)}, …] as the values; got shape {tuple(given.shape)}")
        flat = given.reshape(len(table), -1).to(table)
        few = (_distinct(flat) <= _FEW) | (not given.is_floating_point())
        labels, columns = [*labels, flat[:, few]], [*columns, flat[:, ~few]]
    return torch.cat(labels, dim=1), torch.cat(columns, dim=1)


def _unexplained(values: Tensor, columns: Tensor) -> Tensor:
    """The eigenvalues of the covariance that a regression on these columns leaves, [d]; 0 in known directions."""
    n, d = values.shape
    residual, known = values - values.mean(dim=0), columns - columns.mean(dim=0)
    least = residual.square().sum() * max(n, d) * torch.finfo(values.dtype).eps
    basis, size, _ = torch.linalg.svd(known / known.norm(dim=0).clamp(min=1e-300), full_matrices=False)
    basis = basis[:, size > 1e-9]
    residual = residual - basis @ (basis.T @ residual)

    # through the smaller of XᵀX and XXᵀ
    squares = torch.linalg.eigvalsh(residual.T @ residual if d <= n else residual @ residual.T)
    variances, freedom = values.new_zeros(d), n - 1 - basis.shape[1]
    if freedom > 0:
        variances[: len(squares)] = torch.where(squares > least, squares, 0.0) / freedom
    return variances


def _check_continuous(table: Tensor) -> None:
    """Refuse columns whose values repeat so much that they have no density; a constant column is fine."""
    distinct = _distinct(table)
    few = ((distinct > 1) & (distinct <= _FEW) & (2 * distinct < len(table))).nonzero().flatten().tolist()
    if few:
        shown = ", ".join(map(str, few[:5])) + (", …" if len(few) > 5 else "")
        raise ValueError(_discrete(f"coordinates {shown} with {int(distinct[few[0]])} distinct values"))


def _discrete(what: str) -> str:
    return (
        f"{what}: discrete values have no density, and an attacker may name them exactly. Ask questions about them "
        "(torchfil.questions) or leave them out (Private(coordinates=…)); if they are rounded readings of something "
        "continuous, pass Prior.gaussian(values, allow_discrete=True)"
    )

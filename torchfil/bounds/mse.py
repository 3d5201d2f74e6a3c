"""Mean squared errors of attackers: from Fisher information, from Rényi divergence, and over
people.

**Unbiased attackers, one record** (Theorems 2 and 1 of Guo et al. 2022): all functions up to
:func:`replace_one_rdp`, except :func:`mse_biased`. An attacker who knows what people are like may
err less, at the price of a bias; what follows here and :mod:`torchfil.bounds.reconstruction` bound
every attacker.

**Every attacker, on average over people: the van Trees inequality**

Let people's values z have the density π **given everything that is public** about them (their
labels, known columns), with Fisher information J = E ∇log π ∇log πᵀ. For **every** attacker, biased
or not, who knows π, the model and all other examples,

    E ‖ẑ − z‖² ≥ tr((E_π I + J)⁻¹),

where E is over people with the same public values, batches and noise; the mean over those values
holds for everybody. It says nothing about a single example: for some, an attacker may do better.

π is assumed. A normal density has the least information of all with its covariance, and a squared
cosine of all on an interval, so with either the bound claims too much unless people are distributed
exactly like that. No rule of the gate uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from torchfil.fisher.results import Estimate, Kind

Numbers = float | Sequence[float] | Tensor
_FEW = 10  # distinct values of a column that is not continuous


def mse_from_trace(trace: Tensor, num_coordinates: int) -> Tensor:
    """Theorem 2 of Guo et al. 2022: MSE ≥ d / tr(I) = 1/η̄², for every unbiased attacker.

    Example:
        >>> mse_from_trace(torch.tensor([8.0, 0.0]), num_coordinates=4)
        tensor([0.5000,    inf])
    """
    if not num_coordinates >= 1:
        raise ValueError(f"num_coordinates={num_coordinates} must be at least 1")
    return num_coordinates / _non_negative(trace, "trace")


def mse_from_spectral_norm(eta_squared: Tensor) -> Tensor:
    """Theorem 2, the looser form: MSE ≥ 1/η², η² = ‖I‖₂, for every unbiased attacker.

    It also holds for the MSE in every single direction. η² must not be an underestimate: an
    iterated ("lower bound") spectral norm gives an approximation of this bound, not the bound.
    """
    return 1.0 / _non_negative(eta_squared, "eta_squared")


def mse_from_fim(fim: Tensor) -> Tensor:
    """Theorem 2, the tightest form: MSE ≥ tr(I⁻¹)/d for every unbiased attacker; [batch] from
    [batch, d, d].

    Eigenvalues below d·eps·λ_max cannot be distinguished from zero in floating point and are raised
    to it, so the number stays a valid lower bound; a zero matrix gives infinity.

    Example:
        >>> mse_from_fim(torch.diag(torch.tensor([1.0, 4.0]))[None])
        tensor([0.6250])
    """
    return (
        _inverse_trace(fim, torch.eye(fim.shape[-1], dtype=fim.dtype, device=fim.device))
        / fim.shape[-1]
    )


def mse_biased(fim: Tensor, mean_jacobian: Tensor, bias: Tensor) -> Tensor:
    """Theorem 2 in full: MSE ≥ (tr(J_μ I⁻¹ J_μᵀ) + ‖μ(z) − z‖²) / d for an attacker with mean μ(z).

    Args:
        fim: I, [batch, d, d].
        mean_jacobian: J_μ = ∂μ/∂z, [batch, d, d] or [d, d]; the identity for an unbiased attacker.
        bias: μ(z) − z, [batch, d] or [d].

    Returns:
        The bound, [batch]. Eigenvalues are floored as in :func:`mse_from_fim`. With a zero matrix
        I, the bound is the squared bias if J_μ is zero (a constant guess), and infinite otherwise.
    """
    return (_inverse_trace(fim, mean_jacobian) + bias.square().sum(dim=-1)) / fim.shape[-1]


def attribute_error(diagonal: Tensor) -> Tensor:
    """The standard error of an unbiased guess of one coordinate: at least 1/sqrt(I_jj), in its own
    unit.

    The attacker may know every other coordinate. The result is elementwise, and infinite if I_jj =
    0.

    Example:
        >>> attribute_error(torch.tensor([0.04, 0.0]))  # an age, in years
        tensor([5., inf])
    """
    return _non_negative(diagonal, "diagonal").rsqrt()


def mse_from_rdp(epsilon: float, diameters: Tensor | Sequence[float]) -> float:
    """Theorem 1 of Guo et al. 2022: MSE ≥ Σ_i diam_i² / (4d (e^ε − 1)), for every unbiased
    attacker.

    Args:
        epsilon: The order-2 Rényi divergence between runs on data sets that differ in **the value
            of one example**. For an accountant that adds and removes examples (Opacus), use
            :func:`replace_one_rdp`; the paper's own reading uses the accountant's ε_RDP(2)
            directly, which is not a theorem for such accountants.
        diameters: The range of each private coordinate, [d].

    Example:
        The paper's example: ages in [0, 100] at ε = 2 are safe up to about ±19.

        >>> round(mse_from_rdp(2.0, [100.0]) ** 0.5, 1)
        19.8
    """
    squares = torch.as_tensor(diameters, dtype=torch.float64).square()
    if not (squares.ndim == 1 and len(squares) > 0):
        raise ValueError(
            f"diameters must be one number per private coordinate, got shape {tuple(squares.shape)}"
        )
    if not epsilon >= 0:
        raise ValueError(f"epsilon={epsilon} must be ≥ 0")
    if epsilon == 0:
        return math.inf
    return squares.mean().item() / 4 * math.exp(-epsilon) / -math.expm1(-epsilon)


def replace_one_rdp(rdp: Callable[[float], float], *, order: float = 2.0) -> float:
    """D_α between neighbours that differ in one example's value, from RDP under adding or removing
    one.

    Both neighbours are one removal away from the data set without the example, R. For every p > 1
    with 1/p + 1/p′ = 1 the Rényi divergence has the weak triangle inequality

        D_α(P‖Q) ≤ (α − 1/p)/(α − 1) · D_{pα}(P‖R) + D_{p′(α − 1/p)}(R‖Q).

    At α = 2, p = 2 this is 1.5·ε(4) + ε(3); the smallest value over p is returned.

    Args:
        rdp: α ↦ ε(α), the add/remove RDP of the whole run, from an accountant.
        order: α.

    Example:
        For a Gaussian mechanism, ε(α) = α/2σ², at σ = 1 the true replace-one divergence D₂ is 4:

        >>> bound = replace_one_rdp(lambda alpha: alpha / 2)
        >>> 4 <= bound <= 1.5 * 4 / 2 + 3 / 2
        True
    """
    if not order > 1:
        raise ValueError(f"order={order} must exceed 1")

    def total(p: float) -> float:
        conjugate = p / (p - 1)
        return (order - 1 / p) / (order - 1) * rdp(p * order) + rdp(conjugate * (order - 1 / p))

    best = optimize.minimize_scalar(
        lambda t: total(1 + math.exp(t)), bounds=(-4.0, 4.0), method="bounded"
    )
    return min(float(best.fun), total(2.0))


def _inverse_trace(fim: Tensor, factor: Tensor) -> Tensor:
    """tr(F I⁻¹ Fᵀ), [batch], with the eigenvalues of I floored at d·eps·λ_max."""
    if not (fim.ndim == 3 and fim.shape[-1] == fim.shape[-2]):
        raise ValueError(f"fim must have shape [batch, d, d], got {tuple(fim.shape)}")
    if fim.shape[0] == 0:
        return fim.new_zeros(0)
    values, vectors = torch.linalg.eigh(fim)
    floor = fim.shape[-1] * torch.finfo(fim.dtype).eps * values[:, -1:].clamp(min=0)
    rotated = (factor @ vectors).square().sum(dim=-2).expand_as(values)  # [batch, d]
    terms = rotated / torch.maximum(values, floor)
    return torch.where(rotated == 0, torch.zeros_like(terms), terms).sum(dim=-1)


def _non_negative(value: Tensor, name: str) -> Tensor:
    if (value < 0).any():
        raise ValueError(f"{name} must be ≥ 0, got {value[value < 0].tolist()[:5]}")
    return value


# ----------------------------------------------------------- every attacker, on average over people


@dataclass(frozen=True, eq=False)
class Prior:
    """How people's private values are distributed, given what is public, as the attacker knows it.

    Attributes:
        information: J of the density: its d eigenvalues, or only its trace, which gives a looser
            bound; with ``groups``, the eigenvalues in each group, [groups, d]. Infinite in a
            direction in which all people agree.
        variance: The mean variance of a coordinate given what is public: the MSE of the best guess
            without the model.
        description: Describes the spread; it follows "people whose values are spread like".
        groups: The group of every example, [n]: those with the same public values; None: all are
            alike.
        assumed: Whether another density with the same covariance or range has more information, so
            that the bound claims too much for it.

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
        if not (
            information.ndim <= 1 + (self.groups is not None) and bool((information > 0).all())
        ):
            raise ValueError("information must be tr J, or the eigenvalues of J, [d], and positive")
        if not information.isfinite().any():
            raise ValueError(
                "the prior's information is infinite: an attacker may name its discrete values "
                "exactly. Ask a question about them: torchfil.questions"
            )

    @classmethod
    def gaussian(
        cls, values: object, known: Sequence[Tensor] = (), *, allow_discrete: bool = False
    ) -> Prior:
        """The normal distribution with the mean and covariance of the data, given what is known.

        J = Σ⁻¹.

        Examples with equal labels are fitted separately, each with the residuals of its values
        after a linear regression on the known columns. A label with one example counts as known
        values.

        It is not regularised: the bound is a concave function of Σ, so chance in the covariance
        lowers it on average, and directions without variance count as known to everybody. Of all
        densities with covariance Σ, the normal one has the least information: the bound assumes
        that people are distributed like that, or claims too much.

        Args:
            values: The private coordinates, [n, d], in the order of ``Private``; any further
                dimensions are flattened.
            known: What is public about the same examples, [n, …] each: integers, and columns of few
                values (≤ 10), are labels; others are columns.
            allow_discrete: Whether to accept columns of few values (≤ 10) as readings of a
                continuous quantity.
        """
        given = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
        if not given.is_floating_point() and not allow_discrete:
            raise ValueError(_discrete(f"values of dtype {given.dtype}"))
        table = given.double()
        if not (table.ndim >= 2 and len(table) >= 2 and bool(table.isfinite().all())):
            raise ValueError(
                f"values must be [n, d], finite, n ≥ 2; got shape {tuple(table.shape)}"
            )
        table = table.reshape(len(table), -1)
        if not allow_discrete:
            _check_continuous(table)

        # by label, and beyond what the known columns explain
        labels, columns = _labels_and_columns(known, table)
        groups = labels.unique(dim=0, return_inverse=True)[1]
        parts = [groups == group for group in range(int(groups.max()) + 1)]
        variances = torch.stack([_unexplained(table[part], columns[part]) for part in parts])
        if not (variances > 0).any():
            raise ValueError(
                "what is public (labels, known columns) leaves nothing unknown; ask questions "
                "instead"
            )
        name = (
            "a normal law (assumed: the bound claims too much for any other) fitted to "
            f"{len(table):,} examples"
        )
        if not known:
            return cls(variances[0].reciprocal(), float(variances.mean()), name, assumed=True)
        name += f", given what is public ({len(parts):,} labels, {columns.shape[1]:,} columns)"
        return cls(
            variances.reciprocal(), float(variances[groups].mean()), name, groups, assumed=True
        )

    @classmethod
    def box(cls, low: Numbers, high: Numbers, *, num_coordinates: int) -> Prior:
        """The smoothest density between two values, cos² of the distance from the middle: J =
        π²/r², r half the width.

        Args:
            low: The smallest value, one for all coordinates or one for each, [d].
            high: The largest value, likewise.
            num_coordinates: d.
        """
        ends = [
            torch.as_tensor(end, dtype=torch.float64).expand(num_coordinates) for end in (low, high)
        ]
        half = (ends[1] - ends[0]) / 2
        if not ((half > 0) & half.isfinite()).all():
            raise ValueError(
                f"low={low} must lie below high={high} in every coordinate, both finite"
            )
        one = bool((ends[0] == ends[0][0]).all()) and bool((ends[1] == ends[1][0]).all())
        between = (
            f"between {float(ends[0][0]):g} and {float(ends[1][0]):g}"
            if one
            else "between their ends"
        )
        variance = half.square().mean() * (1 / 3 - 2 / math.pi**2)
        name = (
            f"the smoothest density {between} (a squared cosine, assumed: the bound claims "
            "too much for any other)"
        )
        return cls(math.pi**2 / half.square(), float(variance), name, assumed=True)


@dataclass(frozen=True, eq=False)
class PopulationBound:
    """The MSE that no attacker gets below on average over people; ``str`` gives a sentence to
    quote.

    Attributes:
        bound: Per coordinate, a scalar, in the squared unit of the data; an estimate, because E_π
            tr I is one. For an assumed density its kind is "upper bound": for any other, less can
            be claimed.
        prior_variance: The MSE of the best guess without the model; never below the bound.
        description: Describes the people.
    """

    bound: Estimate
    prior_variance: float
    description: str

    def __str__(self) -> str:
        low = float(self.bound.interval(0.95)[0])
        return (
            f"On average over people whose values are spread like {self.description}, every "
            f"attacker, biased or not, errs by at least {float(self.bound):.3g} (mean squared "
            "error per coordinate; an estimate, whose 95 % interval over people and probes "
            f"begins at {low:.3g}); the best guess without the model errs by "
            f"{self.prior_variance:.3g}. This is about the population, not about any one example."
        )


def mse_van_trees(
    mean_trace: Tensor | float, num_coordinates: int, prior_information: Numbers
) -> Tensor:
    """MSE per coordinate ≥ d / (E_π tr I + tr J), for every attacker, on average over people.

    With the eigenvalues j of J, the bound is as tight as the trace of I allows: an attacker learns
    most if the trace t is spent on the directions that vary most. As in reverse water-filling,

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
    """The van Trees bound from every example's trace.

    Examples count as independent draws from the prior.

    Args:
        trace: tr I of every example, [n], from :meth:`Leakage.get_trace`; examples that were not
            drawn count as 0.
        num_coordinates: d.
        prior: How people's values are spread, given what is public; its groups are those of the
            same examples.

    Returns:
        The bound; its standard error covers the draw of the examples (and of their batches) and, as
        if all examples had the same error, the trace's own error. It does not cover the path of the
        weights in one run: pass traces averaged over runs
        (``FILPrivacyEngine.merge(…).get_trace()``), whose error comes from the spread between runs.

    Example:
        >>> bound = population_mse_bound(
        ...     Estimate.exact(torch.full((50,), 4.0)), 1, Prior.box(-1, 1, num_coordinates=1)
        ... )
        >>> bound.bound
        Estimate(0.0721, upper bound)
    """
    coordinates = prior.information.shape[-1] if prior.information.ndim else num_coordinates
    if coordinates != num_coordinates:
        raise ValueError(
            f"the prior has {coordinates} coordinates, and {num_coordinates} are private; give a "
            "prior for these"
        )
    values = trace.value.double().cpu()
    groups = torch.zeros(len(values)).long() if prior.groups is None else prior.groups.cpu()
    if len(groups) != len(values):
        raise ValueError(
            f"the prior is of {len(groups)} examples, and there are {len(values)} traces"
        )

    # of the mean trace: between people with the same public values, and shared by all
    information = prior.information if prior.groups is not None else prior.information[None]
    value = of_people = shared = torch.zeros((), dtype=torch.float64)
    for group, own in enumerate(information.unbind()):
        people = values[groups == group]
        if not len(people) or not bool(own.isfinite().any()):
            continue  # nothing is unknown about these: their bound is 0
        found, slope = (
            each * len(people) / len(values)
            for each in _water_filled(people.mean(), num_coordinates, own)
        )
        value, shared = value + found, shared + slope
        if len(people) > 1 and bool(people.isfinite().all()):
            of_people = of_people + slope.square() * people.var() / len(people)
    error = (of_people + (shared * trace.standard_error.double().cpu().mean()).square()).sqrt()

    kind: Kind = "upper bound" if prior.assumed or trace.kind == "lower bound" else "estimate"
    return PopulationBound(
        Estimate(value, error, kind, positive=True), prior.variance, prior.description
    )


def _water_filled(
    mean_trace: Tensor | float, num_coordinates: int, prior_information: Numbers
) -> tuple[Tensor, Tensor]:
    """The bound and how fast it falls with the mean trace, both in its shape."""
    trace = torch.as_tensor(mean_trace, dtype=torch.float64)
    if not (not bool((trace < 0).any()) and num_coordinates >= 1):
        raise ValueError(
            f"mean_trace={mean_trace} must be ≥ 0 and num_coordinates={num_coordinates} at least 1"
        )
    information = Prior(
        torch.as_tensor(prior_information, dtype=torch.float64), math.nan, ""
    ).information.cpu()
    if information.ndim == 0:  # the trace alone
        bound = num_coordinates / (trace + information)
        return bound, bound.square() / num_coordinates
    count = len(information)
    if count != num_coordinates:
        raise ValueError(f"prior_information has {count} entries for {num_coordinates} coordinates")

    # with the m least informed directions under water, the level is (t + Σ j)/m; take the last m
    # with j below it
    sorted_information = information.sort().values
    sizes = torch.arange(1, num_coordinates + 1, dtype=torch.float64)
    levels = (trace[..., None].cpu() + sorted_information.cumsum(0)) / sizes
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
        if not (len(given) == len(table) and bool(given.isfinite().all())):
            raise ValueError(
                f"known must be finite, [{len(table)}, …] as the values; got shape "
                f"{tuple(given.shape)}"
            )
        flat = given.reshape(len(table), -1).to(table)
        few = (_distinct(flat) <= _FEW) | (not given.is_floating_point())
        labels, columns = [*labels, flat[:, few]], [*columns, flat[:, ~few]]
    return torch.cat(labels, dim=1), torch.cat(columns, dim=1)


def _unexplained(values: Tensor, columns: Tensor) -> Tensor:
    """The eigenvalues of the covariance that a regression on these columns leaves, [d]; 0 in known
    directions.
    """
    n, d = values.shape
    residual, known = values - values.mean(dim=0), columns - columns.mean(dim=0)
    least = residual.square().sum() * max(n, d) * torch.finfo(values.dtype).eps
    basis, size, _ = torch.linalg.svd(
        known / known.norm(dim=0).clamp(min=1e-300), full_matrices=False
    )
    basis = basis[:, size > 1e-9]
    residual = residual - basis @ (basis.T @ residual)

    # through the smaller of XᵀX and XXᵀ
    squares = torch.linalg.eigvalsh(residual.T @ residual if d <= n else residual @ residual.T)
    variances, freedom = values.new_zeros(d), n - 1 - basis.shape[1]
    if freedom > 0:
        variances[: len(squares)] = torch.where(squares > least, squares, 0.0) / freedom
    return variances


def _check_continuous(table: Tensor) -> None:
    """Refuse columns whose values repeat so much that they have no density.

    A constant column is fine.
    """
    distinct = _distinct(table)
    few = (
        ((distinct > 1) & (distinct <= _FEW) & (2 * distinct < len(table)))
        .nonzero()
        .flatten()
        .tolist()
    )
    if few:
        shown = ", ".join(map(str, few[:5])) + (", …" if len(few) > 5 else "")
        raise ValueError(
            _discrete(f"coordinates {shown} with {int(distinct[few[0]])} distinct values")
        )


def _discrete(what: str) -> str:
    return (
        f"{what}: discrete values have no density, and an attacker may name them exactly. Ask "
        "questions about them (torchfil.questions) or leave them out (Private(coordinates=…)); "
        "if they are rounded readings of something continuous, pass Prior.gaussian(values, "
        "allow_discrete=True)"
    )

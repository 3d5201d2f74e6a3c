"""Losses of generalised linear models, and their minimisation, weighted and regularised, to a
stated tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

_LARGEST_MARGIN = 1e8
Elementwise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MarginLoss:
    """ℓ(m, y), convex in the one margin m = wᵀx, elementwise on tensors.

    Methods take margins [n, K] and all targets, like those of :class:`SoftmaxLoss`; here K = 1, and
    t, the number of the target's coordinates, is 1.

    Attributes:
        name: The name for messages.
        value: ℓ.
        first: b = ∂ℓ/∂m.
        second: a = ∂²ℓ/∂m² ≥ 0.
        target_sensitivity: c = −∂²ℓ/∂m∂y (1 for the squared, logistic and Poisson losses).
        lipschitz: sup abs(∂ℓ/∂m) over all margins and targets in range, or None if it is unbounded.
    """

    name: str
    value: Elementwise
    first: Elementwise
    second: Elementwise
    target_sensitivity: Elementwise
    lipschitz: float | None = None

    @classmethod
    def from_function(cls, value: Elementwise, name: str = "custom") -> MarginLoss:
        """A loss given as a torch function of one margin and one target.

        Derivatives by autograd.
        """
        first = vmap(grad(value, argnums=0))
        second = vmap(grad(grad(value, argnums=0), argnums=0))
        cross = vmap(grad(grad(value, argnums=0), argnums=1))
        return cls(name, vmap(value), first, second, lambda m, y: -cross(m, y))

    def losses(self, margin: Tensor, y: Tensor) -> Tensor:
        """ℓ, [n]."""
        return self.value(margin[:, 0], y)

    def residual(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂m, [n, K]."""
        return self.first(margin[:, 0], y)[:, None]

    def curvature(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m², [n, K, K]."""
        return self.second(margin[:, 0], y)[:, None, None]

    def coupling(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m∂y, [n, K, t]."""
        return -self.target_sensitivity(margin[:, 0], y)[:, None, None]


@dataclass(frozen=True)
class SoftmaxLoss:
    """−Σ_c y_c log softmax(Bm)_c for targets y in the simplex of ``classes`` corners.

    A softmax does not change if a number is added to all its logits, so weights W are determined up
    to W + v1ᵀ. The shortest minimiser has W1 = 0: W = UBᵀ, with B ∈ R^{classes×K} an orthonormal
    basis of 1⊥, K = classes − 1. The margins are those of U: strictly convex, ‖U‖ = ‖W‖, and W's
    Jacobian has the same Gram matrix as U's. The target moves within the simplex: its t = K
    coordinates are those along B.
    """

    classes: int

    name: ClassVar[str] = "softmax"
    lipschitz: ClassVar[float] = 2**0.5

    def losses(self, margin: Tensor, y: Tensor) -> Tensor:
        """ℓ, [n]."""
        return -(y * torch.log_softmax(margin @ self.basis(margin).mT, dim=1)).sum(dim=1)

    def residual(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂m, [n, K]."""
        basis = self.basis(margin)
        return (torch.softmax(margin @ basis.mT, dim=1) - y) @ basis

    def curvature(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m², [n, K, K]."""
        basis = self.basis(margin)
        probability = torch.softmax(margin @ basis.mT, dim=1)
        mean = probability @ basis
        return (
            torch.einsum("ck,nc,cl->nkl", basis, probability, basis)
            - mean[:, :, None] * mean[:, None, :]
        )

    def coupling(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m∂y, [n, K, t]."""
        return -torch.eye(self.classes - 1, dtype=margin.dtype, device=margin.device).expand(
            len(margin), -1, -1
        )

    def basis(self, like: Tensor) -> Tensor:
        """B, [classes, K]."""
        return tangent_basis(self.classes).to(like)


Loss = MarginLoss | SoftmaxLoss  # ℓ(m, y), convex in the K margins m = Uᵀx of an example


def tangent_basis(size: int) -> Tensor:
    """An orthonormal basis of {t ∈ R^size : Σ t = 0}, [size, size − 1]: the directions within a
    simplex.
    """
    if not size >= 2:
        raise ValueError(f"a one-hot attribute needs at least 2 columns, got {size}")
    ones = torch.ones(size, 1, dtype=torch.float64)
    return torch.linalg.qr(torch.cat([ones, torch.eye(size, dtype=torch.float64)[:, 1:]], dim=1)).Q[
        :, 1:
    ]


def _ones(margin: Tensor, target: Tensor) -> Tensor:
    return torch.ones_like(margin)


SQUARED = MarginLoss(
    "squared", lambda m, y: 0.5 * (m - y).square(), lambda m, y: m - y, _ones, _ones
)
LOGISTIC = MarginLoss(
    "logistic",
    lambda m, y: torch.nn.functional.softplus(m) - y * m,
    lambda m, y: torch.sigmoid(m) - y,
    lambda m, y: torch.sigmoid(m) * torch.sigmoid(-m),
    _ones,
    lipschitz=1.0,
)
POISSON = MarginLoss(
    "poisson", lambda m, y: m.exp() - y * m, lambda m, y: m.exp() - y, lambda m, y: m.exp(), _ones
)


class NotConvergedError(ValueError):
    """The gradient did not get below the tolerance."""


class SingularHessianError(ValueError):
    """The minimiser is not unique, so it has no derivative with respect to the data."""


@dataclass(frozen=True)
class Objective:
    """Σ_i ω_i ℓ(Uᵀx_i, y_i) + (nλ/2) tr(UᵀPU), U ∈ R^{p×K} for K margins.

    Attributes:
        loss: ℓ.
        X: [n, p].
        y: The targets, one row each.
        sample_weight: ω, [n].
        l2: λ.
        penalised: The diagonal of P, [p]: 1, and 0 for an intercept.
        margins: K.
    """

    loss: Loss
    X: Tensor
    y: Tensor
    sample_weight: Tensor
    l2: float
    penalised: Tensor
    margins: int

    @property
    def data(self) -> tuple[Loss, Tensor, Tensor, Tensor]:
        """ℓ, X, y and ω."""
        return self.loss, self.X, self.y, self.sample_weight

    @property
    def ridge(self) -> Tensor:
        """nλP's diagonal as a column, [p, 1]."""
        return (len(self.X) * self.l2 * self.penalised)[:, None]

    def value(self, weights: Tensor) -> Tensor:
        """The objective at U, a scalar."""
        losses = self.loss.losses(self.X @ weights, self.y)
        return (self.sample_weight * losses).sum() + 0.5 * (self.ridge * weights.square()).sum()

    def gradient(self, weights: Tensor) -> Tensor:
        """[p, K]."""
        residual = self.loss.residual(self.X @ weights, self.y)
        return self.X.mT @ (self.sample_weight[:, None] * residual) + self.ridge * weights

    def margins_over_targets(self, weights: Tensor) -> Tensor:
        """The largest margin, divided by the largest target if that exceeds 1; a scalar."""
        return (self.X @ weights).abs().max() / self.y.abs().max().clamp(min=1)

    def gradient_terms(self, weights: Tensor) -> Tensor:
        """The total size of the terms of each gradient entry, [p, K].

        Rounding leaves a share of it.

        A margin's own terms also count: through the curvature, their rounding affects the residual.
        """
        margin, sizes = self.X @ weights, self.X.abs()
        curvature = self.loss.curvature(margin, self.y).abs()
        inner = self.loss.residual(margin, self.y).abs() + torch.einsum(
            "nkl,nl->nk", curvature, sizes @ weights.abs()
        )
        return sizes.mT @ (self.sample_weight[:, None] * inner) + self.ridge * weights.abs()

    def hessian(self, weights: Tensor) -> Tensor:
        """H = Σ ω_i x_i x_iᵀ ⊗ M_i + nλP ⊗ I, [pK, pK]; parameter (a, k) is row aK + k."""
        curvature = self.sample_weight[:, None, None] * self.loss.curvature(
            self.X @ weights, self.y
        )
        p, k = weights.shape
        result = self.X.new_zeros(p, k, p, k)
        for i in range(k):
            for j in range(i, k):
                block = self.X.mT @ (curvature[:, i, j, None] * self.X)
                result[:, i, :, j] = block
                result[:, j, :, i] = block
        result = result.view(p * k, p * k)
        result.diagonal().add_(self.ridge.expand(p, k).flatten())
        return result


@dataclass(frozen=True)
class Fit:
    """A minimiser with what is known about it.

    Attributes:
        weights: U*, [p, K].
        hessian: H at U*, [pK, pK].
        gradient_norm: The largest entry of the objective's gradient over n, at U*.
        iterations: Newton steps taken.
    """

    weights: Tensor
    hessian: Tensor
    gradient_norm: float
    iterations: int


def minimise(objective: Objective, *, tolerance: float, max_iterations: int) -> Fit:
    """The minimiser, by Newton's method with backtracking.

    It counts as found when the gradient is below the tolerance and the next Newton step would not
    matter: on separable data the gradient also vanishes, but the steps do not.

    Args:
        objective: What to minimise.
        tolerance: Stop if the gradient's entries over n are below this, or below this share of the
            size of their terms if that exceeds 1 (columns in metres and dollars).
        max_iterations: The largest number of Newton steps.

    Raises:
        SingularHessianError: Collinear columns without regularisation.
        NotConvergedError: The tolerance was not reached (separable data without regularisation).
    """
    n, p = objective.X.shape
    weights = objective.X.new_zeros(p, objective.margins)
    value = float(objective.value(weights))
    for iteration in range(max_iterations + 1):
        gradient = objective.gradient(weights)
        size = (
            float((gradient.abs() / (objective.gradient_terms(weights) / n).clamp(min=1)).max()) / n
        )
        hessian = objective.hessian(weights)
        factor = _factor(hessian, objective.l2)
        step = torch.cholesky_solve(gradient.flatten()[:, None], factor).view_as(weights)
        if size <= tolerance and float(step.abs().max()) <= 1e-5 * (1 + float(weights.abs().max())):
            return Fit(weights, hessian, float(gradient.abs().max()) / n, iteration)

        # Halve the step until it helps (Armijo), unless the possible gain is below rounding.
        decrease = float((gradient * step).sum())
        length = 1.0
        while length > 1e-10:
            candidate = float(objective.value(weights - length * step))
            if candidate <= value - 1e-4 * length * decrease or decrease < 1e-13 * abs(value):
                break
            length /= 2

        weights = weights - length * step
        value = float(objective.value(weights))
        if (
            not np.isfinite(value)
            or not float(objective.margins_over_targets(weights)) <= _LARGEST_MARGIN
        ):
            break
    raise NotConvergedError(
        f"the {objective.loss.name} model did not converge: after {iteration} Newton steps the "
        f"gradient is {size:.2g} (tolerance={tolerance:g}), and the weights still move by "
        f"{float(step.abs().max()):.2g}. On separable data l2={objective.l2:g} leaves no minimum: "
        "set l2 > 0, and leave out the intercept, which has no penalty. Otherwise raise "
        "max_iterations; if columns or targets are of very different size, scale them"
    )


def _factor(hessian: Tensor, l2: float) -> Tensor:
    """The Cholesky factor of the Hessian, which must be regular whatever the columns' scales."""
    scale = hessian.diagonal().clamp(min=1e-300).sqrt()
    pivots, failed = torch.linalg.cholesky_ex(hessian / scale / scale[:, None])
    if int(failed) == 0 and float(pivots.diagonal().min()) > 1e-6:
        return scale[:, None] * pivots
    raise SingularHessianError(
        f"the minimiser is not unique at l2={l2:g}: columns are linear combinations of others "
        "(drop one level of a one-hot), or the data are separable. Drop columns, or set l2 > 0"
    )

"""Minimisation of a weighted, regularised generalised linear model to a stated tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy import linalg, optimize
from torch import Tensor

from torchfil.glm.losses import Loss

__all__ = ["Fit", "NotConvergedError", "Objective", "SingularHessianError", "Solver", "minimise"]

Solver = Literal["newton", "lbfgs"]
_LARGEST_MARGIN = 1e8


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
    margins: int = 1

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
        """The total size of the terms of each gradient entry, [p, K]; rounding leaves a share of it.

        A margin's own terms also count: through the curvature, their rounding affects the residual.
        """
        margin, sizes = self.X @ weights, self.X.abs()
        curvature = self.loss.curvature(margin, self.y).abs()
        inner = self.loss.residual(margin, self.y).abs() + torch.einsum("nkl,nl->nk", curvature, sizes @ weights.abs())
        return sizes.mT @ (self.sample_weight[:, None] * inner) + self.ridge * weights.abs()

    def hessian(self, weights: Tensor) -> Tensor:
        """H = Σ ω_i x_i x_iᵀ ⊗ M_i + nλP ⊗ I, [pK, pK]; parameter (a, k) is row aK + k."""
        curvature = self.sample_weight[:, None, None] * self.loss.curvature(self.X @ weights, self.y)
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


def minimise(
    objective: Objective,
    *,
    tolerance: float = 1e-10,
    max_iterations: int = 100,
    solver: Solver = "newton",
    names: Sequence[Any] | None = None,
) -> Fit:
    """The minimiser, by Newton's method with backtracking.

    It counts as found when the gradient is below the tolerance and the next Newton step would not matter: on separable
    data the gradient also vanishes, but the steps do not.

    Args:
        objective: What to minimise.
        tolerance: Stop if the gradient's entries over n are below this, or below this share of the size of their terms
            if that exceeds 1 (columns in metres and dollars).
        max_iterations: The largest number of Newton steps.
        solver: "newton"; "lbfgs" runs L-BFGS first, so only the last few steps need a Hessian (many columns).
        names: The columns' names, for messages.

    Raises:
        SingularHessianError: Collinear columns without regularisation; the message names them.
        NotConvergedError: The tolerance was not reached (separable data without regularisation).
    """
    n, p = objective.X.shape
    weights = objective.X.new_zeros(p, objective.margins)
    if solver == "lbfgs":
        weights = _lbfgs(objective, weights)
    elif solver != "newton":
        raise ValueError(f"solver={solver!r} must be 'newton' or 'lbfgs'")

    value = float(objective.value(weights))
    for iteration in range(max_iterations + 1):
        gradient = objective.gradient(weights)
        size = float((gradient.abs() / (objective.gradient_terms(weights) / n).clamp(min=1)).max()) / n
        hessian = objective.hessian(weights)
        factor = _factor(hessian, objective, names)
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
        if not np.isfinite(value) or not float(objective.margins_over_targets(weights)) <= _LARGEST_MARGIN:
            break
    raise NotConvergedError(_why_not_converged(objective, weights, step, size, tolerance, iteration))


def _why_not_converged(
    objective: Objective, weights: Tensor, step: Tensor, size: float, tolerance: float, iteration: int
) -> str:
    largest = float(weights.abs().max())
    what = f"the {objective.loss.name} model did not converge: after {iteration} Newton steps"
    if size <= tolerance or not float(objective.margins_over_targets(weights)) <= _LARGEST_MARGIN:
        remedy = "Set l2 > 0" if objective.l2 == 0 else "The intercept has no penalty: leave it out, or raise l2"
        return (
            f"{what} the largest weight is {largest:.2g} and still moves by {float(step.abs().max()):.2g} per step "
            f"while the gradient is {size:.2g}: the weights diverge, as on separable data, where l2={objective.l2:g} "
            f"leaves no minimum. {remedy}; raise max_iterations only if the classes overlap."
        )

    no_minimum = (
        "With l2=0 a minimum exists only if the classes overlap (separable data drive the weights to infinity): set "
        "l2 > 0. "
        if objective.l2 == 0 and objective.loss.lipschitz is not None
        else ""
    )
    return (
        f"{what} the gradient is {size:.2g} (relative to its terms if these exceed 1), above "
        f"tolerance={tolerance:g}. {no_minimum}Raise max_iterations; if rounding keeps the gradient large (columns "
        "or targets of very different size), scale them, or raise tolerance."
    )


def _lbfgs(objective: Objective, start: Tensor) -> Tensor:
    n = len(objective.X)

    def evaluate(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.as_tensor(flat, device=start.device).view_as(start)
        return float(objective.value(weights)) / n, objective.gradient(weights).flatten().cpu().numpy() / n

    options = {"maxiter": 500, "maxcor": 20, "gtol": 1e-7, "ftol": 1e-15}
    result = optimize.minimize(evaluate, start.flatten().cpu().numpy(), jac=True, method="L-BFGS-B", options=options)
    return torch.as_tensor(result.x, device=start.device).view_as(start)


def _factor(hessian: Tensor, objective: Objective, names: Sequence[Any] | None) -> Tensor:
    """The Cholesky factor of the Hessian, which must be regular whatever the columns' scales."""
    scale = hessian.diagonal().clamp(min=1e-300).sqrt()
    pivots, failed = torch.linalg.cholesky_ex(hessian / scale / scale[:, None])
    if int(failed) == 0 and float(pivots.diagonal().min()) > 1e-6:
        return scale[:, None] * pivots
    columns = _dependent_columns(objective.X)
    if columns:
        named = [names[column] if names is not None and column < len(names) else column for column in columns]
        raise SingularHessianError(
            f"columns {named} are linear combinations of the others and l2={objective.l2:g}, so the minimiser is not "
            "unique: drop them (a one-hot attribute needs one level less), or set l2 > 0"
        )
    raise SingularHessianError(
        f"the Hessian is singular at l2={objective.l2:g} (the loss is flat in some direction, as on separable data); "
        "set l2 > 0"
    )


def _dependent_columns(X: Tensor) -> list[int]:
    scale = torch.linalg.vector_norm(X, dim=0).clamp(min=1e-300)
    _, triangle, order = linalg.qr((X / scale).cpu().numpy(), mode="economic", pivoting=True)
    size = np.abs(np.diag(triangle))
    rank = int((size > 1e-6 * max(size[0], 1e-300)).sum()) if len(size) else 0
    return sorted(int(column) for column in order[rank:])

"""Minimisation of a weighted, regularised generalised linear model to a stated tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import linalg
from torch import Tensor

from torchfil.glm.losses import MarginLoss

__all__ = ["Fit", "NotConvergedError", "SingularHessianError", "minimise"]


class NotConvergedError(ValueError):
    """The gradient did not get below the tolerance."""


class SingularHessianError(ValueError):
    """The minimiser is not unique, so it has no derivative with respect to the data."""


@dataclass(frozen=True)
class Fit:
    """A minimiser with what is known of it.

    Attributes:
        weights: w*, [p].
        hessian: H = Σ ω_i ℓ″_i x_i x_iᵀ + nλP, [p, p], at w*.
        gradient_norm: The largest entry of the objective's gradient over n, at w*.
        iterations: Newton steps taken.
    """

    weights: Tensor
    hessian: Tensor
    gradient_norm: float
    iterations: int


def minimise(
    loss: MarginLoss,
    X: Tensor,
    y: Tensor,
    sample_weight: Tensor,
    l2: float,
    penalised: Tensor,
    *,
    tolerance: float = 1e-10,
    max_iterations: int = 100,
    start: Tensor | None = None,
) -> Fit:
    """The minimiser of Σ_i ω_i ℓ(wᵀx_i, y_i) + (nλ/2) wᵀPw, by Newton's method with backtracking.

    It counts as found when the gradient is below the tolerance and the next Newton step would not matter: on separable
    data the gradient vanishes, too, but the steps do not.

    Args:
        loss: ℓ.
        X: [n, p].
        y: [n].
        sample_weight: ω, [n].
        l2: λ.
        penalised: The diagonal of P, [p]: 1, and 0 for an intercept.
        tolerance: The largest entry of the gradient over n at which to stop.
        max_iterations: Newton steps at most.
        start: Where to start; None: at 0.

    Raises:
        SingularHessianError: Collinear columns without regularisation; the text names them.
        NotConvergedError: The tolerance was not reached (separable data without regularisation).
    """
    n, p = X.shape
    ridge = n * l2 * penalised
    w = torch.zeros(p, dtype=X.dtype, device=X.device) if start is None else start.clone()

    def objective(w: Tensor) -> float:
        return float((sample_weight * loss.value(X @ w, y)).sum() + 0.5 * (ridge * w.square()).sum())

    value = objective(w)
    for iteration in range(max_iterations + 1):
        margin = X @ w
        gradient = X.mT @ (sample_weight * loss.first(margin, y)) + ridge * w
        size = float(gradient.abs().max()) / n
        hessian = _hessian(loss, X, y, sample_weight, ridge, margin)
        step = torch.cholesky_solve(gradient[:, None], _factor(hessian, X, l2))[:, 0]
        if size <= tolerance and float(step.abs().max()) <= 1e-5 * (1 + float(w.abs().max())):
            return Fit(w, hessian, size, iteration)
        decrease = float(gradient @ step)
        length = 1.0
        while length > 1e-10:
            candidate = objective(w - length * step)
            if candidate <= value - 1e-4 * length * decrease or decrease < 1e-13 * abs(value):
                break
            length /= 2
        w = w - length * step
        value = objective(w)
        if not np.isfinite(value) or float(w.abs().max()) > 1e8:
            break
    raise NotConvergedError(
        f"the {loss.name} model did not converge: the gradient is {size:.2g} after {iteration} Newton steps, above "
        f"tolerance={tolerance:g}. With l2=0 a minimum exists only if the classes overlap (separable data drive the "
        "weights to infinity): set l2 > 0, or raise max_iterations."
    )


def _hessian(loss: MarginLoss, X: Tensor, y: Tensor, sample_weight: Tensor, ridge: Tensor, margin: Tensor) -> Tensor:
    curvature = sample_weight * loss.second(margin, y)
    return X.mT @ (curvature[:, None] * X) + torch.diag(ridge)


def _factor(hessian: Tensor, X: Tensor, l2: float) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(hessian)
    diagonal = factor.diagonal()
    if int(failed) == 0 and float(diagonal.min()) > 1e-7 * float(diagonal.max()):
        return factor
    columns = _dependent_columns(X)
    if columns:
        raise SingularHessianError(
            f"columns {columns} are linear combinations of the others and l2={l2:g}, so the minimiser is not unique: "
            "drop them (a one-hot attribute needs one level less), or set l2 > 0"
        )
    raise SingularHessianError(
        f"the Hessian is singular at l2={l2:g} (the loss is flat in some direction, as on separable data); set l2 > 0"
    )


def _dependent_columns(X: Tensor) -> list[int]:
    _, triangle, order = linalg.qr(X.cpu().numpy(), mode="economic", pivoting=True)
    size = np.abs(np.diag(triangle))
    rank = int((size > 1e-9 * max(size[0], 1e-300)).sum()) if len(size) else 0
    return sorted(int(column) for column in order[rank:])

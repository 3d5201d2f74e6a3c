r"""The minimisers of a generalised linear model with one example changed, without a refit for each.

Changing example i from x to x′ changes the objective's gradient at w* from 0 to g = ω(b′x′ − bx) and its Hessian by
two rank-one terms, b = ℓ′(w*ᵀx, y), a = ℓ″(w*ᵀx, y) and b′, a′ at x′:

    H′ = H + U S Uᵀ,  U = [x′, x],  S = ω diag(a′, −a),
    H′⁻¹ = A − A U (I + S UᵀA U)⁻¹ S UᵀA,  A = H⁻¹.

Δ = −H′⁻¹g is exact for least squares, O(p²) an example. For other losses it is a Newton step. Steps with the same H′
follow: first, where p³ numbers are few, with the gradient of the other examples to second order, HΔ + ½T[Δ, Δ], T the
third derivative at w*; then with the true gradient at w* + Δ, many examples in one matrix product, until they do not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchfil.attacks.base import with_progress
from torchfil.attacks.glm_view import GLMView, numbers_at_once

__all__ = ["minimiser_changes"]

_CHUNK_NUMBERS = 2**23  # margins computed at a time
_CHUNK_ARRAYS = 16
_THIRD_NUMBERS = 2**21  # the most entries of the third derivative
_SURROGATE_STEPS = 2
_MOST_STEPS = 30


def minimiser_changes(
    view: GLMView,
    columns: Sequence[int],
    codes: Tensor,
    *,
    tolerance: float = 1e-9,
    progress: bool = False,
) -> Tensor:
    """How far the minimiser moves when one example's columns take other values, for every example and every code.

    Args:
        view: The fitted model on its training set.
        columns: Those that change, c of them.
        codes: The values they take, [k, c].
        tolerance: The error of a weight, over 1 + max|w*|, at which to stop; least squares is exact.
        progress: Whether to show a progress bar.

    Returns:
        w*(x_i with code k) − w*, [n, k, p]; 0 where example i has that code.
    """
    n, p = view.X.shape
    inverse = torch.linalg.inv(view.hessian)
    result = view.X.new_zeros(n, len(codes), p)
    codes = codes.to(view.X)
    limit = tolerance * (1 + float(view.weights.abs().max()))

    # One step is exact for least squares; other losses need the margins of all examples for each further step.
    exact = view.loss.name == "squared"
    third = None if exact or p**3 > _THIRD_NUMBERS else _third_derivative(view)
    size = n if exact else max(1, numbers_at_once(view.X.device, _CHUNK_NUMBERS, _CHUNK_ARRAYS) // n)
    parts = [
        (code, rows)
        for code in range(len(codes))
        for rows in (view.X[:, columns] != codes[code]).any(dim=1).nonzero().flatten().split(size)
    ]
    for code, rows in with_progress(parts, progress, "refits"):
        update = _Update.build(view, inverse, rows, columns, codes[code])
        change = update.step(update.own_gradient(view, torch.zeros_like(update.new)))
        result[rows, code] = change if exact else _refined(view, update, change, third, limit)
    return result


@dataclass(frozen=True)
class _Update:
    """The rank-two updates of m changed examples."""

    inverse: Tensor  # A, [p, p]
    rows: Tensor  # [m]
    new: Tensor  # x′, [m, p]
    old: Tensor  # x, [m, p]
    new_pushed: Tensor  # A x′, [m, p]
    old_pushed: Tensor  # A x, [m, p]
    kernel: Tensor  # (I + S UᵀA U)⁻¹ S, [m, 2, 2]

    @classmethod
    def build(cls, view: GLMView, inverse: Tensor, rows: Tensor, columns: Sequence[int], code: Tensor) -> _Update:
        old = view.X[rows]
        new = old.clone()
        new[:, columns] = code
        new_pushed, old_pushed = new @ inverse, old @ inverse
        y, weight = view.y[rows], view.sample_weight[rows]
        curvature = torch.stack(
            [view.loss.second(new @ view.weights, y), -view.loss.second(old @ view.weights, y)], dim=1
        )
        scale = torch.diag_embed(weight[:, None] * curvature)
        cross = (new * old_pushed).sum(dim=1)
        products = torch.stack([(new * new_pushed).sum(dim=1), cross, cross, (old * old_pushed).sum(dim=1)], dim=1)
        identity = torch.eye(2, dtype=old.dtype, device=old.device)
        kernel = torch.linalg.solve(identity + scale @ products.view(-1, 2, 2), scale)
        return cls(inverse, rows, new, old, new_pushed, old_pushed, kernel)

    def step(self, gradient: Tensor) -> Tensor:
        """−H′⁻¹ g, [m, p]."""
        pushed = gradient @ self.inverse
        along = torch.stack([(self.new * pushed).sum(dim=1), (self.old * pushed).sum(dim=1)], dim=1)
        factors = (self.kernel @ along[:, :, None])[:, :, 0]
        return factors[:, :1] * self.new_pushed + factors[:, 1:] * self.old_pushed - pushed

    def own_gradient(self, view: GLMView, change: Tensor) -> Tensor:
        """What the changed examples add to their objectives' gradients at w* + change, [m, p]."""
        y, weight, weights = view.y[self.rows], view.sample_weight[self.rows, None], view.weights + change
        new = view.loss.first((self.new * weights).sum(dim=1), y)[:, None]
        old = view.loss.first((self.old * weights).sum(dim=1), y)[:, None]
        return weight * (new * self.new - old * self.old)


def _third_derivative(view: GLMView) -> Tensor:
    """T = Σ ω_j ℓ‴_j x_j ⊗ x_j ⊗ x_j at w*, [p, p²]."""
    with torch.enable_grad():
        margin = (view.X @ view.weights).requires_grad_()
        (third,) = torch.autograd.grad(view.loss.second(margin, view.y).sum(), margin)
    weighted = (view.sample_weight * third)[:, None] * view.X
    return torch.cat([(view.X * column[:, None]).mT @ weighted for column in view.X.mT], dim=1)


def _refined(view: GLMView, update: _Update, change: Tensor, third: Tensor | None, limit: float) -> Tensor:
    """Newton steps with the Hessian of the first, until the next would be below the limit for every example.

    The first of them over the change before it tells the rate at which they shrink.
    """
    before = change.abs().amax(dim=1).clamp(min=1e-300)
    rate: Tensor | None = None
    for number in range(-_SURROGATE_STEPS if third is not None else 0, _MOST_STEPS):
        if number < 0 and third is not None:
            quadratic = ((change @ third).view(len(change), -1, change.shape[1]) @ change[:, :, None])[:, :, 0]
            gradient = change @ view.hessian + 0.5 * quadratic
        else:
            gradient = view.gradient(view.weights + change)
        step = update.step(gradient + update.own_gradient(view, change))
        change = change + step
        size = step.abs().amax(dim=1)
        rate = size / before if rate is None else rate
        if number >= 0 and bool((size * rate <= limit).all()):
            return change
    worst = int(update.rows[size.argmax()])
    raise ValueError(
        f"the minimiser with example {worst} changed was not found to {limit:.2g} in {_MOST_STEPS} Newton steps: that "
        "example alone turns the model over. Raise the model's l2, or lower that example's weight"
    )

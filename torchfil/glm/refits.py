r"""The minimisers of a generalised linear model with one example changed, without a refit for each.

Changing example i from (x, y) with weight ω to (x′, y′) with weight ω′ (0 if it is left out)
changes the objective's gradient at w* from 0 to g = ω′b′x′ − ωbx and its Hessian by two rank-one
terms, b = ℓ′(w*ᵀx, y), a = ℓ″(w*ᵀx, y) and b′, a′ at (x′, y′):

    H′ = H + U S Uᵀ,  U = [x′, x],  S = diag(ω′a′, −ωa),
    H′⁻¹ = A − A U (I + S UᵀA U)⁻¹ S UᵀA,  A = H⁻¹.

Without example i the penalty is (n − 1)λ: H is then smaller by λP, and g by λPw*, the same for
every example.

Δ = −H′⁻¹g is exact for least squares, in O(p²) per example. For other losses it is a Newton step.
More steps with the same H′ follow, with the true gradient at w* + Δ, many examples in one matrix
product, until the steps no longer matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchfil.glm.solver import MarginLoss, Objective
from torchfil.questions import Alternative
from torchfil.utils.text import with_progress

if TYPE_CHECKING:
    from torchfil.glm.model import GeneralizedLinearModel

_CHUNK_NUMBERS = 2**23  # margins computed at a time
_CHUNK_ARRAYS = 16
_MOST_STEPS = 30
_SINGULAR = 1e-9  # below this det H′ / det H, the minimiser counts as not unique


@dataclass(frozen=True)
class GLMView(Objective):
    """A fitted model of one margin with its training set, as seen by an attacker who knows all
    examples except one.

    Attributes:
        weights: w*, which minimises the objective, [p].
        fit_hessian: The Hessian there, [p, p].
        num_inputs: d; p is d, or d + 1 with an intercept.
    """

    loss: MarginLoss
    weights: Tensor
    fit_hessian: Tensor
    num_inputs: int

    @classmethod
    def build(cls, model: GeneralizedLinearModel, X: object, y: object) -> GLMView:
        """From a fitted model and its training set, with the weights of that fit.

        Raises:
            ValueError: The model is not fitted, has several margins (a softmax), or was fitted on
                other data.
        """
        model._check_fitted()
        if model._num_margins() != 1:
            raise ValueError(
                f"{type(model).__name__} has {model._num_margins()} margins, not one: take a "
                "class against the rest by LogisticRegression"
            )
        objective, fit, d = model._as_fitted(X, y, None), model._fit, model.n_features_in_
        return cls(
            **vars(objective), weights=fit.weights[:, 0], fit_hessian=fit.hessian, num_inputs=d
        )

    def first(self, margin: Tensor) -> Tensor:
        """∂ℓ/∂m of every example at its margins, [n, k] for [n, k]."""
        return self.loss.first(
            margin.flatten(), self.y[:, None].expand_as(margin).flatten()
        ).view_as(margin)

    def gradients(self, weights: Tensor) -> Tensor:
        """The gradient of the objective at k weights, [k, p] for [k, p]."""
        return (
            self.sample_weight[:, None] * self.first(self.X @ weights.mT)
        ).mT @ self.X + self.ridge.mT * weights

    def with_answer(self, alternative: Alternative | None) -> tuple[Tensor, Tensor]:
        """What could be in the training set instead of each example: x′ with the intercept's
        column, and y′.

        An example that is left out (None) keeps its own.
        """
        if alternative is None:
            return self.X, self.y
        return torch.cat(
            [alternative.inputs, self.X[:, self.num_inputs :]], dim=1
        ), alternative.targets

    def changed(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Whether x′ and y′ differ from each example, [n]."""
        return (inputs != self.X).any(dim=1) | (targets != self.y)


def minimiser_changes(
    view: GLMView,
    alternatives: Sequence[Alternative | None],
    *,
    tolerance: float = 1e-9,
    progress: bool = False,
) -> Tensor:
    """How much the minimiser changes if one example is changed, for every example and every
    alternative.

    Args:
        view: The fitted model on its training set.
        alternatives: The m alternatives for each example; None: left out, as in a fit to the n − 1
            others.
        tolerance: The error of a weight, over 1 + max|w*|, at which to stop; least squares is
            exact.
        progress: Whether to show a progress bar.

    Returns:
        w*(alternative k instead of example i) − w*, [n, m, p]; 0 if they are the same.

    Raises:
        ValueError: With some example changed there is no unique minimiser, or Newton steps do not
            find it.
    """
    n, p = view.X.shape
    result = view.X.new_zeros(n, len(alternatives), p)
    limit = tolerance * (1 + float(view.weights.abs().max()))

    # One step is exact for least squares; other losses need the margins of all examples for each
    # further step.
    exact = view.loss.name == "squared"
    size = (
        n if exact else max(1, numbers_at_once(view.X.device, _CHUNK_NUMBERS, _CHUNK_ARRAYS) // n)
    )
    for number, alternative in enumerate(with_progress(alternatives, progress, "refits")):
        base = _Base(view, alternative)
        chosen = (
            torch.arange(n, device=view.X.device)
            if base.absent
            else view.changed(*base.example).nonzero()[:, 0]
        )
        for rows in chosen.split(size) if len(chosen) else ():
            update = _Update(view, base, rows)
            change = update.step(update.own_gradient(view, torch.zeros_like(update.new)))
            result[rows, number] = change if exact else _refined(view, update, change, limit)
    return result


class _Base:
    """What all examples' updates start from: an alternative, and the Hessian with its penalty."""

    def __init__(self, view: GLMView, alternative: Alternative | None) -> None:
        self.absent = alternative is None
        self.example = view.with_answer(alternative)
        self.ridge_change = -view.l2 * view.penalised * self.absent  # −λ, [p]
        # A, [p, p]
        self.inverse = torch.linalg.inv(view.fit_hessian + torch.diag(self.ridge_change))


class _Update:
    """The rank-two updates of m changed examples."""

    def __init__(self, view: GLMView, base: _Base, rows: Tensor) -> None:
        self.base, self.rows = base, rows
        self.old, weight = view.X[rows], view.sample_weight[rows]  # x, [m, p], and ω
        self.new, self.new_target = (part[rows] for part in base.example)  # x′, [m, p], and y′, [m]
        self.new_weight = torch.zeros_like(weight) if base.absent else weight  # ω′, [m]
        # A x′ and A x, [m, p]
        self.new_pushed, self.old_pushed = self.new @ base.inverse, self.old @ base.inverse

        new_curvature = view.loss.second(self.new @ view.weights, self.new_target)
        old_curvature = view.loss.second(self.old @ view.weights, view.y[rows])
        scale = torch.diag_embed(
            torch.stack([self.new_weight * new_curvature, -weight * old_curvature], dim=1)
        )
        cross = (self.new * self.old_pushed).sum(dim=1)
        corners = ((self.new * self.new_pushed).sum(dim=1), (self.old * self.old_pushed).sum(dim=1))
        products = torch.stack([corners[0], cross, cross, corners[1]], dim=1)
        system = torch.eye(2, dtype=scale.dtype, device=scale.device) + scale @ products.view(
            -1, 2, 2
        )

        # Its determinant is det H′ / det H.
        alone = rows[torch.linalg.det(system) <= _SINGULAR].tolist()[:5]
        if alone:
            raise ValueError(
                f"examples {alone} alone determine some weight: without one the minimiser is not "
                "unique. Raise the model's l2"
            )
        self.kernel = torch.linalg.solve(system, scale)  # (I + S UᵀA U)⁻¹ S, [m, 2, 2]

    def step(self, gradient: Tensor) -> Tensor:
        """−H′⁻¹ g, [m, p]."""
        pushed = gradient @ self.base.inverse
        along = torch.stack([(self.new * pushed).sum(dim=1), (self.old * pushed).sum(dim=1)], dim=1)
        factors = (self.kernel @ along[:, :, None])[:, :, 0]
        return factors[:, :1] * self.new_pushed + factors[:, 1:] * self.old_pushed - pushed

    def own_gradient(self, view: GLMView, change: Tensor) -> Tensor:
        """What the change of each example adds to the objective's gradient at w* + change, [m,
        p].
        """
        weights = view.weights + change
        new = self.new_weight * view.loss.first((self.new * weights).sum(dim=1), self.new_target)
        old = view.sample_weight[self.rows] * view.loss.first(
            (self.old * weights).sum(dim=1), view.y[self.rows]
        )
        return new[:, None] * self.new - old[:, None] * self.old + self.base.ridge_change * weights


def _refined(view: GLMView, update: _Update, change: Tensor, limit: float) -> Tensor:
    """Newton steps with the Hessian of the first step, until the next would be below the limit for
    every example.

    The first step divided by the change before it gives the rate at which steps shrink.
    """
    before = change.abs().amax(dim=1).clamp(min=1e-300)
    rate: Tensor | None = None
    for _ in range(_MOST_STEPS):
        step = update.step(
            view.gradients(view.weights + change) + update.own_gradient(view, change)
        )
        change = change + step
        size = step.abs().amax(dim=1)
        rate = size / before if rate is None else rate
        if (size * rate <= limit).all():
            return change
    worst = int(update.rows[size.argmax()])
    raise ValueError(
        f"the minimiser with example {worst} changed was not found to {limit:.2g} in "
        f"{_MOST_STEPS} Newton steps: it alone turns the model over. Raise the model's l2, or "
        "lower that example's weight"
    )


def numbers_at_once(device: torch.device, on_cpu: int, arrays: int) -> int:
    """The largest size of arrays in double precision.

    On a GPU, ``arrays`` of them take a quarter of the free memory; on a CPU, each holds ``on_cpu``
    numbers.
    """
    if device.type != "cuda":
        return on_cpu
    free, _ = torch.cuda.mem_get_info(device)
    return max(on_cpu, free // (4 * 8 * arrays))

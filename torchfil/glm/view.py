"""A fitted generalised linear model with its training set, as seen by an attacker who knows all examples except one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchfil.glm.losses import MarginLoss
    from torchfil.glm.model import GeneralizedLinearModel

__all__ = ["GLMView", "numbers_at_once"]


@dataclass(frozen=True)
class GLMView:
    """w* = argmin Σ ω_i ℓ(wᵀx_i, y_i) + ½ Σ ridge_j w_j², with the parts that determine its minimum.

    Attributes:
        loss: ℓ of one margin.
        X: The training inputs; if there is an intercept, its column of ones comes last, [n, p].
        y: [n].
        sample_weight: ω, [n].
        ridge: nλ, and 0 for an intercept, [p].
        weights: w*, [p].
        hessian: The Hessian at w*, [p, p].
        num_inputs: d; p is d, or d + 1 with an intercept.
    """

    loss: MarginLoss
    X: Tensor
    y: Tensor
    sample_weight: Tensor
    ridge: Tensor
    weights: Tensor
    hessian: Tensor
    num_inputs: int

    @classmethod
    def build(cls, model: GeneralizedLinearModel, X: Any, y: Any) -> GLMView:
        """From a fitted model and its training set, with the weights of that fit.

        Raises:
            ValueError: The model is not fitted, has several margins (a softmax), or was fitted on other data.
        """
        model._check_fitted()
        if model._num_margins() != 1:
            raise ValueError(
                f"{type(model).__name__} has {model._num_margins()} margins; this needs a model of one margin. "
                "Take one class against the rest by LogisticRegression"
            )

        inputs, targets, _ = model._tensors(X, y, None)
        weights = model._training_weight
        if inputs.shape != (len(weights), len(model._fit.weights)):
            raise ValueError(
                f"X has shape {[len(inputs), inputs.shape[1] - int(model.fit_intercept)]}, the model was fitted on "
                f"{[len(weights), model.n_features_in_]}; pass the training set: the attacker knows it"
            )

        ridge = torch.full_like(inputs[0], len(inputs) * model.l2)
        ridge[model.n_features_in_ :] = 0
        view = cls(
            model._loss(),  # type: ignore[arg-type]
            inputs,
            targets,
            weights,
            ridge,
            model._fit.weights[:, 0],
            model._fit.hessian,
            model.n_features_in_,
        )

        # The attack assumes that the gradient vanishes at the weights; on other data it does not.
        size = float(view.gradient(view.weights[None]).abs().max()) / len(inputs)
        if size > 1e-6 + 100 * model.tolerance:
            raise ValueError(
                f"the gradient at the model's weights is {size:.2g} on these data, so it was not fitted on them; pass "
                "the training set as fitted (same rows, same targets)"
            )
        return view

    def first(self, margin: Tensor) -> Tensor:
        """∂ℓ/∂m of every example at its margins, [n, k] for [n, k]."""
        targets = self.y[:, None].expand_as(margin)
        return self.loss.first(margin.flatten(), targets.flatten()).view_as(margin)

    def gradient(self, weights: Tensor) -> Tensor:
        """The gradient of the objective at k weights, [k, p] for [k, p]."""
        residual = self.sample_weight[:, None] * self.first(self.X @ weights.mT)
        return residual.mT @ self.X + self.ridge * weights


def numbers_at_once(device: torch.device, on_cpu: int, arrays: int) -> int:
    """The largest size of arrays in double precision.

    On a GPU, ``arrays`` of them take a quarter of the free memory; on a CPU, each holds ``on_cpu`` numbers.
    """
    if device.type != "cuda":
        return on_cpu
    free, _ = torch.cuda.mem_get_info(device)
    return max(on_cpu, free // (4 * 8 * arrays))

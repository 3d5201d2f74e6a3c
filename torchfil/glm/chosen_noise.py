r"""Noise that was chosen from the private data, and what the choice itself reveals.

A release N(w*, σ²I_p) whose σ depends on the data has the Fisher information

    I = JᵀJ/σ² + 2p ∇log σ ∇log σᵀ,

where :meth:`GeneralizedLinearModel.fil` computes only the first term. Rounded up to a grid of powers, σ is constant
almost everywhere, and the second term vanishes. (Near a step of the grid, a change of one example can still move σ to
the next power; the coarser the grid, the rarer this is.)

∇log η of the deciding example comes from autograd: directly, and through the minimiser, dw* = −H⁻¹ d∇L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from torchfil.glm.fil import Kind, Sensitivity, squared_loss_at
from torchfil.glm.solver import Objective, tangent_basis
from torchfil.utils.errors import require


def round_up(sigma: float, grid: float) -> float:
    """The smallest power of ``grid`` that is at least σ.

    Example:
        >>> round_up(0.3, grid=2.0)
        0.5
    """
    require(1 < grid < math.inf, f"grid={grid}, the factor between neighbouring σ, must be above 1; None: no rounding")
    step = math.log2(grid)
    number = math.ceil(math.log2(sigma) / step)
    return float(2.0 ** (number * step if 2.0 ** (number * step) >= sigma else (number + 1) * step))


def values_that_decide(values: np.ndarray, reduce: str | float) -> dict[int, float]:
    """{k: weight} such that Σ_k weight_k value_k is the largest value ("max"), the mean, or a quantile.

    Example:
        >>> values_that_decide(np.array([1.0, 5.0, 2.0]), 0.75)
        {2: 0.5, 1: 0.5}
    """
    if reduce == "max":
        return {int(values.argmax()): 1.0}
    if reduce == "mean":
        return dict.fromkeys(range(len(values)), 1 / len(values))
    if not (isinstance(reduce, float) and 0 < reduce < 1):
        raise ValueError(f"reduce={reduce!r} must be 'max', 'mean' or a quantile in (0, 1)")
    order, place = np.argsort(values, kind="stable"), reduce * (len(values) - 1)
    low = int(place)
    weights = {int(order[low]): 1 - (place - low)}
    return weights if place == low else {**weights, int(order[low + 1]): place - low}


def information_of_choice(
    objective: Objective,
    weights: Tensor,
    decide: Mapping[int, float],
    attributes: Mapping[str, Sequence[int]] | None = None,
    groups: Sequence[Hashable] | None = None,
    kind: Kind = "spectral",
    one_hot: bool = False,
    *,
    num_inputs: int,
    private_target: bool,
) -> np.ndarray:
    """The most that ∇log σ ∇log σᵀ adds to η² of each value of ``fil``, in its order, divided by 2p.

    This is ‖∇log σ‖² over the private coordinates of the example, attribute or group; with ``kind="trace"``, divided by
    their number.

    Args:
        objective: The objective of the fit, with the training data.
        weights: U*, [p, K].
        decide: σ is proportional to Σ weight·η over these values.
        attributes: As in ``fil``, by column numbers.
        groups: As in ``fil``.
        kind: As in ``fil``.
        one_hot: As in ``fil``.
        num_inputs: d.
        private_target: Whether targets are private.
    """
    n = len(objective.X)
    members = list(dict.fromkeys(groups)) if groups is not None else None
    parts: list[Sequence[int] | None] = [None] if attributes is None else list(attributes.values())

    def eta(sensitivity: Sensitivity, value: int) -> Tensor:
        if groups is not None and members is not None:
            rows = torch.tensor([row for row, label in enumerate(groups) if label == members[value]])
            return squared_loss_at(sensitivity, rows, None, kind, one_hot).sqrt()
        return squared_loss_at(sensitivity, value % n, parts[value // n], kind, one_hot).sqrt()

    def chosen(sensitivity: Sensitivity) -> Tensor:
        return torch.stack([weight * eta(sensitivity, value) for value, weight in decide.items()]).sum()

    by_inputs, by_targets = _log_gradient(objective, weights, chosen, num_inputs, private_target)
    whole = torch.cat([by_inputs, by_targets], dim=1)
    of_examples = [(whole if part is None else by_inputs[:, list(part)]).square() for part in parts]
    if groups is not None and members is not None:
        of_examples = [of_examples[0][[label == member for label in groups]].flatten()[None] for member in members]
    sums = torch.cat([part.sum(dim=1) / (part.shape[1] if kind == "trace" else 1) for part in of_examples])
    return sums.cpu().numpy()


def _log_gradient(
    objective: Objective,
    weights: Tensor,
    quantity: Callable[[Sensitivity], Tensor],
    num_inputs: int,
    private_target: bool,
) -> tuple[Tensor, Tensor]:
    """∇log of a function of the sensitivity, with respect to every example's inputs, [n, d], and target, [n, t]."""
    X, y, w = (part.detach().clone().requires_grad_() for part in (objective.X, objective.y, weights))
    moved = replace(objective, X=X, y=y)
    with torch.enable_grad():
        hessian, data = moved.hessian(w), (objective.loss, X, y, objective.sample_weight)
        logarithm = quantity(Sensitivity.build(*data, w, hessian, num_inputs, private_target)).log()
        direct_x, direct_y, by_weights = torch.autograd.grad(logarithm, (X, y, w), materialize_grads=True)

        # through the minimiser: −(∂∇L)ᵀ H⁻¹ ∂/∂w
        pushed = torch.linalg.solve(hessian.detach(), by_weights.flatten()).view_as(w)
        through_x, through_y = torch.autograd.grad((moved.gradient(w) * pushed).sum(), (X, y), materialize_grads=True)

    by_targets = direct_y - through_y
    if by_targets.ndim == 2:  # a point of the simplex moves within it
        by_targets = by_targets @ tangent_basis(by_targets.shape[1]).to(by_targets)
    by_targets = by_targets.view(len(X), -1)
    return (direct_x - through_x)[:, :num_inputs], by_targets if private_target else by_targets[:, :0]

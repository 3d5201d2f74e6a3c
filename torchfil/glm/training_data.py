"""Whether data are those that a model was fitted on: its columns by name or number, their order, the minimum itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.glm.losses import Loss
from torchfil.glm.solver import Fit

__all__ = ["check_minimum", "check_names", "column_numbers"]


def column_numbers(columns: Sequence[Any] | slice, num_inputs: int, names: Sequence[Any]) -> list[int]:
    """The numbers of columns given by number, by name or as a slice; a fit's d columns may have names.

    Example:
        >>> column_numbers(["dose", 0], 3, ["age", "weight", "dose"])
        [2, 0]
    """
    if isinstance(columns, slice):
        return list(range(num_inputs))[columns]
    columns = [columns] if isinstance(columns, str) else columns
    numbers = [names.index(column) if column in names else column for column in columns]
    wrong = [
        c for c in numbers if isinstance(c, bool) or not (isinstance(c, (int, np.integer)) and 0 <= c < num_inputs)
    ]
    if wrong or not numbers:
        raise ValueError(f"unknown columns {wrong}; use numbers below {num_inputs} or names of {names}")
    repeated = sorted({int(c) for c in numbers if numbers.count(c) > 1})
    if repeated:
        raise ValueError(
            f"columns {repeated} occur more than once in the attribute {list(columns)}, which would count them "
            "twice; name each column once"
        )
    return [int(c) for c in numbers]


def check_names(X: Any, fitted: Sequence[Any]) -> None:
    """Refuse a table whose columns have other names, or another order, than in the fit."""
    given = list(getattr(X, "columns", ()))
    if not (given and fitted and all(isinstance(name, str) for name in [*given, *fitted])) or given == fitted:
        return
    place = next(k for k, (name, expected) in enumerate(zip(given, fitted, strict=True)) if name != expected)
    raise ValueError(
        f"X and y are not what the model was fitted on: column {place} is {given[place]!r}, at the fit it was "
        f"{fitted[place]!r}. Pass the columns in the order of feature_names_in_"
    )


def check_minimum(loss: Loss, fit: Fit, ridge: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> None:
    """Refuse data on which w* is not a minimum, or has another curvature (which shows other weights without l2).

    The gradient may be as large as at the fit, plus a millionth of the sum of its terms' sizes: rounding the inputs
    to float32 changes them by 6e-8. The Hessian's diagonal may change ten times as much, assuming that the third
    derivative is about as large as the second. ``ridge`` is nλ, and 0 for an intercept, [p, 1].
    """
    u = fit.weights
    margin = inputs @ u
    residual, curvature = loss.residual(margin, targets), loss.curvature(margin, targets).abs()
    gradient = inputs.mT @ (weights[:, None] * residual) + ridge * u

    # how much rounding may change each entry
    size = inputs.abs()
    largest = 1 + size @ u.abs()  # of the margins' terms, [n, K]
    rounding = residual.abs() + torch.einsum("nkl,nl->nk", curvature, largest)
    natural = size.mT @ (weights[:, None] * rounding) + ridge * u.abs()
    allowed = 2 * len(inputs) * fit.gradient_norm + 1e-6 * natural

    squares, own = inputs.square().mT, weights[:, None] * curvature.diagonal(dim1=1, dim2=2)
    change = squares @ own + ridge - fit.hessian.diagonal().view_as(u)
    same = (gradient.abs() <= allowed) & (change.abs() <= 1e-5 * (squares @ (own * largest) + ridge))
    if not bool((same & torch.isfinite(gradient) & torch.isfinite(change)).all()):
        raise ValueError(
            "X and y are not what the model was fitted on: at its weights, over n, they give a gradient of up to "
            f"{float(gradient.abs().max()) / len(inputs):.2g} ({fit.gradient_norm:.2g} at the fit), and the "
            f"Hessian's diagonal differs by up to {float(change.abs().max()) / len(inputs):.2g}. Pass the training "
            "set as fitted (same columns in the same order, same targets and weights)"
        )

"""Losses of generalised linear models as functions of margin and target, with the derivatives that FIL needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

__all__ = ["LOGISTIC", "POISSON", "SQUARED", "MarginLoss"]

Elementwise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MarginLoss:
    """ℓ(m, y), convex in the margin m = wᵀx, elementwise on tensors.

    Attributes:
        name: For messages.
        value: ℓ.
        first: b = ∂ℓ/∂m.
        second: a = ∂²ℓ/∂m² ≥ 0.
        target_sensitivity: c = −∂²ℓ/∂m∂y (1 for the squared, logistic and Poisson losses).
        lipschitz: sup |∂ℓ/∂m| over all margins and targets in range, or None where it is unbounded.
    """

    name: str
    value: Elementwise
    first: Elementwise
    second: Elementwise
    target_sensitivity: Elementwise
    lipschitz: float | None = None

    @classmethod
    def from_function(cls, value: Elementwise, name: str = "custom") -> MarginLoss:
        """A loss given as a torch function of one margin and one target; derivatives by autograd."""
        first = vmap(grad(value, argnums=0))
        second = vmap(grad(grad(value, argnums=0), argnums=0))
        cross = vmap(grad(grad(value, argnums=0), argnums=1))
        return cls(name, vmap(value), first, second, lambda m, y: -cross(m, y))


def _ones(margin: Tensor, target: Tensor) -> Tensor:
    return torch.ones_like(margin)


SQUARED = MarginLoss("squared", lambda m, y: 0.5 * (m - y).square(), lambda m, y: m - y, _ones, _ones)
LOGISTIC = MarginLoss(
    "logistic",
    lambda m, y: torch.nn.functional.softplus(m) - y * m,
    lambda m, y: torch.sigmoid(m) - y,
    lambda m, y: torch.sigmoid(m) * torch.sigmoid(-m),
    _ones,
    lipschitz=1.0,
)
POISSON = MarginLoss("poisson", lambda m, y: m.exp() - y * m, lambda m, y: m.exp() - y, lambda m, y: m.exp(), _ones)

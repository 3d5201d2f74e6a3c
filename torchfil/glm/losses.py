"""Losses of generalised linear models as functions of margins and target, with the derivatives that FIL needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

__all__ = ["LOGISTIC", "POISSON", "SQUARED", "Loss", "MarginLoss", "SoftmaxLoss", "tangent_basis"]

Elementwise = Callable[[Tensor, Tensor], Tensor]


class Loss(Protocol):
    """ℓ(m, y), convex in the K margins m = Uᵀx of an example; every method takes margins [n, K] and all targets."""

    @property
    def name(self) -> str:
        """The name for messages."""

    @property
    def lipschitz(self) -> float | None:
        """The largest ‖∂ℓ/∂m‖₂ over all margins and targets in range, or None if it is unbounded."""

    def losses(self, margin: Tensor, y: Tensor) -> Tensor:
        """ℓ, [n]."""

    def residual(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂m, [n, K]."""

    def curvature(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m², [n, K, K]."""

    def coupling(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m∂y, [n, K, t], t the number of the target's coordinates."""


@dataclass(frozen=True)
class MarginLoss:
    """ℓ(m, y), convex in the one margin m = wᵀx, elementwise on tensors.

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
        """A loss given as a torch function of one margin and one target; derivatives by autograd."""
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

    A softmax does not change if a number is added to all its logits, so weights W are determined up to W + v1ᵀ. The
    shortest minimiser has W1 = 0: W = UBᵀ, with B ∈ R^{classes×K} an orthonormal basis of 1⊥, K = classes − 1. The
    margins are those of U: strictly convex, ‖U‖ = ‖W‖, and W's Jacobian has the same Gram matrix as U's. The target
    moves within the simplex: its t = K coordinates are those along B.
    """

    classes: int

    name = "softmax"
    lipschitz = 2**0.5

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
        return torch.einsum("ck,nc,cl->nkl", basis, probability, basis) - mean[:, :, None] * mean[:, None, :]

    def coupling(self, margin: Tensor, y: Tensor) -> Tensor:
        """∂²ℓ/∂m∂y, [n, K, t]."""
        return -torch.eye(self.classes - 1, dtype=margin.dtype, device=margin.device).expand(len(margin), -1, -1)

    def basis(self, like: Tensor) -> Tensor:
        """B, [classes, K]."""
        return tangent_basis(self.classes).to(like)


def tangent_basis(size: int) -> Tensor:
    """An orthonormal basis of {t ∈ R^size : Σ t = 0}, [size, size − 1]: the directions within a simplex."""
    if size < 2:
        raise ValueError(f"a one-hot attribute needs at least 2 columns, got {size}")
    ones = torch.ones(size, 1, dtype=torch.float64)
    return torch.linalg.qr(torch.cat([ones, torch.eye(size, dtype=torch.float64)[:, 1:]], dim=1)).Q[:, 1:]


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

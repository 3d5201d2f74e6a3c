"""Tanh with its second derivative in few operations.

With y = tanh(x),

    ⟨γ, ∂y⟩ = ⟨γ(1 − y²), ∂x⟩,       ⟨w, ∂(γ(1 − y²))⟩ = ⟨w(1 − y²), ∂γ⟩ − 2⟨wγy, ∂y⟩.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchfil.fisher.ghost.accelerated import kernels_for

__all__ = ["tanh"]


class _Tanh(torch.autograd.Function):
    """X ↦ y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        pulled: Tensor = _TanhPulled.apply(gradients[0], y)
        return pulled


class _TanhPulled(torch.autograd.Function):
    """(γ, y) ↦ γ(1 − y²)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gamma: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(gamma, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (w,), (gamma, y) = gradients, ctx.saved_tensors
        kernels = kernels_for(y)
        if kernels is not None and y.is_contiguous():
            both: tuple[Tensor, Tensor] = kernels.tanh_pulled_twice(w.contiguous(), gamma.contiguous(), y)
            return both
        return torch.ops.aten.tanh_backward(w, y), (w * gamma).mul_(y).mul_(-2)


def tanh(x: Tensor) -> Tensor:
    """``x.tanh()``, differentiable twice."""
    result: Tensor = _Tanh.apply(x)
    return result

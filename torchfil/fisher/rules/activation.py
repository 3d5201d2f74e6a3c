"""Tanh and GELU with their second derivatives in few operations.

With y = tanh(x),

    ⟨γ, ∂y⟩ = ⟨γ(1 − y²), ∂x⟩,       ⟨w, ∂(γ(1 − y²))⟩ = ⟨w(1 − y²), ∂γ⟩ − 2⟨wγy, ∂y⟩.

With y = xΦ(x), Φ and φ the normal distribution and its density, both derivatives are formed once:

    y′ = Φ(x) + xφ(x),       y″ = (2 − x²)φ(x).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.substitutes import is_served, register_function, register_substitute


class _Tanh(Function):
    """x ↦ y."""

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
        return _TanhPulled.apply(gradients[0], y)


class _TanhPulled(Function):
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


class _Gelu(Function):
    """x ↦ y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        below = torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)
        square = x.square()
        density = (square * -0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        result = x * below
        ctx.save_for_backward(x, below.addcmul_(x, density), density.mul_(square.neg_().add_(2)))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _GeluPulled.apply(gradients[0], *ctx.saved_tensors)


class _GeluPulled(Function):
    """(γ, x) ↦ γy′, with both derivatives at hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gamma: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return gamma * first

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        gamma, _, first, second = inputs
        ctx.save_for_backward(gamma, first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (w,), (gamma, first, second) = gradients, ctx.saved_tensors
        return w * first, (w * gamma).mul_(second), None, None


def _gelu(x: Any, approximate: str = "none") -> Tensor | None:
    return _Gelu.apply(x) if approximate == "none" and is_served(x) else None


register_substitute(nn.Tanh, lambda module: _Tanh.apply)
register_function(F.gelu, _gelu)

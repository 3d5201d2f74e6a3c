"""GELU and SiLU with their second derivatives in few operations.

y′ and y″ are computed once, in the forward pass; on GPUs, GELU has a kernel. Φ and φ are the normal
distribution function and its density, σ is the logistic function, t = tanh(u) and u = k(x + cx³):

    y = xΦ(x):       y′ = Φ(x) + xφ(x),              y″ = (2 − x²)φ(x);
    y = x(1 + t)/2:  y′ = (1 + t + x(1 − t²)u′)/2,   y″ = (1 − t²)(u′ + x(u″/2 − tu′²));
    y = xσ(x):       y′ = σ(1 + x(1 − σ)),           y″ = σ(1 − σ)(2 + x(1 − 2σ)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.rules.substitutes import (
    FUNCTIONS,
    Function,
    is_served,
    kernels_for,
    register_substitute,
)


class _GELUOnGPU(Function):
    """x ↦ y by torch's own kernel; only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _GELUPulledOnGPU.apply(gradients[0].contiguous(), *ctx.saved_tensors)


class _GELUPulledOnGPU(Function):
    """(γ, x) ↦ γy′."""

    @staticmethod
    def forward(ctx: Any, gamma: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gamma, x)
        return torch.ops.aten.gelu_backward(gamma, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gamma, x = ctx.saved_tensors
        kernels = kernels_for(x, reduced=True)
        return kernels.gelu_pulled_twice(gradients[0].contiguous(), gamma, x)


Derivatives = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # x ↦ y, y′ and y″

_K, _C = math.sqrt(2 / math.pi), 0.044715  # constants of GELU's approximation


class _Smooth(Function):
    """x ↦ y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, derivatives: Derivatives) -> Tensor:
        result, first, second = derivatives(x)
        ctx.save_for_backward(x, first, second)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _SmoothPulled.apply(gradients[0], *ctx.saved_tensors), None


class _SmoothPulled(Function):
    """(γ, x) ↦ γy′, with both derivatives already computed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gamma: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return gamma * first

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        gamma, _, first, second = inputs
        with torch.no_grad():
            ctx.save_for_backward(first, gamma * second)  # computed once for all probes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (w,), (first, curved) = gradients, ctx.saved_tensors
        return w * first, w * curved, None, None


def _gelu_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = torch.ops.aten.gelu_backward(torch.ones((), dtype=x.dtype).expand(x.shape), x)
    square = x.square()
    density = (square * -0.5).sub_(0.5 * math.log(2 * math.pi)).exp_()
    return F.gelu(x), first, square.neg_().add_(2).mul_(density)


def _gelu_tanh_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = x.square()
    t = (square * (_K * _C)).add_(_K).mul_(x).tanh_()
    slope = square.mul_(3 * _K * _C).add_(_K)  # u′
    left = 1 - t * t
    # where u″/2 = 3kcx
    half = torch.addcmul(x * (3 * _K * _C), t, slope.square(), value=-1).mul_(x)
    second = half.add_(slope).mul_(left)
    rising = t.add_(1).mul_(0.5)
    result = x * rising
    return result, rising.add_(slope.mul_(left).mul_(x), alpha=0.5), second


def _silu_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.sigmoid(x)
    left, result = 1 - y, x * y
    second = (left - y).mul_(x).add_(2).mul_(y).mul_(left)
    return result, left.mul_(x).add_(1).mul_(y), second


def _smooth(x: Any, derivatives: Derivatives) -> Tensor | None:
    served = is_served(x) or (
        isinstance(x, Tensor) and x.requires_grad and kernels_for(x) is not None
    )
    return _Smooth.apply(x, derivatives) if served else None


def _gelu(x: Any, approximate: str = "none") -> Tensor | None:
    if approximate != "none":
        return _smooth(x, _gelu_tanh_derivatives)
    if isinstance(x, Tensor) and x.requires_grad and kernels_for(x, reduced=True) is not None:
        return _GELUOnGPU.apply(x.contiguous())
    return _smooth(x, _gelu_derivatives)


def _silu(x: Any, inplace: bool = False) -> Tensor | None:
    return None if inplace else _smooth(x, _silu_derivatives)


register_substitute(  # written out there in eight operations
    "transformers.activations.NewGELUActivation", lambda module: partial(F.gelu, approximate="tanh")
)
for _functions in FUNCTIONS.values():
    _functions |= {F.gelu: _gelu, F.silu: _silu}

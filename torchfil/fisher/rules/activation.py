"""Tanh, GELU, SiLU and cubes with their second derivatives in few operations.

With y = tanh(x),

    ⟨γ, ∂y⟩ = ⟨γ(1 − y²), ∂x⟩,       ⟨w, ∂(γ(1 − y²))⟩ = ⟨w(1 − y²), ∂γ⟩ − 2⟨wγy, ∂y⟩.

The others compute y′ and y″ once, in the forward pass. Φ and φ are the normal distribution function and its density, σ
is the logistic function, t = tanh(u) and u = k(x + cx³):

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
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.substitutes import (
    is_served,
    register_function,
    register_named_substitute,
    register_substitute,
)


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


class _GeluOnGPU(Function):
    """x ↦ xΦ(x), by torch's own kernels; only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _GeluPulledOnGPU.apply(gradients[0].contiguous(), *ctx.saved_tensors)


class _GeluPulledOnGPU(Function):
    """(γ, x) ↦ γy′."""

    @staticmethod
    def forward(ctx: Any, gamma: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gamma, x)
        result: Tensor = torch.ops.aten.gelu_backward(gamma, x)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gamma, x = ctx.saved_tensors
        both: tuple[Tensor, Tensor] = kernels_for(x, reduced=True).gelu_pulled_twice(
            gradients[0].contiguous(), gamma, x
        )
        return both


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
    half = torch.addcmul(x * (3 * _K * _C), t, slope.square(), value=-1).mul_(x)  # where u″/2 = 3kcx
    second = half.add_(slope).mul_(left)
    rising = t.add_(1).mul_(0.5)
    result = x * rising
    return result, rising.add_(slope.mul_(left).mul_(x), alpha=0.5), second


def _silu_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.sigmoid(x)
    left, result = 1 - y, x * y
    second = (left - y).mul_(x).add_(2).mul_(y).mul_(left)
    return result, left.mul_(x).add_(1).mul_(y), second


def _cube_derivatives(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = x.square()
    return square * x, square.mul_(3), x * 6


def _gelu(x: Any, approximate: str = "none") -> Tensor | None:
    if not is_served(x):
        return None
    return _Smooth.apply(x, _gelu_derivatives if approximate == "none" else _gelu_tanh_derivatives)


def _gelu_on_gpu(x: Any, approximate: str = "none") -> Tensor | None:
    if not isinstance(x, Tensor) or not x.requires_grad or kernels_for(x, reduced=True) is None:
        return None
    if approximate == "none":
        return _GeluOnGPU.apply(x.contiguous())
    return _Smooth.apply(x, _gelu_tanh_derivatives) if kernels_for(x) is not None else None


def _silu_on_gpu(x: Any, inplace: bool = False) -> Tensor | None:
    served = isinstance(x, Tensor) and x.requires_grad and not inplace and kernels_for(x) is not None
    return _Smooth.apply(x, _silu_derivatives) if served else None


def _silu(x: Any, inplace: bool = False) -> Tensor | None:
    return _Smooth.apply(x, _silu_derivatives) if is_served(x) and not inplace else None


def _tanh(*args: Any, **options: Any) -> Tensor | None:
    return _Tanh.apply(*args) if len(args) == 1 and not options and is_served(args[0]) else None


def _power(x: Any, exponent: Any = None, **options: Any) -> Tensor | None:
    cube = not isinstance(exponent, Tensor) and exponent == 3 and not options
    return _Smooth.apply(x, _cube_derivatives) if cube and is_served(x) else None


register_substitute(nn.Tanh, lambda module: _Tanh.apply)
register_named_substitute(  # written out there in eight operations
    "transformers.activations.NewGELUActivation", lambda module: partial(F.gelu, approximate="tanh")
)
register_function(F.gelu, _gelu)
register_function(F.silu, _silu)
register_function(F.gelu, _gelu_on_gpu, device="cuda")
register_function(F.silu, _silu_on_gpu, device="cuda")
for _function in (torch.tanh, Tensor.tanh):
    register_function(_function, _tanh)
for _raise in (torch.pow, Tensor.pow, Tensor.__pow__):
    register_function(_raise, _power)

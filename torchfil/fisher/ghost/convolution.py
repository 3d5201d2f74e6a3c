"""Convolutions whose second derivative with respect to the input costs one convolution.

The derivative that torch keeps for ``convolution_backward`` also computes the one with respect to the weight, whether
it is asked for or not, and that is the slowest of all on a GPU. Here weights are constants, and it is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Convolutional", "padded_input", "with_constant_weights"]

Convolutional = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups


class _Convolution(torch.autograd.Function):
    """A ↦ W ∗ a (+ bias), for constant W."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, a.shape
        zeros = [0] * len(stride)
        result: Tensor = torch.ops.aten.convolution(a, weight, bias, stride, padding, dilation, False, zeros, groups)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Transposed.apply(gradients[0], weight, ctx.shape, ctx.geometry), None, None, None


class _Transposed(torch.autograd.Function):
    """δ ↦ Wᵀ ∗ δ, the derivative of :class:`_Convolution`."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        ctx.save_for_backward(weight)
        ctx.geometry = geometry
        zeros = [0] * len(stride)
        placeholder = delta.new_empty(1).expand(shape)
        result: Tensor = torch.ops.aten.convolution_backward(
            delta, placeholder, weight, None, stride, padding, dilation, False, zeros, groups, [True, False, False]
        )[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Convolution.apply(gradients[0], weight, None, ctx.geometry), None, None, None


def padded_input(module: Convolutional, a: Tensor) -> Tensor:
    """The input with the module's own padding laid around it."""
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, padding, mode=mode) if any(padding) else a


@contextlib.contextmanager
def with_constant_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the model's plain convolutions take their weights as constants."""
    changed = [m for m in model.modules() if type(m) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]

    def forward_of(module: Convolutional) -> Any:
        def forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            zeros = (0,) * len(module.kernel_size)
            simple = module.padding_mode == "zeros" and not isinstance(module.padding, str)
            padding = tuple(module.padding) if simple else zeros
            a = a if simple else padded_input(module, a)
            geometry = (tuple(module.stride), padding, tuple(module.dilation), module.groups)
            if a.ndim != 2 + len(zeros):
                return type(module)._conv_forward(module, a, weight, bias)  # type: ignore[arg-type]
            result: Tensor = _Convolution.apply(a, weight, bias, geometry)
            return result

        return forward

    for module in changed:
        module._conv_forward = forward_of(module)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for module in changed:
            del module._conv_forward

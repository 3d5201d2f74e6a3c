"""Convolutions whose second derivative with respect to the input costs one convolution.

The derivative that torch keeps for ``convolution_backward`` also computes the one with respect to the weight, whether
it is asked for or not, and that is the slowest of all on a GPU. Here weights are constants, and it is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Convolutional", "convolve", "padded_input", "patches"]

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


class _Patches(torch.autograd.Function):
    """A ↦ its patches, [batch, channels·kernel, positions]: a copy of a strided view; back by torch's col2im."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, size: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
    ) -> Tensor:
        ctx.geometry, ctx.shape = (size, stride, dilation), a.shape
        view = a
        for axis in (0, 1):
            view = view.unfold(2 + axis, dilation[axis] * (size[axis] - 1) + 1, stride[axis])[..., :: dilation[axis]]
        return view.permute(0, 1, 4, 5, 2, 3).reshape(len(a), a.shape[1] * size[0] * size[1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        size, stride, dilation = ctx.geometry
        return F.fold(gradients[0], ctx.shape[2:], size, dilation, 0, stride), None, None, None


def patches(module: nn.Conv2d, padded: Tensor) -> Tensor:
    """``F.unfold`` of a padded input as the module walks over it, [batch, channels·kernel, positions]."""
    result: Tensor = _Patches.apply(padded, module.kernel_size, module.stride, module.dilation)
    return result


def padded_input(module: Convolutional, a: Tensor) -> Tensor:
    """The input with the module's own padding laid around it."""
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, padding, mode=mode) if any(padding) else a


def convolve(module: Convolutional, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the module makes of inputs [batch, channels, …] with these weights, taken as constants."""
    zeros = (0,) * len(module.kernel_size)
    simple = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    padding = tuple(module.padding) if simple else zeros
    a = a if simple else padded_input(module, a)
    geometry = (tuple(module.stride), padding, tuple(module.dilation), module.groups)
    result: Tensor = _Convolution.apply(a, weight, bias, geometry)
    return result

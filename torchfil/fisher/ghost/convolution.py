"""Convolutions whose second derivative with respect to the input costs one convolution.

The derivative that torch keeps for ``convolution_backward`` also computes the one with respect to the weight, whether
it is asked for or not, and that is the slowest of all on a GPU. Here weights are constants, and it is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.ghost.accelerated import kernels_for

__all__ = ["Convolutional", "convolve", "padded_input", "patches"]

Convolutional = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups
_Walk = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]  # size, stride, dilation, padding


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
    """A ↦ its patches, [batch, channels·kernel, positions]; back by the sum of what each number went into."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, walk: _Walk) -> Tensor:
        ctx.walk, ctx.shape = walk, a.shape
        kernels = kernels_for(a)
        if kernels is not None:
            found: Tensor = kernels.unfold_patches(a.contiguous(), *walk)
            return found
        size, stride, dilation, padding = walk
        view = F.pad(a, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else a
        for axis in (0, 1):
            view = view.unfold(2 + axis, dilation[axis] * (size[axis] - 1) + 1, stride[axis])[..., :: dilation[axis]]
        return view.permute(0, 1, 4, 5, 2, 3).reshape(len(a), a.shape[1] * size[0] * size[1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kernels = kernels_for(gradients[0])
        if kernels is not None:
            return kernels.fold_patches(gradients[0].contiguous(), ctx.shape[2:], *ctx.walk), None
        size, stride, dilation, padding = ctx.walk
        return F.fold(gradients[0], ctx.shape[2:], size, dilation, padding, stride), None


def patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """The input's patches as the module walks over it, [batch, channels·kernel, positions]; differentiable once."""
    simple = _pads_with_zeros(module)
    a, padding = (a, module.padding) if simple else (padded_input(module, a), (0, 0))
    result: Tensor = _Patches.apply(a, (module.kernel_size, module.stride, module.dilation, padding))
    return result


def _pads_with_zeros(module: Convolutional) -> bool:
    """Equally on both sides, too."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def padded_input(module: Convolutional, a: Tensor) -> Tensor:
    """The input with the module's own padding laid around it."""
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, padding, mode=mode) if any(padding) else a


def convolve(module: Convolutional, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the module makes of inputs [batch, channels, …] with these weights, taken as constants."""
    zeros = (0,) * len(module.kernel_size)
    simple = _pads_with_zeros(module)
    padding = tuple(module.padding) if simple else zeros
    a = a if simple else padded_input(module, a)
    geometry = (tuple(module.stride), padding, tuple(module.dilation), module.groups)
    result: Tensor = _Convolution.apply(a, weight, bias, geometry)
    return result

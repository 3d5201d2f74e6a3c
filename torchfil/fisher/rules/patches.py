"""The patches of an input that a convolution sees, and the backward pass from them.

A traced pass adds up shifted images, which a compiler turns into one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.function import Function

__all__ = ["Convolutional", "padded_input", "pads_with_zeros", "patches"]

Convolutional = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Walk = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]  # size, stride, dilation, padding
_MOST_TAPS = 64  # our kernels are unrolled tap by tap; compiling one for a 16×16 patch takes minutes


class _Patches(Function):
    """a ↦ its patches, [batch, channels·kernel, positions]; backwards, each number sums over its patches."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, walk: _Walk) -> Tensor:
        ctx.walk, ctx.shape = walk, a.shape
        size, stride, dilation, padding = walk
        if _side_by_side(a.shape, walk):
            apart = a.reshape(*a.shape[:2], -1, size[0], a.shape[3] // size[1], size[1])
            return apart.permute(0, 1, 3, 5, 2, 4).reshape(len(a), a.shape[1] * size[0] * size[1], -1)
        kernels = _kernels_for(a, walk)
        if kernels is not None:
            columns: Tensor = kernels.unfold_patches(a.contiguous(), *walk)
            return columns
        view = F.pad(a, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else a
        for axis in (0, 1):
            view = view.unfold(2 + axis, dilation[axis] * (size[axis] - 1) + 1, stride[axis])[..., :: dilation[axis]]
        return view.permute(0, 1, 4, 5, 2, 3).reshape(len(a), a.shape[1] * size[0] * size[1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        size, stride, dilation, padding = ctx.walk
        if _side_by_side(ctx.shape, ctx.walk):
            apart = gradients[0].reshape(*ctx.shape[:2], *size, *_positions(ctx.shape, ctx.walk))
            return apart.permute(0, 1, 4, 2, 5, 3).reshape(ctx.shape), None
        kernels = _kernels_for(gradients[0], ctx.walk)
        if kernels is not None:
            return kernels.fold_patches(gradients[0].contiguous(), ctx.shape[2:], *ctx.walk), None
        return F.fold(gradients[0], ctx.shape[2:], size, dilation, padding, stride), None


def _side_by_side(shape: torch.Size, walk: _Walk) -> bool:
    """Whether patches tile the image, as in a vision transformer: each number belongs to one patch."""
    size, stride, dilation, padding = walk
    whole = shape[2] % size[0] == 0 and shape[3] % size[1] == 0
    return whole and size == stride and dilation == (1, 1) and padding == (0, 0)


def _kernels_for(a: Tensor, walk: _Walk) -> Any:
    return kernels_for(a) if walk[0][0] * walk[0][1] <= _MOST_TAPS else None


def _positions(shape: torch.Size, walk: _Walk) -> tuple[int, ...]:
    """The number of positions along both axes."""
    size, stride, dilation, padding = walk
    return tuple(
        (n + 2 * padding[k] - dilation[k] * (size[k] - 1) - 1) // stride[k] + 1 for k, n in enumerate(shape[2:])
    )


def patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """The input's patches as the module walks over it, [batch, channels·kernel, positions]; differentiable once."""
    return _Patches.apply(*_walked(module, a))


def _walked(module: nn.Conv2d, a: Tensor) -> tuple[Tensor, _Walk]:
    """The input, padded if the walk does not pad it, and how the module walks over it."""
    a, padding = (a, module.padding) if pads_with_zeros(module) else (padded_input(module, a), (0, 0))
    return a, (module.kernel_size, module.stride, module.dilation, padding)  # type: ignore[return-value]


def pads_with_zeros(module: Convolutional) -> bool:
    """Whether the module pads with zeros, equally on both sides."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def padded_input(module: Convolutional, a: Tensor) -> Tensor:
    """The input with the module's own padding around it."""
    padding = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, padding, mode=mode) if any(padding) else a

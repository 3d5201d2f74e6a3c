"""Convolutions: their rule, and a forward pass whose second derivative with respect to the input
costs one convolution.

torch's derivative of ``convolution_backward`` always computes the derivative with respect to the
weight as well, which is the slowest one on a GPU. Here weights are constants, and this derivative
is left out.

The rule multiplies δ with the patches of the input that the convolution sees. Average pooling is
here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.models import autocast_inputs
from torchfil.fisher.rules.base import (
    Call,
    Derivatives,
    OuterProductRule,
    UnsupportedCallError,
    register_rule,
)
from torchfil.fisher.rules.substitutes import (
    Function,
    kernels_for,
    products_of_patches,
    register_substitute,
)

# stride, padding, dilation, groups
_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
# size, stride, dilation, padding
_Walk = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_MANY_CHANNELS = 8  # input channels: with fewer, CPUs have no fast kernel for the backward pass
_LARGEST_WINDOW = 4  # of a pooling: one addition per row and column; torch handles large windows
# our kernels are unrolled tap by tap; compiling one for a 16×16 patch takes minutes
_MOST_TAPS = 64


class ConvolutionRule(OuterProductRule):
    """Convolutions in one, two or three dimensions, with stride, padding of any mode, dilation and
    groups.

    Products of patches have the precision that the user has set for convolutions.
    """

    words = "convolution, closed form"
    takes_rows = True
    channels = 1

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """U ∗ a + b."""
        return convolve(call.module, call.input, direction["weight"], direction.get("bias"))

    def input_grad(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """Uᵀ ∗ δ."""
        with torch.enable_grad():
            a, geometry = _padded(call.module, call.input)
        back = _Transposed.apply(delta, direction["weight"], a.shape, geometry)
        return back if a is call.input else torch.autograd.grad(a, call.input, back)[0]

    def inner(self, call: Call, direction: Mapping[str, Tensor]) -> tuple[Tensor, Derivatives]:
        """As in :class:`LinearInWeightsRule`; an example may have several rows."""
        if not _has_rows(call):
            return super().inner(call, direction)
        flat = call.by_row()
        value, derivatives = super().inner(flat, direction)
        of_call = {id(flat.delta): call.delta, id(flat.input): call.input}
        parts = [
            (of_call[id(leaf)], part.unflatten(0, call.delta.shape[:2]))
            for leaf, part in derivatives
        ]
        return value.unflatten(0, call.delta.shape[:2]).sum(dim=1), parts

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`OuterProductRule`; an example may have several rows."""
        if not _has_rows(call):
            return super().weighted_sum(call, weight)
        return super().weighted_sum(call.by_row(), weight.repeat_interleave(call.delta.shape[1]))

    def gradients(self, call: Call) -> dict[str, Tensor]:
        """From products of patches."""
        with products_of_patches(call.delta):
            return super().gradients(call)

    def squared_norm(self, call: Call) -> Tensor:
        """From products of patches."""
        with products_of_patches(call.delta):
            return super().squared_norm(call)

    def products(self, call: Call, other: Call) -> Tensor:
        """From products of patches."""
        with products_of_patches(call.delta):
            return super().products(call, other)

    def weight_grad(self, call: Call, delta: Tensor) -> Tensor:
        """By the backward pass of the convolution itself."""
        a, geometry = _padded(call.module, call.input)
        return _pulled_back(1, delta, a, call.parameters["weight"], geometry)

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """Patches and δ by group and position."""
        module: Any = call.module
        flat, rows = (
            (call.by_row(), call.delta.shape[:2])
            if _has_rows(call)
            else (call, (len(call.delta), 1))
        )
        shape = (*rows, module.groups, -1, flat.delta.shape[2:].numel())
        both = (values.reshape(shape) for values in (patches(module, flat.input), flat.delta))
        a, delta = (values.permute(0, 2, 3, 1, 4).flatten(3, 4).mT for values in both)
        return a, delta


def _has_rows(call: Call) -> bool:
    """Whether an example has several rows: [batch, k, channels, …]."""
    return call.input.ndim == 3 + len(call.module.kernel_size)  # type: ignore[arg-type]


def _padded(module: Any, a: Tensor) -> tuple[Tensor, _Geometry]:
    """The input, padded unless the convolution itself pads it with zeros, and the convolution's
    geometry after that.
    """
    if a.ndim != 2 + len(module.kernel_size):
        raise UnsupportedCallError("a convolution of inputs without a batch dimension")
    padding = module.padding
    if module.padding_mode != "zeros" or isinstance(padding, str):
        around, padding = module._reversed_padding_repeated_twice, (0,) * len(module.kernel_size)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, around, mode=mode) if any(around) else a
    return a, (module.stride, padding, module.dilation, module.groups)


class _Patches(Function):
    """a ↦ its patches, [batch, channels·kernel, positions].

    Backwards, each number sums over its patches.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, walk: _Walk) -> Tensor:
        ctx.walk, ctx.shape = walk, a.shape
        size = walk[0]
        if _side_by_side(a.shape, walk):
            view = a.reshape(*a.shape[:2], -1, size[0], a.shape[3] // size[1], size[1]).permute(
                0, 1, 3, 5, 2, 4
            )
        elif (kernels := _kernels_for(a, walk)) is not None:
            view = kernels.unfold_patches(a.contiguous(), *walk)
        else:
            view = _unfolded(a, walk)
        return view.reshape(len(a), a.shape[1] * size[0] * size[1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), shape, (size, stride, dilation, padding) = gradients, ctx.shape, ctx.walk
        if _side_by_side(shape, ctx.walk):
            apart = gradient.reshape(*shape[:2], *size, shape[2] // size[0], shape[3] // size[1])
            return apart.permute(0, 1, 4, 2, 5, 3).reshape(shape), None
        kernels = _kernels_for(gradient, ctx.walk)
        if kernels is not None:
            return kernels.fold_patches(gradient.contiguous(), shape[2:], *ctx.walk), None
        return F.fold(gradient, shape[2:], size, dilation, padding, stride), None


def _side_by_side(shape: torch.Size, walk: _Walk) -> bool:
    """Whether patches tile the image, as in a vision transformer: each number belongs to one
    patch.
    """
    size, stride, dilation, padding = walk
    whole = shape[2] % size[0] == 0 and shape[3] % size[1] == 0
    return whole and size == stride and dilation == (1, 1) and padding == (0, 0)


def _kernels_for(a: Tensor, walk: _Walk) -> Any:
    return kernels_for(a) if walk[0][0] * walk[0][1] <= _MOST_TAPS else None


def _unfolded(a: Tensor, walk: _Walk) -> Tensor:
    """Patches in any number of dimensions, as a view of the padded input: [batch, channels,
    *kernel, *positions].
    """
    size, stride, dilation, padding = walk
    view, axes = (
        F.pad(a, [pad for pad in reversed(padding) for _ in range(2)]) if any(padding) else a,
        len(size),
    )
    for i in range(axes):
        view = view.unfold(2 + i, dilation[i] * (size[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    return view.permute(0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))


def patches(module: Any, a: Tensor) -> Tensor:
    """The input's patches as the module walks over it, [batch, channels·kernel, positions].

    Differentiable once.
    """
    a, (stride, padding, dilation, _) = _padded(module, a)
    walk = (module.kernel_size, stride, dilation, padding)
    if isinstance(module, nn.Conv2d):
        return _Patches.apply(a, walk)
    return _unfolded(a, walk).flatten(2 + len(stride)).flatten(1, -2)


class _Convolution(Function):
    """a ↦ W ∗ a (+ bias), for constant W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        zeros = [0] * len(stride)
        return torch.ops.aten.convolution(
            a, weight, bias, stride, padding, dilation, False, zeros, groups
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(weight)
        ctx.shape = a.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Transposed.apply(gradients[0], weight, ctx.shape, ctx.geometry), None, None, None


class _Transposed(Function):
    """δ ↦ Wᵀ ∗ δ, the derivative of :class:`_Convolution`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        if delta.device.type == "cpu" and weight.ndim == 4 and groups == 1:
            if weight.shape[1] < _MANY_CHANNELS:
                columns = weight.flatten(1).mT @ delta.flatten(2)
                return F.fold(columns, shape[2:], weight.shape[2:], dilation, padding, stride)
            around = [size - 1 - pad for size, pad in zip(weight.shape[2:], padding, strict=True)]
            # for this convolution, CPUs have a fast kernel
            if {*stride, *dilation} == {1} and min(around) >= 0:
                return F.conv2d(delta, weight.flip(2, 3).transpose(0, 1), padding=around)
        return _pulled_back(0, delta, delta.new_empty(1).expand(shape), weight, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Convolution.apply(gradients[0], weight, None, ctx.geometry), None, None, None


def _pulled_back(to: int, delta: Tensor, a: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
    """δ, taken back through a convolution: to its inputs (0) or its weights (1)."""
    stride, padding, dilation, groups = geometry
    zeros, wanted, back = (
        [0] * len(stride),
        [to == k for k in range(3)],
        torch.ops.aten.convolution_backward,
    )
    return back(delta, a, weight, None, stride, padding, dilation, False, zeros, groups, wanted)[to]


def convolve(module: Any, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The module's output for inputs [batch, channels, …] with these weights as constants."""
    a, geometry = _padded(module, a)
    return _Convolution.apply(a, weight, bias, geometry)


def _substitute(module: Any) -> Callable[..., Tensor]:
    def conv_forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batched = a.ndim == 2 + len(module.kernel_size)
        a, weight, bias = autocast_inputs(a, weight, bias)
        return (
            convolve(module, a, weight, bias)
            if batched
            else type(module)._conv_forward(module, a, weight, bias)
        )

    return conv_forward


def _pooling_substitute(module: Any) -> Callable[[Tensor], Tensor]:
    """Average pooling by adding views, of adjacent windows or on CPUs of windows one apart: up to
    six times as fast.
    """
    axes = 1 if isinstance(module, nn.AvgPool1d) else 2 if isinstance(module, nn.AvgPool2d) else 3
    sizes, strides, padding = (
        (value,) * axes if isinstance(value, int) else tuple(value)
        for value in (module.kernel_size, module.stride, module.padding)
    )
    own_divisor = getattr(module, "divisor_override", None) is not None
    plain = not any(padding) and not own_divisor and max(sizes) <= _LARGEST_WINDOW

    def forward(x: Tensor) -> Tensor:
        batched = plain and x.ndim == 2 + axes
        overlap = batched and set(strides) == {1} and x.device.type == "cpu"
        whole = not any(n % size for n, size in zip(x.shape[2:], sizes, strict=False))
        if not overlap and not (batched and sizes == strides and whole):
            return type(module).forward(module, x)
        for axis, size in enumerate(sizes, start=2):
            if overlap:
                span = x.shape[axis] - size + 1
                first, *others = (x.narrow(axis, k, span) for k in range(size))
            else:
                first, *others = x.unflatten(axis, (-1, size)).unbind(axis + 1)
            x = sum(others, start=first)
        return x / prod(sizes)

    return forward


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_rule(_kind, ConvolutionRule())
    register_substitute(_kind, _substitute, method="_conv_forward")
for _pooling in (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d):
    register_substitute(_pooling, _pooling_substitute)

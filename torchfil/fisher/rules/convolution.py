"""Convolutions whose second derivative with respect to the input costs one convolution.

The derivative that torch keeps for ``convolution_backward`` also computes the one with respect to the weight, whether
it is asked for or not, and that is the slowest of all on a GPU. Here weights are constants, and it is left out.

While a pass is traced, everything is written as plain and transposed convolutions, whose layout the compiler chooses,
with channels filled up to a multiple of four, which GPUs' fast kernels need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.tracing import being_traced

__all__ = ["Convolutional", "convolve", "convolve_back", "padded_input", "patches", "patches_by_position"]

Convolutional = nn.Conv1d | nn.Conv2d | nn.Conv3d
_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups
_CHANNELS_TOGETHER = 4
_MANY_CHANNELS = 8  # of the input: with fewer, torch's own way back is as fast on CPUs
_Walk = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]  # size, stride, dilation, padding


class _Convolution(Function):
    """A ↦ W ∗ a (+ bias), for constant W."""

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        zeros = [0] * len(stride)
        if being_traced() and groups == 1:
            a, weight = _filled_up(a), _filled_up(weight)
        result: Tensor = torch.ops.aten.convolution(a, weight, bias, stride, padding, dilation, False, zeros, groups)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(weight)
        ctx.shape = a.shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Transposed.apply(gradients[0], weight, ctx.shape, ctx.geometry), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], a: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry
    ) -> tuple[Tensor, int]:
        """Many inputs are one large batch; many weights, for one input, are one with many channels."""
        of_a, of_weight, of_bias, _ = in_dims
        if bias is not None and of_bias is not None:
            found, dim = _Convolution.vmap(info, (of_a, of_weight, None, None), a, weight, None, geometry)
            each = bias.movedim(of_bias, 0).reshape(info.batch_size, 1, -1, *[1] * len(geometry[0]))
            return found.movedim(dim, 0) + each, 0
        if of_weight is None:
            if of_a is None:
                return _Convolution.apply(a, weight, bias, geometry)[None], 0
            a = a.movedim(of_a, 0)
            return _Convolution.apply(a.flatten(0, 1), weight, bias, geometry).unflatten(0, a.shape[:2]), 0
        weight = weight.movedim(of_weight, 0)
        count, outputs, (*rest, groups) = len(weight), weight.shape[1], geometry
        bias = None if bias is None else bias.repeat(count)
        if of_a is None and groups == 1:
            found = _Convolution.apply(a, weight.flatten(0, 1), bias, geometry)
        else:
            a = a.movedim(of_a, 1) if of_a is not None else a[:, None].expand(-1, count, *a.shape[1:])
            found = _Convolution.apply(a.flatten(1, 2), weight.flatten(0, 1), bias, (*rest, groups * count))
        return found.unflatten(1, (count, outputs)), 1


class _Transposed(Function):
    """δ ↦ Wᵀ ∗ δ, the derivative of :class:`_Convolution`."""

    @staticmethod
    def forward(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        if being_traced() and groups == 1:
            return _transposed(delta, weight, shape, geometry)
        if delta.device.type == "cpu" and _has_phases(weight, geometry):
            return _by_phases(delta, weight, shape, geometry)
        zeros = [0] * len(stride)
        placeholder = delta.new_empty(1).expand(shape)
        result: Tensor = torch.ops.aten.convolution_backward(
            delta, placeholder, weight, None, stride, padding, dilation, False, zeros, groups, [True, False, False]
        )[0]
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Convolution.apply(gradients[0], weight, None, ctx.geometry), None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry
    ) -> tuple[Tensor, int]:
        """As :meth:`_Convolution.vmap`, the other way round."""
        of_delta, of_weight, *_ = in_dims
        if of_weight is None:
            delta = delta.movedim(of_delta, 0)
            shape = torch.Size((len(delta) * shape[0], *shape[1:]))
            return _Transposed.apply(delta.flatten(0, 1), weight, shape, geometry).unflatten(0, delta.shape[:2]), 0
        weight = weight.movedim(of_weight, 0)
        count, (*rest, groups) = len(weight), geometry
        wide = torch.Size((shape[0], count * shape[1], *shape[2:]))
        if of_delta is None and groups == 1:
            weight = weight.transpose(0, 1).flatten(1, 2)  # [out, count·in, …]
            return _Transposed.apply(delta, weight, wide, geometry).unflatten(1, (count, shape[1])), 1
        delta = (
            delta.movedim(of_delta, 1) if of_delta is not None else delta[:, None].expand(-1, count, *delta.shape[1:])
        )
        found = _Transposed.apply(delta.flatten(1, 2), weight.flatten(0, 1), wide, (*rest, groups * count))
        return found.unflatten(1, (count, shape[1])), 1


def _filled_up(x: Tensor) -> Tensor:
    """X, [a, channels, …], with channels of zeros behind its own, up to a multiple of four."""
    missing = -x.shape[1] % _CHANNELS_TOGETHER
    return F.pad(x, (*[0] * (2 * (x.ndim - 2)), 0, missing)) if missing else x


def _transposed(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    sizes = zip(shape[2:], delta.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    beyond = [n - ((m - 1) * step - 2 * pad + gap * (size - 1) + 1) for n, m, size, step, pad, gap in sizes]
    result: Tensor = torch.ops.aten.convolution(
        delta, _filled_up(weight), None, stride, padding, dilation, True, beyond, groups
    )
    return result[:, : shape[1]]


def _has_phases(weight: Tensor, geometry: _Geometry) -> bool:
    """Whether :func:`_by_phases` is faster than torch's own, which it is for kernels of whole strides."""
    stride, padding, dilation, groups = geometry
    whole = all(
        size % step == 0 and pad < size for size, step, pad in zip(weight.shape[2:], stride, padding, strict=True)
    )
    return weight.ndim == 4 and groups == 1 and set(dilation) == {1} and whole and weight.shape[1] >= _MANY_CHANNELS


def _by_phases(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
    """Wᵀ ∗ δ as one plain convolution, which CPUs have a fast kernel for.

    Along an axis of stride s, the outputs at s·q + φ − padding are those of δ convolved with every s-th weight from the
    φ-th on: s convolutions side by side, whose outputs are laid between each other.
    """
    (step_y, step_x), padding = geometry[0], geometry[1]
    outputs, channels, height, width = weight.shape
    rows, columns = height // step_y, width // step_x
    phases = weight.reshape(outputs, channels, rows, step_y, columns, step_x).flip(2, 4).permute(1, 3, 5, 0, 2, 4)
    kernel = phases.reshape(-1, outputs, rows, columns)
    if step_y == step_x == 1:
        return F.conv2d(delta, kernel, padding=(rows - 1 - padding[0], columns - 1 - padding[1]))
    found = F.conv2d(delta, kernel, padding=(rows - 1, columns - 1))
    found = found.reshape(len(delta), channels, step_y, step_x, *found.shape[2:]).permute(0, 1, 4, 2, 5, 3)
    found = found.reshape(len(delta), channels, found.shape[2] * step_y, -1)
    ends = [n + pad - m for n, pad, m in zip(shape[2:], padding, found.shape[2:], strict=True)]
    return F.pad(found, (-padding[1], ends[1], -padding[0], ends[0]))


class _Patches(Function):
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
        if being_traced():
            return _added_up(gradients[0], ctx.shape, ctx.walk), None
        size, stride, dilation, padding = ctx.walk
        return F.fold(gradients[0], ctx.shape[2:], size, dilation, padding, stride), None


def _added_up(columns: Tensor, shape: torch.Size, walk: _Walk) -> Tensor:
    """``F.fold`` as a sum of shifted images, of which a compiler makes one kernel; its own fold writes astray."""
    (batch, channels, _, _), (size, _, _, _) = shape, walk
    return _shifted_sum(
        columns.reshape(batch, channels, *size, *_positions(shape, walk)).permute(0, 2, 3, 1, 4, 5), shape, walk
    )


def _positions(shape: torch.Size, walk: _Walk) -> tuple[int, ...]:
    """How many positions there are along both axes."""
    size, stride, dilation, padding = walk
    return tuple(
        (n + 2 * padding[k] - dilation[k] * (size[k] - 1) - 1) // stride[k] + 1 for k, n in enumerate(shape[2:])
    )


def _shifted_sum(taps: Tensor, shape: torch.Size, walk: _Walk) -> Tensor:
    """From what lies at each tap, [batch, rows, columns of the kernel, channels, *positions]."""
    size, stride, dilation, padding = walk
    (height, width), total = shape[2:], taps.new_zeros(shape)
    for i in range(size[0]):
        for j in range(size[1]):
            spread = taps[:, i, j]
            if stride != (1, 1):
                spread = F.pad(spread[..., None, :, None], (0, stride[1] - 1, 0, 0, 0, stride[0] - 1))
                spread = spread.flatten(-4, -3).flatten(-2)
            top, left = i * dilation[0] - padding[0], j * dilation[1] - padding[1]
            below, right = height - spread.shape[-2] - top, width - spread.shape[-1] - left
            total = total + F.pad(spread, (left, right, top, below))
    return total


class _PatchesByPosition(Function):
    """A ↦ its patches, [batch, positions, kernel·channels]: channels last, as a compiler lays images out."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, walk: _Walk) -> Tensor:
        ctx.walk, ctx.shape = walk, a.shape
        size, stride, dilation, padding = walk
        view = F.pad(a, (padding[1], padding[1], padding[0], padding[0])).permute(0, 2, 3, 1)
        for axis in (0, 1):
            view = view.unfold(1 + axis, dilation[axis] * (size[axis] - 1) + 1, stride[axis])[..., :: dilation[axis]]
        return view.permute(0, 1, 2, 4, 5, 3).reshape(len(a), view.shape[1] * view.shape[2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        taps = gradients[0].reshape(len(gradients[0]), *_positions(ctx.shape, ctx.walk), *ctx.walk[0], ctx.shape[1])
        return _shifted_sum(taps.permute(0, 3, 4, 5, 1, 2), ctx.shape, ctx.walk), None


def patches_by_position(module: nn.Conv2d, a: Tensor) -> Tensor:
    """The input's patches, [batch, positions, kernel·channels]; differentiable once."""
    result: Tensor = _PatchesByPosition.apply(*_walked(module, a))
    return result


def patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """The input's patches as the module walks over it, [batch, channels·kernel, positions]; differentiable once."""
    result: Tensor = _Patches.apply(*_walked(module, a))
    return result


def _walked(module: nn.Conv2d, a: Tensor) -> tuple[Tensor, _Walk]:
    """The input, padded where the walk does not, and how the module walks over it."""
    a, padding = (a, module.padding) if _pads_with_zeros(module) else (padded_input(module, a), (0, 0))
    return a, (module.kernel_size, module.stride, module.dilation, padding)  # type: ignore[return-value]


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
    padding = _own_padding(module)
    a = a if _pads_with_zeros(module) else padded_input(module, a)
    geometry = (tuple(module.stride), padding, tuple(module.dilation), module.groups)
    result: Tensor = _Convolution.apply(a, weight, bias, geometry)
    return result


def convolve_back(module: Convolutional, delta: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """The derivative of ⟨δ, :func:`convolve` (a)⟩ with respect to a."""
    geometry = (tuple(module.stride), _own_padding(module), tuple(module.dilation), module.groups)
    if _pads_with_zeros(module):
        result: Tensor = _Transposed.apply(delta, weight, a.shape, geometry)
        return result
    with torch.enable_grad():
        padded = padded_input(module, a)
    (result,) = torch.autograd.grad(padded, a, _Transposed.apply(delta, weight, padded.shape, geometry))
    return result


def _own_padding(module: Convolutional) -> tuple[int, ...]:
    """What is left for the convolution to pad."""
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        return (0,) * len(module.kernel_size)
    return tuple(module.padding)

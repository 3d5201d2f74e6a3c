"""Convolutions: their rule, and a forward pass whose second derivative with respect to the input costs one convolution.

torch's derivative of ``convolution_backward`` always computes the derivative with respect to the weight as well, which
is the slowest one on a GPU. Here weights are constants, and this derivative is left out.

While a pass is traced, everything is written as plain and transposed convolutions, whose layout the compiler chooses.
Channels are padded to a multiple of four, which the fast kernels of GPUs need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.precision import autocast_inputs
from torchfil.fisher.rules.base import OuterProductRule, per_example, register_rule
from torchfil.fisher.rules.call import Call, UnsupportedCallError
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.patches import Convolutional, padded_input, pads_with_zeros, patches
from torchfil.fisher.rules.products import products_of_patches
from torchfil.fisher.rules.substitutes import register_substitute

__all__ = ["ConvolutionRule", "convolve"]

_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]  # stride, padding, dilation, groups
_MANY_CHANNELS = 8  # input channels: with fewer, CPUs have no fast kernel for the backward pass


class ConvolutionRule(OuterProductRule):
    """Convolutions in one, two or three dimensions, with stride, padding of any mode, dilation and groups.

    Products of patches have the precision that the user has set for convolutions.
    """

    channels = 1

    def output(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """U ∗ a + b."""
        assert isinstance(call.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if "weight" not in direction:
            return direction["bias"].reshape(-1, *[1] * len(call.module.kernel_size)).expand(call.delta.shape)
        return convolve(call.module, call.input, direction["weight"], direction.get("bias"))

    def way_back(self, call: Call, direction: Mapping[str, Tensor], delta: Tensor) -> Tensor:
        """Uᵀ ∗ δ."""
        assert isinstance(call.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if "weight" not in direction:
            return torch.zeros_like(call.input)
        return _convolve_back(call.module, delta, direction["weight"], call.input)

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

    def weighted_sum(self, call: Call, weight: Tensor) -> dict[str, Tensor]:
        """As in :class:`LayerRule`, by the backward pass of the convolution itself."""
        module, result = call.module, {}
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        with torch.no_grad():
            delta = call.delta * per_example(weight, call.delta)
            if "weight" in call.parameters:
                axes = len(module.kernel_size)
                result["weight"] = torch.ops.aten.convolution_backward(
                    delta,
                    self._padded(call),
                    call.parameters["weight"],
                    None,
                    module.stride,
                    [0] * axes,
                    module.dilation,
                    False,
                    [0] * axes,
                    module.groups,
                    [False, True, False],
                )[1]
            if "bias" in call.parameters:
                result["bias"] = delta.transpose(0, 1).flatten(1).sum(dim=1)
        return result

    @staticmethod
    def _padded(call: Call) -> Tensor:
        module, a = call.module, call.input
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if a.ndim != 2 + len(module.kernel_size):
            raise UnsupportedCallError(f"{call.name}: a convolution of inputs without a batch dimension")
        return padded_input(module, a)

    def factors(self, call: Call) -> tuple[Tensor, Tensor]:
        """Patches and δ by group and position."""
        module, a, delta = call.module, call.input, call.delta
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        positions = delta.shape[2:].numel()
        if isinstance(module, nn.Conv2d) and a.ndim == 4:
            columns = patches(module, a)  # [batch, in·kernel, T]
            return (
                columns.reshape(len(a), module.groups, -1, positions).mT,
                delta.reshape(len(a), module.groups, -1, positions).mT,
            )
        view = self._padded(call)
        for axis, (size, stride, dilation) in enumerate(
            zip(module.kernel_size, module.stride, module.dilation, strict=True)
        ):
            view = view.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        batch, groups, axes = len(a), module.groups, len(module.kernel_size)
        view = view.reshape(batch, groups, -1, *view.shape[2:])  # [batch, groups, in, *positions, *kernel]
        view = view.movedim(2, 2 + axes)  # [batch, groups, *positions, in, *kernel]
        return (
            view.reshape(batch, groups, positions, -1),
            delta.reshape(batch, groups, -1, positions).mT,
        )


class _Convolution(Function):
    """a ↦ W ∗ a (+ bias), for constant W."""

    @staticmethod
    def forward(a: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        zeros = [0] * len(stride)
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
        """Many inputs become one large batch; many weights for one input become one weight with many channels."""
        of_a, of_weight, of_bias, _ = in_dims
        if bias is not None and of_bias is not None:
            result, dim = _Convolution.vmap(info, (of_a, of_weight, None, None), a, weight, None, geometry)
            each = bias.movedim(of_bias, 0).reshape(info.batch_size, 1, -1, *[1] * len(geometry[0]))
            return result.movedim(dim, 0) + each, 0
        if of_weight is None:
            if of_a is None:
                return _Convolution.apply(a, weight, bias, geometry)[None], 0
            a = a.movedim(of_a, 0)
            return _Convolution.apply(a.flatten(0, 1), weight, bias, geometry).unflatten(0, a.shape[:2]), 0
        weight = weight.movedim(of_weight, 0)
        count, outputs, (*rest, groups) = len(weight), weight.shape[1], geometry
        bias = None if bias is None else bias.repeat(count)
        if of_a is None and groups == 1:
            result = _Convolution.apply(a, weight.flatten(0, 1), bias, geometry)
        else:
            a = a.movedim(of_a, 1) if of_a is not None else a[:, None].expand(-1, count, *a.shape[1:])
            result = _Convolution.apply(a.flatten(1, 2), weight.flatten(0, 1), bias, (*rest, groups * count))
        return result.unflatten(1, (count, outputs)), 1


class _Transposed(Function):
    """δ ↦ Wᵀ ∗ δ, the derivative of :class:`_Convolution`."""

    @staticmethod
    def forward(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        stride, padding, dilation, groups = geometry
        if delta.device.type == "cpu" and _has_phases(weight, geometry):
            return _by_phases(delta, weight, shape, geometry)
        if delta.device.type == "cpu" and weight.ndim == 4 and groups == 1 and weight.shape[1] < _MANY_CHANNELS:
            return F.fold(
                weight.flatten(1).mT @ delta.flatten(2), shape[2:], weight.shape[2:], dilation, padding, stride
            )
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
        """The transposed form of :meth:`_Convolution.vmap`."""
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
        result = _Transposed.apply(delta.flatten(1, 2), weight.flatten(0, 1), wide, (*rest, groups * count))
        return result.unflatten(1, (count, shape[1])), 1


def _has_phases(weight: Tensor, geometry: _Geometry) -> bool:
    """Whether :func:`_by_phases` is faster than torch's own: if the kernel's size is a multiple of the stride."""
    stride, padding, dilation, groups = geometry
    whole = all(
        size % step == 0 and pad < size for size, step, pad in zip(weight.shape[2:], stride, padding, strict=True)
    )
    return weight.ndim == 4 and groups == 1 and set(dilation) == {1} and whole and weight.shape[1] >= _MANY_CHANNELS


def _by_phases(delta: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
    """Wᵀ ∗ δ as one plain convolution, for which CPUs have a fast kernel.

    Along an axis of stride s, the outputs at s·q + φ − padding are δ convolved with every s-th weight from the φ-th on:
    s convolutions side by side, whose outputs are interleaved.
    """
    (step_y, step_x), padding = geometry[0], geometry[1]
    outputs, channels, height, width = weight.shape
    rows, columns = height // step_y, width // step_x
    phases = weight.reshape(outputs, channels, rows, step_y, columns, step_x).flip(2, 4).permute(1, 3, 5, 0, 2, 4)
    kernel = phases.reshape(-1, outputs, rows, columns)
    if step_y == step_x == 1:
        return F.conv2d(delta, kernel, padding=(rows - 1 - padding[0], columns - 1 - padding[1]))
    phased = F.conv2d(delta, kernel, padding=(rows - 1, columns - 1))
    phased = phased.reshape(len(delta), channels, step_y, step_x, *phased.shape[2:]).permute(0, 1, 4, 2, 5, 3)
    phased = phased.reshape(len(delta), channels, phased.shape[2] * step_y, -1)
    ends = [n + pad - m for n, pad, m in zip(shape[2:], padding, phased.shape[2:], strict=True)]
    return F.pad(phased, (-padding[1], ends[1], -padding[0], ends[0]))


def convolve(module: Convolutional, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The module's output for inputs [batch, channels, …] with these weights as constants."""
    a, geometry = a if pads_with_zeros(module) else padded_input(module, a), _geometry(module)
    return _Convolution.apply(a, weight, bias, geometry)


def _convolve_back(module: Convolutional, delta: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """The derivative of ⟨δ, :func:`convolve` (a)⟩ with respect to a."""
    geometry = _geometry(module)
    if pads_with_zeros(module):
        return _Transposed.apply(delta, weight, a.shape, geometry)
    with torch.enable_grad():
        padded = padded_input(module, a)
    return torch.autograd.grad(padded, a, _Transposed.apply(delta, weight, padded.shape, geometry))[0]


def _geometry(module: Convolutional) -> _Geometry:
    """The geometry, with the padding that is left to the convolution."""
    padding = module.padding if pads_with_zeros(module) else (0,) * len(module.kernel_size)
    return tuple(module.stride), tuple(padding), tuple(module.dilation), module.groups  # type: ignore[arg-type]


def _substitute(module: Any) -> Callable[..., Tensor]:
    def conv_forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batched = a.ndim == 2 + len(module.kernel_size)
        a, weight, bias = autocast_inputs(a, weight, bias)
        return convolve(module, a, weight, bias) if batched else type(module)._conv_forward(module, a, weight, bias)

    return conv_forward


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_rule(_kind, ConvolutionRule())
    register_substitute(_kind, _substitute, method="_conv_forward")

"""Layers that a model calls as functions, such as ``F.linear(x, weight)``: which layer an operation corresponds to.

This concerns only watched parameters (:mod:`torchfil.fisher.recording.watching`). The corresponding layer has the
operation's geometry and no weights; its rule does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfil.fisher.rules.base import LayerRule, rule_for
from torchfil.fisher.rules.convolution import convolve
from torchfil.fisher.rules.linear import TransposedLinearRule
from torchfil.fisher.rules.normalisation import group_norm, layer_norm

__all__ = ["Operation", "operation_of"]

_Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Operation:
    """One call of a function that is a layer.

    Attributes:
        module: A layer with the same geometry.
        rule: Its rule.
        input: a.
        weights: The weights by the layer's local names.
        run: Computes the output from weights by name.
    """

    module: nn.Module
    rule: LayerRule
    input: Tensor
    weights: dict[str, Tensor]
    run: Callable[[_Weights], Tensor]


def operation_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operation | None:
    """The layer that the call corresponds to; None if it is not a known layer.

    Example:
        >>> x, weight = torch.ones(2, 3), torch.ones(4, 3)
        >>> operation_of(F.linear, (x, weight), {}).module
        Linear(in_features=3, out_features=4, bias=False)
        >>> operation_of(torch.add, (x, x), {}) is None
        True
    """
    read = _READERS.get(function)
    try:
        return None if read is None else read(*args, **kwargs)
    except TypeError:  # not the usual signature
        return None


def _operation(
    module: nn.Module,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    run: Callable[[_Weights], Tensor],
    rule: LayerRule | None = None,
) -> Operation:
    named = {"weight": weight, "bias": bias}
    weights = {name: value for name, value in named.items() if value is not None}
    return Operation(module, rule_for(module) if rule is None else rule, input, weights, run)


@functools.lru_cache(maxsize=1024)
def _stand_in(kind: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """A layer without weights. It draws no random numbers, because a pass counts them."""
    weightless: Callable[..., nn.Module] = type(kind.__name__, (kind,), {"reset_parameters": lambda self: None})
    return weightless(*args, **kwargs, device="meta")


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operation | None:
    if weight.ndim != 2:
        return None
    module = _stand_in(nn.Linear, weight.shape[1], weight.shape[0], bias=False)
    return _operation(module, input, weight, bias, lambda w: F.linear(input, w["weight"], w.get("bias")))


def _product(input: Tensor, other: Tensor) -> Operation | None:
    """input @ other, of a weight [in, out]."""
    if other.ndim != 2 or input.ndim < 2:
        return None
    module = _stand_in(nn.Linear, *other.shape, bias=False)
    return _operation(module, input, other, None, lambda w: input @ w["weight"], TransposedLinearRule())


def _product_plus(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Operation | None:
    """input + mat1 @ mat2, of a bias [out] and a weight [in, out]: GPT-2's Conv1D."""
    if input.ndim != 1 or beta != 1 or alpha != 1:
        return None
    module = _stand_in(nn.Linear, *mat2.shape, bias=False)
    run = lambda w: torch.addmm(w["bias"], mat1, w["weight"])  # noqa: E731
    return _operation(module, mat1, mat2, input, run, TransposedLinearRule())


def _convolution(
    kind: type[nn.Module],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Operation | None:
    axes = weight.ndim - 2
    if input.ndim != weight.ndim:
        return None
    stride, padding, dilation = (_each(value, axes) for value in (stride, padding, dilation))
    module: Any = _stand_in(
        kind,  # type: ignore[arg-type]
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        stride,
        padding,
        dilation,
        groups,
        bias=False,
    )
    return _operation(module, input, weight, bias, lambda w: convolve(module, input, w["weight"], w.get("bias")))


def _each(value: Any, axes: int) -> Any:
    """One number for every axis; strings stay as they are."""
    if isinstance(value, int):
        return (value,) * axes
    return value if isinstance(value, str) else tuple(value) * (axes if len(value) == 1 else 1)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Operation | None:
    shape = tuple(normalized_shape)
    module = _stand_in(nn.LayerNorm, shape, eps, elementwise_affine=False)
    run = lambda w: layer_norm(input, shape, w.get("weight"), w.get("bias"), eps)  # noqa: E731
    return _operation(module, input, weight, bias, run)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Operation | None:
    shape = tuple(normalized_shape)
    module = _stand_in(nn.RMSNorm, shape, eps, elementwise_affine=False)
    return _operation(module, input, weight, None, lambda w: F.rms_norm(input, shape, w["weight"], eps))


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Operation | None:
    module = _stand_in(nn.GroupNorm, num_groups, input.shape[1], eps, affine=False)
    run = lambda w: group_norm(input, num_groups, w.get("weight"), w.get("bias"), eps)  # noqa: E731
    return _operation(module, input, weight, bias, run)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operation | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    module = _stand_in(nn.Embedding, *weight.shape, padding_idx)
    return _operation(module, input, weight, None, lambda w: F.embedding(input, w["weight"], padding_idx))


def _rows(table: Tensor, index: Any) -> Operation | None:
    """table[index], for integers that differ between examples."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or table.ndim != 2:
        return None
    return _embedding(index, table)


_READERS: dict[Any, Callable[..., Operation | None]] = {
    F.linear: _linear,
    torch.matmul: _product,
    torch.mm: _product,
    Tensor.matmul: _product,
    Tensor.mm: _product,
    Tensor.__matmul__: _product,
    Tensor.__rmatmul__: lambda self, other: _product(other, self),
    torch.addmm: _product_plus,
    Tensor.addmm: _product_plus,
    F.conv1d: functools.partial(_convolution, nn.Conv1d),
    F.conv2d: functools.partial(_convolution, nn.Conv2d),
    F.conv3d: functools.partial(_convolution, nn.Conv3d),
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.embedding: _embedding,
    Tensor.__getitem__: _rows,
}

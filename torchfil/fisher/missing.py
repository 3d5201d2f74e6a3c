"""Replacements for torch's functions that have no second derivative, or one that takes minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["with_second_derivatives"]

_uses_any: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def with_second_derivatives(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Inside, the model can be differentiated twice, even through layers that torch differentiates only once.

    Example:
        >>> x = torch.tensor([0.5], requires_grad=True)
        >>> with with_second_derivatives(nn.Hardsigmoid()):
        ...     y = F.hardsigmoid(x)
        >>> torch.autograd.grad(y, x, create_graph=True)[0]
        tensor([0.1667])
    """
    if model not in _uses_any:
        _uses_any[model] = any(
            isinstance(module, nn.Hardsigmoid | nn.EmbeddingBag) or _cuts_into_patches(module)
            for module in model.modules()
        )
    return _Replaced() if _uses_any[model] else contextlib.nullcontext()


def _cuts_into_patches(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) or module.groups != 1:
        return False
    return module.stride == module.kernel_size and max(module.stride) > 1


class _Replaced(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = _REPLACED.get(func)
        result = None if own is None else own(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.clamp(input / 6 + 0.5, 0, 1)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """The sum or mean of a table's rows, where bags are rows of ``input``; None for other kinds of bags."""
    if input.ndim != 2 or mode not in ("mean", "sum") or max_norm is not None or scale_grad_by_freq:
        return None
    rows = F.embedding(input, weight, padding_idx)  # [bags, T, width]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    kept = torch.ones_like(input, dtype=rows.dtype) if padding_idx is None else input.ne(padding_idx).to(rows.dtype)
    total = (rows * kept.unsqueeze(-1)).sum(dim=1)
    return total if mode == "sum" else total / kept.sum(dim=1, keepdim=True).clamp(min=1)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A matrix product over adjacent patches, as in a vision transformer's first layer; None for other convolutions.

    Torch's second derivative is a convolution whose kernel is an image, dilated by the stride; it takes minutes for a
    ViT-Base.
    """
    sizes = tuple(weight.shape[2:])
    as_sizes = [(value,) * len(sizes) if isinstance(value, int) else value for value in (stride, padding, dilation)]
    if any(isinstance(value, str) for value in as_sizes) or groups != 1 or input.ndim != weight.ndim:
        return None
    if [tuple(value) for value in as_sizes] != [sizes, (0,) * len(sizes), (1,) * len(sizes)] or max(sizes) == 1:
        return None

    # [batch, channels, n₁, k₁, n₂, k₂, …] → [batch, n₁, n₂, …, channels · k₁ · k₂ · …]
    counts = [length // size for length, size in zip(input.shape[2:], sizes, strict=True)]
    for axis, (count, size) in enumerate(zip(counts, sizes, strict=True), start=2):
        input = input.narrow(axis, 0, count * size)  # the rest, less than a patch, is not used
    apart = input.reshape(*input.shape[:2], *(n for pair in zip(counts, sizes, strict=True) for n in pair))
    places, inside = range(2, apart.ndim, 2), range(3, apart.ndim, 2)
    patches = apart.permute(0, *places, 1, *inside).flatten(1 + len(sizes))
    return F.linear(patches, weight.flatten(1), bias).movedim(-1, 1)


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.hardsigmoid: _hardsigmoid,
    F.embedding_bag: _embedding_bag,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
}

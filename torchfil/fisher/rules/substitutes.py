"""Layers and functions whose own second derivative is slow, computed in another way inside a recorded pass.

The outputs are the same; derivatives with respect to the layers' weights are not defined, which a recorded pass takes
as constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchfil.fisher.rules.accelerated import kernels_for
from torchfil.fisher.rules.activation import gelu, tanh
from torchfil.fisher.rules.convolution import convolve
from torchfil.fisher.rules.normalisation import group_norm, layer_norm
from torchfil.fisher.rules.pooling import average_pool, pools_by_views
from torchfil.fisher.rules.products import batched_product
from torchfil.fisher.rules.tracing import being_traced

__all__ = ["FastOnCPU", "with_substitutes"]


@contextlib.contextmanager
def with_substitutes(model: nn.Module) -> Iterator[None]:
    """Inside, the model's plain convolutions, normalisations, poolings and tanh are computed by this package."""
    changed: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        substitute = _SUBSTITUTES.get(type(module))
        if substitute is not None:
            name, make = substitute
            changed.append((module, name))
            setattr(module, name, make(module))
    try:
        yield
    finally:
        for module, name in changed:
            delattr(module, name)


def _convolution(module: Any) -> Callable[..., Tensor]:
    def conv_forward(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batched = a.ndim == 2 + len(module.kernel_size)
        return convolve(module, a, weight, bias) if batched else type(module)._conv_forward(module, a, weight, bias)

    return conv_forward


def _pooling(module: Any) -> Callable[..., Tensor]:
    return lambda x: average_pool(module, x) if pools_by_views(module, x) else type(module).forward(module, x)


def _group_norm(module: Any) -> Callable[..., Tensor]:
    """On GPUs without Triton or a compiler torch's own is faster, whose many operations are mostly on few numbers."""

    def forward(x: Tensor) -> Tensor:
        ours = x.device.type == "cpu" or being_traced() or kernels_for(x) is not None
        return group_norm(module, x) if ours else type(module).forward(module, x)

    return forward


_SUBSTITUTES: dict[type[nn.Module], tuple[str, Callable[[Any], Callable[..., Tensor]]]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("_conv_forward", _convolution)),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), ("forward", _pooling)),
    nn.GroupNorm: ("forward", _group_norm),
    nn.LayerNorm: ("forward", lambda module: lambda x: layer_norm(module, x)),
    nn.Tanh: ("forward", lambda module: tanh),
}


class FastOnCPU(TorchFunctionMode):
    """Inside, products of batches of matrices and GELU, as functions, are computed by this package on CPUs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and not kwargs and _are_matrices_alike(*args):
            return batched_product(*args)
        if func is F.gelu and kwargs.get("approximate", "none") == "none" and len(args) == 1 and _is_served(args[0]):
            return gelu(args[0])
        return func(*args, **kwargs)


_PRODUCTS = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})


def _is_served(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and value.device.type == "cpu"
        and value.dtype in (torch.float32, torch.float64)
    )


def _are_matrices_alike(a: Any, b: Any) -> bool:
    """Whether both are batches of matrices, the same number of each."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim == b.ndim >= 3 and a.shape[:-2] == b.shape[:-2]
    return both and (_is_served(a) or _is_served(b))

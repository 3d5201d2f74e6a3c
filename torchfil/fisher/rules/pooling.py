"""Average pooling by adding views of adjacent windows: on CPUs up to three times as fast as torch's own derivatives."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn

from torchfil.fisher.rules.substitutes import register_substitute

_LARGEST_WINDOW = 4  # one addition per row and column of the window; torch handles large windows


def _substitute(module: Any) -> Callable[[Tensor], Tensor]:
    axes = 1 if isinstance(module, nn.AvgPool1d) else 2 if isinstance(module, nn.AvgPool2d) else 3
    sizes, strides, padding = (
        (value,) * axes if isinstance(value, int) else tuple(value)
        for value in (module.kernel_size, module.stride, module.padding)
    )
    plain = sizes == strides and not any(padding) and getattr(module, "divisor_override", None) is None
    served = plain and max(sizes) <= _LARGEST_WINDOW

    def forward(x: Tensor) -> Tensor:
        whole = x.ndim == 2 + axes and not any(n % size for n, size in zip(x.shape[2:], sizes, strict=True))
        if not served or not whole:
            return type(module).forward(module, x)
        for axis, size in enumerate(sizes, start=2):
            first, *others = x.unflatten(axis, (-1, size)).unbind(axis + 1)
            x = sum(others, start=first)
        return x / prod(sizes)

    return forward


for _kind in (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d):
    register_substitute(_kind, _substitute)

"""A model in float64, even if it contains casts: a trial must not compare rounding errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchfil.fisher.gradients import ExampleGradients

__all__ = ["in_double"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class _CastsToDouble(TorchFunctionMode):
    """Inside, a cast to a narrower floating-point type becomes a cast to float64.

    Models contain casts: Llama casts to float32 in RMSNorm and for rotary positions, and masks have a fixed type.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func in _CASTS else func
        args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
        kwargs = {name: torch.float64 if _is_narrow(value) else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


@contextlib.contextmanager
def in_double(gradients: ExampleGradients) -> Iterator[ExampleGradients]:
    """The same examples and weights in float64; inside, the model stays in float64.

    Changes that the model makes to its buffers are copied to the original buffers.
    """
    doubled = gradients.double()
    try:
        with _CastsToDouble():
            yield doubled
    finally:
        for name, value in gradients.constants.items():
            copy = doubled.constants[name]
            if copy is not value and copy._version > 0:
                value.copy_(copy)

"""The precision of passes: torch's autocast as in the loop, wide sums, and the precision of matrix products.

A training loop under ``torch.autocast`` computes layers in bfloat16 and keeps float32 weights. Its gradients belong to
that computation, so every pass over its batch runs under the same autocast. Norms, inner products and sums of these
gradients are computed in float32 or wider: see :func:`wide`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor

ProbePrecision = Literal["float32", "tf32", "bfloat16"]
PROBE_PRECISIONS: tuple[str, ...] = get_args(ProbePrecision)

REDUCED = frozenset({torch.bfloat16, torch.float16})  # fewer digits than float32


def autocast_now(device: torch.device) -> torch.dtype | None:
    """The current dtype of autocast on this device; None: no autocast.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     autocast_now(torch.device("cpu"))
        torch.bfloat16
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_as(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, autocast is as :func:`autocast_now` found it, whatever it is outside.

    Casts of weights are not cached: if the whole loop runs inside one autocast, they would outlive an update of the
    weights, and they would keep the graph of a recorded pass.
    """
    if not torch.amp.is_autocast_available(device.type) or (
        dtype is None and not torch.is_autocast_enabled(device.type)
    ):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def is_reduced(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype have fewer digits than float32."""
    return dtype in REDUCED


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for norms and sums of such numbers: float32 or wider."""
    return torch.float32 if dtype in REDUCED else dtype


def wide(value: Tensor) -> Tensor:
    """The same numbers in a dtype that is wide enough for sums; differentiable.

    Example:
        >>> wide(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return value.float() if value.dtype in REDUCED else value


def autocast_inputs(*values: Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, as convolutions and products receive them; unchanged without autocast."""
    device = next(value.device for value in values if value is not None)
    dtype = autocast_now(device)
    return values if dtype is None else tuple(None if value is None else value.to(dtype) for value in values)


def normalised_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the output of torch's normalisation layers for x: autocast on GPUs widens it."""
    return wide_dtype(x.dtype) if x.is_cuda and autocast_now(x.device) is not None else x.dtype


def product_precision() -> str:
    """The current precision of products of float32 matrices on GPUs."""
    return torch.backends.cuda.matmul.fp32_precision


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Inside, products of float32 matrices on GPUs have this precision.

    "tf32" keeps every digit of numbers that come from bfloat16 or float16, and sums in float32.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    if before == precision:
        yield
        return
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


probe_dtype: ContextVar[torch.dtype | None] = ContextVar("probe_dtype", default=None)


@contextlib.contextmanager
def probes_in(precision: ProbePrecision | None, *, reduced: bool = False) -> Iterator[None]:
    """Inside, matrix products are only as precise as a probe needs, whose own error is 20 %.

    TF32 rounds factors to 0.05 %, bfloat16 to 0.4 %; both sum in float32. Do not compute norms or released sums inside.

    Args:
        precision: "tf32", on GPUs; "bfloat16", for the layers' own products, and "tf32" for the rest; "float32". None:
            as outside.
        reduced: Whether the model computes in bfloat16 or float16, so that "tf32" would add no digits.
    """
    if precision is None:
        yield
        return
    narrow = precision == "bfloat16" or (precision == "tf32" and reduced)
    token = probe_dtype.set(torch.bfloat16 if narrow else None)
    try:
        with products_in("ieee" if precision == "float32" else "tf32"):
            yield
    finally:
        probe_dtype.reset(token)


def probes_are_narrow() -> bool:
    """Whether layers' products with probes are currently computed in bfloat16."""
    return probe_dtype.get() is not None


def probe_inputs(*values: Any) -> tuple[Any, ...]:
    """Factors of a product in the precision of :func:`probes_in`: bfloat16, or unchanged; None stays None.

    Example:
        >>> with probes_in("bfloat16"):
        ...     probe_inputs(torch.ones(2), None)
        (tensor([1., 1.], dtype=torch.bfloat16), None)
    """
    dtype = probe_dtype.get()
    return values if dtype is None else tuple(None if value is None else value.to(dtype) for value in values)

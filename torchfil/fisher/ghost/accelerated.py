"""Whether the GPU kernels of :mod:`torchfil.fisher.ghost.kernels` serve a tensor; everything else computes in torch.

A pass that is traced, to be compiled, is made of torch's operations only: the compiler makes kernels of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torchfil.fisher.tracing import being_traced

__all__ = [
    "are_of_patches",
    "convolution_precision",
    "exact_convolutions",
    "kernels_for",
    "outer_product",
    "product",
    "product_precision",
    "products_in",
    "products_of_patches",
]

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float64)


def kernels_for(tensor: Tensor) -> Any:
    """The module of kernels, or None where torch has to do: on CPUs, without Triton, for other dtypes or GPUs.

    Triton launches on the current GPU, whatever its tensors lie on.
    """
    if (
        being_traced()
        or not tensor.is_cuda
        or tensor.dtype not in _DTYPES
        or tensor.device.index != torch.cuda.current_device()
    ):
        return None
    return _kernels(tensor.device)


@functools.cache
def _kernels(device: torch.device) -> Any:
    """Tried once: Triton may be missing, lack a compiler, or not know the GPU."""
    try:
        from torchfil.fisher.ghost import kernels

        probe = torch.ones(8, device=device)
        kernels.tanh_pulled_twice(probe, probe, probe)
    except Exception as error:
        logger.info("Triton does not serve %s, and second derivatives are slower: %s", device, error)
        return None
    return kernels


def convolution_precision(tensor: Tensor) -> str:
    """How precise the user lets convolutions of such tensors be, for :func:`products_in`.

    A product of patches is a convolution, which torch computes in TF32 on GPUs unless told otherwise; other matrix
    products it does not.
    """
    in_tf32 = tensor.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if in_tf32 else product_precision()


def product_precision() -> str:
    """How precise products of float32 matrices are on GPUs at present."""
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Inside, products of float32 matrices on GPUs have this precision."""
    before = product_precision()
    if precision == before:
        yield
        return
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Inside, convolutions of float32 tensors on GPUs are not rounded to TF32."""
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


_of_patches: ContextVar[bool] = ContextVar("of_patches", default=False)


def are_of_patches() -> bool:
    """Whether products are computed for a convolution at present."""
    return _of_patches.get()


@contextlib.contextmanager
def products_of_patches(like: Tensor, really: bool = True) -> Iterator[None]:
    """Inside, products are as precise as the user lets convolutions of such tensors be; ``really`` False: as before."""
    if not really:
        yield
        return
    token = _of_patches.set(True)
    try:
        with products_in(convolution_precision(like)):
            yield
    finally:
        _of_patches.reset(token)


@torch.library.custom_op("torchfil::product", mutates_args=())
def _product_in_trace(a: Tensor, b: Tensor, of_patches: bool) -> Tensor:
    with products_of_patches(a, of_patches):
        return a @ b


@_product_in_trace.register_fake
def _(a: Tensor, b: Tensor, of_patches: bool) -> Tensor:
    return a @ b


def product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b, where a trace leaves the precision to the time when it runs."""
    if being_traced() and a.is_cuda:
        result: Tensor = _product_in_trace(a, b, are_of_patches())
        return result
    return a @ b


@torch.library.custom_op("torchfil::outer_product", mutates_args=())
def _outer_product_in_trace(a: Tensor, delta: Tensor, of_patches: bool) -> tuple[Tensor, Tensor, Tensor]:
    with products_of_patches(a, of_patches):
        total = a.mT @ delta
        return total, delta @ total.mT, a @ total


@_outer_product_in_trace.register_fake
def _(a: Tensor, delta: Tensor, of_patches: bool) -> tuple[Tensor, Tensor, Tensor]:
    total = a.mT @ delta
    return total, delta @ total.mT, a @ total


def outer_product(a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W = Σ_t a_t δ_tᵀ, and the derivatives of ‖W‖²/2 with respect to a and δ, as one operation of a trace.

    A compiler lays operands out for each operation anew.
    """
    result: tuple[Tensor, Tensor, Tensor] = _outer_product_in_trace(a, delta, are_of_patches())
    return result

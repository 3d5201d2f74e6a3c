"""Products of batches of small matrices: their precision, and forms that are fast to differentiate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchfil.fisher.precision import product_precision, products_in
from torchfil.fisher.rules.function import Function
from torchfil.fisher.rules.substitutes import is_served, register_function
from torchfil.fisher.rules.tracing import being_traced

__all__ = [
    "batched_product",
    "convolution_precision",
    "exact_convolutions",
    "gram",
    "outer_square",
    "products_of_patches",
]


def convolution_precision(tensor: Tensor) -> str:
    """The precision that the user has set for convolutions of such tensors, for :func:`products_in`.

    A product of patches is a convolution, which torch computes in TF32 on GPUs by default; it does not do so for other
    matrix products.
    """
    in_tf32 = tensor.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if in_tf32 else product_precision()


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


def _are_of_patches() -> bool:
    """Whether products are currently computed for a convolution."""
    return _of_patches.get()


@contextlib.contextmanager
def products_of_patches(like: Tensor, really: bool = True) -> Iterator[None]:
    """Inside, products have the precision set for convolutions of such tensors; if ``really`` is False, as before."""
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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; in a trace, the precision is chosen when it runs."""
    if being_traced() and a.is_cuda:
        result: Tensor = _product_in_trace(a, b, _are_of_patches())
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


class _BatchedProduct(Function):
    """a @ b over leading dimensions; on CPUs, a transposed right factor is copied first.

    Batched products of small matrices are several times slower on CPUs with a transposed factor, and autograd's own
    derivative has one. The derivative is as precise as the product.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _product_of_any(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _are_of_patches()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        (gradient,) = gradients
        with products_of_patches(gradient, ctx.of_patches):
            left = batched_product(gradient, b.mT) if ctx.needs_input_grad[0] else None
            right = batched_product(a.mT, gradient) if ctx.needs_input_grad[1] else None
        return left, right


def _product_of_any(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b.contiguous() if b.device.type == "cpu" else b)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over leading dimensions, differentiable any number of times."""
    if not torch.is_grad_enabled():
        return _product_of_any(a, b)
    return _BatchedProduct.apply(a, b)


class _Gram(Function):
    """x ↦ x xᵀ over leading dimensions; its derivative, (γ + γᵀ)x, is one product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _product_of_any(x, x.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _are_of_patches()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ((x,), (gradient,)) = ctx.saved_tensors, gradients
        with products_of_patches(gradient, ctx.of_patches):
            return batched_product(gradient + gradient.mT, x)


def gram(x: Tensor) -> Tensor:
    """x xᵀ of factors […, T, p], […, T, T], differentiable any number of times."""
    return _Gram.apply(x)


class _OuterSquare(Function):
    """‖W‖² for W = Σ_t a_t δ_tᵀ over groups, [batch], in the form for traces.

    W and the derivatives of ‖W‖²/2 are one operation of the trace, because a compiler arranges the operands of each
    operation again.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, delta: Tensor) -> Tensor:
        total, to_a, to_delta = _outer_product_in_trace(a, delta, _are_of_patches())
        ctx.save_for_backward(to_a, to_delta)
        return total.square().sum(dim=(1, 2, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        to_a, to_delta = ctx.saved_tensors
        twice = 2 * gradients[0][:, None, None, None]
        return twice * to_a, twice * to_delta


def outer_square(a: Tensor, delta: Tensor) -> Tensor:
    """‖Σ_t a_t δ_tᵀ‖² of factors [batch, groups, T, …], [batch], differentiable once; for traced passes."""
    return _OuterSquare.apply(a, delta)


def _product_of_alike(*operands: Any, **options: Any) -> Tensor | None:
    """:func:`batched_product` of two batches of matrices, the same number of each."""
    if len(operands) != 2 or options or not all(isinstance(operand, Tensor) for operand in operands):
        return None
    a, b = operands
    alike = a.ndim == b.ndim >= 3 and a.shape[:-2] == b.shape[:-2]
    return batched_product(a, b) if alike and (is_served(a) or is_served(b)) else None


for _function in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm):
    register_function(_function, _product_of_alike)

"""Products of batches of small matrices: their precision, and forms that are fast to differentiate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from torchfil.fisher.precision import product_precision, products_in
from torchfil.fisher.rules.substitutes import Function, is_served, register_function


def convolution_precision(tensor: Tensor) -> str:
    """The precision that the user has set for convolutions of such tensors, for :func:`products_in`.

    A product of patches is a convolution, which torch computes in TF32 on GPUs by default; it does not do so for other
    matrix products.
    """
    in_tf32 = tensor.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if in_tf32 else product_precision()


_of_patches: ContextVar[bool] = ContextVar("of_patches", default=False)  # whether products are of a convolution


@contextlib.contextmanager
def products_of_patches(like: Tensor) -> Iterator[None]:
    """Inside, products have the precision set for convolutions of such tensors."""
    token = _of_patches.set(True)
    try:
        with products_in(convolution_precision(like)):
            yield
    finally:
        _of_patches.reset(token)


class _BatchedProduct(Function):
    """a @ b over leading dimensions; on CPUs, a transposed right factor is copied first.

    Batched products of small matrices are several times slower on CPUs with a transposed factor, and autograd's own
    derivative has one. The derivative is as precise as the product.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ (b.contiguous() if b.device.type == "cpu" else b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _of_patches.get()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        (gradient,) = gradients
        with products_of_patches(gradient) if ctx.of_patches else contextlib.nullcontext():
            left = batched_product(gradient, b.mT) if ctx.needs_input_grad[0] else None
            right = batched_product(a.mT, gradient) if ctx.needs_input_grad[1] else None
        return left, right


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over leading dimensions, differentiable any number of times."""
    return _BatchedProduct.apply(a, b) if torch.is_grad_enabled() else _BatchedProduct.forward(a, b)


class _Gram(Function):
    """x ↦ x xᵀ over leading dimensions; its derivative, (γ + γᵀ)x, is one product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _BatchedProduct.forward(x, x.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.of_patches = _of_patches.get()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ((x,), (gradient,)) = ctx.saved_tensors, gradients
        with products_of_patches(gradient) if ctx.of_patches else contextlib.nullcontext():
            return batched_product(gradient + gradient.mT, x)


def gram(x: Tensor) -> Tensor:
    """x xᵀ of factors […, T, p], […, T, T], differentiable any number of times."""
    return _Gram.apply(x)


def _product_of_alike(*operands: Any, **options: Any) -> Tensor | None:
    """:func:`batched_product` of two batches of matrices, the same number of each."""
    if len(operands) != 2 or options or not all(isinstance(operand, Tensor) for operand in operands):
        return None
    a, b = operands
    alike = a.ndim == b.ndim >= 3 and a.shape[:-2] == b.shape[:-2]
    return batched_product(a, b) if alike and (is_served(a) or is_served(b)) else None


for _function in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm):
    register_function(_function, _product_of_alike)

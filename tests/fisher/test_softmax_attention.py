"""Attention with its second derivative in closed form, against torch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import DEVICE
from torchfil.fisher.masks import recorded_masks, replayed_masks
from torchfil.fisher.rules.attention import attention

SHAPE = (2, 3, 5, 4)


def operands(seed: int = 0, keys: int = 5) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = (SHAPE, (2, 3, keys, 4), (2, 3, keys, 6))
    return [torch.randn(shape, dtype=torch.float64).to(DEVICE).requires_grad_() for shape in shapes]


def masks(kind: str, keys: int = 5) -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
        "added": {"attn_mask": torch.randn(2, 1, 5, keys, dtype=torch.float64).to(DEVICE)},
        "padding": {"attn_mask": (torch.arange(keys) < torch.tensor([[keys], [2]]))[:, None, None].to(DEVICE)},
    }[kind]


def twice(function: Any, given: list[Tensor]) -> list[Tensor]:
    """The output, the way back of a fixed γ, and the derivatives of a fixed product with it."""
    generator = torch.Generator().manual_seed(3)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(DEVICE)

    output = function(*given)
    gamma = like(output).requires_grad_()
    first = torch.autograd.grad(output, given, gamma, create_graph=True)
    total = sum((like(x) * x).sum() for x in first)
    return [output, *first, *torch.autograd.grad(total, [*given, gamma])]


@pytest.mark.parametrize("kind", ["none", "causal", "scale", "added", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_both_derivatives_are_torchs(kind: str, dropout: float) -> None:
    given, options = operands(), masks(kind)
    with sdpa_kernel(SDPBackend.MATH), recorded_masks() as drawn:
        F.scaled_dot_product_attention(*given, dropout_p=dropout, **options)

    def with_masks(function: Any) -> list[Tensor]:
        def call(*x: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH), replayed_masks(drawn):
                result: Tensor = function(*x, dropout_p=dropout, **options)
            return result

        return twice(call, given)

    ours, theirs = map(with_masks, (attention, F.scaled_dot_product_attention))
    for own, true in zip(ours, theirs, strict=True):
        assert torch.allclose(own, true, rtol=1e-9, atol=1e-11)


def test_more_keys_than_queries() -> None:
    given = operands(keys=9)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = twice(F.scaled_dot_product_attention, given)
    for own, true in zip(twice(attention, given), theirs, strict=True):
        assert torch.allclose(own, true, rtol=1e-9, atol=1e-11)


def test_what_is_not_served() -> None:
    q, k, v = operands()
    table = torch.zeros(5, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert attention(q, k, v, attn_mask=table) is None, "a bias that is trained"
    assert attention(q[0], k[0], v[0]) is None
    assert attention(q.detach(), k.detach(), v.detach()) is None


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_of_queries_that_share_keys(heads: int) -> None:
    q, k, v = operands()
    given = [q, *(x.detach()[:, :heads].clone().requires_grad_() for x in (k, v))]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = twice(partial(F.scaled_dot_product_attention, enable_gqa=True), given)
    for own, true in zip(twice(partial(attention, enable_gqa=True), given), theirs, strict=True):
        assert torch.allclose(own, true, rtol=1e-9, atol=1e-11)


def test_under_autocast() -> None:
    """Products of bfloat16 numbers, summed in float32; the result in bfloat16, as torch's own."""
    given = [x.detach().float().requires_grad_() for x in operands()]
    with sdpa_kernel(SDPBackend.MATH), torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours, theirs = (
            [x.double() for x in twice_in_float(function, given)]
            for function in (attention, F.scaled_dot_product_attention)
        )
    for own, true in zip(ours, theirs, strict=True):
        assert float(((own - true).norm() / true.norm()).detach()) < 0.02


def twice_in_float(function: Any, given: list[Tensor]) -> list[Tensor]:
    output = function(*given)
    assert output.dtype == torch.bfloat16
    first = torch.autograd.grad(output, given, torch.ones_like(output), create_graph=True)
    total = sum(x.square().sum() for x in first)
    return [output, *first, *torch.autograd.grad(total, given)]

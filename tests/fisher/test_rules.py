"""Attention with its second derivative in closed form, and the registries of rules and substitutes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.cases import DEVICE
from torchfil.fisher.masks import recorded_masks, replayed_masks
from torchfil.fisher.rules import register_rule, rule_for
from torchfil.fisher.rules.attention import attention
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.parameters import GenericRule
from torchfil.fisher.rules.substitutes import register_substitute, with_substitutes


def operands(keys: int = 5, heads: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, 5, 4), (2, heads, keys, 4), (2, heads, keys, 6))
    return [torch.randn(shape, dtype=torch.float64).to(DEVICE).requires_grad_() for shape in shapes]


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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "added": {"attn_mask": torch.randn(2, 1, 5, 5, dtype=torch.float64).to(DEVICE)},
    "padding": {"attn_mask": (torch.arange(5) < torch.tensor([[5], [2]]))[:, None, None].to(DEVICE)},
    "dropout, causal": {"dropout_p": 0.4, "is_causal": True},
    "shared keys": {"enable_gqa": True},
    "more keys": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_has_torchs_derivatives(name: str) -> None:
    given = operands(9 if name == "more keys" else 5, 1 if name == "shared keys" else 3)
    plain = partial(F.scaled_dot_product_attention, **OPTIONS[name])
    with sdpa_kernel(SDPBackend.MATH), recorded_masks() as drawn:
        plain(*given)

    def replayed(function: Any) -> list[Tensor]:
        def call(*x: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH), replayed_masks(drawn):
                result: Tensor = function(*x)
            return result

        return twice(call, given)

    for own, true in zip(replayed(partial(attention, **OPTIONS[name])), replayed(plain), strict=True):
        torch.testing.assert_close(own, true, rtol=1e-9, atol=1e-11)


def test_attention_that_is_not_served() -> None:
    q, k, v = operands()
    table = torch.zeros(5, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert attention(q, k, v, attn_mask=table) is None, "a bias that is trained"
    assert attention(q[0], k[0], v[0]) is None
    assert attention(q.detach(), k.detach(), v.detach()) is None


def test_rules_are_not_replaced_silently() -> None:
    with pytest.raises(ValueError, match="overwrite=True"):
        register_rule(nn.Linear, GenericRule())
    assert isinstance(rule_for(nn.Linear(1, 1)), LinearRule)

    class Fresh(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert isinstance(rule_for(Fresh(1, 1)), GenericRule)
    register_rule(Fresh, rule := LinearRule())
    assert rule_for(Fresh(1, 1)) is rule


def test_substitutes_are_not_replaced_silently() -> None:
    """A forward that a module was given is left alone."""
    with pytest.raises(ValueError, match="overwrite=True"):
        register_substitute(nn.Tanh, lambda module: torch.tanh)
    own, usual = nn.Tanh(), nn.Tanh()
    own.forward = torch.sigmoid  # type: ignore[method-assign]
    with with_substitutes(nn.ModuleList([own, usual]), device="cuda"):
        assert own.forward is torch.sigmoid
        assert "forward" in vars(usual)
    assert "forward" not in vars(usual)

"""The registries of rules and substitutes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchfil.fisher.rules import register_rule, rule_for
from torchfil.fisher.rules.linear import LinearRule
from torchfil.fisher.rules.parameters import GenericRule
from torchfil.fisher.rules.substitutes import register_substitute, with_substitutes


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
        register_substitute(nn.GroupNorm, lambda module: torch.tanh)
    own, usual = nn.GroupNorm(1, 1), nn.GroupNorm(1, 1)
    own.forward = torch.sigmoid  # type: ignore[method-assign]
    with with_substitutes(nn.ModuleList([own, usual]), device="cuda"):
        assert own.forward is torch.sigmoid
        assert "forward" in vars(usual)
    assert "forward" not in vars(usual)

"""Refusals that Opacus's users know how to catch."""

from __future__ import annotations

import pytest
from opacus.validators import errors
from torch import nn

from tests.engine.loops import make, step
from torchfil.utils.errors import UnsupportedModuleError


def test_the_engines_refusal_is_opacus_error_too() -> None:
    """A frozen BatchNorm passes Opacus's check in eval mode; put into training, the engine refuses it at the step."""
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    module = nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()
    _, _, model, optimizer, loader = make(module=module, poisson_sampling=False)
    norm.train()
    with pytest.raises(errors.UnsupportedModuleError, match="BatchNorm1d") as caught:
        step(model, optimizer, next(iter(loader)))
    assert isinstance(caught.value, UnsupportedModuleError)
    assert isinstance(caught.value, ValueError)

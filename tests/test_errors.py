"""Refusals that Opacus's users know how to catch."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchfil import FILPrivacyEngine, SmoothnessValidator
from torchfil.smoothness import NonSmoothModuleError
from torchfil.utils.errors import UnsupportedModuleError


def test_the_engines_refusal_is_opacus_error_too() -> None:
    """A frozen BatchNorm passes Opacus's check in eval mode; put into training, the engine refuses it at the step."""
    from opacus.validators import errors

    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    module: nn.Module = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), batch_size=4)
    model, optimizer, loader = FILPrivacyEngine().make_private(module, optimizer, data, poisson_sampling=False)
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    norm.train()
    with pytest.raises(errors.UnsupportedModuleError, match=r"\(BatchNorm1d\): batch normalisation mixes") as caught:
        optimizer.step()
    assert isinstance(caught.value, UnsupportedModuleError)
    assert isinstance(caught.value, ValueError)


def test_subclasses_keep_their_name_and_can_be_pickled() -> None:
    from opacus.validators import errors

    with pytest.raises(errors.UnsupportedModuleError, match="ReLU") as caught:
        SmoothnessValidator.validate(nn.ReLU(), strict=True)
    assert type(caught.value).__name__ == "NonSmoothModuleError"
    assert type(type(caught.value)("again")) is type(caught.value)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copied, NonSmoothModuleError)
    assert str(copied) == str(caught.value)

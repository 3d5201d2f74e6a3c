"""A real torchvision network, made smooth, against brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import relative_error
from torchfil import Private, SmoothnessValidator, fisher
from torchfil.fisher import reference

torchvision = pytest.importorskip("torchvision", reason="needs torchvision", exc_type=Exception)
pytestmark = pytest.mark.vision


def test_resnet18_with_group_norm() -> None:
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=4, norm_layer=lambda c: nn.GroupNorm(8, c))
    model = SmoothnessValidator.fix(network, activation="gelu").double()
    pixels = torch.zeros(3, 32, 32, dtype=torch.bool)
    pixels[:, 10, 5:7] = True
    given: Any = (
        model,
        nn.CrossEntropyLoss(),
        torch.randn(2, 3, 32, 32).double(),
        torch.tensor([0, 3]),
    )
    settings: Any = {
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
        "private": Private(coordinates=pixels),
    }
    truth = reference.exact_fim(*given, **settings, mode="forward")
    assert relative_error(fisher.exact_fim(*given, **settings), truth) < 1e-8

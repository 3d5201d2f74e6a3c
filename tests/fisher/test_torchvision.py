"""A real torchvision network, made smooth, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases import relative_error
from torchfil import Private, SmoothnessValidator, fisher
from torchfil.fisher import reference

torchvision = pytest.importorskip("torchvision", reason="needs torchvision", exc_type=Exception)
pytestmark = pytest.mark.vision


def smooth_resnet18() -> nn.Module:
    torch.manual_seed(0)
    network = torchvision.models.resnet18(num_classes=4, norm_layer=lambda c: nn.GroupNorm(8, c))
    return SmoothnessValidator.fix(network, activation="gelu").double()


def test_resnet18_with_group_norm() -> None:
    model = smooth_resnet18()
    assert SmoothnessValidator.is_valid(model, example_inputs=torch.randn(1, 3, 32, 32).double())
    x, y = torch.randn(2, 3, 32, 32).double(), torch.tensor([0, 3])
    pixels = torch.zeros(3, 32, 32, dtype=torch.bool)
    pixels[:, 10, 5:7] = True
    settings = {"max_grad_norm": 1.0, "private": Private(coordinates=pixels)}
    truth = reference.exact_fim(model, nn.CrossEntropyLoss(), x, y, **settings, noise_multiplier=1.0, mode="forward")
    got = fisher.exact_fim(model, nn.CrossEntropyLoss(), x, y, **settings, noise_multiplier=1.0)
    assert got.shape == (2, 6, 6)
    assert relative_error(got, truth) < 1e-8
    trace = fisher.fim_trace(model, nn.CrossEntropyLoss(), x, y, **settings, noise_multiplier=1.0, num_probes=4)
    low, high = trace.interval(0.9999)
    exact = torch.einsum("bii->b", truth)
    assert ((low <= exact) & (exact <= high)).all()


def test_the_stock_network_is_refused_by_name() -> None:
    network = torchvision.models.resnet18(num_classes=4)
    names = [str(error) for error in SmoothnessValidator.validate(network)]
    assert any(text.startswith("maxpool (MaxPool2d)") for text in names)
    with pytest.raises(ValueError, match=r"bn1 \(BatchNorm2d\): batch normalisation"):
        fisher.fim_trace(
            network,
            nn.CrossEntropyLoss(),
            torch.randn(2, 3, 32, 32),
            torch.tensor([0, 1]),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
        )

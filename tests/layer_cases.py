"""Small networks of every kind, with their parameters by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo


def small_case(name: str, n: int = 3) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A small network in float64, its loss, inputs and targets."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels = torch.rand(n, 1, 8, 8), torch.randint(3, (n,))
        loss: nn.Module = nn.CrossEntropyLoss()
        model: nn.Module
        if name == "small_alexnet":
            model = zoo.small_alexnet(3, 1, 8)
        elif name == "vgg11":
            model = zoo.vgg11(3, 1, 8)
        elif name == "fcnet":
            model, images = zoo.fcnet(3, 5, width=4), torch.randn(n, 5)
        elif name == "vit_tiny":
            model = zoo.vit_tiny(3, 1, 8, width=4, heads=2, depth=1)
        elif name == "token_transformer":
            model = zoo.token_transformer(3, 7, 4, width=4, heads=2, depth=2)
            images = torch.randint(7, (n, 4))
        elif name == "regression":
            model, loss = zoo.fcnet(2, 4, width=3, depth=3), nn.MSELoss()
            images, labels = torch.randn(n, 4), torch.randn(n, 2, dtype=torch.float64)
        else:
            raise KeyError(name)
        images = images.double() if images.is_floating_point() else images
        return model.double(), loss, images, labels


def own_parameters(model: nn.Module, bias: bool) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for layer, module in model.named_modules():
        own = [p for key, p in module.named_parameters(recurse=False) if p.requires_grad and (bias or key != "bias")]
        if own:
            found[layer] = own
    return found

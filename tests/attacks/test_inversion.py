"""Gradient inversion where the answer is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from tests.refused import all_refused
from torchfil.attacks.inversion import invert_gradients, observed_gradients


def test_a_dense_layers_gradient_gives_the_image_and_noise_takes_it_away() -> None:
    """The first layer's gradient is an outer product with the image, so only one direction fits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    across, loss, labels = (
        torch.linspace(0, 1, 6),
        nn.CrossEntropyLoss(),
        torch.tensor([0, 1], device=DEVICE),
    )
    waves = 3 * across[:, None] + 2 * across + torch.arange(2.0)[:, None, None]
    images = (0.5 + 0.4 * torch.sin(waves)).unsqueeze(1).to(DEVICE)

    def found(seen: torch.Tensor, steps: int = 120) -> Any:
        options: dict[str, Any] = {
            "shape": (1, 6, 6),
            "restarts": 1,
            "total_variation_weight": 1e-4,
            "seed": 0,
        }
        return invert_gradients(model, loss, seen, labels, steps=steps, **options)

    plain = observed_gradients(model, loss, images, labels)
    loss(model(images[1:2]), labels[1:2]).backward()
    torch.testing.assert_close(
        plain[1], torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    )  # type: ignore[union-attr]
    clipped = observed_gradients(model, loss, images, labels, max_grad_norm=0.1)
    torch.testing.assert_close(clipped.norm(dim=1), torch.full((2,), 0.1, device=DEVICE))
    noisy = observed_gradients(
        model, loss, images, labels, max_grad_norm=0.1, noise_multiplier=2.0, seed=0
    )
    assert (noisy - clipped).std().item() == pytest.approx(0.2, rel=0.1)

    assert found(plain).result(images).achieved.max() < 2e-3
    assert found(noisy).result(images).achieved.min() > 0.02
    refused = {
        "noise needs max_grad_norm": lambda: observed_gradients(
            model, loss, images, labels, noise_multiplier=1.0
        ),
        "never finite": lambda: found(plain * torch.nan, steps=3),
    }
    all_refused(refused)

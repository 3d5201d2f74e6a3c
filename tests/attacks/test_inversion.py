"""Gradient inversion where the answer is known."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from attack_inversion import haarpsi
from torch import nn

from tests.cases import DEVICE
from tests.refused import all_refused
from torchfil.attacks.inversion import invert_gradients, observed_gradients, require_ssim, ssim


def smooth_images(n: int, size: int) -> torch.Tensor:
    across = torch.linspace(0, 1, size)
    phase = torch.arange(n).float()[:, None, None]
    return (0.5 + 0.4 * torch.sin(3 * across[:, None] + 2 * across[None] + phase)).unsqueeze(1)


def case() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2))
    return model.to(DEVICE), nn.CrossEntropyLoss(), smooth_images(2, 6).to(DEVICE), torch.tensor([0, 1], device=DEVICE)


def test_a_dense_layers_gradient_gives_the_image_and_noise_takes_it_away() -> None:
    """The first layer's gradient is an outer product with the image, so only one direction fits."""
    model, loss, images, labels = case()
    options = {"shape": (1, 6, 6), "steps": 120, "restarts": 1, "total_variation_weight": 1e-4, "seed": 0}
    seen = observed_gradients(model, loss, images, labels)
    clear = invert_gradients(model, loss, seen, labels, **options).result(images, measure="mse")  # type: ignore[arg-type]
    assert clear.achieved.max() < 2e-3
    noisy = observed_gradients(model, loss, images, labels, max_grad_norm=1.0, noise_multiplier=1.0, seed=1)
    blurred = invert_gradients(model, loss, noisy, labels, **options).result(images, measure="mse")  # type: ignore[arg-type]
    assert blurred.achieved.min() > 0.02


def test_what_is_observed_is_clipped_and_noisy() -> None:
    model, loss, images, labels = case()
    plain = observed_gradients(model, loss, images, labels)
    loss(model(images[1:2]), labels[1:2]).backward()
    torch.testing.assert_close(plain[1], torch.cat([p.grad.reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
    clipped = observed_gradients(model, loss, images, labels, max_grad_norm=0.1)
    torch.testing.assert_close(clipped.norm(dim=1), torch.full((2,), 0.1, device=DEVICE))
    noisy = observed_gradients(model, loss, images, labels, max_grad_norm=0.1, noise_multiplier=2.0, seed=0)
    assert (noisy - clipped).std().item() == pytest.approx(0.2, rel=0.1)


def test_refusals() -> None:
    model, loss, images, labels = case()

    def inverted(seen: torch.Tensor, **options: Any) -> Any:
        return invert_gradients(model, loss, seen, labels, shape=(1, 6, 6), **options)

    seen = observed_gradients(model, loss, images, labels)
    refused = {
        "noise needs max_grad_norm": lambda: observed_gradients(model, loss, images, labels, noise_multiplier=1.0),
        "never finite": lambda: inverted(seen * torch.nan, steps=3),
        "the truth has shape": lambda: inverted(seen, steps=1).result(images[:, 0], measure="mse"),
    }
    all_refused(refused)


# --- how alike two images are


def test_without_torchmetrics_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    for ask in (require_ssim, lambda: ssim(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))):
        with pytest.raises(ImportError, match=r"SSIM needs torchmetrics: pip install 'torchfil\[attacks\]'"):
            ask()


def test_haarpsi_falls_with_noise_and_is_symmetric() -> None:
    images = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1, 1)
    noise = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    changed = (images + torch.tensor([0.0, 0.05, 0.5])[:, None, None, None] * noise).to(DEVICE)
    images = images.to(DEVICE)
    found = haarpsi(images, changed)
    assert found[0].item() == pytest.approx(1, abs=1e-5)
    assert found[0] > found[1] > found[2]
    torch.testing.assert_close(found, haarpsi(changed, images))
    flat = torch.zeros(1, 1, 32, 32, device=DEVICE)
    assert haarpsi(flat, flat + 0.5)[0] > 0  # finite: the borders differ
    assert math.isclose(haarpsi(flat, flat)[0].item(), 1, abs_tol=1e-5)

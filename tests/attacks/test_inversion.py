"""Gradient inversion where the answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases import DEVICE
from torchfil.attacks.inversion import invert_gradients, observed_gradients, total_variation


def smooth_images(n: int, size: int) -> torch.Tensor:
    across = torch.linspace(0, 1, size)
    phase = torch.arange(n).float()[:, None, None]
    return (0.5 + 0.4 * torch.sin(3 * across[:, None] + 2 * across[None] + phase)).unsqueeze(1)


def case() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2))
    return model.to(DEVICE), nn.CrossEntropyLoss(), smooth_images(2, 6).to(DEVICE), torch.tensor([0, 1], device=DEVICE)


def test_the_search_ends_at_the_image_that_a_dense_layers_gradient_holds() -> None:
    """∂ℓ/∂W = δ xᵀ and ∂ℓ/∂b = δ: the image is a quotient of what is seen, and no other image fits."""
    model, loss, images, labels = case()
    seen = observed_gradients(model, loss, images, labels)
    outer, delta = seen[:, : 8 * 36].reshape(2, 8, 36), seen[:, 8 * 36 : 8 * 36 + 8]
    held = (delta.unsqueeze(2) * outer).sum(dim=1) / delta.square().sum(dim=1, keepdim=True)
    torch.testing.assert_close(held, images.flatten(1))
    found = invert_gradients(
        model, loss, seen, labels, shape=(1, 6, 6), steps=400, restarts=1, total_variation_weight=0.0, seed=0
    )
    torch.testing.assert_close(found.images.flatten(1), held, atol=0.01, rtol=0)
    assert found.objective.max() < 1e-4


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


def test_more_restarts_never_fit_worse_and_the_model_stays() -> None:
    model, loss, images, labels = case()
    before = [value.clone() for value in model.parameters()]
    seen = observed_gradients(model, loss, images, labels)
    options = {"shape": (1, 6, 6), "steps": 5, "seed": 3}
    few = invert_gradients(model, loss, seen, labels, restarts=1, **options)  # type: ignore[arg-type]
    many = invert_gradients(model, loss, seen, labels, restarts=4, **options)  # type: ignore[arg-type]
    assert (many.objective <= few.objective).all()
    assert many.objective.sum() < few.objective.sum()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_is_observed_is_clipped_and_noisy() -> None:
    model, loss, images, labels = case()
    plain = observed_gradients(model, loss, images, labels)
    loss(model(images[1:2]), labels[1:2]).backward()
    torch.testing.assert_close(plain[1], torch.cat([p.grad.reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
    clipped = observed_gradients(model, loss, images, labels, max_grad_norm=0.1)
    torch.testing.assert_close(clipped.norm(dim=1), torch.full((2,), 0.1, device=DEVICE))
    noisy = observed_gradients(model, loss, images, labels, max_grad_norm=0.1, noise_multiplier=2.0, seed=0)
    assert (noisy - clipped).std().item() == pytest.approx(0.2, rel=0.1)


def test_total_variation_is_differentiable_and_zero_for_flat_images() -> None:
    assert total_variation(torch.ones(2, 3, 4, 5)).item() == 0
    x = torch.rand(1, 4, 4, requires_grad=True)
    total_variation(x).backward()
    assert x.grad is not None


def test_refusals() -> None:
    model, loss, images, labels = case()
    with pytest.raises(ValueError, match="noise needs max_grad_norm"):
        observed_gradients(model, loss, images, labels, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"gradients \[2, 5\] must be \[2, 314\]"):
        invert_gradients(model, loss, torch.zeros(2, 5, device=DEVICE), labels, shape=(1, 6, 6))
    with pytest.raises(ValueError, match="restarts=0 and steps=10"):
        invert_gradients(model, loss, torch.zeros(2, 314, device=DEVICE), labels, shape=(1, 6, 6), restarts=0, steps=10)
    with pytest.raises(ValueError, match="measure='psnr' must be one of ssim, haarpsi, mse"):
        invert_gradients(
            model, loss, observed_gradients(model, loss, images, labels), labels, shape=(1, 6, 6), steps=1
        ).result(images, measure="psnr")


def test_images_one_pixel_high_are_searched_for_and_nothing_else_is_told_as_such() -> None:
    """No neighbours, no variation: its mean over none was NaN, and the random start came back."""
    model, loss, images, labels = case()
    flat = images.reshape(len(images), 1, 1, -1)
    seen = observed_gradients(model, loss, flat, labels)
    found = invert_gradients(model, loss, seen, labels, shape=(1, 1, 36), steps=120, restarts=1, seed=0)
    assert bool(found.objective.isfinite().all())
    assert found.result(flat, measure="mse").achieved.max() < 0.02
    with pytest.raises(ValueError, match="the truth has shape .*, the images"):
        found.result(flat[:, 0], measure="mse")
    with pytest.raises(ValueError, match="was NaN or infinite at every step"):
        invert_gradients(model, loss, seen * torch.nan, labels, shape=(1, 1, 36), steps=3, restarts=2, seed=0)

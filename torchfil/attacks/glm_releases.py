"""The releases of a linear model that an attack is tried on: w* + σξ, ξ ~ N(0, I)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchfil.attacks.base import make_generator


def check_release(sigma: float, trials: int) -> None:
    """Raise for a release that is not possible."""
    if not sigma >= 0 or trials < 1:
        raise ValueError(f"sigma={sigma} must be ≥ 0 and trials={trials} at least 1")


def release_noise(trials: int, weights: Tensor, seed: int | None, generator: torch.Generator | None) -> Tensor:
    """ξ of that many releases, on the weights' device, [trials, p]; drawn together, however they are cut up later."""
    source = make_generator(generator, seed, weights.device)
    drawn = torch.randn(trials, len(weights), generator=source, dtype=weights.dtype, device=source.device)
    return drawn.to(weights.device)

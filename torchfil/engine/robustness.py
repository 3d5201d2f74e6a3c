"""Reconstruction robustness of a run: for everybody, and for each example from its own clipped norms.

For everybody it is a bound on every attacker's chance of success. With an example's own norms, ‖g̃‖ in place of C, it
is an **estimate**: the norms depend on this run's output (as with individual ε, Yu et al. 2022), and between
participations the last known norm is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import special
from torch import Tensor

from torchfil.bounds import Bracket, rero
from torchfil.bounds.reconstruction import success_by_counts
from torchfil.engine.epsilon import NormHistory

__all__ = ["everybodys_robustness", "individual_robustness", "robustness_with_known_batches"]

_MOST_SETTINGS = 32  # different (σ, q) that are composed without rounding


def everybodys_robustness(
    releases: Sequence[tuple[float, float, int]], prior_success: Sequence[float], tolerance: float = 1e-3
) -> Bracket:
    """The success of any attacker against anybody, [priors], for the accountant's history of (σ, q, steps).

    With more than 32 different settings, σ is rounded down to steps of 2 %: the upper end stays valid, and the lower
    end is π₀.
    """
    prior = torch.as_tensor(prior_success, dtype=torch.float64)
    if not releases:
        return Bracket(prior, prior)
    sigmas, rates, steps = (list(column) for column in zip(*releases, strict=True))
    if min(sigmas) == 0:  # nothing is robust
        return Bracket(torch.ones_like(prior), torch.ones_like(prior))
    settings = {(float(sigma), float(q)) for sigma, q, _ in releases}
    if len(settings) > _MOST_SETTINGS:
        lowest = min(sigmas)
        levels = [math.floor(math.log(sigma / lowest) / math.log(1.02)) for sigma in sigmas]
        high = rero(
            prior_success,
            q=max(rates),
            noise_multiplier=[lowest * 1.02**level for level in levels],
            steps=steps,
            tolerance=tolerance,
        ).high
        return Bracket(prior, high)
    return rero(prior_success, q=rates, noise_multiplier=sigmas, steps=steps, tolerance=tolerance)


def individual_robustness(history: NormHistory, rows: Tensor, prior_success: Sequence[float]) -> Tensor:
    """The same from the examples' own norms, rounded up, [rows, priors]; the batches are secret."""
    if history.noiseless:
        return torch.ones(len(rows), len(prior_success), dtype=torch.float64)
    if history.steps == 0 or len(rows) == 0:
        return torch.tensor(prior_success, dtype=torch.float64).expand(len(rows), -1).clone()
    counts = history.counts_of(rows).cpu().numpy()
    return torch.from_numpy(success_by_counts(prior_success, history.sample_rate, history.multipliers(), counts))


def robustness_with_known_batches(squared_norm: Tensor, noise_std: float, prior_success: Sequence[float]) -> Tensor:
    """Φ(Φ⁻¹(π₀) + sqrt(Σ‖g̃‖²)/s), [rows, priors], for an attacker who knows every batch (two normal laws).

    Args:
        squared_norm: Σ‖g̃‖² over the steps that used the example, [rows].
        noise_std: s = σC, the smallest of the run.
        prior_success: π₀, [priors].
    """
    distance = squared_norm.double().cpu().numpy()[:, None] ** 0.5 / noise_std if noise_std > 0 else np.inf
    shifted = special.ndtri(np.asarray(prior_success, dtype=float)) + distance
    return torch.from_numpy(special.ndtr(np.broadcast_to(shifted, (len(squared_norm), len(prior_success)))))

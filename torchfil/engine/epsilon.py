"""What a run says by its DP accountant's rules: individual ε, and robustness against reconstruction.

Individual ε is each example's own RDP, from its own clipped gradient norms. If the sensitivity of a Gaussian mechanism
to example i is ‖g̃_i‖ ≤ C, a step has for i the RDP of the noise multiplier σC/‖g̃_i‖ (Feldman & Zrnic 2021; Yu et al.
2022). Norms are rounded up to a grid (:mod:`torchfil.accounting.norms`), so that the numbers are computed once per grid
value at the end. Between participations the last known norm is used, or C if there is none yet; therefore
``norm_refresh`` is recommended. Without Poisson sampling batches may be known, and only the steps that used the example
count. The result is **output-specific** (Yu et al. 2022): the norms depend on what this run released. It is an
estimate; a guarantee needs a filter (Feldman & Zrnic 2021; Koskela et al. 2023).

Reconstruction robustness for everybody is a bound on every attacker's chance of success. With an example's own norms,
‖g̃‖ in place of C, it is an **estimate** for the same reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import special
from torch import Tensor

from torchfil.accounting.norms import NormHistory
from torchfil.bounds import Bracket, rero
from torchfil.bounds.reconstruction import success_by_counts

__all__ = [
    "epsilon_over_time",
    "everybodys_robustness",
    "individual_epsilon",
    "individual_robustness",
    "robustness_with_known_batches",
]

_AT_ONCE = 65_536  # examples that are processed together
_MOST_SETTINGS = 32  # different (σ, q) that are composed without rounding


def individual_epsilon(history: NormHistory, rows: Tensor, delta: float) -> Tensor:
    """ε_i at δ of these examples, [rows], output-specific, by the RDP accountant's own orders and conversion."""
    if history.noiseless:
        return torch.full((len(rows),), math.inf, dtype=torch.float64)
    if history.steps == 0:
        return torch.zeros(len(rows), dtype=torch.float64)
    multipliers = history.multipliers()
    result = [torch.zeros(0, dtype=torch.float64)]
    for part in rows.split(_AT_ONCE):
        counts = history.counts_of(part).cpu().double().numpy()
        used = np.flatnonzero(counts.sum(axis=0)).tolist()
        per_step = np.stack([_rdp_per_step(history.sample_rate, multipliers[level]) for level in used])
        result.append(torch.from_numpy(_epsilon_from_rdp(counts[:, used] @ per_step, delta)))
    return torch.cat(result)


def epsilon_over_time(history: Sequence[tuple[float, float, int]], steps: Sequence[int], delta: float) -> np.ndarray:
    """The RDP accountant's ε at δ after each of these numbers of steps, [t], for its history of (σ, q, steps)."""
    orders = RDPAccountant.DEFAULT_ALPHAS
    rdp = np.zeros((len(steps), len(orders)))
    before = 0
    for sigma, q, count in history:
        inside = (np.asarray(steps) - before).clip(0, count)
        rdp += np.outer(inside, _rdp_per_step(q, sigma))
        before += count
    return _epsilon_from_rdp(rdp, delta)


def _epsilon_from_rdp(rdp: np.ndarray, delta: float) -> np.ndarray:
    """The least ε over all orders, [k], from RDP [k, orders]."""
    orders = np.asarray(RDPAccountant.DEFAULT_ALPHAS, dtype=float)
    penalty = (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.nanmin(rdp - penalty + np.log((orders - 1) / orders), axis=1).clip(min=0)


@lru_cache(maxsize=1024)
def _rdp_per_step(q: float, noise_multiplier: float) -> np.ndarray:
    orders = RDPAccountant.DEFAULT_ALPHAS
    return np.asarray(compute_rdp(q=q, noise_multiplier=noise_multiplier, steps=1, orders=orders))


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

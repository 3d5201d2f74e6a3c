"""Bounds from Rényi divergence against closed forms and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from torchfil import bounds


def test_against_a_gaussian_attacker() -> None:
    """z in [0, M] released as z + N(0, s²): order-2 divergence M²/s², attacker's MSE s²."""
    assert all(bounds.mse_from_rdp(M**2 / 1.0**2, [M]) <= 1.0 for M in (0.1, 1.0, 3.0))
    assert bounds.mse_from_rdp(0.001**2, [0.001]) == pytest.approx(0.25, rel=1e-4)


def test_edge_values() -> None:
    assert bounds.mse_from_rdp(0.0, [1.0]) == math.inf
    assert bounds.mse_from_rdp(5000.0, [1.0]) == 0.0
    assert bounds.mse_from_rdp(1.0, [1.0, 2.0]) == pytest.approx(5 / (4 * 2 * (math.e - 1)))
    with pytest.raises(ValueError, match=r"epsilon=-1 must be ≥ 0"):
        bounds.mse_from_rdp(-1, [1.0])
    with pytest.raises(ValueError, match="one number per private coordinate"):
        bounds.mse_from_rdp(1.0, [])


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_replace_one_covers_the_true_divergence(sigma: float) -> None:
    """Gaussians at +C and −C from the data set without the example: D₂ = 4/σ²; add/remove: ε(α) = α/2σ²."""
    got = bounds.replace_one_rdp(lambda alpha: alpha / (2 * sigma**2))
    assert 4 / sigma**2 <= got <= (1.5 * 4 / 2 + 3 / 2) / sigma**2


def test_replace_one_covers_a_subsampled_mixture() -> None:
    """Two Poisson-subsampled steps with opposite gradients, integrated numerically; add/remove from Opacus."""
    from opacus.accountants.analysis.rdp import compute_rdp

    q, sigma = 0.2, 0.8
    x = np.linspace(-12, 12, 200_001)
    plus, minus = (q * stats.norm.pdf(x, mean, sigma) + (1 - q) * stats.norm.pdf(x, 0, sigma) for mean in (1.0, -1.0))
    true = math.log(integrate.trapezoid(plus**2 / minus, x))
    got = bounds.replace_one_rdp(lambda alpha: float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=alpha)))
    paper = float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=2.0))
    assert paper < true <= got, "the paper's reading is not a bound here"

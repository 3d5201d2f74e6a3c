"""Cramér–Rao against algebra, closed forms, and attackers that come as close as a bound allows.

Rényi likewise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import integrate, stats
from torch import Tensor

from tests.refused import all_refused
from torchfil import bounds
from torchfil.fisher import poisson_amplification


def random_fim(batch: int, d: int, seed: int = 0) -> Tensor:
    factor = torch.randn(
        batch, d + 2, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return factor.mT @ factor


class TestTheorem2:
    def test_full_inverse_trace_and_spectral_bounds_are_ordered(self) -> None:
        fim = random_fim(20, 6)
        full = bounds.mse_from_fim(fim)
        trace = bounds.mse_from_trace(torch.einsum("bii->b", fim), 6)
        spectral = bounds.mse_from_spectral_norm(torch.linalg.eigvalsh(fim)[:, -1])
        assert torch.allclose(full, torch.einsum("bii->b", torch.linalg.inv(fim)) / 6, rtol=1e-9)
        assert (full >= trace).all()
        assert (trace >= spectral).all()
        assert bounds.mse_from_trace(torch.tensor([12.0]), 4).item() == pytest.approx(1 / 3)

    def test_singular_matrices_stay_lower_bounds(self) -> None:
        bound = bounds.mse_from_fim(torch.ones(1, 3, 3, dtype=torch.float64)).item()
        assert 1e10 < bound < math.inf
        assert bounds.mse_from_fim(torch.zeros(1, 3, 3)).item() == math.inf
        assert bounds.mse_from_fim(torch.zeros(0, 3, 3)).shape == (0,)

    def test_the_least_squares_attacker_attains_the_full_bound(self) -> None:
        """o = Az + N(0, s²I): the unbiased least-squares guess has exactly tr(I⁻¹)/d."""
        generator = torch.Generator().manual_seed(1)
        A = torch.randn(9, 4, generator=generator, dtype=torch.float64)
        z = torch.randn(4, generator=generator, dtype=torch.float64)
        s, trials = 0.3, 20_000
        release = z @ A.T + s * torch.randn(trials, 9, generator=generator, dtype=torch.float64)
        errors = (release @ torch.linalg.pinv(A).T - z).square().mean(dim=1)
        bound = bounds.mse_from_fim((A.T @ A / s**2)[None]).item()
        assert abs(errors.mean().item() - bound) < 4 * errors.std().item() / math.sqrt(trials)
        assert bounds.mse_from_trace((A.T @ A / s**2).trace(), 4) <= bound

    def test_a_shrinking_attacker_beats_the_unbiased_bound_but_not_the_biased_one(self) -> None:
        """ẑ = c·o with o = z + N(0, s²I): MSE = c²s² + (1−c)²z², the general form exactly."""
        generator = torch.Generator().manual_seed(2)
        z, s, c, trials = torch.tensor([0.2, -0.1], dtype=torch.float64), 1.0, 0.3, 40_000
        guess = c * (z + s * torch.randn(trials, 2, generator=generator, dtype=torch.float64))
        errors = (guess - z).square().mean(dim=1)
        fim = torch.eye(2, dtype=torch.float64)[None] / s**2
        biased = bounds.mse_biased(fim, c * torch.eye(2, dtype=torch.float64), (c - 1) * z).item()
        assert errors.mean().item() < bounds.mse_from_fim(fim).item()
        assert abs(errors.mean().item() - biased) < 4 * errors.std().item() / math.sqrt(trials)

    def test_a_mean_with_any_jacobian(self) -> None:
        """tr(J_μ I⁻¹ J_μᵀ) with J_μ that mixes coordinates and stretches them by different
        factors.
        """
        generator = torch.Generator().manual_seed(4)
        fim, bias = random_fim(5, 4), torch.randn(5, 4, generator=generator, dtype=torch.float64)
        jacobian = torch.randn(4, 4, generator=generator, dtype=torch.float64).triu()
        want = torch.einsum(
            "ij,bjk,ik->b", jacobian, torch.linalg.inv(fim), jacobian
        ) + bias.square().sum(dim=1)
        torch.testing.assert_close(
            bounds.mse_biased(fim, jacobian, bias), want / 4, rtol=1e-9, atol=0
        )

    def test_one_attribute(self) -> None:
        """Knowing all else, an attacker guesses coordinate j with standard error 1/sqrt(I_jj), and
        no better.
        """
        fim = random_fim(1, 5)[0]
        error = bounds.attribute_error(fim.diagonal())
        unknown_rest = torch.linalg.inv(fim).diagonal().sqrt()
        assert (error <= unknown_rest).all()
        generator = torch.Generator().manual_seed(3)
        factor = torch.linalg.cholesky(fim).mT  # I = FᵀF: the release o = Fz + N(0, I)
        column = factor[:, 2]
        noise = torch.randn(50_000, 5, generator=generator, dtype=torch.float64)
        guess_error = noise @ column / column.square().sum()
        assert guess_error.std().item() == pytest.approx(error[2].item(), rel=0.02)

    def test_refusals(self) -> None:
        refused = {
            "trace must be ≥ 0": lambda: bounds.mse_from_trace(torch.tensor([1.0, -1.0]), 3),
            "fim must have shape": lambda: bounds.mse_from_fim(torch.eye(3)),
        }
        all_refused(refused)


def test_a_maximum_likelihood_attacker_attains_the_poisson_bound() -> None:
    """One dimension, g̃(z) = z: T steps o_t = b_t z + N(0, 1), b_t ~ Bernoulli(q).

    The bound is 1/(T q κ∥).
    """
    z, q, steps, runs = 1.0, 0.1, 4000, 200
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(runs, steps, generator=generator, dtype=torch.float64)
    outputs += z * (torch.rand(runs, steps, generator=generator, dtype=torch.float64) < q)
    guess = torch.full((runs,), z, dtype=torch.float64)
    for _ in range(40):  # EM for the mixture's mean
        logit = math.log(q / (1 - q)) + guess[:, None] * outputs - guess[:, None].square() / 2
        posterior = torch.sigmoid(logit)
        guess = (posterior * outputs).sum(dim=1) / posterior.sum(dim=1)
    bound = 1 / (steps * q * poisson_amplification(z, q)[1].item())
    assert bound == pytest.approx(0.00966, abs=5e-6)
    variance, relative_error = guess.var().item(), math.sqrt(2 / runs)
    assert variance > bound * (1 - 3 * relative_error), "no attacker may beat it"
    assert variance < bound * (1 + 4 * relative_error), "this one comes close"
    assert variance > 3 / (steps * q), "κ = 1 would have claimed four times less"


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_replace_one_covers_the_true_divergence(sigma: float) -> None:
    """Gaussians at +C and −C from the data set without the example: D₂ = 4/σ².

    Add/remove: ε(α) = α/2σ².
    """
    got = bounds.replace_one_rdp(lambda alpha: alpha / (2 * sigma**2))
    assert 4 / sigma**2 <= got <= (1.5 * 4 / 2 + 3 / 2) / sigma**2


def test_replace_one_covers_a_subsampled_mixture() -> None:
    """Two Poisson-subsampled steps with opposite gradients, integrated numerically.

    Add/remove from Opacus.
    """
    q, sigma = 0.2, 0.8
    x = np.linspace(-12, 12, 200_001)
    plus, minus = (
        q * stats.norm.pdf(x, mean, sigma) + (1 - q) * stats.norm.pdf(x, 0, sigma)
        for mean in (1.0, -1.0)
    )
    true = math.log(integrate.trapezoid(plus**2 / minus, x))
    got = bounds.replace_one_rdp(
        lambda alpha: float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=alpha))
    )
    paper = float(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=2.0))
    assert paper < true <= got, "the paper's reading is not a bound here"

"""Subsampling factors against integration, the paper's formula, and a simulation of the real
step.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.cases import build
from torchfil import fisher
from torchfil.fisher import reference


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.5, 1.0])
def test_factors_against_two_dimensional_integration(q: float) -> None:
    for rho in (0.0, 1e-4, 0.03, 1.0, 1.9999, 5.3, 20.0, 49.9):
        got = [factor.item() for factor in fisher.poisson_amplification(rho, q)]
        assert got == pytest.approx(reference.poisson_amplification(rho, q), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        *((lambda q=q: fisher.poisson_amplification(1.0, q), "q=") for q in (0.0, math.nan)),
        (lambda: fisher.PoissonAmplification(1.1), "q="),
        (lambda: fisher.get_amplification("theorem4"), "unknown"),
        (
            lambda: fisher.Mechanism.build(
                1.0, 1.0, amplification=fisher.PoissonAmplification(0.01), sample_rate=0.1
            ),
            "does not fit",
        ),
    ],
)
def test_refusals(call: Any, noun: str) -> None:
    with pytest.raises(ValueError, match=noun):
        call()


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
def test_the_analytic_epsilon_solves_its_equation(delta: float) -> None:
    for sigma in (0.05, 0.3, 1.0, 4.0, 50.0):
        epsilon = fisher.analytic_gaussian_epsilon(sigma, delta)
        first = stats.norm.cdf(0.5 / sigma - epsilon * sigma)
        solved = first - math.exp(epsilon + stats.norm.logcdf(-0.5 / sigma - epsilon * sigma))
        assert solved <= delta if epsilon == 0 else solved == pytest.approx(delta, rel=1e-6)


class Half:
    """An amplification of one's own."""

    secret_batches = False

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        return 0.5 * torch.ones_like(rho), 0.25 * torch.ones_like(rho)


def test_an_amplification_of_ones_own() -> None:
    perp, par = fisher.Mechanism.build(1.0, 2.0, amplification=Half()).weights(torch.ones(1))
    assert (perp.item(), par.item()) == (0.125, 0.0625)
    strange: Any = 3
    with pytest.raises(TypeError, match="factors"):
        fisher.get_amplification(strange)


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_simulated_scores_of_the_real_step_agree(q: float) -> None:
    """Sample the release o = b g̃ + N(0, s²I), b ~ Bernoulli(q), of a tiny model.

    Average its score's outer product.

    The score is ∂/∂z log(q N(o; g̃, s²I) + (1−q) N(o; 0, s²I)); divided by q, the chance of taking
    part.
    """
    case, sigma, count = build("mlp", 1), 0.9, 200_000
    settings, s = {"max_grad_norm": case.C, "noise_multiplier": sigma}, sigma * case.C
    j = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C)[0].cpu()
    g = reference.clipped_gradients(*case.arguments, max_grad_norm=case.C)[0].cpu()
    source = torch.Generator().manual_seed(0)
    noise = s * torch.randn(count, len(g), generator=source, dtype=torch.float64)
    released = noise + (torch.rand(count, generator=source, dtype=torch.float64) < q)[:, None] * g
    log_in = math.log(q) - (released - g).square().sum(dim=1) / (2 * s**2)
    log_out = math.log1p(-q) - released.square().sum(dim=1) / (2 * s**2)
    score = torch.sigmoid(log_in - log_out)[:, None] * ((released - g) @ j) / s**2  # [samples, d]
    outer = score[:, :, None] * score[:, None, :] / q
    mean, error = outer.mean(dim=0), outer.std(dim=0) / math.sqrt(count)

    exact, unamplified = (
        fisher.exact_fim(*case.arguments, **settings, amplification=each)[0].cpu()
        for each in (fisher.PoissonAmplification(q), fisher.NoAmplification())
    )
    assert ((mean - exact).abs() < 4.5 * error).all()
    assert (mean.trace() - exact.trace()).abs() < 0.05 * exact.trace()
    assert ((mean - unamplified).abs() > 10 * error).any(), (
        "the simulation can tell the factors apart"
    )

"""Subsampling factors against integration, the paper's formula, and a simulation of the real step."""

from __future__ import annotations

import math

import pytest
import torch
from cases import build
from scipy import stats

from torchfil import fisher
from torchfil.fisher import (
    NoAmplification,
    PoissonAmplification,
    Theorem4Amplification,
    analytic_gaussian_epsilon,
    classical_gaussian_epsilon,
    poisson_amplification,
    reference,
)

RATES = [1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("q", RATES)
@pytest.mark.parametrize("rho", [0.0, 1e-4, 0.03, 0.5, 1.0, 1.9999, 3.7, 5.3, 8.0, 20.0, 49.9])
def test_factors_against_two_dimensional_integration(rho: float, q: float) -> None:
    perp, par = poisson_amplification(rho, q)
    want_perp, want_par = reference.poisson_amplification(rho, q)
    assert perp.item() == pytest.approx(want_perp, rel=1e-9)
    assert par.item() == pytest.approx(want_par, rel=1e-9)


@pytest.mark.parametrize(
    ("sigma", "theorem4", "perp", "par"),
    [
        (0.5, 1.0000, 0.1640, 0.3037),
        (1, 0.9999, 0.0257, 0.0472),
        (2, 0.9322, 0.0128, 0.0158),
        (5, 0.1534, 0.0104, 0.0108),
    ],
)
def test_published_table(sigma: float, theorem4: float, perp: float, par: float) -> None:
    got = poisson_amplification(1 / sigma, 0.01)
    assert round(got[0].item(), 4) == perp
    assert round(got[1].item(), 4) == par
    paper = Theorem4Amplification(0.01, sigma, 1e-9, epsilon_method="classical", norm_bound=1.115)
    assert round(paper.kappa, 4) == theorem4


def test_limits_shape_dtype_and_order() -> None:
    rho = torch.linspace(0, 80, 33, dtype=torch.float32).reshape(3, 11)
    perp, par = poisson_amplification(rho, 0.05)
    assert perp.shape == par.shape == rho.shape
    assert perp.dtype == par.dtype == torch.float32
    assert perp[0, 0].item() == pytest.approx(0.05, rel=1e-6)
    assert par[0, 0].item() == pytest.approx(0.05, rel=1e-6)
    assert perp[-1, -1] == par[-1, -1] == 1
    assert (perp.flatten().diff() >= -1e-7).all(), "κ⊥ grows with ρ"
    everyone = poisson_amplification(rho.double(), 1.0)
    assert torch.allclose(everyone[0], torch.ones(3, 11, dtype=torch.float64), rtol=1e-12)
    empty = poisson_amplification(torch.zeros(0), 0.1)
    assert empty[0].shape == (0,)


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, float("nan")])
def test_rates_outside_the_unit_interval_are_refused(q: float) -> None:
    with pytest.raises(ValueError, match=r"q=.* must lie in \(0, 1\]"):
        poisson_amplification(1.0, q)
    with pytest.raises(ValueError, match=r"q=.* must lie in \(0, 1\]"):
        PoissonAmplification(q)


def test_negative_rho_is_refused() -> None:
    with pytest.raises(ValueError, match="rho must be ≥ 0, got -1"):
        poisson_amplification(torch.tensor([0.5, -1.0]), 0.1)


class TestTheorem4:
    @pytest.mark.parametrize("sigma", [0.5, 2.0, 5.0])
    @pytest.mark.parametrize("q", [0.01, 0.2, 1.0])
    def test_the_papers_formula(self, q: float, sigma: float) -> None:
        epsilon = 2 * 1.115 * math.sqrt(2 * math.log(1.25 / 1e-6)) / sigma
        want = q / (q + (1 - q) * math.exp(-epsilon))
        got = Theorem4Amplification(q, sigma, 1e-6, epsilon_method="classical", norm_bound=1.115)
        assert got.epsilon == pytest.approx(epsilon, rel=1e-12)
        assert got.kappa == pytest.approx(want, rel=1e-12)
        assert got.factors(torch.zeros(3))[1].tolist() == pytest.approx([want] * 3)

    def test_add_remove_halves_the_sensitivity(self) -> None:
        replace = Theorem4Amplification(0.01, 4.0, 1e-6, adjacency="replace-one")
        remove = Theorem4Amplification(0.01, 2.0, 1e-6, adjacency="add-remove")
        assert replace.epsilon == pytest.approx(remove.epsilon, rel=1e-12)

    @pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
    @pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 4.0, 50.0])
    def test_the_analytic_epsilon_solves_its_equation(self, sigma: float, delta: float) -> None:
        epsilon = analytic_gaussian_epsilon(sigma, delta)
        first = stats.norm.cdf(0.5 / sigma - epsilon * sigma)
        second = math.exp(epsilon + stats.norm.logcdf(-0.5 / sigma - epsilon * sigma))
        if epsilon == 0:
            assert first - second <= delta
        else:
            assert first - second == pytest.approx(delta, rel=1e-6)

    def test_the_classical_epsilon_is_no_bound_for_small_noise(self) -> None:
        assert analytic_gaussian_epsilon(0.1, 1e-5) > classical_gaussian_epsilon(0.1, 1e-5)
        assert analytic_gaussian_epsilon(5.0, 1e-5) < classical_gaussian_epsilon(5.0, 1e-5)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="noise_multiplier=0.0 must be positive"):
            Theorem4Amplification(0.1, 0.0, 1e-5)
        with pytest.raises(ValueError, match="delta=0 must lie strictly between 0 and 1"):
            Theorem4Amplification(0.1, 1.0, 0)
        with pytest.raises(ValueError, match="adjacency='swap' must be one of"):
            Theorem4Amplification(0.1, 1.0, 1e-5, adjacency="swap")  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_simulated_scores_of_the_real_step_agree_and_lie_below_theorem_4(q: float) -> None:
    """Sample the noisy, Poisson-subsampled release of a tiny model and average the outer product of its score."""
    case = build("mlp", 1)
    sigma = 0.9
    settings = {"max_grad_norm": case.C, "noise_multiplier": sigma}
    jacobian = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C)[0].cpu()
    clipped = reference.clipped_gradients(*case.arguments, max_grad_norm=case.C)[0].cpu()
    mean, error = reference.sampled_fim(
        jacobian,
        clipped,
        sigma * case.C,
        q,
        num_samples=400_000,
        generator=torch.Generator().manual_seed(0),
    )
    exact = fisher.exact_fim(*case.arguments, **settings, amplification=PoissonAmplification(q))[0].cpu()
    assert ((mean - exact).abs() < 4.5 * error).all()
    assert (mean.trace() - exact.trace()).abs() < 0.05 * exact.trace()

    unamplified = fisher.exact_fim(*case.arguments, **settings, amplification=NoAmplification())[0].cpu()
    assert ((mean - unamplified).abs() > 10 * error).any(), "the simulation can tell the factors apart"
    theorem4 = fisher.exact_fim(*case.arguments, **settings, amplification=Theorem4Amplification(q, sigma, 1e-6))[
        0
    ].cpu()
    assert torch.linalg.eigvalsh(theorem4 - exact).min() > 0
    assert (mean.trace() + 4 * error.diagonal().sum() < theorem4.trace()).item()

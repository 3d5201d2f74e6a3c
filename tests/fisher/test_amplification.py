"""Subsampling factors against integration, the paper's formula, and a simulation of the real step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.cases import build
from torchfil import fisher
from torchfil.fisher import (
    Mechanism,
    NoAmplification,
    PoissonAmplification,
    Theorem4Amplification,
    amplification,
    analytic_gaussian_epsilon,
    available_amplifications,
    classical_gaussian_epsilon,
    get_amplification,
    poisson_amplification,
    reference,
    register_amplification,
)
from torchfil.fisher.amplification import name_of_amplification

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
    paper = Theorem4Amplification(epsilon_method="classical", norm_bound=1.115)
    assert round(paper.kappa(0.01, sigma), 4) == theorem4


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
        got = Theorem4Amplification(q, 1e-6, epsilon_method="classical", norm_bound=1.115)
        assert got.epsilon(sigma) == pytest.approx(epsilon, rel=1e-12)
        assert got.kappa(q, sigma) == pytest.approx(want, rel=1e-12)
        assert got.factors(torch.zeros(3), None, sigma)[1].tolist() == pytest.approx([want] * 3)

    def test_add_remove_halves_the_sensitivity(self) -> None:
        replace = Theorem4Amplification(delta=1e-6, adjacency="replace-one")
        remove = Theorem4Amplification(delta=1e-6, adjacency="add-remove")
        assert replace.epsilon(4.0) == pytest.approx(remove.epsilon(2.0), rel=1e-12)

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
            Theorem4Amplification(0.1).epsilon(0.0)
        with pytest.raises(ValueError, match="delta=0 must lie strictly between 0 and 1"):
            Theorem4Amplification(0.1, delta=0)
        with pytest.raises(ValueError, match="adjacency='swap' must be one of"):
            Theorem4Amplification(adjacency="swap")  # type: ignore[arg-type]


class TestRates:
    """The mechanism hands in q and σ at each use."""

    def test_the_mechanisms_rate_serves_an_amplification_without_one(self) -> None:
        norms = torch.tensor([0.1, 0.7], dtype=torch.float64)
        for made, given in (("poisson", PoissonAmplification(0.1)), ("theorem4", Theorem4Amplification(0.1))):
            mechanism = Mechanism.build(1.0, 0.9, amplification=made, sample_rate=0.1)
            assert mechanism.sample_rate == 0.1
            want = Mechanism.build(1.0, 0.9, amplification=given)
            for got, expected in zip(mechanism.weights(norms), want.weights(norms), strict=True):
                assert torch.equal(got, expected)

    def test_factors_follow_the_noise(self) -> None:
        amplification, norms = Theorem4Amplification(0.01), torch.ones(1, dtype=torch.float64)
        for sigma in (1.0, 4.0):
            perp, _ = Mechanism.build(1.0, sigma, amplification=amplification).weights(norms)
            assert perp.item() * sigma**2 == pytest.approx(amplification.kappa(0.01, sigma))

    def test_another_rate_than_the_samplers_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"\(q=0\.01\) does not fit: examples are drawn at rate 0\.1"):
            Mechanism.build(1.0, 1.0, amplification=PoissonAmplification(0.01), sample_rate=0.1)
        assert Mechanism.build(1.0, 1.0, amplification=PoissonAmplification(0.1), sample_rate=0.1).sample_rate == 0.1

    @pytest.mark.parametrize("amplification", ["poisson", "theorem4", PoissonAmplification()])
    def test_secret_batches_of_no_known_rate_are_refused(self, amplification: Any) -> None:
        with pytest.raises(ValueError, match=r"which is unknown: give it as \w+\(q=…\), or as sample_rate"):
            Mechanism.build(1.0, 1.0, amplification=amplification)
        case = build("mlp", 2)
        with pytest.raises(ValueError, match="which is unknown"):
            fisher.fim_trace(*case.arguments, max_grad_norm=1.0, noise_multiplier=1.0, amplification=amplification)

    def test_who_keeps_batches_secret(self) -> None:
        secret = {name: get_amplification(name).secret_batches for name in available_amplifications()}
        assert secret == {"none": False, "poisson": True, "theorem4": True}


class TestRegistry:
    def test_a_registered_amplification_is_found_by_name(self, clean_registry: None) -> None:
        class Half:
            secret_batches = False

            def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
                return 0.5 * torch.ones_like(rho), 0.25 * torch.ones_like(rho)

        register_amplification("half", Half())
        assert "half" in available_amplifications()
        assert name_of_amplification(get_amplification("half")) == "half"
        perp, par = Mechanism.build(1.0, 2.0, amplification="half").weights(torch.ones(1))
        assert (perp.item(), par.item()) == (0.125, 0.0625)
        with pytest.raises(ValueError, match="'half' is already registered; pass overwrite=True"):
            register_amplification("half", Half())
        register_amplification("half", NoAmplification(), overwrite=True)

    def test_what_is_no_amplification_is_told(self, clean_registry: None) -> None:
        class Silent:
            def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
                return rho, rho

        for strange in (Silent(), 0.5):
            with pytest.raises(TypeError, match=r"needs factors\(rho, q, sigma\) and a flag secret_batches"):
                register_amplification("strange", strange)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="secret_batches"):
                Mechanism.build(1.0, 1.0, amplification=strange)  # type: ignore[arg-type]
        assert "strange" not in available_amplifications()
        with pytest.raises(ValueError, match="amplification='magic' is unknown; use one of none, poisson, theorem4"):
            get_amplification("magic")

    @pytest.fixture
    def clean_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(amplification, "_REGISTRY", dict(amplification._REGISTRY))


def sampled_fim(
    jacobian: Tensor,
    clipped_gradient: Tensor,
    noise_std: float,
    q: float,
    *,
    num_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The FIM of the real subsampled step from sampled scores, per participation: mean and standard error, [d, d] each.

    Draws o = b g̃ + N(0, s²I), b ~ Bernoulli(q), and averages the outer product of the score
    ∂/∂z log(q N(o; g̃, s²I) + (1−q) N(o; 0, s²I)); divided by q, the chance of taking part.

    Args:
        jacobian: J̃ of one example, [p, d].
        clipped_gradient: g̃ of that example, [p].
        noise_std: s.
        q: The sampling rate.
        num_samples: How many steps to simulate.
        generator: Source of randomness.
    """
    j, g = jacobian.double(), clipped_gradient.double()
    noise = noise_std * torch.randn(num_samples, len(g), generator=generator, dtype=torch.float64)
    inside = torch.rand(num_samples, generator=generator, dtype=torch.float64) < q
    released = noise + inside[:, None] * g
    log_in = math.log(q) - (released - g).square().sum(dim=1) / (2 * noise_std**2)
    log_out = math.log1p(-q) - released.square().sum(dim=1) / (2 * noise_std**2)
    posterior = torch.sigmoid(log_in - log_out)
    score = posterior[:, None] * ((released - g) @ j) / noise_std**2  # [samples, d]
    outer = score[:, :, None] * score[:, None, :] / q
    return outer.mean(dim=0), outer.std(dim=0) / math.sqrt(num_samples)


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_simulated_scores_of_the_real_step_agree_and_lie_below_theorem_4(q: float) -> None:
    """Sample the noisy, Poisson-subsampled release of a tiny model and average the outer product of its score."""
    case = build("mlp", 1)
    sigma = 0.9
    settings = {"max_grad_norm": case.C, "noise_multiplier": sigma}
    jacobian = reference.exact_jacobian(*case.arguments, max_grad_norm=case.C)[0].cpu()
    clipped = reference.clipped_gradients(*case.arguments, max_grad_norm=case.C)[0].cpu()
    mean, error = sampled_fim(
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
    by_theorem = Theorem4Amplification(q, delta=1e-6)
    theorem4 = fisher.exact_fim(*case.arguments, **settings, amplification=by_theorem)[0].cpu()
    assert torch.linalg.eigvalsh(theorem4 - exact).min() > 0
    assert (mean.trace() + 4 * error.diagonal().sum() < theorem4.trace()).item()

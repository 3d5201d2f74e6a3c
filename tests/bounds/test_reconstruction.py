"""Reconstruction robustness against closed forms, integrals and sampled runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.refused import all_refused
from torchfil import bounds
from torchfil.bounds.reconstruction import success_by_counts


def sampled(
    prior: float, stretches: list[tuple[float, float, int]], runs: int, seed: int = 0
) -> tuple[float, float]:
    """The success rate and its standard error by brute force: thresholds from runs of ν, successes
    from runs of μ.
    """
    generator = np.random.default_rng(seed)
    ratios = []
    for participates in (False, True):
        total = np.zeros(runs)
        for q, sigma, steps in stretches:
            for _ in range(steps):
                x = sigma * generator.standard_normal(runs)
                x += participates * (generator.random(runs) < q)
                total += np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
        ratios.append(total)
    threshold = np.quantile(ratios[0], 1 - prior)
    success = float((ratios[1] > threshold).mean())
    slope = math.exp(threshold)  # dP_μ/dP_ν on the border
    return success, math.sqrt((success * (1 - success) + slope**2 * prior * (1 - prior)) / runs)


@pytest.mark.parametrize(("steps", "sigma"), [(1, 5.0), (20, 5.0), (3, 0.5)])
def test_closed_form_without_subsampling(steps: int, sigma: float) -> None:
    priors = np.array([1e-9, 1e-6, 0.02, 0.5])
    truth = stats.norm.sf(stats.norm.isf(priors) - math.sqrt(steps) / sigma)
    bracket = bounds.rero(priors.tolist(), q=1.0, noise_multiplier=sigma, steps=steps)
    np.testing.assert_allclose(bracket.high, truth, rtol=1e-9)
    assert torch.equal(bracket.low, bracket.high)


@pytest.mark.parametrize("q", [0.3, 0.01])
@pytest.mark.parametrize(("prior", "sigma"), [(1e-6, 0.7), (0.05, 0.7), (1e-20, 0.1)])
def test_one_subsampled_step_by_hand(q: float, prior: float, sigma: float) -> None:
    """In one step the likelihood ratio grows with the output, so that the threshold is one on the
    output.

    With little noise, the losses that matter for a tiny prior exceed 40.
    """
    threshold = stats.norm.isf(prior) * sigma
    truth = q * stats.norm.sf((threshold - 1) / sigma) + (1 - q) * prior
    bracket = bounds.rero(prior, q=q, noise_multiplier=sigma, steps=1)
    assert float(bracket.low) <= truth <= float(bracket.high)
    assert float(bracket.high) <= float(bracket.low) * (1 + 1e-4)


@pytest.mark.parametrize(
    "stretches", [[(0.3, 0.7, 5)], [(0.1, 1.0, 10), (0.2, 2.0, 20), (0.1, 1.0, 5)]]
)
def test_sampled_runs_agree(stretches: list[tuple[float, float, int]]) -> None:
    q, sigma, steps = (list(column) for column in zip(*stretches, strict=True))
    for prior in (0.01, 0.2):
        bracket = bounds.rero(prior, q=q, noise_multiplier=sigma, steps=steps)
        success, error = sampled(prior, stretches, runs=100_000)
        assert float(bracket.low) - 4 * error < success < float(bracket.high) + 4 * error
        assert float(bracket.high) - float(bracket.low) <= 1e-4 * float(bracket.high)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.034, 1.5, 12_000), (0.01, 0.3, 200), (1e-5, 1.0, 1_000_000)]
)
def test_long_runs_have_narrow_brackets(q: float, sigma: float, steps: int) -> None:
    bracket = bounds.rero([1e-6, 0.001, 0.1], q=q, noise_multiplier=sigma, steps=steps)
    assert (bracket.low <= bracket.high).all()
    assert (bracket.high <= bracket.low * (1 + 5e-4)).all()


def test_many_examples_at_once() -> None:
    """By levels of effective noise: an upper end that is close to the bracket of the example
    alone.
    """
    q, sigmas = 0.05, [1.0, 1.5, 4.0, 20.0]
    counts = np.array(
        [[300, 0, 0, 0], [100, 100, 100, 0], [0, 0, 0, 300], [0, 0, 0, 0], [100, 100, 100, 0]]
    )
    priors = [0.001, 0.1]
    success = success_by_counts(priors, q, sigmas, counts)
    assert success[3].tolist() == priors, "nothing was released"
    assert np.array_equal(success[1], success[4])
    for row in (0, 1, 2):
        used = counts[row] > 0
        alone = bounds.rero(
            priors,
            q=q,
            noise_multiplier=np.array(sigmas)[used].tolist(),
            steps=counts[row][used].tolist(),
        )
        assert (success[row] >= alone.low.numpy()).all()
        np.testing.assert_allclose(success[row], alone.high, rtol=0.01)
    without = success_by_counts(priors, 1.0, sigmas, counts)
    np.testing.assert_allclose(
        without[2], stats.norm.cdf(stats.norm.ppf(priors) + math.sqrt(300) / 20), rtol=1e-12
    )


def test_refusals() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "prior_success": {"prior_success": 0},
        "noise_multiplier=0": {"noise_multiplier": 0},
        "q=1.5": {"q": 1.5},
        "steps=0": {"steps": 0},
        r"have \[2, 1, 3\] entries": {"q": [0.5, 0.1], "steps": [1, 2, 3]},
    }
    right = {"prior_success": 0.1, "q": 0.5, "noise_multiplier": 1, "steps": 1}
    all_refused(
        {
            noun: lambda options=options: bounds.rero(**{**right, **options})
            for noun, options in wrong.items()
        }
    )


# --- next to no noise, whose losses no grid would hold

PRIORS = [0.001, 0.1, 0.5]


@pytest.mark.parametrize("sigma", [0.04, 1e-8, 1e-300])
def test_a_step_that_drew_the_example_is_told(sigma: float) -> None:
    """1 − (1 − q)^T (1 − π₀): whoever was drawn is known, of others the attacker guesses."""
    for q, steps in ((0.01, 100), (0.5, 3), (0.2, 1000)):
        limit = 1 - (1 - q) ** steps * (1 - torch.tensor(PRIORS, dtype=torch.float64))
        bracket = bounds.rero(PRIORS, q=q, noise_multiplier=sigma, steps=steps)
        assert bool((bracket.low <= bracket.high).all())
        torch.testing.assert_close(bracket.low, limit, rtol=1e-6, atol=0)
        torch.testing.assert_close(bracket.high, limit, rtol=1e-9, atol=0)


def test_the_success_of_long_runs_is_no_more_than_one() -> None:
    """Losses beyond the largest exponent that float64 has."""
    bracket = bounds.rero(PRIORS, q=0.5, noise_multiplier=0.1, steps=10**5)
    assert bool((bracket.high == 1).all())
    assert bool((bracket.low > 1 - 1e-6).all())


def test_little_noise_by_example() -> None:
    counts = np.array([[2, 3], [0, 5], [5, 0], [0, 0]])
    found = success_by_counts(PRIORS, 0.1, [1e-8, 1.0], counts)
    noisy = success_by_counts(PRIORS, 0.1, [0.06, 1.0], counts)
    assert np.allclose(found, noisy, rtol=3e-3)
    assert np.allclose(found[2], 1 - 0.9**5 * (1 - np.array(PRIORS)))
    assert np.allclose(found[3], PRIORS)

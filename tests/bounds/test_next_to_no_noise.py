"""Reconstruction robustness of runs with next to no noise, whose losses no grid would hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchfil.bounds import rero
from torchfil.bounds.reconstruction import success_by_counts

PRIORS = [0.001, 0.1, 0.5]


@pytest.mark.parametrize("sigma", [0.04, 1e-3, 1e-8, 1e-300])
def test_a_step_that_drew_the_example_is_told(sigma: float) -> None:
    """1 − (1 − q)^T (1 − π₀): whoever was drawn is known, of others the attacker guesses."""
    for q, steps in ((0.01, 100), (0.5, 3), (0.2, 1000)):
        limit = 1 - (1 - q) ** steps * (1 - torch.tensor(PRIORS, dtype=torch.float64))
        bracket = rero(PRIORS, q=q, noise_multiplier=sigma, steps=steps)
        assert bool((bracket.low <= bracket.high).all())
        torch.testing.assert_close(bracket.low, limit, rtol=1e-6, atol=0)
        torch.testing.assert_close(bracket.high, limit, rtol=1e-9, atol=0)


def test_beside_steps_with_noise() -> None:
    mixed = {"q": [0.01, 0.02], "steps": [20, 500]}
    bare = rero(PRIORS, noise_multiplier=[1e-8, 1.0], **mixed)
    some = rero(PRIORS, noise_multiplier=[0.06, 1.0], **mixed)  # composed on the grid
    assert bool((bare.high >= some.low).all())
    torch.testing.assert_close(bare.high, some.high, rtol=1e-3, atol=0)
    torch.testing.assert_close(bare.low, some.low, rtol=1e-3, atol=0)


def test_the_success_of_long_runs_is_no_more_than_one() -> None:
    """Losses beyond the largest exponent that float64 has."""
    for q, steps in ((0.2, 1000), (0.5, 10**5)):
        bracket = rero(PRIORS, q=q, noise_multiplier=0.1, steps=steps)
        assert bool((bracket.high == 1).all())
        assert bool((bracket.low > 1 - 1e-6).all())


def test_by_example() -> None:
    counts = np.array([[2, 3], [0, 5], [5, 0], [0, 0]])
    found = success_by_counts(PRIORS, 0.1, [1e-8, 1.0], counts)
    noisy = success_by_counts(PRIORS, 0.1, [0.06, 1.0], counts)
    assert np.allclose(found, noisy, rtol=3e-3)
    assert np.allclose(found[2], 1 - 0.9**5 * (1 - np.array(PRIORS)))
    assert np.allclose(found[3], PRIORS)

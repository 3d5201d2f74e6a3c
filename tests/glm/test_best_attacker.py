"""The best attacker's accuracy between normal laws, against integration and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr

from torchfil.glm.guesses import best_accuracy

GRID = 1201


def distances_of(means: np.ndarray) -> np.ndarray:
    """[n, m, m] for [n, m, dimensions]."""
    return np.linalg.norm(means[:, :, None] - means[:, None], axis=3)


def integrated(means: np.ndarray, prior: np.ndarray) -> float:
    """∫ max_a π_a p_a over the plane, on a grid, for means [m, 2]."""
    axes = [np.linspace(means[:, k].min() - 8, means[:, k].max() + 8, GRID) for k in (0, 1)]
    x, y = np.meshgrid(*axes, indexing="ij")
    largest = np.zeros_like(x)
    for (mean_x, mean_y), chance in zip(means, prior, strict=True):
        largest = np.maximum(largest, chance * np.exp(-((x - mean_x) ** 2 + (y - mean_y) ** 2) / 2) / (2 * np.pi))
    return float(largest.sum() * np.prod([axis[1] - axis[0] for axis in axes]))


def simulated(means: np.ndarray, prior: np.ndarray, draws: int, seed: int) -> tuple[float, float]:
    """How often the largest posterior is right, with its standard error, for means [m, dimensions]."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(len(prior), size=draws, p=prior)
    seen = means[truth] + rng.normal(size=(draws, means.shape[1]))
    with np.errstate(divide="ignore"):
        scores = np.log(prior) + seen @ means.T - (means**2).sum(axis=1) / 2
    right = scores.argmax(axis=1) == truth
    return float(right.mean()), float(right.std() / draws**0.5)


def priors(rng: np.random.Generator, n: int, m: int) -> np.ndarray:
    return rng.dirichlet(np.full(m, 0.7), size=n)


def test_two_answers() -> None:
    d = np.array([0.0, 1e-9, 0.5, 3.0, 1e6])
    means = np.stack([np.zeros(5), d], axis=1)[:, :, None]
    even = best_accuracy(distances_of(means), np.full((5, 2), 0.5))
    assert even.value == pytest.approx(ndtr(d / 2), abs=1e-14)
    assert (even.error == 0).all()
    prior = np.tile([0.2, 0.8], (5, 1))
    shifted = 0.2 * ndtr(d[2:] / 2 - np.log(4) / d[2:]) + 0.8 * ndtr(d[2:] / 2 + np.log(4) / d[2:])
    assert best_accuracy(distances_of(means), prior).value[2:] == pytest.approx(shifted, abs=1e-14)
    assert best_accuracy(distances_of(means), prior).value[:2] == pytest.approx([0.8, 0.8], abs=1e-14)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_three_answers_against_integration(scale: float) -> None:
    rng = np.random.default_rng(1)
    means = scale * rng.normal(size=(8, 3, 2))
    means[1] = means[1, :1] * np.array([[0.0], [1.0], [2.0]])  # on a line
    means[2, 1] = means[2, 0]  # two that cannot be told apart
    means[3] = 0
    prior = priors(rng, 8, 3)
    prior[4] = 1 / 3
    prior[5] = [0.5, 0.5, 0.0]
    prior[2] = [0.3, 0.3, 0.4]
    found = best_accuracy(distances_of(means), prior)
    expected = [integrated(*case) for case in zip(means, prior, strict=True)]
    assert found.value == pytest.approx(expected, abs=2e-5)
    assert (found.error == 0).all()


@pytest.mark.parametrize("answers", [4, 6])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_more_answers_in_a_plane_against_integration(answers: int, scale: float) -> None:
    rng = np.random.default_rng(2)
    means = scale * rng.normal(size=(6, answers, 2))
    means[1] = means[1, :1] * np.arange(answers)[:, None]  # on a line
    means[2, 1] = means[2, 0]
    prior = priors(rng, 6, answers)
    prior[3] = 1 / answers
    prior[4, :2] = [prior[4, :2].sum(), 0]
    found = best_accuracy(distances_of(means), prior)
    expected = np.array([integrated(*case) for case in zip(means, prior, strict=True)])
    assert found.error.max() < 3e-3
    assert (np.abs(found.value - expected) < 6 * found.error + 1e-4).all()


def test_more_answers_in_all_dimensions_against_simulation() -> None:
    rng = np.random.default_rng(3)
    means = np.array([0.3, 1.0, 1.0, 2.0])[:, None, None] * rng.normal(size=(4, 7, 9))
    prior = priors(rng, 4, 7)
    found = best_accuracy(distances_of(means), prior)
    for row in range(4):
        value, error = simulated(means[row], prior[row], 200_000, row)
        assert abs(found.value[row] - value) < 4 * error + 5 * found.error[row]


def test_the_stated_error_is_that_of_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against 64 times the points; few points, so that there is an error to be seen."""
    rng = np.random.default_rng(4)
    distances, prior = distances_of(rng.normal(size=(100, 6, 5))), np.full((100, 6), 1 / 6)
    monkeypatch.setattr("torchfil.glm.guesses._POINTS", 4096)
    reference = best_accuracy(distances, prior).value
    monkeypatch.setattr("torchfil.glm.guesses._POINTS", 64)
    found = best_accuracy(distances, prior)
    errors = np.abs(found.value - reference) / found.error
    assert found.error.max() < 0.01
    assert np.median(errors) < 1.5  # 0.77 for Student's t of three degrees of freedom
    assert (errors < 6).mean() > 0.95


def test_limits() -> None:
    """Far apart: always right. All the same: the prior. Parts that are far apart: each on its own."""
    prior = np.array([[0.4, 0.3, 0.2, 0.1]])
    corners = np.eye(4)[None]
    assert best_accuracy(distances_of(1e6 * corners), prior).value == pytest.approx([1.0])
    assert best_accuracy(distances_of(0 * corners), prior).value == pytest.approx([0.4])
    pairs = np.array([[[0.0, 0], [0, 1], [100, 0], [100, 2]]])
    expected = sum(
        weight * best_accuracy(np.array([[[0, d], [d, 0]]]), odds).value
        for weight, d, odds in ((0.7, 1.0, np.array([[4 / 7, 3 / 7]])), (0.3, 2.0, np.array([[2 / 3, 1 / 3]])))
    )
    assert best_accuracy(distances_of(pairs), prior).value == pytest.approx(expected, abs=1e-5)

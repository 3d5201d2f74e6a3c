"""What the best attacker can tell of each record: against integration, simulation and true
refits.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from tests.refused import all_refused
from torchfil.glm import Label, LinearRegression, NominalAttribute, guess
from torchfil.glm.guesses import ask, best_accuracy
from torchfil.glm.refits import GLMView, minimiser_changes

COUNTS = {3: (0.29, 0.37, 0.34), 6: (0.75, 0.13, 0.09, 0.01, 0.01, 0.01)}
GRID, TRIALS = 801, 10_000


def distances_of(means: np.ndarray) -> np.ndarray:
    """[n, m, m] for [n, m, dimensions]."""
    return np.linalg.norm(means[:, :, None] - means[:, None], axis=3)


def integrated(means: np.ndarray, prior: np.ndarray) -> float:
    """∫ max_a π_a p_a over the plane, on a grid, for means [m, 2]."""
    axes = [np.linspace(means[:, k].min() - 8, means[:, k].max() + 8, GRID) for k in (0, 1)]
    x, y = np.meshgrid(*axes, indexing="ij")
    largest = np.zeros_like(x)
    for (mean_x, mean_y), chance in zip(means, prior, strict=True):
        largest = np.maximum(
            largest, chance * np.exp(-((x - mean_x) ** 2 + (y - mean_y) ** 2) / 2) / (2 * np.pi)
        )
    return float(largest.sum() * np.prod([axis[1] - axis[0] for axis in axes]))


def simulated(means: np.ndarray, prior: np.ndarray, seed: int) -> float:
    """How often the largest posterior is right, for means [m, dimensions] and answers drawn from
    the prior.
    """
    rng = np.random.default_rng(seed)
    truth = rng.choice(len(prior), size=TRIALS, p=prior)
    seen = means[truth] + rng.normal(size=(TRIALS, means.shape[1]))
    with np.errstate(divide="ignore"):
        scores = np.log(prior) + seen @ means.T - (means**2).sum(axis=1) / 2
    return float((scores.argmax(axis=1) == truth).mean())


def test_two_answers() -> None:
    d = np.array([0.0, 1e-9, 0.5, 3.0, 1e6])
    means = np.stack([np.zeros(5), d], axis=1)[:, :, None]
    even = best_accuracy(distances_of(means), np.full((5, 2), 0.5))
    assert even.value == pytest.approx(ndtr(d / 2), abs=1e-14)
    assert (even.error == 0).all()
    prior = np.tile([0.2, 0.8], (5, 1))
    shifted = 0.2 * ndtr(d[2:] / 2 - np.log(4) / d[2:]) + 0.8 * ndtr(d[2:] / 2 + np.log(4) / d[2:])
    assert best_accuracy(distances_of(means), prior).value == pytest.approx(
        [0.8, 0.8, *shifted], abs=1e-14
    )


@pytest.mark.parametrize(
    ("answers", "scale"), [(3, 0.1), (3, 1.0), (3, 3.0), (4, 1.0), (6, 0.3), (6, 4.0)]
)
def test_answers_in_a_plane_against_integration(answers: int, scale: float) -> None:
    """Three answers in closed form, more of them by draws with an error that is told."""
    rng = np.random.default_rng(2)
    means = scale * rng.normal(size=(6, answers, 2))
    means[1] = means[1, :1] * np.arange(answers)[:, None]  # on a line
    means[2, 1] = means[2, 0]  # two that cannot be told apart
    means[5] = 0
    prior = rng.dirichlet(np.full(answers, 0.7), size=6)
    prior[3] = 1 / answers
    prior[4, :2] = [prior[4, :2].sum(), 0]
    found = best_accuracy(distances_of(means), prior)
    expected = np.array([integrated(*case) for case in zip(means, prior, strict=True)])
    assert found.error.max() <= (3e-3 if answers > 3 else 0)
    assert (
        np.abs(found.value - expected) < 6 * found.error + (1e-4 if answers > 3 else 2e-5)
    ).all()


def test_an_answer_far_from_the_others_takes_no_digits_from_them() -> None:
    means = np.random.default_rng(3).normal(size=(20, 4, 2))
    near = best_accuracy(distances_of(means[:, 1:]), np.full((20, 3), 1 / 3))
    means[:, 0] = 1e8
    found = best_accuracy(distances_of(means), np.full((20, 4), 1 / 4))
    assert (np.abs(found.value - (1 + 3 * near.value) / 4) < 6 * found.error + 1e-4).all()
    assert found.error.max() < 3e-3


def test_the_stated_error_is_that_of_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against many times the draws; few of them, so that there is an error to be seen."""
    rng = np.random.default_rng(4)
    distances, prior = distances_of(rng.normal(size=(100, 6, 5))), np.full((100, 6), 1 / 6)
    monkeypatch.setattr("torchfil.glm.guesses._POINTS", 2048)
    reference = best_accuracy(distances, prior).value
    monkeypatch.setattr("torchfil.glm.guesses._POINTS", 32)
    found = best_accuracy(distances, prior)
    errors = np.abs(found.value - reference) / found.error
    assert found.error.max() < 0.01
    assert np.median(errors) < 1.5
    assert (errors < 6).mean() > 0.95


def patients(n: int) -> tuple[np.ndarray, np.ndarray, dict[int, NominalAttribute]]:
    """Made up, in the shape of the warfarin data: 14 columns, attributes of three and of six
    levels.
    """
    rng = np.random.default_rng(0)
    attributes, parts, place = {}, [rng.normal(size=(n, 7))], 7
    for levels, shares in COUNTS.items():
        codes = np.vstack([np.zeros(levels - 1), np.eye(levels - 1)])
        parts.append(codes[rng.choice(levels, size=n, p=shares)])
        attributes[levels] = NominalAttribute(list(range(place, place + levels - 1)), codes)
        place += levels - 1
    X = np.concatenate(parts, axis=1)
    return X, X @ rng.normal(size=X.shape[1]) + rng.normal(size=n), attributes


@pytest.mark.parametrize("levels", COUNTS)
def test_nobody_beats_it_and_the_bayes_attacker_attains_it(levels: int) -> None:
    """Made-up patients: the attacker compares a release with every answer's refit.

    Answers are drawn from the prior.
    """
    (X, y, attributes), sigma = patients(80), 3e-2
    model = LinearRegression(l2=1e-2).fit(X, y)
    found = guess(model, X, y, attributes[levels], sigma)
    view = GLMView.build(model, X, y)
    # [n, m, p]
    means = minimiser_changes(view, ask(attributes[levels], view).alternatives).numpy() / sigma
    share = np.array([simulated(each, found.prior[0], row) for row, each in enumerate(means)])
    error = np.sqrt(np.maximum(share * (1 - share), 1 / TRIALS) / TRIALS)
    off = (found.accuracy - share) / np.hypot(error, found.accuracy_error)
    assert np.abs(off).max() < 5
    assert off.std() < 1.15
    assert (found.accuracy >= found.prior_accuracy).all()
    assert found.accuracy.mean() > found.prior_accuracy.mean() + 0.05


def test_priors() -> None:
    X, y, attributes = patients(200)
    model, attribute = LinearRegression(l2=1e-2).fit(X, y), attributes[3]
    shares = np.bincount(attribute.levels(X)) / 200
    common = guess(model, X, y, attribute, 0.05)
    assert common.prior[7].tolist() == shares.tolist()
    uniform = guess(model, X, y, attribute, 0.05, prior="uniform")
    assert uniform.prior_accuracy == pytest.approx(np.full(200, 1 / 3))
    rates = ndtr(ndtri(0.01) + np.sqrt(2 * common.divergence.max(axis=1)))
    assert common.true_positive_rate(0.01) == pytest.approx(rates)
    refused = {
        "sigma=0.0": lambda: guess(model, X, y, attribute, 0.0),
        "sum to 1": lambda: guess(model, X, y, attribute, 1.0, prior=[0.5, 0.5, 0.5]),
        "answers of Label": lambda: guess(model, X, y, Label(2), 1.0),
    }
    all_refused(refused)

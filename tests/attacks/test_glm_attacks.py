"""Attacks on linear models, on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.cases import DEVICE
from tests.glm.glm_cases import CODES, COLUMNS, table
from tests.glm.glm_cases import EXACT_MODELS as MODELS
from tests.refused import all_refused
from torchfil import bounds
from torchfil.attacks.attributes import (
    BlackBoxInversion,
    NominalAttribute,
    WhiteBoxInversion,
    ideal_inversion,
    prior_inversion,
)
from torchfil.attacks.glm_reconstruction import GLMReconstruction, biased_bound
from torchfil.glm import PoissonRegression, SoftmaxRegression
from torchfil.glm.refits import GLMView

ATTRIBUTE = NominalAttribute(COLUMNS, CODES)


def normal(*shape: int, seed: int) -> torch.Tensor:
    """As the attacks draw it."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("name", ["linear", "logistic with intercept"])
def test_white_box_is_the_closest_refit(name: str) -> None:
    """Without noise always right; with it, the guess of a search over true refits; with much, no better than chance."""
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = WhiteBoxInversion(model, X, y, ATTRIBUTE)
    assert attack.run(0.0, 1).achieved.min() == 1
    sigma, trials = 0.05, 4
    result = attack.run(sigma, trials, seed=9)
    assert 0.4 < result.achieved.mean() < 1
    noise = sigma * normal(trials, len(attack.changes[0, 0]), seed=9)
    for i in range(0, len(y), 10):
        refits = []
        for code in CODES:
            moved = X.copy()
            moved[i, COLUMNS] = code
            refits.append(MODELS[name]().fit(moved, y)._fit.weights[:, 0])
        for trial in range(trials):
            released = model._fit.weights[:, 0] + noise[trial]
            closest = int(np.argmin([float((released - refit).norm()) for refit in refits]))
            assert result.guesses[i, trial] == closest
    blind = attack.run(1e6, 400, seed=1)
    assert abs(blind.achieved.mean() - 1 / 3) < 0.1


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_black_box_by_hand(name: str) -> None:
    """The prior times a normal density of the residual, or the share of the label among that prediction."""
    X, y, levels = table(name)
    model = MODELS[name]().fit(X, y)
    guesses = BlackBoxInversion(model, X, y, ATTRIBUTE).run(0.0, 1).guesses
    margin, prior = X @ model.coef_, np.bincount(levels) / len(y)
    variance = ((y - margin) ** 2).sum() / (len(y) - 5)
    scores = []
    for k in range(3):
        moved = X.copy()
        moved[:, COLUMNS] = CODES[k]
        tried = moved @ model.coef_
        chance = stats.norm.pdf(tried, y, variance**0.5)
        if name == "logistic":
            same = [(margin > 0) == each for each in tried > 0]
            chance = np.array([(y[among] == y[i]).mean() for i, among in enumerate(same)])
        scores.append(prior[k] * chance)
    assert (guesses[:, 0] == np.argmax(scores, axis=0)).all()


def test_baselines() -> None:
    X, _, levels = table("linear", 300)
    assert prior_inversion(X, ATTRIBUTE).achieved.mean() == np.bincount(levels).max() / 300
    weight = np.where(levels == 2, 10.0, 1.0)
    assert (prior_inversion(X, ATTRIBUTE, sample_weight=weight).guesses == 2).all()
    target = levels.astype(float)  # the target tells the level of all
    assert ideal_inversion(X, target, ATTRIBUTE, l2=1e-6).achieved.mean() > 0.95


@pytest.mark.parametrize("name", ["ridge with intercept", "logistic with intercept"])
@pytest.mark.parametrize("label", ["known", "unknown"])
def test_without_noise_the_example_comes_out(name: str, label: str) -> None:
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y, sample_weight=np.linspace(0.5, 2, len(y)))
    attack = GLMReconstruction(model, X, y, label=label)  # type: ignore[arg-type]
    guess, target = attack.reconstruct(model._fit.weights[:, 0], range(len(y)))
    assert np.allclose(guess.cpu().numpy(), X, atol=1e-6)
    assert np.allclose(target.cpu().numpy(), y, atol=1e-6)


def test_label_instead_of_an_intercept() -> None:
    """Two margins explain a gradient of least squares, m and y − m; the one fitting better is guessed."""
    X, y, _ = table("linear")
    model = MODELS["linear"]().fit(X, y)
    guess, _ = GLMReconstruction(model, X, y, label="known").reconstruct(model.coef_, range(len(y)))
    margin = X @ model.coef_
    clear = np.abs(margin - y) < 0.5 * np.abs(margin)
    assert clear.sum() > 5
    assert np.allclose(guess.cpu().numpy()[clear], X[clear], atol=1e-5)


@pytest.mark.parametrize("label", ["known", "unknown"])
@pytest.mark.parametrize("value_range", [None, (-3.0, 3.0)])
def test_errors_are_those_of_the_guesses(label: str, value_range: tuple[float, float] | None) -> None:
    name, sigma, trials = "logistic with intercept", 1e-3, 20
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = GLMReconstruction(model, X, y, label=label, value_range=value_range)  # type: ignore[arg-type]
    rows = [3, 40, 11]
    result = attack.run(sigma, trials, rows=rows, seed=2)
    releases = attack.view.weights + sigma * normal(trials, 6, seed=2)
    guesses = torch.stack([attack.reconstruct(release, rows)[0] for release in releases]).cpu().numpy()
    errors = np.square(guesses - X[rows]).mean(axis=2)  # [trials, 3]
    assert result.ids == rows
    assert np.allclose(result.achieved, errors.mean(axis=0), rtol=1e-4)
    assert np.allclose(result.standard_error, errors.std(axis=0, ddof=1) / trials**0.5, rtol=1e-3)
    assert np.allclose(result.guesses, guesses.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_small_noise_reaches_the_information() -> None:
    """With label and intercept the likeliest guess errs by tr(I⁻¹)/d, the least that an unbiased one can; it is one."""
    name, sigma, rows = "logistic with intercept", 1e-6, [4, 20]
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = GLMReconstruction(model, X, y, label="known")
    result = attack.run(sigma, 2000, seed=0)
    fim = model.sensitivity(X, y, private_target=False).gram(slice(None)) / sigma**2
    least = bounds.mse_from_fim(fim).cpu().numpy()
    assert (abs(result.achieved - least) < 4.5 * result.standard_error + 0.01 * least).mean() > 0.9
    assert abs(np.median(result.achieved / least) - 1) < 0.05  # the examples share the releases' luck
    found = biased_bound(attack, sigma, rows, 20000, seed=0)
    assert found.response == pytest.approx([1, 1], abs=0.03)
    assert found.bound == pytest.approx(least[rows].tolist(), rel=0.03)
    with pytest.raises(ValueError, match="sigma=0 must be positive and trials=5"):
        biased_bound(attack, 0, rows, 5)


@pytest.mark.parametrize("label", [pytest.param("known", marks=pytest.mark.slow), "unknown"])
def test_the_mean_guess_follows_the_example_as_refits_say(label: str) -> None:
    """tr J_μ by parts against differences over refits with the example moved, same noise; a bound that holds."""
    name, sigma, row, step, trials = "logistic with intercept", 3e-3, 11, 1e-3, 4000
    X, y, _ = table(name)
    X = np.clip(X, -1, 1)

    def attacked(data: np.ndarray) -> GLMReconstruction:
        return GLMReconstruction(MODELS[name]().fit(data, y), data, y, label=label, value_range=(-1, 1))  # type: ignore[arg-type]

    attack = attacked(X)
    noise = normal(trials, 6, seed=0)
    slopes = []
    for column in range(5):
        means = []
        for sign in (-1, 1):
            moved = X.copy()
            moved[row, column] += sign * step
            other = attacked(moved)
            guesses = other.guesses(other.view.weights + sigma * noise, torch.tensor([row], device=DEVICE))
            means.append(guesses[0, :, column].mean())
        slopes.append(float(means[1] - means[0]) / (2 * step))
    found = biased_bound(attack, sigma, [row], 40 * trials, seed=1)
    assert 0.02 < np.mean(slopes) < 0.9
    assert found.response[0] == pytest.approx(np.mean(slopes), abs=0.03)
    achieved = attack.run(sigma, 40 * trials, rows=[row], seed=2).achieved[0]
    assert 0.3 * achieved < found.bound[0] < 1.01 * achieved


def test_what_cannot_be_attacked_is_refused() -> None:
    X, y, levels = table("linear")
    model, counts = MODELS["linear"]().fit(X, y), PoissonRegression(l2=1.0).fit(X, levels)
    refused = {
        "label='known'": lambda: GLMReconstruction(model, X, y),
        "not what the model was fitted on": lambda: GLMView.build(model, X, y + 1),
        "fitted on 60 examples, got 59": lambda: GLMView.build(model, X[1:], y[1:]),
        "SoftmaxRegression has 2": lambda: GLMView.build(SoftmaxRegression(l2=0.1).fit(X, levels), X, levels),
        "rows .4.": lambda: NominalAttribute([0], np.eye(2)[:, :1]).levels(np.array([[0.0]] * 4 + [[2.0]])),
        "poisson loss": lambda: BlackBoxInversion(counts, X, levels, ATTRIBUTE),
        "sigma=-1 must be": lambda: WhiteBoxInversion(model, X, y, ATTRIBUTE).run(-1),
    }
    all_refused(refused)

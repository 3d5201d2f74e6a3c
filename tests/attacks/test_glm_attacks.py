"""Attacks on linear models, on cases whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from torchfil.attacks.attributes import (
    BlackBoxInversion,
    NominalAttribute,
    WhiteBoxInversion,
    accuracy_by_part,
    ideal_inversion,
    prior_inversion,
)
from torchfil.attacks.glm_reconstruction import GLMReconstruction
from torchfil.attacks.glm_view import GLMView
from torchfil.attacks.refits import minimiser_changes
from torchfil.datasets import DataNotFoundError, data_folder, iwpc
from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
    iteratively_reweighted_fil,
)

COLUMNS = [1, 2]
CODES = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
ATTRIBUTE = NominalAttribute(COLUMNS, CODES)

MODELS: dict[str, Callable[[], GeneralizedLinearModel]] = {
    "linear": lambda: LinearRegression(l2=0.0, tolerance=1e-14),
    "ridge with intercept": lambda: LinearRegression(l2=0.02, fit_intercept=True, tolerance=1e-14),
    "logistic": lambda: LogisticRegression(l2=0.05, tolerance=1e-14),
    "logistic with intercept": lambda: LogisticRegression(l2=0.05, fit_intercept=True, tolerance=1e-14),
    "poisson": lambda: PoissonRegression(l2=0.1, tolerance=1e-14),
    "pseudo-huber": lambda: GeneralizedLinearModel(
        lambda m, y: torch.sqrt(1 + (m - y).square()) - 1, l2=0.05, tolerance=1e-14
    ),
}


def table(name: str, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    levels = rng.integers(3, size=n)
    X = np.column_stack([rng.normal(size=n), CODES[levels], rng.normal(size=(n, 2))])
    signal = X @ np.array([0.5, 1.0, -1.0, 0.3, 0.0])
    if name.startswith("logistic"):
        y = (rng.random(n) < 1 / (1 + np.exp(-signal))).astype(float)
    elif name == "poisson":
        y = rng.poisson(np.exp(0.3 * signal)).astype(float)
    else:
        y = signal + 0.5 * rng.normal(size=n)
    return X, y, levels


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("surrogate", [True, False])
def test_updates_equal_refits(name: str, surrogate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example and level, weighted, against a fit from scratch."""
    if not surrogate:
        monkeypatch.setattr("torchfil.attacks.refits._THIRD_NUMBERS", 0)
    X, y, levels = table(name)
    weight = np.random.default_rng(5).uniform(0.2, 2.0, len(y))
    model = MODELS[name]().fit(X, y, sample_weight=weight)
    view = GLMView.build(model, X, y)
    changes = minimiser_changes(view, COLUMNS, torch.as_tensor(CODES), tolerance=1e-11)
    for i in range(0, len(y), 12):
        assert float(changes[i, levels[i]].abs().max()) == 0
        for k in range(3):
            moved = X.copy()
            moved[i, COLUMNS] = CODES[k]
            refit = MODELS[name]().fit(moved, y, sample_weight=weight)
            found = view.weights + changes[i, k]
            assert torch.allclose(found, refit._fit.weights[:, 0], rtol=0, atol=1e-9), (i, k)


@pytest.mark.parametrize("name", ["linear", "logistic with intercept"])
def test_white_box_is_the_closest_refit(name: str) -> None:
    """Without noise always right; with it, the guess of a search over true refits; with much, no better than chance."""
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = WhiteBoxInversion(model, X, y, ATTRIBUTE)
    assert attack.run(0.0, 1).achieved.min() == 1
    sigma, trials = 0.02, 4
    result = attack.run(sigma, trials, seed=9)
    assert 0.4 < result.achieved.mean() < 1
    noise = sigma * torch.randn(
        trials, len(attack.changes[0, 0]), generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    assert result.guesses is not None
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
    assert blind.standard_error is not None
    assert abs(blind.achieved.mean() - 1 / 3) < 0.1


def test_black_box_regression_by_hand() -> None:
    X, y, levels = table("linear")
    model = MODELS["linear"]().fit(X, y)
    result = BlackBoxInversion(model, X, y, ATTRIBUTE).run(0.0, 1)
    residual = y - X @ model.coef_
    variance = (residual**2).sum() / (len(y) - 5)
    prior = np.bincount(levels) / len(y)
    scores = []
    for k in range(3):
        moved = X.copy()
        moved[:, COLUMNS] = CODES[k]
        scores.append(prior[k] * stats.norm.pdf(moved @ model.coef_, y, variance**0.5))
    assert result.guesses is not None
    assert (result.guesses[:, 0] == np.argmax(scores, axis=0)).all()


def test_black_box_classification_by_hand() -> None:
    X, y, levels = table("logistic")
    model = MODELS["logistic"]().fit(X, y)
    result = BlackBoxInversion(model, X, y, ATTRIBUTE).run(0.0, 1)
    predicted, prior = X @ model.coef_ > 0, np.bincount(levels) / len(y)
    scores = np.zeros((3, len(y)))
    for k in range(3):
        moved = X.copy()
        moved[:, COLUMNS] = CODES[k]
        for i, tried in enumerate(moved @ model.coef_ > 0):
            same = predicted == tried
            scores[k, i] = prior[k] * (y[same] == y[i]).mean()
    assert result.guesses is not None
    assert (result.guesses[:, 0] == scores.argmax(axis=0)).all()


def test_baselines() -> None:
    X, _, levels = table("linear", 300)
    assert prior_inversion(X, ATTRIBUTE).achieved.mean() == np.bincount(levels).max() / 300
    weight = np.where(levels == 2, 10.0, 1.0)
    assert (prior_inversion(X, ATTRIBUTE, sample_weight=weight).guesses == 2).all()
    target = levels.astype(float)  # the target tells the level of all
    assert ideal_inversion(X, target, ATTRIBUTE, l2=1e-6).achieved.mean() > 0.95


def test_accuracy_by_part() -> None:
    X, _, _ = table("linear")
    result = prior_inversion(X, ATTRIBUTE)
    assert accuracy_by_part(result, -result.achieved, 2)[0] == min(1, result.achieved.mean() * 2)
    with pytest.raises(ValueError, match="score has 3 entries for 60"):
        accuracy_by_part(result, [1, 2, 3])


@pytest.mark.parametrize("name", ["ridge with intercept", "logistic with intercept"])
@pytest.mark.parametrize("label", ["known", "unknown"])
def test_without_noise_the_example_comes_out(name: str, label: str) -> None:
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y, sample_weight=np.linspace(0.5, 2, len(y)))
    attack = GLMReconstruction(model, X, y, label=label)  # type: ignore[arg-type]
    guess, target = attack.reconstruct(model._fit.weights[:, 0], range(len(y)))
    assert np.allclose(guess.numpy(), X, atol=1e-6)
    assert np.allclose(target.numpy(), y, atol=1e-6)


def test_label_instead_of_an_intercept() -> None:
    """Two margins explain a gradient of least squares, m and y − m; the one fitting better is guessed."""
    X, y, _ = table("linear")
    model = MODELS["linear"]().fit(X, y)
    guess, _ = GLMReconstruction(model, X, y, label="known").reconstruct(model.coef_, range(len(y)))
    margin = X @ model.coef_
    clear = np.abs(margin - y) < 0.5 * np.abs(margin)
    assert clear.sum() > 5
    assert np.allclose(guess.numpy()[clear], X[clear], atol=1e-5)


@pytest.mark.parametrize("value_range", [None, (-3.0, 3.0)])
def test_errors_are_those_of_the_guesses(value_range: tuple[float, float] | None) -> None:
    name, sigma, trials = "logistic with intercept", 1e-3, 20
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = GLMReconstruction(model, X, y, value_range=value_range)
    rows = [3, 40, 11]
    result = attack.run(sigma, trials, rows=rows, seed=2)
    noise = torch.randn(trials, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    guesses = torch.stack([attack.reconstruct(attack.view.weights + sigma * row, rows)[0] for row in noise]).numpy()
    errors = np.square(guesses - X[rows]).mean(axis=2)  # [trials, 3]
    assert result.ids == rows
    assert np.allclose(result.achieved, errors.mean(axis=0), rtol=1e-4)
    assert np.allclose(result.standard_error, errors.std(axis=0, ddof=1) / trials**0.5, rtol=1e-3)
    assert np.allclose(result.guesses, guesses.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_small_noise_keeps_to_the_bound() -> None:
    """At small noise the guess is nearly unbiased, so that no example is guessed better than its bound."""
    name, sigma = "logistic with intercept", 1e-6
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    result = GLMReconstruction(model, X, y).run(sigma, 2000, seed=0)
    bound = model.mse_bound(X, y, sigma, private_target=False)
    assert result.standard_error is not None
    assert (result.achieved + 4 * result.standard_error > bound).all()
    assert np.median(result.achieved / bound) < 20


def test_what_cannot_be_attacked_is_refused() -> None:
    X, y, levels = table("linear")
    model = MODELS["linear"]().fit(X, y)
    with pytest.raises(ValueError, match="fit the model with fit_intercept=True, or attack with label='known'"):
        GLMReconstruction(model, X, y)
    with pytest.raises(ValueError, match="it was not fitted on them"):
        GLMView.build(model, X, y + 1)
    with pytest.raises(ValueError, match=r"X has shape \[59, 5\], the model was fitted on \[60, 5\]"):
        GLMView.build(model, X[1:], y[1:])
    with pytest.raises(ValueError, match="SoftmaxRegression has 2 margins"):
        GLMView.build(SoftmaxRegression(l2=0.1).fit(X, levels), X, levels)
    with pytest.raises(ValueError, match="row 4 holds"):
        NominalAttribute([0], np.array([[0.0], [1.0]])).levels(np.array([[0.0]] * 4 + [[2.0]]))
    with pytest.raises(ValueError, match="poisson loss has no performance statistic"):
        BlackBoxInversion(PoissonRegression(l2=1.0).fit(X, levels), X, levels, ATTRIBUTE)
    with pytest.raises(ValueError, match="sigma=-1 must be"):
        WhiteBoxInversion(model, X, y, ATTRIBUTE).run(-1)


def test_warfarin_patients_as_in_the_paper() -> None:
    """Hannun et al. 2021, figures 6 and 7: accuracies of both attacks, and reweighting flattens them by decile."""
    try:
        data_folder()
    except DataNotFoundError as error:
        pytest.skip(str(error))
    task = iwpc()
    X, y = task.train_inputs, task.train_targets
    attribute = NominalAttribute.of_task(task, "vkorc1")
    model = LinearRegression(l2=1e-2).fit(X, y)
    white, black = WhiteBoxInversion(model, X, y, attribute), BlackBoxInversion(model, X, y, attribute)
    assert prior_inversion(X, attribute).achieved.mean() == pytest.approx(0.367, abs=0.001)
    expected = {1e-5: (1.0, 0.489), 1e-4: (0.98, 0.489), 1e-3: (0.55, 0.489), 1e-2: (0.32, 0.491)}
    for sigma, accuracies in expected.items():
        found = [attack.run(sigma, 100, seed=0).achieved.mean() for attack in (white, black)]
        assert found == pytest.approx(accuracies, abs=0.02), sigma
    eta = model.fil(X, y, attributes={"vkorc1": attribute.columns})["vkorc1"]
    equal = iteratively_reweighted_fil(model, X, y, rounds=10, attribute=attribute.columns).model
    spreads = []
    for attack in (white, WhiteBoxInversion(equal, X, y, attribute)):
        deciles = accuracy_by_part(attack.run(1e-3, 100, seed=1), eta)
        spreads.append(abs(deciles[-1] - deciles[0]))
    assert spreads[0] > 0.4
    assert spreads[1] < spreads[0] / 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attacks_follow_the_model_to_a_gpu() -> None:
    name = "logistic with intercept"
    X, y, _ = table(name)
    there, here = MODELS[name]().set_params(device="cuda").fit(X, y), MODELS[name]().fit(X, y)
    changes = [WhiteBoxInversion(model, X, y, ATTRIBUTE).changes.cpu() for model in (there, here)]
    assert torch.allclose(*changes, rtol=0, atol=1e-9)
    for attack in (WhiteBoxInversion, BlackBoxInversion):
        assert attack(there, X, y, ATTRIBUTE).run(1e-9, 2, seed=0).achieved.shape == (60,)
    for value_range in (None, (-3.0, 3.0)):
        found = GLMReconstruction(there, X, y, value_range=value_range).run(1e-9, 5, seed=0)
        assert found.achieved.max() < 1e-6

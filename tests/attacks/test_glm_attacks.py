"""Attacks on linear models, on cases whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from tests.cases import DEVICE
from tests.paper_files import real_data
from torchfil import bounds
from torchfil.attacks.attributes import (
    BlackBoxInversion,
    NominalAttribute,
    WhiteBoxInversion,
    accuracy_by_part,
    ideal_inversion,
    prior_inversion,
)
from torchfil.attacks.comparison import compare_with_bounds
from torchfil.attacks.glm_reconstruction import GLMReconstruction, biased_bound
from torchfil.attacks.glm_slopes import believed_margins
from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
    iteratively_reweighted_fil,
)
from torchfil.glm.refits import GLMView, numbers_at_once

COLUMNS = [1, 2]
CODES = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
ATTRIBUTE = NominalAttribute(COLUMNS, CODES)

MODELS: dict[str, Callable[[], GeneralizedLinearModel]] = {
    "linear": lambda: LinearRegression(l2=0.0, tolerance=1e-14, device=DEVICE),
    "ridge with intercept": lambda: LinearRegression(l2=0.02, fit_intercept=True, tolerance=1e-14, device=DEVICE),
    "logistic": lambda: LogisticRegression(l2=0.05, tolerance=1e-14, device=DEVICE),
    "logistic with intercept": lambda: LogisticRegression(l2=0.05, fit_intercept=True, tolerance=1e-14, device=DEVICE),
    "poisson": lambda: PoissonRegression(l2=0.1, tolerance=1e-14, device=DEVICE),
    "pseudo-huber": lambda: GeneralizedLinearModel(
        lambda m, y: torch.sqrt(1 + (m - y).square()) - 1, l2=0.05, tolerance=1e-14, device=DEVICE
    ),
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    """As the attacks draw it."""
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64, device=DEVICE)


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


@pytest.mark.parametrize("l2", [0.02, 0.0])
def test_targets_of_any_size(l2: float) -> None:
    """Margins of some hundreds, which a known label must not keep from being found."""
    X, y, _ = table("linear")
    model = LinearRegression(l2=l2, fit_intercept=True, tolerance=1e-12, device=DEVICE).fit(X, y + 300)
    guess, _ = GLMReconstruction(model, X, y + 300, label="known").reconstruct(model._fit.weights[:, 0], range(len(y)))
    assert np.allclose(guess.cpu().numpy(), X, atol=1e-5)


def test_believed_margins_come_from_the_others() -> None:
    margins = torch.tensor([[1.0, -2.0], [20.0, 5.0], [3.0, 3.0]])
    assert believed_margins(margins, torch.tensor([0, 1, 2])).tolist() == [[40.0], [15.0], [40.0]]


def test_arrays_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten arrays of double precision in a quarter of what is free; never less than on a CPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_200_000, 10**9))
    assert numbers_at_once(torch.device("cpu"), 77, 10) == 77
    assert numbers_at_once(torch.device("cuda"), 77, 10) == 10_000
    assert numbers_at_once(torch.device("cuda"), 77_000, 10) == 77_000


@pytest.mark.parametrize("name", ["ridge with intercept", "logistic with intercept"])
def test_label_and_intercept_maximise_the_likelihood(name: str) -> None:
    """Against a search over the whole example: min over x of ‖H_i⁻¹(v − b(x)·(x, 1))‖, H_i of the others."""
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y, sample_weight=np.linspace(0.5, 2, len(y)))
    attack = GLMReconstruction(model, X, y, label="known")
    view = attack.view
    noise = normal(len(view.weights), seed=4)
    release = view.weights + 1e-3 * noise
    rows = [2, 30, 55]
    found, _ = attack.reconstruct(release, rows)
    for i, guess in zip(rows, found, strict=True):
        others = torch.arange(len(y), device=DEVICE) != i
        slopes = view.sample_weight * view.loss.first(view.X @ release, view.y)
        v = -(slopes[others] @ view.X[others] + view.ridge * release) / view.sample_weight[i]
        curvature = view.sample_weight * view.loss.second(view.X @ view.weights, view.y)
        hessian = (view.X[others].mT * curvature[others]) @ view.X[others] + torch.diag(view.ridge)

        def misfit(x: np.ndarray, i: int = i, v: torch.Tensor = v, hessian: torch.Tensor = hessian) -> np.ndarray:
            whole = torch.cat([torch.as_tensor(x), torch.ones(1, dtype=torch.float64)]).to(v)
            slope = view.loss.first((whole @ release)[None], view.y[i : i + 1])
            return torch.linalg.solve(hessian, v - slope * whole).cpu().numpy()

        best = optimize.least_squares(misfit, X[i], xtol=1e-14, ftol=1e-14, gtol=1e-14, x_scale="jac")
        assert np.linalg.norm(best.x - X[i]) > 1e-3
        assert np.allclose(guess.cpu().numpy(), best.x, atol=1e-5)


@pytest.mark.parametrize("label", ["known", "unknown"])
@pytest.mark.parametrize("value_range", [None, (-3.0, 3.0)])
def test_errors_are_those_of_the_guesses(label: str, value_range: tuple[float, float] | None) -> None:
    name, sigma, trials = "logistic with intercept", 1e-3, 20
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    attack = GLMReconstruction(model, X, y, label=label, value_range=value_range)  # type: ignore[arg-type]
    rows = [3, 40, 11]
    result = attack.run(sigma, trials, rows=rows, seed=2)
    noise = normal(trials, 6, seed=2)
    guesses = (
        torch.stack([attack.reconstruct(attack.view.weights + sigma * row, rows)[0] for row in noise]).cpu().numpy()
    )
    errors = np.square(guesses - X[rows]).mean(axis=2)  # [trials, 3]
    assert result.ids == rows
    assert np.allclose(result.achieved, errors.mean(axis=0), rtol=1e-4)
    assert np.allclose(result.standard_error, errors.std(axis=0, ddof=1) / trials**0.5, rtol=1e-3)
    assert np.allclose(result.guesses, guesses.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_small_noise_reaches_the_information() -> None:
    """With label and intercept the likeliest guess errs by tr(I⁻¹)/d, the least that an unbiased one can."""
    name, sigma = "logistic with intercept", 1e-6
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    result = GLMReconstruction(model, X, y, label="known").run(sigma, 2000, seed=0)
    fim = model.sensitivity(X, y, private_target=False).gram(slice(None)) / sigma**2
    least = bounds.mse_from_fim(fim).cpu().numpy()
    assert result.standard_error is not None
    assert (abs(result.achieved - least) < 4.5 * result.standard_error + 0.01 * least).mean() > 0.9
    assert abs(np.median(result.achieved / least) - 1) < 0.05  # the examples share the releases' luck


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


@pytest.mark.parametrize("label", ["known", "unknown"])
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
            means.append(
                other.guesses(other.view.weights + sigma * noise, torch.tensor([row], device=DEVICE))[
                    0, :, column
                ].mean()
            )
        slopes.append(float(means[1] - means[0]) / (2 * step))
    found = biased_bound(attack, sigma, [row], 40 * trials, seed=1)
    assert 0.02 < np.mean(slopes) < 0.9
    assert found.response[0] == pytest.approx(np.mean(slopes), abs=0.03)
    achieved = attack.run(sigma, 40 * trials, rows=[row], seed=2).achieved[0]
    assert 0.3 * achieved < found.bound[0] < 1.01 * achieved


def test_nobody_is_biased_without_a_reason() -> None:
    """At small noise the likeliest guess is unbiased: it follows the example, and its bound is tr(I⁻¹)/d."""
    name, sigma, rows = "logistic with intercept", 1e-6, [4, 20]
    X, y, _ = table(name)
    model = MODELS[name]().fit(X, y)
    found = biased_bound(GLMReconstruction(model, X, y, label="known"), sigma, rows, 20000, seed=0)
    fim = model.sensitivity(X, y, private_target=False).gram(slice(None))[rows] / sigma**2
    assert found.response == pytest.approx([1, 1], abs=0.03)
    assert found.bound == pytest.approx(bounds.mse_from_fim(fim).tolist(), rel=0.03)
    with pytest.raises(ValueError, match="sigma=0 must be positive and trials=5"):
        biased_bound(GLMReconstruction(model, X, y), 0, rows, 5)


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
    task = real_data("iwpc").iwpc()
    X, y = task.train_inputs, task.train_targets
    attribute = task.question("vkorc1")
    model = LinearRegression(l2=1e-2, device=DEVICE).fit(X, y)
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


def test_digits_as_in_the_paper() -> None:
    """Guo et al. 2022, figure 3, every 20th digit: errors ordered as bounds; only biased guesses fall below them."""
    task = real_data("mnist").mnist_zero_one(components=None, scaled=False)
    X, y, sigma = task.train_inputs, task.train_targets, 1e-5
    model = LogisticRegression(1e-2, fit_intercept=True, solver="lbfgs", device=DEVICE).fit(X, y)
    rows = np.arange(0, len(y), 20)
    bound = model.mse_bound(X, y, sigma, private_target=False)[rows]
    low = bound < 1
    found = {
        (label, value_range): compare_with_bounds(
            bound,
            GLMReconstruction(model, X, y, label=label, value_range=value_range).run(sigma, 100, rows=rows, seed=0),  # type: ignore[arg-type]
        )
        for label, value_range in (("known", None), ("known", (0.0, 1.0)), ("unknown", (0.0, 1.0)))
    }
    for one in found.values():
        assert stats.spearmanr(bound[low], one.attack.achieved[low]).statistic > 0.9
    assert found["known", None].violations == 0
    biased = found["known", (0.0, 1.0)]
    assert biased.violations > 0.5
    assert biased.attack.squared_bias is not None
    assert (biased.attack.squared_bias / biased.attack.achieved)[biased.violated].min() > 0.1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_attacks_follow_the_model_to_a_gpu() -> None:
    """The same numbers from tensors on a GPU as from arrays on a CPU, release by release."""
    name, sigma = "logistic with intercept", 1e-4
    X, y, _ = table(name)
    data = [torch.as_tensor(values, device="cuda") for values in (X, y)]
    there, here = MODELS[name]().set_params(device="cuda").fit(*data), MODELS[name]().set_params(device="cpu").fit(X, y)

    def source() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    changes = [WhiteBoxInversion(m, *d, ATTRIBUTE).changes.cpu() for m, d in ((there, data), (here, (X, y)))]
    assert torch.allclose(*changes, rtol=0, atol=1e-9)
    for inversion in (WhiteBoxInversion, BlackBoxInversion):
        guesses = [
            inversion(m, *d, ATTRIBUTE).run(100 * sigma, 50, generator=source()).guesses
            for m, d in ((there, data), (here, (X, y)))
        ]
        assert (guesses[0] == guesses[1]).mean() > 0.999
    for label in ("known", "unknown"):
        for value_range in (None, (-3.0, 3.0)):
            attacks = [
                GLMReconstruction(m, *d, label=label, value_range=value_range)  # type: ignore[arg-type]
                for m, d in ((there, data), (here, (X, y)))
            ]
            assert attacks[0].view.X.is_cuda
            found, expected = (attack.run(sigma, 40, generator=source()) for attack in attacks)
            assert np.allclose(found.achieved, expected.achieved, rtol=1e-3)
            own, plain = (biased_bound(attack, sigma, [1, 5], 40, generator=source()) for attack in attacks)
            assert np.allclose(own.response, plain.response, rtol=1e-2, atol=1e-3)

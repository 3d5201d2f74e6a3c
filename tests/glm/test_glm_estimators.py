"""The estimators as users of scikit-learn meet them: fitting, predicting, releasing, refusing."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from scipy.special import xlogy
from sklearn import linear_model

from tests.glm.glm_cases import CASES, D, N, data
from tests.refused import all_refused
from torchfil import glm
from torchfil.fisher import analytic_gaussian_epsilon
from torchfil.glm.model import round_up


def test_noise_and_the_attacker_who_knows_all_else() -> None:
    """One attribute unknown: the best unbiased guess from w* + noise has error σ/‖J_j‖
    (linearised).
    """
    X, y, _ = data("linear", False)
    model = glm.LinearRegression().fit(X, y)
    generator = torch.Generator().manual_seed(0)
    noise = torch.stack([model.release(1e-4, generator) for _ in range(4000)]).numpy() - model.coef_
    assert np.allclose(noise.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(noise.std(axis=0), 1e-4, rtol=0.05)
    column = model.sensitivity(X, y).jacobian(5).numpy()[:, 1]
    eta = model.fil(X, y, sigma=1e-4, attributes={"a": [1]})["a"][5]
    assert (noise @ column / (column @ column)).std() == pytest.approx(1 / eta, rel=0.05)
    assert model.mse_bound(X, y, sigma=1e-4, attributes={"a": [1]})["a"][5] == pytest.approx(
        eta**-2
    )


def test_sigma_for_a_target() -> None:
    X, y, _ = data("logistic", False)
    model = glm.LogisticRegression(l2=0.05).fit(X, y)
    for options in ({"groups": ["all"] * N}, {"attributes": {"a": [0], "b": [1, 2]}}):
        sigma = model.sigma_for(X, y, 0.2, **options)
        largest = max(np.max(each) for each in model.fil(X, y, sigma, **options).values())
        assert 0.2 / 2**0.25 <= largest <= 0.2
        assert 4 * np.log2(sigma) == pytest.approx(round(4 * np.log2(sigma)), abs=1e-9)
    for sigma in [*np.exp(np.random.default_rng(0).normal(scale=8, size=200)), 0.125, 1.0, 2**0.75]:
        assert sigma <= round_up(float(sigma)) <= sigma * 2**0.25 * (1 + 1e-12)


def test_sigma_for_differential_privacy() -> None:
    X, y, _ = data("logistic", False)
    X = X / np.linalg.norm(X, axis=1).max()
    model = glm.LogisticRegression(l2=0.05).fit(X, y)
    sigma, sensitivity = model.sigma_for_dp(X, 1.0, 1e-5), 2 / (N * 0.05)
    assert analytic_gaussian_epsilon(sigma / sensitivity, 1e-5) == pytest.approx(1.0, rel=1e-6)
    squared = glm.LinearRegression().fit(X, y)
    refused = {
        "unbounded derivative; l2=0.0": lambda: squared.sigma_for_dp(X, 1.0, 1e-5),
        "the shape": lambda: model.sigma_for_dp(np.vstack([X] * 10), 1.0, 1e-5),
    }
    all_refused(refused)


def test_what_has_no_minimum_is_told() -> None:
    X, y, _ = data("linear", False)
    two = np.array([[-1.0], [1.0]])
    biased, coarse = (
        glm.LogisticRegression(l2=0.1, fit_intercept=True),
        glm.LogisticRegression(max_iterations=1),
    )
    for error, fit in (
        (glm.NotConvergedError, lambda: glm.LogisticRegression().fit(two, [0, 1])),
        (glm.NotConvergedError, lambda: biased.fit(two, [0, 0])),
        (glm.NotConvergedError, lambda: coarse.fit(*data("logistic", False)[:2])),
        (glm.SingularHessianError, lambda: glm.LinearRegression().fit(np.hstack([X, X[:, :1]]), y)),
        (
            glm.SingularHessianError,
            lambda: glm.LinearRegression(fit_intercept=True).fit(np.ones((N, 1)), y),
        ),
    ):
        with pytest.raises(error, match="l2"):
            fit()


def test_tables_in_their_own_units_are_fitted() -> None:
    """Areas, years, incomes and prices: rounding leaves gradients of 1e-6 and more."""
    rng = np.random.default_rng(0)
    X = np.stack(
        [rng.normal(2000, 500, N), rng.integers(1950, 2020, N), rng.normal(5e4, 1e4, N)], axis=1
    )
    y = 1e6 * (150 * X[:, 0] + 10 * X[:, 2] + rng.normal(0, 3e4, N))
    model = glm.LinearRegression(l2=1e-2, fit_intercept=True).fit(X, y)
    full = np.column_stack([X, np.ones(N)])
    expected = np.linalg.solve(full.T @ full + N * 1e-2 * np.diag([1.0, 1.0, 1.0, 0.0]), full.T @ y)
    np.testing.assert_allclose([*model.coef_, model.intercept_], expected, rtol=1e-6)
    assert np.isfinite(model.fil(X, y, sigma=1.0)).all()


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_agrees_with_scikit_learn(name: str) -> None:
    X, y, weights = data(name, True)
    labels = y if name == "logistic" else np.array(["a", "b", "c"])[y.astype(int)]
    kind = glm.LogisticRegression if name == "logistic" else glm.SoftmaxRegression
    ours = kind(l2=0.05, fit_intercept=True).fit(X, labels, weights)
    theirs = linear_model.LogisticRegression(C=1 / (N * 0.05), tol=1e-12, max_iter=10_000).fit(
        X, labels, weights
    )
    assert np.allclose(ours.coef_, theirs.coef_.reshape(ours.coef_.shape), atol=1e-5)
    assert np.allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)
    assert (ours.predict(X) == theirs.predict(X)).all()
    assert ours.score(X, labels) == theirs.score(X, labels)


def test_column_names() -> None:
    X, y, _ = data("poisson", False)
    frame = pandas.DataFrame(X, columns=list("abcd"))
    named = glm.LinearRegression().fit(frame, y)
    assert np.allclose(
        *(named.fil(frame, y, attributes={"x": each})["x"] for each in (["b", "d"], [1, 3]))
    )
    refused = {
        r"unknown columns \['z'\]": lambda: named.fil(frame, y, attributes={"x": ["z"]}),
        "column 0 is 'b'": lambda: named.fil(frame[["b", "a", "c", "d"]], y),
    }
    all_refused(refused)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sigma", [0.0, 0.2, 1.5])
def test_the_expected_score_is_the_mean_over_releases(case: str, sigma: float) -> None:
    """Within three standard errors of 4,000 releases, whose scores are computed here.

    At σ = 0 it is the score.
    """
    # else e^margin has too long a tail to be simulated
    sigma = sigma / 5 if case == "poisson" else sigma
    X, y, _ = data(case, weighted=False)
    X[0] = 0.0  # without an intercept, noise does not move its margin
    model = CASES[case]().fit(X, y)
    found = model.expected_score(X, y, sigma)
    if sigma == 0:
        assert found == pytest.approx(model.score(X, y), abs=1e-12)
        return
    generator = torch.Generator().manual_seed(0)
    inputs = np.append(X, np.ones((N, 1)), axis=1)[:, : D + model.fit_intercept]
    scores = []
    for _ in range(4000):
        margin = inputs @ model.release(sigma, generator).numpy().T
        if model.score_name == "R²":
            scores.append(1 - np.square(y - margin).sum() / np.square(y - y.mean()).sum())
        elif model.score_name == "D²":
            null = 2 * (xlogy(y, y / y.mean())).sum()
            scores.append(1 - 2 * (xlogy(y, y) - y * margin - y + np.exp(margin)).sum() / null)
        elif model.score_name == "accuracy":
            scores.append(
                ((margin > 0) == y if margin.ndim == 1 else margin.argmax(axis=1) == y).mean()
            )
        else:
            scores.append(-(np.sqrt(1 + np.square(margin - y)) - 1).mean())
    assert abs(found - np.mean(scores)) < 3 * np.std(scores) / 4000**0.5


def test_refusals() -> None:
    X, y, _ = data("linear", False)
    broken = X.copy()
    broken[3, 0] = np.nan
    model = glm.LinearRegression().fit(X, y)
    refused = {
        "not fitted": lambda: glm.LinearRegression().fil(X, y),
        "smallest is -1": lambda: glm.PoissonRegression().fit(X, -np.ones(N)),
        "0 or 1": lambda: glm.LogisticRegression().fit(X, np.sign(y)),
        r"rows \[3\], columns \[0\] of X": lambda: glm.LinearRegression().fit(broken, y),
        "infinite": lambda: model.fil(X, y, sigma=0),
    }
    all_refused(refused)


@pytest.mark.parametrize("name", CASES)
def test_fil_is_about_the_training_data_and_no_others(name: str) -> None:
    """Refused: other data. Not refused: another order, precision or container, and coarse fits."""
    X, y, weights = data(name, True)
    model = CASES[name]().fit(X, y, weights)
    changed = np.where(np.arange(N * D).reshape(N, D) == 7, X + 0.01, X)
    for inputs, targets in ((X[:, ::-1], y), (X, y[::-1]), (X * 2, y), (changed, y)):
        for ask in (model.fil, glm.Composition([(model, 1.0)]).fil):
            with pytest.raises(ValueError, match="fitted on"):
                ask(inputs, targets)
    with pytest.raises(ValueError, match="fitted on"):
        model.fil(X, y, sample_weight=2 * weights)

    eta, order = model.fil(X, y), np.random.default_rng(1).permutation(N)
    assert np.allclose(model.fil(X[order], y[order], sample_weight=weights[order]), eta[order])
    assert np.allclose(model.fil(X[:3], y[:3], sample_weight=weights[:3]), eta[:3]), "a part"
    for given in (torch.tensor(X), torch.tensor(X).float(), pandas.DataFrame(X), X.tolist()):
        assert np.allclose(model.fil(given, y), eta, rtol=1e-4)
    assert np.isfinite(CASES[name]().set_params(tolerance=1e-2).fit(X, y, weights).fil(X, y)).all()
    assert np.allclose(model.set_params(l2=7.0, tolerance=1e-15).fil(X, y), eta), (
        "of the fit, not of the settings"
    )

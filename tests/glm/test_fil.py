"""Closed forms against finite differences of refits, implicit differentiation and singular values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    NotConvergedError,
    PoissonRegression,
    SingularHessianError,
    iteratively_reweighted_fil,
)

N, D = 25, 4


def pseudo_huber(margin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(1 + (margin - target).square()) - 1


CASES: dict[str, Callable[[], GeneralizedLinearModel]] = {
    "linear": lambda: LinearRegression(l2=0.0),
    "ridge": lambda: LinearRegression(l2=0.03),
    "linear with intercept": lambda: LinearRegression(l2=0.01, fit_intercept=True),
    "logistic": lambda: LogisticRegression(l2=0.05),
    "logistic with intercept": lambda: LogisticRegression(l2=0.05, fit_intercept=True),
    "poisson": lambda: PoissonRegression(l2=0.1),
    "pseudo-huber": lambda: GeneralizedLinearModel(pseudo_huber, l2=0.02),
}


def data(name: str, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D))
    if name.startswith("logistic"):
        y = (rng.random(N) < 0.5).astype(float)
    elif name == "poisson":
        y = rng.poisson(2.0, N).astype(float)
    else:
        y = X @ np.array([1.0, -0.5, 0.2, 0.0]) + rng.normal(size=N)
    return X, y, rng.uniform(0.5, 2.0, N) if weighted else np.ones(N)


def parameters(model: GeneralizedLinearModel) -> np.ndarray:
    tail = [model.intercept_] if model.fit_intercept else []
    return np.concatenate([model.coef_, tail])


def refit(model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    if isinstance(model, LogisticRegression):  # a target between 0 and 1, for the derivative
        model = GeneralizedLinearModel(model._margin_loss(), model.l2, model.fit_intercept, model.tolerance)
    return parameters(clone(model).fit(X, y, weights))


def refitted_jacobian(
    model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, weights: np.ndarray, i: int
) -> np.ndarray:
    """∂w*/∂(x_i, y_i) by central differences of refits, with Richardson's extrapolation, [p, d + 1]."""
    columns = []
    for j in range(D + 1):
        slopes = []
        for step in (1e-3, 5e-4):
            ends = []
            for sign in (1, -1):
                X2, y2 = X.copy(), y.copy()
                if j < D:
                    X2[i, j] += sign * step
                else:
                    y2[i] += sign * step
                ends.append(refit(model, X2, y2, weights))
            slopes.append((ends[0] - ends[1]) / (2 * step))
        columns.append((4 * slopes[1] - slopes[0]) / 3)
    return np.stack(columns, axis=1)


@pytest.fixture(params=[False, True], ids=["unweighted", "weighted"])
def weighted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=list(CASES))
def fitted(request: pytest.FixtureRequest, weighted: bool) -> Any:
    X, y, weights = data(request.param, weighted)
    model = CASES[request.param]()
    model.tolerance = 1e-13
    return model.fit(X, y, weights), X, y, weights


def test_jacobian_is_the_derivative_of_the_refitted_minimiser(fitted: Any) -> None:
    model, X, y, weights = fitted
    sensitivity = model.sensitivity(X, y)
    for i in (0, 7):
        want = refitted_jacobian(model, X, y, weights, i)
        got = sensitivity.jacobian(i).numpy()
        assert np.abs(got - want).max() < 1e-7 * np.abs(want).max()


def test_jacobian_is_the_implicit_derivative(fitted: Any) -> None:
    """−H⁻¹ ∂(gradient)/∂(x_i, y_i) by autograd through the objective."""
    model, X, y, weights = fitted
    loss = model._margin_loss()
    w = torch.tensor(parameters(model))

    def objective(w: torch.Tensor, z: torch.Tensor, i: int) -> torch.Tensor:
        inputs = torch.tensor(X).index_copy(0, torch.tensor([i]), z[None, :D])
        targets = torch.tensor(y).index_copy(0, torch.tensor([i]), z[D:])
        if model.fit_intercept:
            inputs = torch.cat([inputs, torch.ones(N, 1, dtype=torch.float64)], dim=1)
        return (torch.tensor(weights) * loss.value(inputs @ w, targets)).sum() + N * model.l2 / 2 * w[:D].square().sum()

    for i in (3, 11):
        z = torch.tensor(np.append(X[i], y[i]))
        gradient = torch.func.grad(objective)
        hessian = torch.func.jacrev(gradient)(w, z, i)
        cross = torch.func.jacrev(gradient, argnums=1)(w, z, i)
        want = -torch.linalg.solve(hessian, cross)
        assert torch.allclose(model.sensitivity(X, y).jacobian(i), want, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("private_target", [True, False])
def test_every_granularity_against_singular_values(fitted: Any, private_target: bool) -> None:
    model, X, y, _ = fitted
    sensitivity = model.sensitivity(X, y, private_target=private_target)
    jacobians = np.stack([sensitivity.jacobian(i).numpy() for i in range(N)])  # [n, p, d + 1]
    options: dict[str, Any] = {"private_target": private_target, "sigma": 0.5}
    norms = np.linalg.norm(jacobians, 2, axis=(1, 2))
    assert np.allclose(model.fil(X, y, **options), norms / 0.5, rtol=1e-9)
    coordinates = D + int(private_target)
    frobenius = np.linalg.norm(jacobians, axis=(1, 2)) / np.sqrt(coordinates)
    assert np.allclose(model.fil(X, y, **options, kind="trace"), frobenius / 0.5, rtol=1e-9)

    sets = {"one": [2], "two": [0, 3], "slice": slice(1, 4)}
    by_attribute = model.fil(X, y, **options, attributes=sets)
    for name, columns in sets.items():
        part = jacobians[:, :, columns]
        assert np.allclose(by_attribute[name], np.linalg.norm(part, 2, axis=(1, 2)) / 0.5, rtol=1e-9)
    tangent = np.linalg.svd(np.ones((1, 3)))[2][1:].T  # of the simplex, [3, 2]
    constrained = model.fil(X, y, **options, attributes={"race": [0, 1, 2]}, one_hot=True)["race"]
    assert np.allclose(constrained, np.linalg.norm(jacobians[:, :, :3] @ tangent, 2, axis=(1, 2)) / 0.5, rtol=1e-9)

    labels = ["a" if i % 3 else "b" for i in range(N)]
    by_group = model.fil(X, y, **options, groups=labels)
    for label in "ab":
        stacked = np.concatenate([jacobians[i] for i in range(N) if labels[i] == label], axis=1)
        assert by_group[label] == pytest.approx(np.linalg.norm(stacked, 2) / 0.5, rel=1e-9)
    everybody = model.fil(X, y, **options, groups=["all"] * N)["all"]
    assert everybody == pytest.approx(np.linalg.norm(np.concatenate(list(jacobians), axis=1), 2) / 0.5, rel=1e-9)
    assert everybody >= max(by_group.values()) >= (norms / 0.5).max() - 1e-12


def test_many_columns_against_singular_values() -> None:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(300, 60)) * np.linspace(0.01, 1, 60)
    y = (rng.random(300) < 0.5).astype(float)
    model = LogisticRegression(l2=1e-3).fit(X, y)
    eta = model.fil(X, y)
    sensitivity = model.sensitivity(X, y)
    for i in range(0, 300, 25):
        assert eta[i] == pytest.approx(np.linalg.norm(sensitivity.jacobian(i).numpy(), 2), rel=1e-9)


def test_an_example_that_fits_perfectly_leaks_through_its_target_only() -> None:
    """b = 0: J = −ωA[a x wᵀ, −c x], of norm ω‖Ax‖ sqrt(a²‖w‖² + c²)."""
    X = np.eye(3)
    model = LinearRegression().fit(X, np.array([1.0, 2.0, 3.0]))
    assert np.allclose(model.fil(X, [1.0, 2.0, 3.0]), np.sqrt(14 + 1))
    assert np.allclose(model.fil(X, [1.0, 2.0, 3.0], private_target=False), np.sqrt(14))


class TestInvariances:
    def test_noise_scale_permutation_and_duplication(self) -> None:
        X, y, _ = data("logistic", False)
        model = LogisticRegression(l2=0.05).fit(X, y)
        eta = model.fil(X, y)
        assert np.allclose(model.fil(X, y, sigma=4.0), eta / 4)
        order = np.random.default_rng(0).permutation(N)
        shuffled = LogisticRegression(l2=0.05).fit(X[order], y[order])
        assert np.allclose(shuffled.fil(X[order], y[order]), eta[order], rtol=1e-6)
        twice = LogisticRegression(l2=0.05).fit(np.tile(X, (2, 1)), np.tile(y, 2))
        doubled = twice.fil(np.tile(X, (2, 1)), np.tile(y, 2))
        assert np.allclose(doubled[:N], doubled[N:])
        assert np.allclose(doubled[:N], eta / 2, rtol=1e-6), "the same minimiser, half the influence"

    def test_a_weight_of_two_is_two_copies(self) -> None:
        X, y, _ = data("linear", False)
        weights = np.ones(N)
        weights[0] = 2
        one = LinearRegression().fit(X, y, weights)
        two = LinearRegression().fit(np.vstack([X, X[:1]]), np.append(y, y[0]))
        assert np.allclose(one.coef_, two.coef_, rtol=1e-9)

    def test_post_processing_never_raises_it(self) -> None:
        """Releasing a projection of w*: ‖PJ‖ ≤ ‖J‖."""
        X, y, _ = data("linear", False)
        model = LinearRegression().fit(X, y)
        sensitivity = model.sensitivity(X, y)
        projection = np.linalg.qr(np.random.default_rng(2).normal(size=(D, 2)))[0].T
        for i, eta in enumerate(model.fil(X, y)):
            assert np.linalg.norm(projection @ sensitivity.jacobian(i).numpy(), 2) <= eta * (1 + 1e-12)


class TestRelease:
    def test_gaussian_and_laplace_noise(self) -> None:
        X, y, _ = data("linear", False)
        model = LinearRegression().fit(X, y)
        generator = torch.Generator().manual_seed(0)
        draws = torch.stack([model.release(0.3, generator) for _ in range(4000)]).numpy()
        assert np.allclose(draws.mean(axis=0), model.coef_, atol=0.02)
        assert np.allclose(draws.std(axis=0), 0.3, rtol=0.05)
        laplace = torch.stack([model.release(0.3, generator, noise="laplace") for _ in range(4000)]).numpy()
        assert np.allclose(np.abs(laplace - model.coef_).mean(axis=0), 0.3, rtol=0.06)
        with pytest.raises(ValueError, match="scale=0 must be positive"):
            model.release(0)

    def test_an_attacker_who_knows_all_else_attains_the_bound(self) -> None:
        """One attribute unknown: the best unbiased guess from w* + noise has error σ/‖J_j‖ (linearised)."""
        X, y, _ = data("linear", False)
        model = LinearRegression().fit(X, y)
        sigma, i, j = 1e-4, 5, 1
        column = model.sensitivity(X, y).jacobian(i).numpy()[:, j]
        generator = torch.Generator().manual_seed(1)
        noise = torch.stack([model.release(sigma, generator) for _ in range(4000)]).numpy() - model.coef_
        guess_error = noise @ column / (column @ column)
        eta = model.fil(X, y, sigma=sigma, attributes={"a": [j]})["a"][i]
        assert guess_error.std() == pytest.approx(1 / eta, rel=0.05)

    def test_sigma_for_a_target(self) -> None:
        X, y, _ = data("logistic", False)
        model = LogisticRegression(l2=0.05).fit(X, y)
        assert model.fil(X, y, model.sigma_for(X, y, 0.2)).max() == pytest.approx(0.2)
        assert model.fil(X, y, model.sigma_for(X, y, 0.2, reduce="mean")).mean() == pytest.approx(0.2)
        sigma = model.sigma_for(X, y, 0.2, reduce=0.9)
        assert np.quantile(model.fil(X, y, sigma), 0.9) == pytest.approx(0.2)
        with pytest.raises(ValueError, match="reduce='median' must be"):
            model.sigma_for(X, y, 0.2, reduce="median")  # type: ignore[arg-type]

    def test_sigma_for_differential_privacy(self) -> None:
        from torchfil.fisher import analytic_gaussian_epsilon

        X, y, _ = data("logistic", False)
        X = X / np.linalg.norm(X, axis=1).max()
        model = LogisticRegression(l2=0.05).fit(X, y)
        sigma = model.sigma_for_dp(X, 1.0, 1e-5)
        sensitivity = 2 / (N * 0.05)
        assert analytic_gaussian_epsilon(sigma / sensitivity, 1e-5) == pytest.approx(1.0, rel=1e-6)
        moved = X.copy()
        moved[0] = -moved[0]
        other = LogisticRegression(l2=0.05).fit(moved, np.where(np.arange(N) == 0, 1 - y, y))
        assert np.linalg.norm(other.coef_ - model.coef_) <= sensitivity
        with pytest.raises(ValueError, match="the squared loss has an unbounded derivative; l2=0.0 must be positive"):
            LinearRegression().fit(X, y).sigma_for_dp(X, 1.0, 1e-5)


class TestFit:
    def test_separable_data_without_regularisation_is_told(self) -> None:
        X = np.array([[1.0, 0.1], [2.0, -0.3], [-1.0, 0.2], [-2.0, 0.5]])
        with pytest.raises((NotConvergedError, SingularHessianError), match="separable"):
            LogisticRegression().fit(X, [1, 1, 0, 0])

    def test_collinear_columns_are_named(self) -> None:
        X, y, _ = data("linear", False)
        X = np.hstack([X, X[:, :1] + X[:, 1:2]])
        with pytest.raises(SingularHessianError, match=r"columns \[\d\] are linear combinations of the others"):
            LinearRegression().fit(X, y)
        assert LinearRegression(l2=0.1).fit(X, y).coef_.shape == (5,)

    def test_agrees_with_scikit_learn(self) -> None:
        from sklearn.linear_model import LogisticRegression as Theirs

        X, y, weights = data("logistic", True)
        ours = LogisticRegression(l2=0.05, fit_intercept=True).fit(X, y, weights)
        theirs = Theirs(C=1 / (N * 0.05), tol=1e-12, max_iter=10_000).fit(X, y, weights)
        assert np.allclose(ours.coef_, theirs.coef_[0], atol=1e-6)
        assert ours.intercept_ == pytest.approx(theirs.intercept_[0], abs=1e-6)
        assert np.allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)

    def test_pipelines_clones_and_column_names(self) -> None:
        import pandas

        X, y, _ = data("linear", False)
        pipeline = make_pipeline(StandardScaler(), LinearRegression(fit_intercept=True)).fit(X, y)
        assert pipeline.score(X, y) > 0.3
        assert clone(LinearRegression(l2=3.0)).get_params()["l2"] == 3.0
        frame = pandas.DataFrame(X, columns=list("abcd"))
        named = LinearRegression().fit(frame, y)
        by_name = named.fil(frame, y, attributes={"x": ["b", "d"]})["x"]
        assert np.allclose(by_name, named.fil(X, y, attributes={"x": [1, 3]})["x"])
        with pytest.raises(ValueError, match=r"unknown columns \['z'\]"):
            named.fil(frame, y, attributes={"x": ["z"]})

    def test_refusals(self) -> None:
        X, y, _ = data("linear", False)
        with pytest.raises(ValueError, match="is not fitted yet"):
            LinearRegression().fil(X, y)
        with pytest.raises(ValueError, match="l2=-1 must be ≥ 0"):
            LinearRegression(l2=-1).fit(X, y)
        with pytest.raises(ValueError, match="logistic targets must be 0 or 1"):
            LogisticRegression().fit(X, np.sign(y))
        broken = X.copy()
        broken[3, 0] = np.nan
        with pytest.raises(ValueError, match=r"NaN or infinite values in rows \[3\]"):
            LinearRegression().fit(broken, y)
        model = LinearRegression().fit(X, y)
        with pytest.raises(ValueError, match="sigma=0 must be positive"):
            model.fil(X, y, sigma=0)
        with pytest.raises(ValueError, match="the model was fitted on 25, got 3"):
            model.fil(X[:3], y[:3])


class TestIRFIL:
    @pytest.mark.parametrize("name", ["ridge", "logistic"])
    def test_everybody_leaks_alike_in_the_end(self, name: str) -> None:
        rng = np.random.default_rng(3)
        X = rng.normal(size=(200, 3))
        y = X @ np.ones(3) + rng.normal(size=200)
        y = (y > 0).astype(float) if name == "logistic" else y
        model = CASES[name]()
        result = iteratively_reweighted_fil(model, X, y, rounds=40)
        assert result.spread[-1] < 1e-4 < result.spread[0]
        assert result.sample_weight.mean() == pytest.approx(1.0)
        assert result.etas.shape == (41, 200)
        assert not hasattr(model, "coef_"), "the given model is left alone"
        again = result.model.fil(X, y, sample_weight=result.sample_weight)
        assert np.allclose(again, result.etas[-1])

    def test_clamps_stopping_and_attributes(self) -> None:
        X, y, _ = data("ridge", False)
        clamped = iteratively_reweighted_fil(LinearRegression(l2=0.1), X, y, rounds=5, clamp=(0.8, 1.2))
        assert clamped.sample_weight.max() / clamped.sample_weight.min() <= 1.5 + 1e-9
        stopped = iteratively_reweighted_fil(LinearRegression(l2=0.1), X, y, rounds=200, tolerance=0.01)
        assert len(stopped.etas) < 201
        assert stopped.spread[-1] <= 0.01 * stopped.etas[-1].mean()
        one = iteratively_reweighted_fil(
            LinearRegression(l2=0.1),
            X,
            y,
            rounds=200,
            eta=lambda m, w: m.fil(X, y, attributes={"a": [1]}, sample_weight=w)["a"],
        )
        assert one.spread[-1] < 1e-3 * one.spread[0]

"""The estimators as users of scikit-learn meet them: fitting, predicting, releasing, refusing."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.glm.glm_cases import CASES, D, N, data, pseudo_huber
from tests.refused import all_refused
from torchfil.glm import (
    Composition,
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    NotConvergedError,
    PoissonRegression,
    SingularHessianError,
    SoftmaxRegression,
)


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
        everybody = ["all"] * N
        values = {
            "max": lambda sigma: model.fil(X, y, sigma).max(),
            "mean": lambda sigma: model.fil(X, y, sigma).mean(),
            0.9: lambda sigma: np.quantile(model.fil(X, y, sigma), 0.9),
        }
        for reduce, value in values.items():
            assert 0.2 / 2**0.25 <= value(model.sigma_for(X, y, 0.2, reduce=reduce)) <= 0.2
            with pytest.warns(UserWarning, match="released unrounded, it leaks itself: with it the largest η is up to"):
                assert value(model.sigma_for(X, y, 0.2, reduce=reduce, grid=None)) == pytest.approx(0.2)
        sigma = model.sigma_for(X, y, 0.2, groups=everybody, grid=2.0)
        assert 0.1 <= model.fil(X, y, sigma, groups=everybody)["all"] <= 0.2
        assert np.log2(sigma) == round(np.log2(sigma))
        with pytest.raises(ValueError, match="reduce='median' must be"):
            model.sigma_for(X, y, 0.2, reduce="median")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="grid=1.0 is the factor between neighbouring σ and must be above 1"):
            model.sigma_for(X, y, 0.2, grid=1.0)

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
        softmax = SoftmaxRegression(l2=0.05).fit(X, y)
        assert softmax.sigma_for_dp(X, 1.0, 1e-5) == pytest.approx(np.sqrt(2) * sigma)
        with pytest.raises(ValueError, match="the squared loss has an unbounded derivative; l2=0.0 must be positive"):
            LinearRegression().fit(X, y).sigma_for_dp(X, 1.0, 1e-5)
        with pytest.raises(
            ValueError, match=r"the shape \[250, 4\], the model was fitted on \[25, 4\].*the training set"
        ):
            model.sigma_for_dp(np.vstack([X] * 10), 1.0, 1e-5)


class TestFit:
    def test_separable_data_without_regularisation_is_told(self) -> None:
        X = np.array([[1.0, 0.1], [2.0, -0.3], [-1.0, 0.2], [-2.0, 0.5]])
        with pytest.raises((NotConvergedError, SingularHessianError), match="separable"):
            LogisticRegression().fit(X, [1, 1, 0, 0])

    def test_weights_that_diverge_are_told_as_such(self) -> None:
        """The gradient vanishes on separable data: it is not what failed."""
        X, y = np.array([[-1.0], [1.0]]), [0, 1]
        with pytest.raises(NotConvergedError, match="diverge, as on separable data.*Set l2 > 0") as told:
            LogisticRegression().fit(X, y)
        assert "above tolerance" not in str(told.value)
        with pytest.raises(NotConvergedError, match="diverge.*The intercept has no penalty"):
            LogisticRegression(l2=0.1, fit_intercept=True).fit(X, [0, 0])
        with pytest.raises(NotConvergedError, match=r"after 1 Newton steps the gradient is .*, above tolerance=1e-10"):
            LogisticRegression(l2=0.01, max_iterations=1).fit(*data("logistic", False)[:2])

    @pytest.mark.parametrize("size", [1.0, 1e6])
    def test_tables_in_their_own_units_are_fitted(self, size: float) -> None:
        """Areas, years, incomes and prices: rounding leaves gradients of 1e-6 and more."""
        rng = np.random.default_rng(0)
        X = np.stack([rng.normal(2000, 500, N), rng.integers(1950, 2020, N), rng.normal(5e4, 1e4, N)], axis=1)
        y = size * (150 * X[:, 0] + 10 * X[:, 2] + rng.normal(0, 3e4, N))
        model = LinearRegression(l2=1e-2, fit_intercept=True).fit(X, y)
        full = np.column_stack([X, np.ones(N)])
        ridge = N * 1e-2 * np.diag([1.0, 1.0, 1.0, 0.0])
        expected = np.linalg.solve(full.T @ full + ridge, full.T @ y)
        np.testing.assert_allclose([*model.coef_, model.intercept_], expected, rtol=1e-6)
        eta = model.fil(X, y, sigma=1.0)
        scale = np.array([1e3, 1e3, 1e4])
        penalty = LinearRegression(fit_intercept=True).fit(X / scale, y / size)  # without l2 scales do not matter
        plain = LinearRegression(fit_intercept=True).fit(X, y)
        np.testing.assert_allclose(plain.coef_ * scale / size, penalty.coef_, rtol=1e-6)
        assert np.isfinite(eta).all()

    def test_collinear_columns_are_named(self) -> None:
        X, y, _ = data("linear", False)
        X = np.hstack([X, X[:, :1] + X[:, 1:2]])
        with pytest.raises(SingularHessianError, match=r"columns \[\d\] are linear combinations of the others"):
            LinearRegression().fit(X, y)
        assert LinearRegression(l2=0.1).fit(X, y).coef_.shape == (5,)
        frame = pandas.DataFrame(X[:, [0, 1, 4]], columns=["age", "height", "sum"])
        with pytest.raises(SingularHessianError, match=r"columns \['(age|height|sum)'\] are linear combinations"):
            LinearRegression().fit(frame, y)
        constant = np.ones((N, 1))
        with pytest.raises(SingularHessianError, match=r"columns \[(0|'intercept')\]"):
            LinearRegression(fit_intercept=True).fit(constant, y)

    def test_agrees_with_scikit_learn(self) -> None:
        from sklearn.linear_model import LogisticRegression as Theirs

        X, y, weights = data("logistic", True)
        ours = LogisticRegression(l2=0.05, fit_intercept=True).fit(X, y, weights)
        theirs = Theirs(C=1 / (N * 0.05), tol=1e-12, max_iter=10_000).fit(X, y, weights)
        assert np.allclose(ours.coef_, theirs.coef_[0], atol=1e-6)
        assert ours.intercept_ == pytest.approx(theirs.intercept_[0], abs=1e-6)
        assert np.allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)

    def test_softmax_agrees_with_scikit_learn(self) -> None:
        from sklearn.linear_model import LogisticRegression as Theirs

        X, y, weights = data("softmax", True)
        labels = np.array(["a", "b", "c"])[y.astype(int)]
        ours = SoftmaxRegression(l2=0.05, fit_intercept=True).fit(X, labels, weights)
        theirs = Theirs(C=1 / (N * 0.05), tol=1e-12, max_iter=10_000).fit(X, labels, weights)
        assert np.allclose(ours.coef_, theirs.coef_, atol=1e-5)
        assert np.allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-5)
        assert (ours.predict(X) == theirs.predict(X)).all()
        assert ours.score(X, labels) == theirs.score(X, labels)
        with pytest.raises(ValueError, match=r"labels \['d'\] are not among the classes \['a', 'b', 'c'\]"):
            ours.fil(X[:1], ["d"], sample_weight=[1.0])
        with pytest.raises(ValueError, match="needs at least 2 classes"):
            SoftmaxRegression().fit(X, ["a"] * N)

    def test_both_solvers_find_the_same_minimum(self) -> None:
        for name, build in CASES.items():
            X, y, weights = data(name, True)
            newton = build().fit(X, y, weights)
            quasi = build().set_params(solver="lbfgs").fit(X, y, weights)
            assert np.allclose(newton.coef_, quasi.coef_, atol=1e-7), name
            assert quasi.n_iter_ <= 3, "L-BFGS leaves little to Newton"
        with pytest.raises(ValueError, match="solver='adam' must be 'newton' or 'lbfgs'"):
            LinearRegression(solver="adam").fit(X, y)  # type: ignore[arg-type]

    def test_scores(self) -> None:
        from sklearn.metrics import d2_tweedie_score, r2_score
        from sklearn.model_selection import cross_val_score

        X, y, weights = data("poisson", True)
        poisson = PoissonRegression(l2=0.1).fit(X, y)
        assert poisson.score(X, y) == pytest.approx(d2_tweedie_score(y, poisson.predict(X), power=1))
        linear = LinearRegression().fit(X, y)
        assert linear.score(X, y, weights) == pytest.approx(r2_score(y, linear.predict(X), sample_weight=weights))
        general = GeneralizedLinearModel(pseudo_huber, l2=0.1).fit(X, y)
        assert general.score(X, y) == pytest.approx(-(np.sqrt(1 + (general.predict(X) - y) ** 2) - 1).mean())
        assert cross_val_score(SoftmaxRegression(l2=0.1), X, y > 1, cv=3).shape == (3,)

    def test_pipelines_clones_and_column_names(self) -> None:
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
        with pytest.raises(ValueError, match=r"unknown columns \[True, False\]"):
            named.fil(frame, y, attributes={"x": [True, False]})
        for repeated in ([0, 0], ["a", 0], ["a", "b", "a"]):
            with pytest.raises(ValueError, match=r"columns \[0\] occur more than once"):
                named.fil(frame, y, attributes={"x": repeated})

    def test_refusals(self) -> None:
        X, y, _ = data("linear", False)
        all_refused(
            {
                "is not fitted yet": lambda: LinearRegression().fil(X, y),
                "l2=-1 must be a finite number": lambda: LinearRegression(l2=-1).fit(X, y),
                "l2=inf must be a finite": lambda: LinearRegression(l2=np.inf).fit(X, y),
                "the smallest is -1": lambda: PoissonRegression().fit(X, -np.ones(N)),
                "logistic targets must be 0 or": lambda: LogisticRegression().fit(X, np.sign(y)),
            }
        )
        broken = X.copy()
        broken[3, 0] = np.nan
        with pytest.raises(ValueError, match=r"NaN or infinite values in rows \[3\], columns \[0\] of X"):
            LinearRegression().fit(broken, y)
        model = LinearRegression().fit(X, y)
        with pytest.raises(ValueError, match="sigma=0 must be positive"):
            model.fil(X, y, sigma=0)
        with pytest.raises(ValueError, match="fitted on 25 examples, got 3"):
            model.fil(X[:3], y[:3])


class TestTrainingData:
    """FIL speaks of the data that the model was fitted on, and of no others."""

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("name", CASES)
    def test_other_data_are_refused(self, name: str, weighted: bool) -> None:
        X, y, weights = data(name, weighted)
        model = CASES[name]().fit(X, y, weights)
        others = {
            "other columns' order": (X[:, ::-1], y),
            "other targets": (X, y[::-1]),
            "scaled": (X * 2, y),
            "one entry changed": (np.where(np.arange(N * D).reshape(N, D) == 7, X + 0.01, X), y),
        }
        for what, (inputs, targets) in others.items():
            for ask in (model.fil, model.mse_bound, Composition([(model, 1.0)]).fil):
                with pytest.raises(ValueError, match="X and y are not what the model was fitted on"):
                    pytest.fail(f"{what}: {ask(inputs, targets)}")
        with pytest.raises(ValueError, match="X and y are not what the model was fitted on"):
            model.fil(X, y, sample_weight=2 * weights)

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("name", CASES)
    def test_the_training_data_never_are(self, name: str, weighted: bool) -> None:
        """Neither in another order, precision or container, nor if the fit was coarse or is of another scale."""
        X, y, weights = data(name, weighted)
        model = CASES[name]().fit(X, y, weights)
        eta = model.fil(X, y)
        order = np.random.default_rng(1).permutation(N)
        assert np.allclose(model.fil(X[order], y[order], sample_weight=weights[order]), eta[order])
        assert np.allclose(model.fil(X[:3], y[:3], sample_weight=weights[:3]), eta[:3]), "a part"
        for given in (X.astype(np.float32), torch.tensor(X), torch.tensor(X).float(), pandas.DataFrame(X), X.tolist()):
            assert np.allclose(model.fil(given, y), eta, rtol=1e-4)
        assert np.allclose(CASES[name]().fit(X.astype(np.float32), y, weights).fil(X, y), eta, rtol=1e-4)
        assert np.isfinite(CASES[name]().set_params(tolerance=1e-2).fit(X, y, weights).fil(X, y)).all()
        assert np.isfinite(CASES[name]().set_params(solver="lbfgs").fit(X, y, weights).fil(X, y)).all()
        assert np.allclose(model.set_params(l2=7.0, tolerance=1e-15).fil(X, y), eta), "of the fit, not of the settings"

    def test_a_tables_columns_must_have_their_names(self) -> None:
        X, y, _ = data("linear", False)
        frame = pandas.DataFrame(X, columns=list("abcd"))
        model = LinearRegression(l2=0.1).fit(frame, y)
        with pytest.raises(ValueError, match="column 0 is 'b', at the fit it was 'a'"):
            model.fil(frame[["b", "a", "c", "d"]], y)
        with pytest.raises(ValueError, match="column 2 is 'd', at the fit it was 'c'"):
            model.fil(frame[["a", "b", "d", "c"]][:3], y[:3], sample_weight=np.ones(3))

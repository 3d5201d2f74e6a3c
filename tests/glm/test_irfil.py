"""Iteratively reweighted FIL: fixed points, clamps, groups, attributes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glm.glm_cases import CASES, data
from tests.refused import all_refused
from torchfil.glm import LinearRegression, LogisticRegression, iteratively_reweighted_fil


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
        one = iteratively_reweighted_fil(LinearRegression(l2=0.1), X, y, rounds=200, attribute=[1])
        assert one.spread[-1] < 1e-3 * one.spread[0]
        assert np.allclose(one.etas[-1], one.model.fil(X, y, attributes={"a": [1]})["a"])

    def test_classes_and_groups_share_a_weight(self) -> None:
        rng = np.random.default_rng(4)
        X = rng.normal(size=(300, 3))
        y = (X[:, 0] + rng.normal(size=300) > 1.2).astype(float)
        model = LogisticRegression(l2=0.01)
        result = iteratively_reweighted_fil(model, X, y, groups="class", rounds=60, tolerance=1e-6)
        assert result.converged
        means = [[eta[y == c].mean() for c in (0, 1)] for eta in (result.etas[0], result.etas[-1])]
        assert abs(means[0][0] - means[0][1]) > 1e-2 * means[0][0]
        assert means[1][0] == pytest.approx(means[1][1], rel=1e-5)
        assert all(np.ptp(result.sample_weight[y == c]) == 0 for c in (0, 1))
        labels = ["u" if v else "v" for v in y]
        named = iteratively_reweighted_fil(model, X, y, groups=labels, rounds=60, tolerance=1e-6)
        assert np.allclose(named.sample_weight, result.sample_weight)
        assert result.etas[-1].std() > 0.1 * result.etas[-1].mean(), "within a class they still differ"

    def test_refusals(self) -> None:
        X, y, _ = data("ridge", False)
        all_refused(
            {
                "one label per example: 3 for": lambda: iteratively_reweighted_fil(
                    LinearRegression(), X, y, groups=["a"] * 3
                ),
                "must hold 1": lambda: iteratively_reweighted_fil(LinearRegression(), X, y, clamp=(2.0, 3.0)),
                "rounds=0 must be at least 1": lambda: iteratively_reweighted_fil(LinearRegression(), X, y, rounds=0),
                "an example has η = 0": lambda: iteratively_reweighted_fil(
                    LinearRegression(l2=0.1), np.vstack([X, np.zeros(4)]), np.append(y, 0.0)
                ),
            }
        )

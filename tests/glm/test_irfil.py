"""Iteratively reweighted FIL: fixed points, clamps, groups, attributes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glm.glm_cases import CASES, data
from torchfil.glm import LinearRegression, LogisticRegression, iteratively_reweighted_fil

MODEL = LinearRegression(l2=0.1)


@pytest.mark.parametrize("name", ["ridge", "logistic"])
def test_everybody_leaks_alike_in_the_end(name: str) -> None:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 3))
    y = X @ np.ones(3) + rng.normal(size=60)
    y = (y > 0).astype(float) if name == "logistic" else y
    model = CASES[name]()
    result = iteratively_reweighted_fil(model, X, y, rounds=40)
    assert result.spread[-1] < 1e-4 < result.spread[0]
    assert result.sample_weight.mean() == pytest.approx(1.0)
    assert result.etas.shape == (41, 60)
    assert not hasattr(model, "coef_"), "the given model is left alone"
    again = result.model.fil(X, y, sample_weight=result.sample_weight)
    assert np.allclose(again, result.etas[-1])


def test_clamps_stopping_attributes_and_refusals() -> None:
    X, y, _ = data("ridge", False)
    clamped = iteratively_reweighted_fil(MODEL, X, y, rounds=5, clamp=(0.8, 1.2))
    assert clamped.sample_weight.max() / clamped.sample_weight.min() <= 1.5 + 1e-9
    stopped = iteratively_reweighted_fil(MODEL, X, y, rounds=200, tolerance=0.01)
    assert len(stopped.etas) < 201
    assert stopped.spread[-1] <= 0.01 * stopped.etas[-1].mean()
    one = iteratively_reweighted_fil(MODEL, X, y, rounds=200, tolerance=1e-4, attribute=[1])
    assert one.spread[-1] < 1e-3 * one.spread[0]
    assert np.allclose(one.etas[-1], one.model.fil(X, y, attributes={"a": [1]})["a"])
    with pytest.raises(ValueError, match="must hold 1"):
        iteratively_reweighted_fil(MODEL, X, y, clamp=(2.0, 3.0))
    with pytest.raises(ValueError, match="η = 0"):
        iteratively_reweighted_fil(MODEL, np.vstack([X, np.zeros(4)]), np.append(y, 0.0))


def test_classes_and_groups_share_a_weight() -> None:
    rng = np.random.default_rng(4)
    X = rng.normal(size=(300, 3))
    y = (X[:, 0] + rng.normal(size=300) > 1.2).astype(float)
    model = LogisticRegression(l2=0.01)
    result = iteratively_reweighted_fil(model, X, y, groups="class", rounds=60, tolerance=1e-6)
    assert result.converged
    before, after = (
        [eta[y == c].mean() for c in (0, 1)] for eta in (result.etas[0], result.etas[-1])
    )
    assert abs(before[0] - before[1]) > 1e-2 * before[0]
    assert after[0] == pytest.approx(after[1], rel=1e-5)
    assert all(np.ptp(result.sample_weight[y == c]) == 0 for c in (0, 1))

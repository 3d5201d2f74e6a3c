"""What must hold of every Fisher information loss, whatever the model and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
)

MODELS: dict[str, Any] = {
    "linear": LinearRegression,
    "logistic": LogisticRegression,
    "softmax": SoftmaxRegression,
    "poisson": PoissonRegression,
}
relaxed = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Problem:
    build: Any
    X: np.ndarray
    y: np.ndarray
    weights: np.ndarray
    rng: np.random.Generator

    def fitted(self) -> GeneralizedLinearModel:
        return self.build().fit(self.X, self.y, self.weights)


@st.composite
def problems(draw: Any, names: tuple[str, ...] = tuple(MODELS)) -> Problem:
    name = draw(st.sampled_from(names))
    n, d = draw(st.integers(6, 24)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    X = rng.normal(size=(n, d)) * draw(st.sampled_from([0.1, 1.0, 3.0]))
    if name == "linear":
        y = rng.normal(size=n)
    elif name == "poisson":
        X = X / max(1.0, np.abs(X).max())
        y = rng.poisson(2.0, size=n).astype(float)
    else:
        y = np.arange(n) % (2 if name == "logistic" else 3) * 1.0
    l2, intercept = draw(st.sampled_from([1e-2, 0.1, 1.0])), draw(st.booleans())
    weights = rng.uniform(0.2, 3.0, n) if draw(st.booleans()) else np.ones(n)
    return Problem(lambda: MODELS[name](l2=l2, fit_intercept=intercept, tolerance=1e-12), X, y, weights, rng)


@relaxed
@given(problems(), st.integers(2, 4))
def test_copies_share_the_influence(problem: Problem, copies: int) -> None:
    """k copies of the whole set: the same minimiser, every copy 1/k of the influence, k of them sqrt(k)/k."""
    X, y, weights = problem.X, problem.y, problem.weights
    n = len(y)
    model = problem.fitted()
    many = problem.build().fit(np.tile(X, (copies, 1)), np.tile(y, copies), np.tile(weights, copies))
    assert np.allclose(many.coef_, model.coef_, rtol=1e-5, atol=1e-8)
    eta = many.fil(np.tile(X, (copies, 1)), np.tile(y, copies))
    assert np.allclose(eta, np.tile(model.fil(X, y), copies) / copies, rtol=1e-5)
    together = many.fil(np.tile(X, (copies, 1)), np.tile(y, copies), groups=list(range(n)) * copies)
    assert np.allclose([together[i] for i in range(n)], model.fil(X, y) / np.sqrt(copies), rtol=1e-5)


@relaxed
@given(problems())
def test_post_processing_never_raises_it(problem: Problem) -> None:
    """Of any linear function Tw′ of the release: I = JᵀTᵀ(TTᵀ)⁻¹TJ/σ² has no larger norm or trace."""
    model = problem.fitted()
    sensitivity = model.sensitivity(problem.X, problem.y)
    parameters = sensitivity.inverse.shape[0]
    map_ = problem.rng.normal(size=(problem.rng.integers(1, parameters + 1), parameters))
    projection = np.linalg.pinv(map_) @ map_
    eta, trace = model.fil(problem.X, problem.y), model.fil(problem.X, problem.y, kind="trace")
    for i in range(len(eta)):
        kept = projection @ sensitivity.jacobian(i).numpy()
        assert np.linalg.norm(kept, 2) <= eta[i] * (1 + 1e-9)
        assert np.linalg.norm(kept) <= trace[i] * np.sqrt(sensitivity.num_coordinates) * (1 + 1e-9)


@relaxed
@given(problems())
def test_knowing_less_leaves_less(problem: Problem) -> None:
    """η of fewer coordinates or fewer examples is no larger."""
    X, y = problem.X, problem.y
    model = problem.fitted()
    eta = model.fil(X, y)
    assert (model.fil(X, y, private_target=False) <= eta * (1 + 1e-9)).all()
    assert (model.fil(X, y, attributes={"a": [0]})["a"] <= eta * (1 + 1e-9)).all()
    if X.shape[1] > 1:
        free, simplex = (model.fil(X, y, attributes={"a": slice(None)}, one_hot=o)["a"] for o in (False, True))
        assert (simplex <= free * (1 + 1e-9)).all()
    labels = [int(g) for g in problem.rng.integers(3, size=len(y))]
    by_group = model.fil(X, y, groups=labels)
    assert all(by_group[label] >= eta[i] * (1 - 1e-9) for i, label in enumerate(labels))
    everybody = model.fil(X, y, groups=["all"] * len(y))["all"]
    assert everybody >= max(by_group.values()) * (1 - 1e-9)

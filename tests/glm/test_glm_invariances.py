"""What must hold of every Fisher information loss, whatever the model and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchfil.glm import (
    Composition,
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
@given(problems(), st.floats(1e-3, 1e3), st.sampled_from(["spectral", "trace"]))
def test_noise_twice_as_large_halves_it(problem: Problem, sigma: float, kind: Any) -> None:
    model = problem.fitted()
    assert np.allclose(
        model.fil(problem.X, problem.y, sigma, kind=kind) * sigma, model.fil(problem.X, problem.y, kind=kind)
    )
    bound = model.mse_bound(problem.X, problem.y, sigma)
    assert np.allclose(bound / sigma**2, model.mse_bound(problem.X, problem.y))


@relaxed
@given(problems(), st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_releases_of_one_model_add_their_information(problem: Problem, scales: list[float]) -> None:
    model, X, y = problem.fitted(), problem.X, problem.y
    together = Composition([(model, s) for s in scales]).fil(X, y)
    assert np.allclose(together, model.fil(X, y) * np.sqrt(sum(s**-2 for s in scales)))


@relaxed
@given(problems(("linear",)), st.floats(0.1, 10), st.floats(0.1, 10))
def test_releases_of_two_models_add_their_information(problem: Problem, first: float, second: float) -> None:
    """Traces add exactly; norms lie between the larger and the sum; the order does not matter."""
    X, y = problem.X, problem.y
    one, two = problem.fitted(), LinearRegression(l2=0.5).fit(X, y)
    both, swapped = Composition([(one, first), (two, second)]), Composition([(two, second), (one, first)])
    squares = [m.fil(X, y, s, kind="trace") ** 2 for m, s in ((one, first), (two, second))]
    assert np.allclose(both.fil(X, y, kind="trace") ** 2, squares[0] + squares[1])
    a, b = one.fil(X, y, first), two.fil(X, y, second)
    eta = both.fil(X, y)
    assert (eta >= np.maximum(a, b) * (1 - 1e-9)).all()
    assert (eta <= np.hypot(a, b) * (1 + 1e-9)).all()
    assert np.allclose(eta, swapped.fil(X, y))


@relaxed
@given(problems())
def test_the_order_of_examples_does_not_matter(problem: Problem) -> None:
    eta = problem.fitted().fil(problem.X, problem.y)
    order = problem.rng.permutation(len(eta))
    shuffled = problem.build().fit(problem.X[order], problem.y[order], problem.weights[order])
    assert np.allclose(shuffled.fil(problem.X[order], problem.y[order]), eta[order], rtol=1e-6)


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
def test_a_weight_of_two_is_two_copies(problem: Problem) -> None:
    """Without a penalty that counts examples: both copies moved together are the one of weight two."""
    X, y = problem.X, problem.y
    weights = np.where(np.arange(len(y)) == 0, 2.0, 1.0)
    n = len(y)
    one = problem.build().fit(X, y, weights)
    two = problem.build()
    two.l2 = one.l2 * n / (n + 1)
    two.fit(np.vstack([X, X[:1]]), np.append(y, y[0]))
    assert np.allclose(one.coef_, two.coef_, rtol=1e-5, atol=1e-8)
    copies = two.fil(np.vstack([X, X[:1]]), np.append(y, y[0]))
    assert np.allclose(one.fil(X, y)[0], 2 * copies[0], rtol=1e-5)


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


@relaxed
@given(problems(("linear",)))
def test_rotating_the_inputs_rotates_the_leak(problem: Problem) -> None:
    X, y = problem.X, problem.y
    rotation = np.linalg.qr(problem.rng.normal(size=(X.shape[1], X.shape[1])))[0]
    turned = problem.build().fit(X @ rotation, y, problem.weights)
    assert np.allclose(turned.fil(X @ rotation, y), problem.fitted().fil(X, y), rtol=1e-7)

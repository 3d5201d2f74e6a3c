"""A σ computed from the data leaks itself: by how much, and that a rounded one does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.glm.glm_cases import CASES, D, N, data
from torchfil.glm import GeneralizedLinearModel, LinearRegression
from torchfil.glm.model import information_of_choice, round_up, values_that_decide

OPTIONS: dict[str, dict[str, Any]] = {
    "largest": {},
    "mean": {"reduce": "mean"},
    "quantile": {"reduce": 0.85},
    "trace": {"kind": "trace"},
    "attributes": {"attributes": {"a": [0], "b": [1, 3]}},
    "one-hot": {"attributes": {"b": [1, 2, 3]}, "one_hot": True},
    "groups": {"groups": ["u", "v", "u", "v", "w"] * (N // 5)},
    "public target": {"private_target": False},
}


def chosen(model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, **options: Any) -> float:
    """σ for η = 1 as it comes, of a fresh fit."""
    reduce = options.pop("reduce", "max")
    eta = type(model)(**model.get_params()).fit(X, y).fil(X, y, **options)
    values = np.concatenate([np.atleast_1d(v) for v in eta.values()]) if isinstance(eta, dict) else eta
    if reduce == "max":
        return float(values.max())
    return float(values.mean() if reduce == "mean" else np.quantile(values, reduce))


def slopes(model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, row: int, **options: Any) -> np.ndarray:
    """∂ log σ by each input of an example, and by its target, by central differences of whole refits, [d + 1]."""
    result = []
    for column in range(D + 1):
        logs = []
        for step in (1e-5, -1e-5):
            moved, targets = X.copy(), y.copy()
            if column < D:
                moved[row, column] += step
            else:
                targets[row] += step
            logs.append(np.log(chosen(model, moved, targets, **options)))
        result.append((logs[0] - logs[1]) / 2e-5)
    return np.array(result)


def squares_of(model: GeneralizedLinearModel, X: np.ndarray, y: np.ndarray, **options: Any) -> np.ndarray:
    eta = model.fil(X, y, **{name: value for name, value in options.items() if name != "reduce"})
    values = np.concatenate([np.atleast_1d(v) for v in eta.values()]) if isinstance(eta, dict) else eta
    decide = values_that_decide(values, options.pop("reduce", "max"))
    return information_of_choice(
        model._objective(*model._tensors(X, y, None)),
        model._fit.weights,
        decide,
        num_inputs=D,
        **{"private_target": True, **options},
    )


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(("linear with intercept", asked) for asked in OPTIONS),
        *(pytest.param("poisson", asked, marks=[pytest.mark.slow] * (asked != "groups")) for asked in OPTIONS),
        ("linear", "largest"),
        ("pseudo-huber", "largest"),
    ],
)
def test_the_derivative_is_that_of_refits(name: str, asked: str) -> None:
    options = OPTIONS[asked]
    X, y, _ = data(name, False)
    model = CASES[name]().set_params(tolerance=1e-13).fit(X, y)
    squares = squares_of(model, X, y, **options)
    rows = [3, 12] if "groups" not in options else range(4, N, 5)  # those of group w
    expected = np.array([slopes(model, X, y, row, **options) for row in rows])
    inputs, whole = expected[:, :D] ** 2, expected**2
    if "groups" in options:
        assert squares[2] == pytest.approx(whole.sum(), rel=1e-4)
    elif options.get("attributes", {}).keys() == {"a", "b"}:
        assert squares.reshape(2, N)[:, [3, 12]] == pytest.approx(
            np.stack([inputs[:, 0], inputs[:, [1, 3]].sum(axis=1)]), rel=1e-4
        )
    elif "one_hot" in options:
        assert squares[[3, 12]] == pytest.approx(inputs[:, 1:].sum(axis=1), rel=1e-4)
    elif options.get("private_target") is False:
        assert squares[[3, 12]] == pytest.approx(inputs.sum(axis=1), rel=1e-4)
    else:
        size = D + 1 if options.get("kind") == "trace" else 1
        assert squares[[3, 12]] == pytest.approx(whole.sum(axis=1) / size, rel=1e-4)


def test_the_information_of_release_and_choice_by_simulation() -> None:
    """E[score²] of 200,000 releases N(w*(z), σ(z)²I) is J²/σ² + 2p(∂log σ)²: more than the η that was asked for."""
    X, y, _ = data("ridge", False)
    model = CASES["ridge"]().fit(X, y)
    row = int(model.fil(X, y).argmax())
    sigma = chosen(model, X, y)
    slope = slopes(model, X, y, row)
    jacobian = model.sensitivity(X, y).jacobian(row).numpy()
    direction = np.linalg.eigh(jacobian.T @ jacobian / sigma**2 + 2 * D * np.outer(slope, slope))[1][:, -1]

    # the density of a release, moved along that direction, refitted and with its own σ
    rng, step = np.random.default_rng(0), 1e-4
    released = model.coef_ + sigma * rng.normal(size=(200_000, D))
    logs = []
    for sign in (1, -1):
        moved, targets = X.copy(), y.copy()
        moved[row] += sign * step * direction[:D]
        targets[row] += sign * step * direction[D]
        own = chosen(model, moved, targets)
        weights = CASES["ridge"]().fit(moved, targets).coef_
        logs.append(-((released - weights) ** 2).sum(axis=1) / (2 * own**2) - D * np.log(own))
    scores = (logs[0] - logs[1]) / (2 * step)
    claimed = direction @ (jacobian.T @ jacobian / sigma**2 + 2 * D * np.outer(slope, slope)) @ direction
    assert np.mean(scores**2) == pytest.approx(claimed, rel=0.02)
    assert claimed > 1.1  # 1 was asked for


def test_the_warning_tells_the_largest_eta() -> None:
    """At least the true one, by central differences; at most √2 of it."""
    X, y, _ = data("ridge", False)
    model = CASES["ridge"]().fit(X, y)
    with pytest.warns(UserWarning, match="it leaks itself") as caught:
        sigma = model.sigma_for(X, y, 1.0, grid=None)
    told = re.search(r"is up to ([\d.]+), without it 1\.", str(caught[0].message))
    assert told is not None
    sensitivity, largest = model.sensitivity(X, y), 0.0
    for row in np.argsort(model.fil(X, y))[-4:].tolist():
        jacobian, slope = sensitivity.jacobian(row).numpy() / sigma, slopes(model, X, y, row)
        largest = max(largest, np.linalg.eigvalsh(jacobian.T @ jacobian + 2 * D * np.outer(slope, slope))[-1] ** 0.5)
    assert 1.05 < largest <= float(told[1]) * 1.01
    assert float(told[1]) <= 1.42 * largest


def test_a_rounded_sigma_is_constant_almost_everywhere() -> None:
    X, y, _ = data("ridge", False)
    model = LinearRegression(l2=0.03).fit(X, y)
    sigma = model.sigma_for(X, y, 1.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        moved = X + 1e-4 * rng.normal(size=X.shape)
        assert LinearRegression(l2=0.03).fit(moved, y).sigma_for(moved, y, 1.0) == sigma
    assert model.fil(X, y, sigma).max() <= 1


def test_the_grid() -> None:
    rng = np.random.default_rng(0)
    for sigma in [*np.exp(rng.normal(scale=8, size=200)), 0.125, 1.0, 2**0.75]:
        for grid in (2**0.25, 2.0, 10.0, 1.01):
            rounded = round_up(float(sigma), grid)
            assert sigma <= rounded <= sigma * grid * (1 + 1e-12)
            power = np.log(rounded) / np.log(grid)
            assert power == pytest.approx(round(power), abs=1e-6)

"""A σ computed from the data leaks itself: by how much, and that a rounded one does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.glm.glm_cases import CASES, D, N, data
from torchfil.glm import GeneralizedLinearModel
from torchfil.glm.model import information_of_choice, round_up, values_that_decide

# What is asked for, and the squares that the choice tells of it, from ∂ log σ by inputs and target, [examples, d + 1].
OPTIONS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Any]]] = {
    "largest": ({}, lambda s: (s**2).sum(axis=1)),
    "mean": ({"reduce": "mean"}, lambda s: (s**2).sum(axis=1)),
    "quantile": ({"reduce": 0.85}, lambda s: (s**2).sum(axis=1)),
    "trace": ({"kind": "trace"}, lambda s: (s**2).mean(axis=1)),
    "attributes": ({"attributes": {"a": [0], "b": [1, 3]}}, lambda s: [s[:, 0] ** 2, (s[:, [1, 3]] ** 2).sum(axis=1)]),
    "one-hot": ({"attributes": {"b": [1, 2, 3]}, "one_hot": True}, lambda s: (s[:, 1:D] ** 2).sum(axis=1)),
    "groups": ({"groups": ["u", "v", "u", "v", "w"] * (N // 5)}, lambda s: (s**2).sum()),
    "public target": ({"private_target": False}, lambda s: (s[:, :D] ** 2).sum(axis=1)),
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
        model._objective(X, y, None),
        model._fit.weights,
        decide,
        num_inputs=D,
        **{"private_target": True, **options},
    )


@pytest.mark.parametrize(
    ("name", "asked"),
    [*(("linear with intercept", asked) for asked in OPTIONS), ("poisson", "groups"), ("pseudo-huber", "largest")],
)
def test_the_derivative_is_that_of_refits(name: str, asked: str) -> None:
    options, squares_from = OPTIONS[asked]
    X, y, _ = data(name, False)
    model = CASES[name]().set_params(tolerance=1e-13).fit(X, y)
    squares = squares_of(model, X, y, **options)
    rows = list(range(4, N, 5)) if asked == "groups" else [3, 12]  # those of group w
    expected = squares_from(np.array([slopes(model, X, y, row, **options) for row in rows]))
    found = squares[2] if asked == "groups" else squares.reshape(-1, N)[:, rows]
    assert found == pytest.approx(np.asarray(expected).reshape(np.shape(found)), rel=1e-4)


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
    sensitivity, largest = model.sensitivity(X, y), 0.0
    for row in np.argsort(model.fil(X, y))[-4:].tolist():
        jacobian, slope = sensitivity.jacobian(row).numpy() / sigma, slopes(model, X, y, row)
        largest = max(largest, np.linalg.eigvalsh(jacobian.T @ jacobian + 2 * D * np.outer(slope, slope))[-1] ** 0.5)
    assert 1.05 < largest <= float(told[1]) * 1.01
    assert float(told[1]) <= 1.42 * largest


def test_the_grid() -> None:
    rng = np.random.default_rng(0)
    for sigma in [*np.exp(rng.normal(scale=8, size=200)), 0.125, 1.0, 2**0.75]:
        for grid in (2**0.25, 2.0, 10.0, 1.01):
            rounded = round_up(float(sigma), grid)
            assert sigma <= rounded <= sigma * grid * (1 + 1e-12)
            power = np.log(rounded) / np.log(grid)
            assert power == pytest.approx(round(power), abs=1e-6)

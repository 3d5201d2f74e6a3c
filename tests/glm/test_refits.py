"""Minimisers with one example changed, against fits from scratch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.glm.glm_cases import CODES, COLUMNS, table
from tests.glm.glm_cases import EXACT_MODELS as MODELS
from torchfil.glm import Absent, Label, LinearRegression, NominalAttribute, Question, Shift
from torchfil.glm.guesses import ask
from torchfil.glm.refits import GLMView, minimiser_changes

N = 60


def with_code(number: int) -> Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
    def change(X: np.ndarray, y: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
        X[row, COLUMNS] = CODES[number]
        return X, y

    return change


def with_label(X: np.ndarray, y: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    y[row] = 1 - y[row] if set(y) <= {0, 1} else y[row] + 1
    return X, y


def with_more(X: np.ndarray, y: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    X[row, 3] += 0.7
    return X, y


def without(X: np.ndarray, y: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    return np.delete(X, row, axis=0), np.delete(y, row)


def refit(name: str, X: np.ndarray, y: np.ndarray, weight: np.ndarray, row: int, change: Callable) -> torch.Tensor:  # type: ignore[type-arg]
    inputs, targets = change(X.copy(), y.copy(), row)
    weights = weight if len(inputs) == len(X) else np.delete(weight, row)
    return MODELS[name]().fit(inputs, targets, sample_weight=weights)._fit.weights[:, 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("surrogate", [True, False])
def test_updates_equal_refits(name: str, surrogate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of question, weighted."""
    if not surrogate:
        monkeypatch.setattr("torchfil.glm.refits._THIRD_NUMBERS", 0)
    X, y, _ = table(name)
    weight = np.random.default_rng(5).uniform(0.2, 2.0, N)
    view = GLMView.build(MODELS[name]().fit(X, y, sample_weight=weight), X, y)
    label = Label(2) if name.startswith("logistic") else Shift(1.0)
    cases: list[tuple[Question, dict[int, Callable]]] = [  # type: ignore[type-arg]
        (NominalAttribute(COLUMNS, CODES), {k: with_code(k) for k in range(3)}),
        (label, {1: with_label}),
        (Shift(0.7, column=3), {1: with_more}),
        (Absent(), {1: without}),
    ]
    for question, changes in cases:
        asked = ask(question, view)
        moved = minimiser_changes(view, asked.alternatives, tolerance=1e-11)
        for row in range(0, N, 20):
            own = int(asked.truth[row])
            assert float(moved[row, own].abs().max()) == 0
            for answer, change in changes.items():
                place = 1 - own if isinstance(question, Label) else answer
                expected = refit(name, X, y, weight, row, change)
                assert torch.allclose(view.weights + moved[row, place], expected, rtol=0, atol=1e-9), (row, question)


def test_an_example_that_cannot_be_spared() -> None:
    """Without it a weight would be arbitrary."""
    X, y = np.vstack([np.eye(3), np.eye(3)[:2]]), np.arange(5.0)
    view = GLMView.build(LinearRegression().fit(X, y), X, y)
    with pytest.raises(ValueError, match=r"examples \[2\] alone"):
        minimiser_changes(view, ask(Absent(), view).alternatives)
    assert torch.isfinite(minimiser_changes(view, ask(Shift(1.0), view).alternatives)).all()

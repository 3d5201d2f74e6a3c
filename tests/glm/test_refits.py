"""Minimisers with one example changed, against fits from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

from tests.glm.glm_cases import CODES, COLUMNS, table
from tests.glm.glm_cases import EXACT_MODELS as MODELS
from torchfil.glm import Absent, Label, LinearRegression, NominalAttribute, Question, Shift, guess
from torchfil.glm.guesses import ask
from torchfil.glm.refits import GLMView, minimiser_changes

N = 60


def refit(
    name: str, X: np.ndarray, y: np.ndarray, weight: np.ndarray, row: int, change: str, code: int
) -> Any:
    """The weights of a fit from scratch, with one example changed or left out."""
    X, y, keep = X.copy(), y.copy(), np.full(N, True)
    if change == "attribute":
        X[row, COLUMNS] = CODES[code]
    elif change == "label":
        y[row] = 1 - y[row] if name.startswith("logistic") else y[row] + 1
    elif change == "column":
        X[row, 3] += 0.7
    else:
        keep[row] = False
    return MODELS[name]().fit(X[keep], y[keep], sample_weight=weight[keep])._fit.weights[:, 0]


@pytest.mark.parametrize("name", MODELS)
def test_updates_equal_refits(name: str) -> None:
    """Every kind of question, weighted."""
    X, y, _ = table(name)
    weight = np.random.default_rng(5).uniform(0.2, 2.0, N)
    model = MODELS[name]().fit(X, y, sample_weight=weight)
    view = GLMView.build(model, X, y)
    questions: dict[str, Question] = {
        "attribute": NominalAttribute(COLUMNS, CODES),
        "label": Label(2) if name.startswith("logistic") else Shift(1.0),
        "column": Shift(0.7, column=3),
        "absent": Absent(),
    }
    for change, question in questions.items():
        asked = ask(question, view)
        moved = minimiser_changes(view, asked.alternatives, tolerance=1e-11)
        found, distances = (
            guess(model, X, y, question, 0.02),
            (moved.norm(dim=2) / 0.02).cpu().numpy(),
        )
        assert found.divergence == pytest.approx(distances**2 / 2, rel=1e-6)
        # of the likelihood ratio, of the answer that is told best
        rates = ndtr(ndtri(0.05) + distances.max(axis=1))
        assert found.true_positive_rate(0.05) == pytest.approx(rates, rel=1e-6)
        for row in range(0, N, 20):
            own = int(asked.truth[row])
            assert float(moved[row, own].abs().max()) == 0
            for answer in range(3) if change == "attribute" else [1 - own]:
                expected = refit(name, X, y, weight, row, change, answer)
                assert torch.allclose(
                    view.weights + moved[row, answer], expected, rtol=0, atol=1e-9
                ), (row, change)


def test_an_example_that_cannot_be_spared() -> None:
    """Without it a weight would be arbitrary."""
    X, y = np.vstack([np.eye(3), np.eye(3)[:2]]), np.arange(5.0)
    view = GLMView.build(LinearRegression().fit(X, y), X, y)
    with pytest.raises(ValueError, match=r"examples \[2\] alone"):
        minimiser_changes(view, ask(Absent(), view).alternatives)
    assert torch.isfinite(minimiser_changes(view, ask(Shift(1.0), view).alternatives)).all()

"""What the release of a linear model leaks about every row of a table: private columns and questions, by name."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas
import torch

from torchfil.glm.estimators import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
)
from torchfil.glm.guesses import Absent, Guess, Label, NominalAttribute, Question, Shift, guess
from torchfil.glm.tables import EncodedTable, check_column

__all__ = ["FALSE_POSITIVE_RATE", "MODELS", "LeakageTable", "leakage_table", "question_about"]

ModelName = Literal["linear", "logistic", "softmax", "poisson"]
MODELS: dict[str, type[Any]] = {
    "linear": LinearRegression,
    "logistic": LogisticRegression,
    "softmax": SoftmaxRegression,
    "poisson": PoissonRegression,
}
_MOST_ANSWERS = 12
FALSE_POSITIVE_RATE = 0.01  # the false-positive rate for the true-positive rates
_RELEASES, _SCORED = 300, 10_000  # how often the noise is drawn for a released model's score; on how many rows


@dataclass(frozen=True)
class LeakageTable:
    """Leakage by row.

    Attributes:
        columns: ``fil`` (η of all private coordinates together) and ``mse_bound`` (per coordinate), and for each
            private attribute ``<name>_fil`` (η) and ``<name>_error`` (the least root mean squared error of an
            unbiased attacker, in the attribute's own unit, or of its 0/1 columns if it is one-hot), [n] each. For each
            question ``<question>_guess`` (how often the best attacker is right), ``<question>_divergence`` and
            ``<question>_tpr`` (its true-positive rate at a false-positive rate of 1 %).
        score: The score of the fitted model on the table: R², accuracy or D².
        released_score: The same for the released model: the median over draws of the noise.
        blind_score: The same for a model without inputs.
        guesses: What any attacker can infer, by question.
        model: The fitted model.
        targets: The targets of the fit, [n].
    """

    columns: dict[str, np.ndarray]
    score: float
    released_score: float
    blind_score: float
    guesses: dict[str, Guess]
    model: GeneralizedLinearModel
    targets: np.ndarray


def leakage_table(
    table: EncodedTable,
    private: Sequence[str] = (),
    *,
    questions: Sequence[str] = (),
    model: ModelName = "linear",
    l2: float = 1e-2,
    sigma: float,
    intercept: bool = True,
) -> LeakageTable:
    """Fit the model to all rows, and compute what releasing w* + N(0, σ²I) leaks about each.

    Args:
        table: From :func:`torchfil.glm.tables.read_table`.
        private: The attributes that an attacker wants who knows everything else; none: everything, including the
            target.
        questions: The questions of an attacker who knows everything else; see :func:`question_about`.
        model: "linear", "logistic" (two labels), "softmax" or "poisson".
        l2: λ, the penalty.
        sigma: σ.
        intercept: Whether to fit (and release) an intercept.

    Raises:
        ValueError: There is no such attribute, the targets do not fit the model, or no minimum was found.
    """
    for name in private:
        check_column(name, list(table.attributes))
    if not math.isfinite(sigma) or not sigma > 0:
        raise ValueError(f"sigma={sigma} must be positive and finite: without noise the release gives everything away")
    asked = {text: question_about(table, text, model) for text in questions}

    X, y = pandas.DataFrame(table.inputs, columns=table.columns, copy=False), _targets_for(model, table.targets)
    fitted: GeneralizedLinearModel = MODELS[model](l2=l2, fit_intercept=intercept).fit(X, y)
    columns = _fil_columns(table, fitted, X, y, sigma, private)
    guesses = {text: guess(fitted, X, y, question, sigma) for text, question in asked.items()}
    for text, best in guesses.items():
        columns[f"{text}_guess"] = best.accuracy
        columns[f"{text}_divergence"] = best.divergence.max(axis=1)
        columns[f"{text}_tpr"] = best.true_positive_rate(FALSE_POSITIVE_RATE)
    return LeakageTable(columns, float(fitted.score(X, y)), *_released_scores(fitted, X, y, sigma), guesses, fitted, y)


def _released_scores(fitted: GeneralizedLinearModel, X: Any, y: np.ndarray, sigma: float) -> tuple[float, float]:
    """The scores of the model with its noise (median of 300 draws) and of one without inputs.

    The noise here has a separate seed, and its draws are not released; for long tables, 10,000 rows are scored.
    """
    rows = np.random.default_rng(0).permutation(len(y))[:_SCORED]
    inputs, targets = np.asarray(X)[rows], y[rows]
    released = copy.copy(fitted)
    generator = torch.Generator().manual_seed(0)

    scores = []
    for _ in range(_RELEASES):
        weights = fitted.release(sigma, generator).numpy()
        released.coef_ = weights[..., : fitted.n_features_in_]
        if fitted.fit_intercept:
            released.intercept_ = weights[..., -1]
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                scores.append(float(released.score(inputs, targets)))
        except ValueError:  # overflowing predictions have no score
            scores.append(-math.inf)

    _, counts = np.unique(targets, return_counts=True)
    blind = counts.max() / len(targets) if hasattr(fitted, "classes_") else 0.0
    return float(np.median(scores)), float(blind)


def question_about(table: EncodedTable, text: str, model: ModelName = "linear") -> Question:
    """The question that a text describes.

    ``vkorc1``: which value does this column (or the target) have? ``age+10``: is the value as it is, or 10 more?
    ``absent``: is the row there at all?

    Raises:
        ValueError: There is no such column, or it has more than 12 different values.
    """
    if text == table.target:
        labels = np.unique(table.targets)
        _check_few(text, len(labels))
        return Label(range(len(labels)) if model == "logistic" else labels.tolist(), [str(v) for v in labels])
    if text in table.levels:
        codes = np.eye(len(table.levels[text]))[:, 1:]
        return NominalAttribute(table.attributes[text], codes, table.levels[text])
    if text in table.attributes:
        numbers = np.unique(table.inputs[:, table.attributes[text][0]])
        _check_few(text, len(numbers))
        return NominalAttribute(table.attributes[text], numbers[:, None])

    # no column: a difference, or absence
    if text == "absent":
        return Absent()
    difference = re.fullmatch(r"(.+?)([+-]\d+\.?\d*(?:e[+-]?\d+)?)", text)
    name, by = (difference[1].strip(), float(difference[2])) if difference else (text, 0.0)
    check_column(name, [*table.attributes, table.target])
    if name in table.levels:
        raise ValueError(f"{name!r} is one-hot, so {text!r} has no meaning; ask for {name!r}")
    return Shift(by, None if name == table.target else table.attributes[name][0])


def _check_few(name: str, values: int) -> None:
    if values > _MOST_ANSWERS:
        raise ValueError(
            f"{name!r} has {values} different values, a question at most {_MOST_ANSWERS} answers; ask for a "
            f"difference, e.g. --question {name}+1"
        )


def _fil_columns(
    table: EncodedTable, fitted: GeneralizedLinearModel, X: Any, y: Any, sigma: float, private: Sequence[str]
) -> dict[str, np.ndarray]:
    """η and error for all private coordinates together, and for each private attribute."""
    if not private:
        return {"fil": fitted.fil(X, y, sigma), "mse_bound": fitted.mse_bound(X, y, sigma)}

    together = sorted({column for name in private for column in table.attributes[name]})
    places = [together, *(list(table.attributes[name]) for name in private)]
    # numbers instead of names, which could clash with the name of the whole
    asked: dict[str, Any] = {str(number): columns for number, columns in enumerate(places)}
    eta, bound = fitted.fil(X, y, sigma, attributes=asked), fitted.mse_bound(X, y, sigma, attributes=asked)
    columns = {"fil": eta["0"], "mse_bound": bound["0"]}
    for number, name in enumerate(private, start=1):
        columns[f"{name}_fil"] = eta[str(number)]
        columns[f"{name}_error"] = np.sqrt(bound[str(number)])
    return columns


def _targets_for(model: str, targets: np.ndarray) -> np.ndarray:
    labels = np.unique(targets)
    if model == "softmax":
        return targets
    if model == "logistic":
        if len(labels) != 2:
            shown = ", ".join(map(str, labels[:4])) + (", …" if len(labels) > 4 else "")
            raise ValueError(f"a logistic model needs a target with two values, this one has {len(labels)}: {shown}")
        return (targets == labels[1]).astype(float)
    if targets.dtype.kind != "f":
        raise ValueError(f"a {model} model needs a target of numbers, got e.g. {str(labels[0])!r}; use logistic?")
    return targets

"""The models that the GLM tests go through, with data for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.cases import DEVICE
from torchfil.glm import (
    GeneralizedLinearModel,
    LinearRegression,
    LogisticRegression,
    PoissonRegression,
    SoftmaxRegression,
)

N, D = 25, 4


def pseudo_huber(margin: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(1 + (margin - target).square()) - 1


CASES: dict[str, Callable[[], GeneralizedLinearModel]] = {
    "linear": lambda: LinearRegression(l2=0.0),
    "ridge": lambda: LinearRegression(l2=0.03),
    "linear with intercept": lambda: LinearRegression(l2=0.01, fit_intercept=True),
    "logistic": lambda: LogisticRegression(l2=0.05),
    "logistic with intercept": lambda: LogisticRegression(l2=0.05, fit_intercept=True),
    "poisson": lambda: PoissonRegression(l2=0.1),
    "softmax": lambda: SoftmaxRegression(l2=0.03),
    "softmax with intercept": lambda: SoftmaxRegression(l2=0.03, fit_intercept=True),
    "pseudo-huber": lambda: GeneralizedLinearModel(pseudo_huber, l2=0.02),
}


def data(name: str, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D))
    if name.startswith("logistic"):
        y = (rng.random(N) < 0.5).astype(float)
    elif name.startswith("softmax"):
        y = rng.integers(3, size=N).astype(float)
    elif name == "poisson":
        y = rng.poisson(2.0, N).astype(float)
    else:
        y = X @ np.array([1.0, -0.5, 0.2, 0.0]) + rng.normal(size=N)
    return X, y, rng.uniform(0.5, 2.0, N) if weighted else np.ones(N)


# --- for refits and attacks: an attribute of three levels in the columns 1 and 2, and fits to the
# last digit

COLUMNS = [1, 2]
CODES = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
EXACT: dict[str, Any] = {"tolerance": 1e-14, "device": DEVICE}
EXACT_MODELS: dict[str, Callable[[], GeneralizedLinearModel]] = {
    "linear": lambda: LinearRegression(l2=0.0, **EXACT),
    "ridge with intercept": lambda: LinearRegression(l2=0.02, fit_intercept=True, **EXACT),
    "logistic": lambda: LogisticRegression(l2=0.05, **EXACT),
    "logistic with intercept": lambda: LogisticRegression(l2=0.05, fit_intercept=True, **EXACT),
    "poisson": lambda: PoissonRegression(l2=0.1, **EXACT),
    "pseudo-huber": lambda: GeneralizedLinearModel(pseudo_huber, l2=0.05, **EXACT),
}


def table(name: str, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs with the attribute, targets, and its levels."""
    rng = np.random.default_rng(3)
    levels = rng.integers(3, size=n)
    X = np.column_stack([rng.normal(size=n), CODES[levels], rng.normal(size=(n, 2))])
    signal = X @ np.array([0.5, 1.0, -1.0, 0.3, 0.0])
    if name.startswith("logistic"):
        y = (rng.random(n) < 1 / (1 + np.exp(-signal))).astype(float)
    elif name == "poisson":
        y = rng.poisson(np.exp(0.3 * signal)).astype(float)
    else:
        y = signal + 0.5 * rng.normal(size=n)
    return X, y, levels

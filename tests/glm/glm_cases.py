"""The models that the GLM tests go through, with data for each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

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

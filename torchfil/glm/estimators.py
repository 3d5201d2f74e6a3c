"""The usual generalised linear models in scikit-learn's manner: their losses, targets, predictions and scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.glm.model import ClassifierMixin, GeneralizedLinearModel, RegressorMixin
from torchfil.glm.solver import LOGISTIC, POISSON, SQUARED, Loss, SoftmaxLoss, Solver
from torchfil.utils.errors import require
from torchfil.viz.common import as_array


class _OwnLoss(GeneralizedLinearModel):
    """A model with its own loss."""

    def __init__(
        self,
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
        solver: Solver = "newton",
    ) -> None:
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.device = device
        self.solver = solver


class LinearRegression(RegressorMixin, _OwnLoss):
    """Least squares, ½(wᵀx − y)²; its score is R². See :class:`GeneralizedLinearModel`."""

    loss = SQUARED


class LogisticRegression(ClassifierMixin, _OwnLoss):
    """Logistic regression, log(1 + e^m) − ym for targets in {0, 1}; see :class:`GeneralizedLinearModel`."""

    loss = LOGISTIC

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets must be 0 or 1."""
        values = np.unique(as_array(y).astype(float))
        require(set(values.tolist()) <= {0.0, 1.0}, f"logistic targets must be 0 or 1, got {values[:5].tolist()}")
        self.classes_ = np.array([0, 1])
        return super().fit(X, y, sample_weight)

    def decision_function(self, X: Any) -> np.ndarray:
        """The margin, [n]."""
        return self.margin(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of 0 and 1, [n, 2]."""
        margin = torch.as_tensor(self.margin(X))
        return torch.stack([torch.sigmoid(-margin), torch.sigmoid(margin)], dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """0 or 1."""
        return (self.margin(X) > 0).astype(int)


class SoftmaxRegression(ClassifierMixin, _OwnLoss):
    """Softmax regression, −log softmax(Wx)_y for any number of classes; see :class:`GeneralizedLinearModel`.

    The minimisers differ by one vector added to every class; the shortest one is used: Σ_c w_c = 0. It is released with
    noise on all classes × p entries. A private target moves within the simplex: it has classes − 1 coordinates.

    Attributes:
        classes_: The labels.
        coef_: [classes, d].
        intercept_: [classes].
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets are labels."""
        classes = np.unique(as_array(y))
        require(len(classes) >= 2, f"a classifier needs at least 2 classes, y holds {classes.tolist()}")
        self.classes_ = classes
        return super().fit(X, y, sample_weight)

    def decision_function(self, X: Any) -> np.ndarray:
        """The logits, [n, classes]."""
        return self.margin(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The classes' probabilities, [n, classes]."""
        return torch.softmax(torch.as_tensor(self.margin(X)), dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most likely label."""
        return self.classes_[self.margin(X).argmax(axis=1)]

    def _loss(self) -> Loss:
        return SoftmaxLoss(len(self.classes_))

    def _num_margins(self) -> int:
        return len(self.classes_) - 1

    def _targets(self, y: Any) -> Tensor:
        labels = as_array(y)
        unknown = np.setdiff1d(labels, self.classes_).tolist()
        require(not unknown, f"labels {unknown} are not among the classes {self.classes_.tolist()}")
        return self._tensor(labels[:, None] == self.classes_[None, :])

    def _parameters(self) -> Tensor:
        weights = self._fit.weights
        return SoftmaxLoss(len(self.classes_)).basis(weights) @ weights.mT


class PoissonRegression(RegressorMixin, _OwnLoss):
    """Poisson regression, e^m − ym for counts y ≥ 0; see :class:`GeneralizedLinearModel`."""

    loss = POISSON

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets must not be negative."""
        smallest = np.min(as_array(y).astype(float), initial=0)
        require(smallest >= 0, f"Poisson targets are counts; the smallest is {smallest:g}")
        return super().fit(X, y, sample_weight)

    def predict(self, X: Any) -> np.ndarray:
        """The expected count e^m."""
        return np.exp(self.margin(X))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D², the share of the deviance explained."""
        from sklearn.metrics import d2_tweedie_score

        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))

"""Generalised linear models in scikit-learn's manner, computed in torch, with the Fisher information they release."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchfil.fisher.amplification import analytic_gaussian_epsilon
from torchfil.glm.fil import Sensitivity
from torchfil.glm.losses import LOGISTIC, POISSON, SQUARED, MarginLoss
from torchfil.glm.solver import minimise

try:
    from sklearn.base import BaseEstimator
except ImportError as error:
    raise ImportError("torchfil.glm needs scikit-learn: pip install 'torchfil[glm]'") from error

__all__ = ["GeneralizedLinearModel", "LinearRegression", "LogisticRegression", "PoissonRegression"]

Reduce = Literal["max", "mean"] | float


class GeneralizedLinearModel(BaseEstimator):
    """w* = argmin Σ ω_i ℓ(wᵀx_i, y_i) + (nλ/2)‖w‖², for any convex, twice differentiable ℓ(margin, target).

    Args:
        loss: A :class:`MarginLoss`, or a torch function of one margin and one target (derivatives by autograd).
        l2: λ ≥ 0.
        fit_intercept: Whether to add a column of ones; it is public and not penalised.
        tolerance: The largest entry of the gradient over n at which the fit counts as exact.
        max_iterations: Newton steps at most.
        device: Where to compute.

    Attributes:
        coef_: The inputs' weights, [d].
        intercept_: The intercept, 0 without one.
        gradient_norm_: The largest entry of the gradient over n.
        n_features_in_: d.
    """

    def __init__(
        self,
        loss: MarginLoss | Callable[[Tensor, Tensor], Tensor],
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        self.loss = loss
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.tolerance = tolerance
        self.max_iterations = max_iterations
        self.device = device

    def _margin_loss(self) -> MarginLoss:
        return self.loss if isinstance(self.loss, MarginLoss) else MarginLoss.from_function(self.loss)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Minimise to ``tolerance``.

        Raises:
            SingularHessianError: Collinear columns with l2 = 0, by name or number.
            NotConvergedError: No minimum was found (separable data with l2 = 0).
        """
        if not self.l2 >= 0:
            raise ValueError(f"l2={self.l2} must be ≥ 0")
        names = list(X.columns) if hasattr(X, "columns") else None
        inputs, targets, weights = self._tensors(X, y, sample_weight)
        penalised = torch.ones(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
        if self.fit_intercept:
            penalised[-1] = 0
        self._fit = minimise(
            self._margin_loss(),
            inputs,
            targets,
            weights,
            self.l2,
            penalised,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
        self._training_weight = weights
        self.n_features_in_ = inputs.shape[1] - int(self.fit_intercept)
        self.coef_ = self._fit.weights[: self.n_features_in_].cpu().numpy()
        self.intercept_ = float(self._fit.weights[-1]) if self.fit_intercept else 0.0
        self.gradient_norm_ = self._fit.gradient_norm
        if names is not None:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        return self

    def margin(self, X: Any) -> np.ndarray:
        """wᵀx, plus the intercept."""
        self._check_fitted()
        return np.asarray(X, dtype=float) @ self.coef_ + self.intercept_

    def predict(self, X: Any) -> np.ndarray:
        """The margin; subclasses predict on the target's scale."""
        return self.margin(X)

    def release(
        self,
        scale: float,
        generator: torch.Generator | None = None,
        *,
        noise: Literal["gaussian", "laplace"] = "gaussian",
    ) -> Tensor:
        """The perturbed parameters, [p] (the intercept last): Gaussian of deviation σ or Laplace of scale b.

        The FIM of either is JᵀJ/scale²: a Laplace release of scale b carries the information 1/b² per coordinate.
        """
        self._check_fitted()
        if not scale > 0:
            raise ValueError(f"scale={scale} must be positive: without noise the release gives everything away")
        w = self._fit.weights.cpu()
        if noise == "gaussian":
            return w + scale * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        if noise != "laplace":
            raise ValueError(f"noise={noise!r} must be 'gaussian' or 'laplace'")
        uniform = torch.rand(w.shape, generator=generator, dtype=w.dtype) - 0.5
        return w - scale * uniform.sign() * torch.log1p(-2 * uniform.abs())

    def sensitivity(self, X: Any, y: Any, *, private_target: bool = True, sample_weight: Any = None) -> Sensitivity:
        """The minimiser's dependence on the training examples (X, y), as fitted (same rows, same weights)."""
        self._check_fitted()
        inputs, targets, weights = self._tensors(X, y, sample_weight)
        if sample_weight is None:
            if len(weights) != len(self._training_weight):
                raise ValueError(
                    f"FIL speaks of the training examples: the model was fitted on {len(self._training_weight)}, got "
                    f"{len(weights)}. Pass the training set, or sample_weight for a part of it."
                )
            weights = self._training_weight
        return Sensitivity.build(
            self._margin_loss(),
            inputs,
            targets,
            weights,
            self._fit.weights,
            self._fit.hessian,
            num_inputs=self.n_features_in_,
            private_target=private_target,
        )

    def fil(
        self,
        X: Any,
        y: Any,
        sigma: float = 1.0,
        attributes: Mapping[str, Sequence[Any] | slice] | None = None,
        groups: Sequence[Hashable] | None = None,
        private_target: bool = True,
        kind: Literal["spectral", "trace"] = "spectral",
        *,
        one_hot: bool = False,
        sample_weight: Any = None,
    ) -> Any:
        """Fisher information loss of releasing w* + N(0, σ²I): η per example, attribute, group, or for all.

        Args:
            X: The training inputs, [n, d].
            y: The training targets, [n].
            sigma: σ (or a Laplace release's scale b).
            attributes: {name: columns (numbers, names or a slice)}; gives η of each attribute set for every example.
            groups: One label per example; gives η of each group of examples together. The label of everybody, e.g.
                ``["all"] * n``, gives that of the whole data set.
            private_target: Whether y is private.
            kind: "spectral": η = ‖J‖₂/σ. "trace": η̄ = ‖J‖_F/(σ sqrt(d)), d the number of private coordinates.
            one_hot: Whether the attributes are one-hot: they move within the simplex only.
            sample_weight: Of the examples given, where they are a part of the training set.

        Returns:
            An array [n]; with ``attributes`` a dict {name: [n]}; with ``groups`` a dict {group: η}.
        """
        if not sigma > 0:
            raise ValueError(f"sigma={sigma} must be positive: without noise the Fisher information is infinite")
        if kind not in ("spectral", "trace"):
            raise ValueError(f"kind={kind!r} must be 'spectral' or 'trace'")
        if attributes is not None and groups is not None:
            raise ValueError("ask for attributes or groups, one at a time")
        sensitivity = self.sensitivity(X, y, private_target=private_target, sample_weight=sample_weight)
        if attributes is not None:
            return {
                name: self._attribute_fil(sensitivity, self._columns(columns), kind, one_hot) / sigma
                for name, columns in attributes.items()
            }
        coordinates = self.n_features_in_ + int(private_target)
        if groups is not None:
            return {group: value / sigma for group, value in _group_fil(sensitivity, groups, kind, coordinates).items()}
        square = sensitivity.squared_norm() if kind == "spectral" else sensitivity.squared_trace() / coordinates
        return square.clamp(min=0).sqrt().cpu().numpy() / sigma

    def sigma_for(self, X: Any, y: Any, target_eta: float, *, reduce: Reduce = "max", **options: Any) -> float:
        """The σ at which the largest ("max"), mean, or a quantile (a number in (0, 1)) of η is ``target_eta``."""
        if not target_eta > 0:
            raise ValueError(f"target_eta={target_eta} must be positive")
        eta = self.fil(X, y, 1.0, **options)
        if reduce == "max":
            return float(eta.max() / target_eta)
        if reduce == "mean":
            return float(eta.mean() / target_eta)
        if isinstance(reduce, float) and 0 < reduce < 1:
            return float(np.quantile(eta, reduce) / target_eta)
        raise ValueError(f"reduce={reduce!r} must be 'max', 'mean' or a quantile in (0, 1)")

    def sigma_for_dp(self, X: Any, epsilon: float, delta: float) -> float:
        """The σ that makes the release (ε, δ)-differentially private (replace one), analytic Gaussian mechanism.

        Sensitivity 2L/(nλ) (Chaudhuri et al. 2011), for an L-Lipschitz loss, ‖x‖ ≤ 1, λ > 0, equal weights and no
        intercept; each assumption is checked.
        """
        self._check_fitted()
        lipschitz = self._margin_loss().lipschitz
        norms = np.linalg.norm(np.asarray(X, dtype=float), axis=1)
        n = len(norms)
        reasons = {
            f"the {self._margin_loss().name} loss has an unbounded derivative": lipschitz is None,
            f"l2={self.l2} must be positive": not self.l2 > 0,
            f"inputs must have norm at most 1, the largest is {norms.max():.3g}": norms.max() > 1 + 1e-12,
            "an intercept is not penalised": self.fit_intercept,
            "sample weights must all be 1": bool((self._training_weight != 1).any()),
        }
        broken = [reason for reason, holds in reasons.items() if holds]
        if broken or lipschitz is None:
            raise ValueError(f"output perturbation has no finite sensitivity here: {'; '.join(broken)}")
        low, high = 1e-6, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if analytic_gaussian_epsilon(middle, delta) > epsilon else (low, middle)
        return high * 2 * lipschitz / (n * self.l2)

    def _attribute_fil(self, sensitivity: Sensitivity, columns: list[int], kind: str, one_hot: bool) -> np.ndarray:
        gram = sensitivity.attribute_gram(columns, tangent=one_hot)
        if kind == "spectral":
            square = torch.linalg.eigvalsh(gram)[:, -1]
        else:
            square = torch.einsum("nii->n", gram) / gram.shape[1]
        return square.clamp(min=0).sqrt().cpu().numpy()

    def _columns(self, columns: Sequence[Any] | slice) -> list[int]:
        if isinstance(columns, slice):
            return list(range(self.n_features_in_))[columns]
        names = list(getattr(self, "feature_names_in_", ()))
        numbers = [names.index(column) if column in names else column for column in columns]
        wrong = [c for c in numbers if not (isinstance(c, (int, np.integer)) and 0 <= c < self.n_features_in_)]
        if wrong or not numbers:
            raise ValueError(f"unknown columns {wrong}; use numbers below {self.n_features_in_} or names of {names}")
        return [int(c) for c in numbers]

    def _tensors(self, X: Any, y: Any, sample_weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = torch.as_tensor(np.asarray(X, dtype=np.float64), device=self.device)
        targets = torch.as_tensor(np.asarray(y, dtype=np.float64), device=self.device)
        if inputs.ndim != 2 or targets.shape != inputs.shape[:1] or not len(inputs):
            raise ValueError(f"X must be [n, d] and y [n], got {tuple(inputs.shape)} and {tuple(targets.shape)}")
        wrong = ~(torch.isfinite(inputs).all(dim=1) & torch.isfinite(targets))
        if bool(wrong.any()):
            raise ValueError(f"NaN or infinite values in rows {wrong.nonzero().flatten().tolist()[:10]}")
        weights = torch.ones_like(targets)
        if sample_weight is not None:
            weights = torch.as_tensor(np.asarray(sample_weight, dtype=np.float64), device=self.device)
            if weights.shape != targets.shape or bool((weights < 0).any()):
                raise ValueError("sample_weight must be one number ≥ 0 per example")
        if self.fit_intercept:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        return inputs, targets, weights

    def _check_fitted(self) -> None:
        if not hasattr(self, "_fit"):
            raise ValueError(f"this {type(self).__name__} is not fitted yet; call fit(X, y) first")


class LinearRegression(GeneralizedLinearModel):
    """Least squares, ½(wᵀx − y)²; see :class:`GeneralizedLinearModel`."""

    def __init__(
        self,
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        super().__init__(SQUARED, l2, fit_intercept, tolerance, max_iterations, device)

    def score(self, X: Any, y: Any) -> float:
        """R²."""
        y = np.asarray(y, dtype=float)
        return float(1 - np.square(y - self.predict(X)).sum() / np.square(y - y.mean()).sum())


class LogisticRegression(GeneralizedLinearModel):
    """Logistic regression, log(1 + e^m) − ym for targets in {0, 1}; see :class:`GeneralizedLinearModel`."""

    def __init__(
        self,
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        super().__init__(LOGISTIC, l2, fit_intercept, tolerance, max_iterations, device)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets must be 0 or 1."""
        values = np.unique(np.asarray(y, dtype=float))
        if not set(values.tolist()) <= {0.0, 1.0}:
            raise ValueError(f"logistic targets must be 0 or 1, got {values[:5].tolist()}")
        self.classes_ = np.array([0, 1])
        return super().fit(X, y, sample_weight)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of 0 and 1, [n, 2]."""
        positive = 1 / (1 + np.exp(-self.margin(X)))
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """0 or 1."""
        return (self.margin(X) > 0).astype(int)

    def score(self, X: Any, y: Any) -> float:
        """Accuracy."""
        return float((self.predict(X) == np.asarray(y)).mean())


class PoissonRegression(GeneralizedLinearModel):
    """Poisson regression, e^m − ym for counts y ≥ 0; see :class:`GeneralizedLinearModel`."""

    def __init__(
        self,
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        super().__init__(POISSON, l2, fit_intercept, tolerance, max_iterations, device)

    def predict(self, X: Any) -> np.ndarray:
        """The expected count e^m."""
        return np.exp(self.margin(X))


def _group_fil(
    sensitivity: Sensitivity, groups: Sequence[Hashable], kind: str, coordinates: int
) -> dict[Hashable, float]:
    labels = list(groups)
    if len(labels) != len(sensitivity.X):
        raise ValueError(f"groups must give one label per example: {len(labels)} for {len(sensitivity.X)}")
    members: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        members.setdefault(label, []).append(row)
    result: dict[Hashable, float] = {}
    for label, rows in members.items():
        gram = sensitivity.group_gram(torch.tensor(rows, device=sensitivity.X.device))
        if kind == "spectral":
            square = torch.linalg.eigvalsh((gram + gram.mT) / 2)[-1]
        else:
            square = gram.trace() / (coordinates * len(rows))
        result[label] = float(square.clamp(min=0).sqrt())
    return result

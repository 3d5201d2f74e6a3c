"""A generalised linear model like scikit-learn's, computed in torch, with the Fisher information
that it releases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy import special
from torch import Generator, Tensor

from torchfil.fisher.amplification import analytic_gaussian_epsilon
from torchfil.glm import solver as solvers
from torchfil.glm.fil import Kind, Release, Sensitivity, fisher_information_loss, mse_bound_from_fil
from torchfil.glm.solver import Fit, Loss, MarginLoss, Objective, SoftmaxLoss
from torchfil.utils.errors import installed_by
from torchfil.utils.noise import NoiseSource
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array

with installed_by("glm", "torchfil.glm needs scikit-learn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone

Attributes = Mapping[str, Sequence[Any] | slice]
_DRAWS = 2**17  # of noise, for the mean of a score


class GeneralizedLinearModel(BaseEstimator):
    """w* = argmin Σ ω_i ℓ(wᵀx_i, y_i) + (nλ/2)‖w‖², for any convex, twice differentiable ℓ(margin,
    target).

    Args:
        loss: A :class:`MarginLoss`, or a torch function of one margin and one target (derivatives
            by autograd).
        l2: λ ≥ 0.
        fit_intercept: Whether to add a column of ones; it is public and not penalised.
        tolerance: The largest entry of the gradient over n at which the fit counts as exact.
        max_iterations: The largest number of Newton steps.
        device: The device for the computation.

    Attributes:
        coef_: The inputs' weights, [d].
        intercept_: The intercept, 0 without one.
        gradient_norm_: The largest entry of the gradient over n.
        n_iter_: Newton steps taken.
        n_features_in_: d.
        score_name: What :meth:`score` is.
    """

    score_name = "minus the mean loss"

    def __init__(
        self,
        loss: MarginLoss | Callable[[Tensor, Tensor], Tensor],
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        self.loss, self.l2, self.fit_intercept = loss, l2, fit_intercept
        self.tolerance, self.max_iterations, self.device = tolerance, max_iterations, device

    def fit(self, X: object, y: object, sample_weight: object = None) -> Any:
        """Minimise to ``tolerance``.

        Raises:
            SingularHessianError: Collinear columns with l2 = 0.
            NotConvergedError: No minimum was found (separable data with l2 = 0).
        """
        if not 0 <= self.l2 < math.inf:
            raise ValueError(f"l2={self.l2} must be a finite number ≥ 0")
        names = list(X.columns) if hasattr(X, "columns") else None
        objective = self._objective(X, y, sample_weight)
        num_inputs = objective.X.shape[1] - int(self.fit_intercept)
        self._fit = solvers.minimise(
            objective, tolerance=self.tolerance, max_iterations=self.max_iterations
        )

        # FIL is about exactly these examples: their weights and penalty are kept to recognise them.
        self._training_weight, self._training_l2 = objective.sample_weight, objective.l2
        self.n_features_in_ = num_inputs
        self.gradient_norm_ = self._fit.gradient_norm
        self.n_iter_ = self._fit.iterations
        parameters = self._parameters().cpu().numpy()
        self.coef_ = parameters[..., :num_inputs]
        intercept = parameters[..., -1] if self.fit_intercept else np.zeros(parameters.shape[:-1])
        self.intercept_: float | np.ndarray = intercept if parameters.ndim > 1 else float(intercept)
        if names is not None:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def margin(self, X: object) -> np.ndarray:
        """wᵀx, plus the intercept."""
        self._check_fitted()
        return as_array(X).astype(float) @ self.coef_.T + self.intercept_

    def predict(self, X: object) -> np.ndarray:
        """The margin; subclasses predict on the target's scale."""
        return self.margin(X)

    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """Minus the mean loss; subclasses have their field's usual score."""
        self._check_fitted()
        _, targets, weights = self._tensors(X, y, sample_weight)
        losses = self._loss().losses(self._tensor(self.margin(X))[:, None], targets)
        return -float((weights * losses).sum() / weights.sum())

    def expected_score(self, X: object, y: object, sigma: float) -> float:
        """The mean of :meth:`score` over the noise of a release w* + N(0, σ²I), for any σ ≥ 0: what
        noise costs.

        Noise on the weights moves each margin of row x by s z, with s = σ‖x‖ (with an intercept, σ
        sqrt(1 + ‖x‖²)) and z ~ N(0, 1). All scores are means over rows, so that rows may have noise
        of their own. R² falls by Σs²/Σ(y − ȳ)²; others are means over at least 131,072 draws of z,
        always the same.

        Args:
            X: Inputs, [n, d].
            y: Targets, [n].
            sigma: σ.

        Example:
            >>> from torchfil.glm import LinearRegression
            >>> X, y = np.array([[-1.0], [1.0]]), np.array([-2.0, 2.0])
            >>> LinearRegression().fit(X, y).expected_score(X, y, sigma=0.5)  # 1 − 2 · 0.5² / 8
            0.9375
        """
        if not 0 <= sigma < math.inf:
            raise ValueError(f"sigma={sigma} must be 0 or more, and finite")
        inputs, targets = as_array(X).astype(float), as_array(y)
        spread = sigma * np.sqrt(np.square(inputs).sum(axis=1) + self.fit_intercept)
        if self.score_name == "R²":
            return float(
                self.score(X, y)
                - np.square(spread).sum() / np.square(targets - targets.mean()).sum()
            )
        margins = self.margin(X).reshape(len(inputs), -1)
        copies = math.ceil(_DRAWS / margins.size)
        draws = np.random.default_rng(0).standard_normal((copies, *margins.shape))
        # e^m is finite
        moved = (margins + spread[:, None] * draws).clip(-700, 700).reshape(-1, margins.shape[1])

        # the score of a model whose inputs are the margins
        noisy = copy.copy(self)
        noisy.coef_, noisy.intercept_ = (
            np.eye(margins.shape[1]).reshape(*self.coef_.shape[:-1], -1),
            0.0,
        )
        with np.errstate(over="ignore"):
            return float(noisy.score(moved, np.tile(targets, copies)))

    def release(self, sigma: float, generator: Generator | None = None) -> Tensor:
        """The parameters plus N(0, σ²I), the intercept last.

        The information JᵀJ/σ² holds for a public σ: one computed from the data leaks, too, unless
        it is rounded (:meth:`sigma_for`). The operating system seeds the noise, not
        ``torch.manual_seed``; ``generator`` is for tests, because whoever knows its seed can
        subtract the noise.

        Returns:
            [p]; [classes, p] for a softmax.
        """
        self._check_fitted()
        if not sigma > 0:
            raise ValueError(
                f"sigma={sigma} must be positive: without noise the release gives everything away"
            )
        w, generator = (
            self._parameters().cpu(),
            generator or NoiseSource().generator(torch.device("cpu")),
        )
        return w + sigma * torch.randn(w.shape, generator=generator, dtype=w.dtype)

    def sensitivity(
        self, X: object, y: object, *, private_target: bool = True, sample_weight: object = None
    ) -> Sensitivity:
        """The minimiser's dependence on the training examples (X, y), as fitted (same columns, same
        weights).

        Guarantees:
            * All rows: they are refused unless, at w*, the objective has the same gradient and
              Hessian diagonal on them as in the fit, up to rounding of the inputs to float32. Their
              order matters only if weights differ.
            * Fewer rows, with their ``sample_weight``: only the columns' names and number can be
              checked.

        Raises:
            ValueError: The model is not fitted, or was fitted on other data.
        """
        objective, fit = self._as_fitted(X, y, sample_weight), self._fit
        return Sensitivity.build(
            *objective.data, fit.weights, fit.hessian, self.n_features_in_, private_target
        )

    def _as_fitted(self, X: object, y: object, sample_weight: object) -> Objective:
        """The objective of the fit on its training examples (X, y), checked."""
        self._check_fitted()
        objective = replace(self._objective(X, y, sample_weight), l2=self._training_l2)
        given, n = len(objective.X), len(self._training_weight)
        d, columns = self.n_features_in_, objective.X.shape[1] - int(self.fit_intercept)
        if columns != d:
            raise ValueError(f"X has {columns} columns, the model was fitted on {d}")
        _check_names(X, list(getattr(self, "feature_names_in_", ())))

        # Without weights the rows must be the whole training set, whose weights are known.
        if sample_weight is None:
            if given != n:
                raise ValueError(
                    f"the model was fitted on {n} examples, got {given}. Pass the training set; "
                    "fil also takes a part, with its sample_weight"
                )
            objective = replace(objective, sample_weight=self._training_weight)
        if given == n:
            _check_minimum(objective, self._fit)
        return objective

    def fil(
        self,
        X: object,
        y: object,
        sigma: float = 1.0,
        attributes: Attributes | None = None,
        groups: Sequence[Hashable] | None = None,
        private_target: bool = True,
        kind: Kind = "spectral",
        *,
        one_hot: bool = False,
        sample_weight: object = None,
    ) -> Any:
        """Fisher information loss of releasing w* + N(0, σ²I): η per example, attribute, group, or
        for all.

        Args:
            X: The training inputs, [n, d].
            y: The training targets, [n].
            sigma: σ, public or rounded; see :meth:`sigma_for`.
            attributes: {name: columns (numbers, names or a slice)}; gives η of each attribute set
                for every example.
            groups: One label per example; gives η of each group of examples together. One label for
                everybody, e.g. ``["all"] * n``, gives η of the whole data set.
            private_target: Whether y is private.
            kind: "spectral": η = ‖J‖₂/σ. "trace": η̄ = ‖J‖_F/(σ sqrt(d)), d the number of private
                coordinates (the square root of Guo et al.'s dFIL).
            one_hot: Whether the attributes are one-hot, so that they move only within the simplex.
            sample_weight: The examples' weights, if they are a part of the training set.

        Returns:
            An array [n]; with ``attributes`` a dict {name: [n]}; with ``groups`` a dict {group: η}.
        """
        sensitivity = self.sensitivity(
            X, y, private_target=private_target, sample_weight=sample_weight
        )
        return fisher_information_loss(
            [Release(sensitivity, sigma)], self._numbered(attributes), groups, kind, one_hot
        )

    def mse_bound(self, X: object, y: object, sigma: float = 1.0, **options: Any) -> Any:
        """1/η̄² of :meth:`fil` with ``kind="trace"``, with the same options and shapes.

        This is the least mean squared error per private coordinate, over the noise, of an unbiased
        attacker who sees w* + N(0, σ²I) and knows everything else. Biased attackers can do better;
        :func:`torchfil.glm.guess` binds every attacker.
        """
        return mse_bound_from_fil(self.fil(X, y, sigma, kind="trace", **options))

    def sigma_for(self, X: object, y: object, target_eta: float, **options: Any) -> float:
        """The σ at which the largest η is at most ``target_eta``, rounded up to a public grid, the
        powers of 2^(1/4).

        This is at most 19 % more noise than needed. A σ that is computed from the data and released
        unrounded leaks, too.

        Args:
            X: The training inputs, [n, d].
            y: The training targets, [n].
            target_eta: The target η.
            **options: Options of :meth:`fil`, including ``attributes`` and ``groups``.
        """
        if not target_eta > 0:
            raise ValueError(f"target_eta={target_eta} must be positive")
        eta = self.fil(X, y, 1.0, **options)
        largest = max(np.max(each) for each in eta.values()) if isinstance(eta, dict) else eta.max()
        return round_up(float(largest) / target_eta)

    def sigma_for_dp(self, X: object, epsilon: float, delta: float) -> float:
        """The σ that makes the release (ε, δ)-differentially private (replace one), analytic
        Gaussian mechanism.

        Sensitivity 2L/(nλ) (Chaudhuri et al. 2011), for an L-Lipschitz loss, ‖x‖ ≤ 1, λ > 0, equal
        weights and no intercept; each assumption is checked. X is the training inputs: n is their
        number.
        """
        self._check_fitted()
        if not (epsilon > 0 and 0 < delta < 1):
            raise ValueError(f"epsilon={epsilon} must be positive and delta={delta} in (0, 1)")
        loss, inputs, n = self._loss(), as_array(X).astype(float), len(self._training_weight)
        given, wanted = list(inputs.shape), [n, self.n_features_in_]
        if given != wanted:
            raise ValueError(
                f"X has the shape {given}, the model was fitted on {wanted}: pass the training set"
            )

        # The theorem's assumptions; the error names those that fail.
        norms = np.linalg.norm(inputs, axis=1)
        reasons = {
            f"the {loss.name} loss has an unbounded derivative": loss.lipschitz is None,
            f"l2={self.l2} must be positive": not self.l2 > 0,
            f"inputs must have norm at most 1, the largest is {norms.max():.3g}": norms.max()
            > 1 + 1e-12,
            "an intercept is not penalised": self.fit_intercept,
            "sample weights must all be 1": bool((self._training_weight != 1).any()),
        }
        broken = [reason for reason, holds in reasons.items() if holds]
        if broken or loss.lipschitz is None:
            raise ValueError(
                f"output perturbation has no finite sensitivity here: {'; '.join(broken)}"
            )

        # ε falls with the noise: bisected on a logarithmic scale, for a sensitivity of 1.
        low, high = 1e-6, 1e6
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (
                (middle, high)
                if analytic_gaussian_epsilon(middle, delta) > epsilon
                else (low, middle)
            )
        return high * 2 * loss.lipschitz / (n * self.l2)

    def _objective(self, X: object, y: object, sample_weight: object) -> Objective:
        inputs, targets, weights = self._tensors(X, y, sample_weight)
        penalised = torch.ones_like(inputs[0])
        penalised[len(penalised) - int(self.fit_intercept) :] = 0
        return Objective(
            self._loss(), inputs, targets, weights, self.l2, penalised, self._num_margins()
        )

    def _loss(self) -> Loss:
        return (
            self.loss if isinstance(self.loss, MarginLoss) else MarginLoss.from_function(self.loss)
        )

    def _num_margins(self) -> int:
        return 1

    def _parameters(self) -> Tensor:
        return self._fit.weights[:, 0]

    def _numbered(self, attributes: Attributes | None) -> dict[str, list[int]] | None:
        return (
            None
            if attributes is None
            else {key: self.column_numbers(each) for key, each in attributes.items()}
        )

    def column_numbers(self, columns: Sequence[Any] | slice) -> list[int]:
        """The numbers of columns of the fitted model, given by number, by name or as a slice."""
        names, known = list(getattr(self, "feature_names_in_", ())), range(self.n_features_in_)
        if isinstance(columns, slice):
            return list(known)[columns]
        columns = [columns] if isinstance(columns, str) else columns
        numbers = [names.index(column) if column in names else column for column in columns]
        wrong = [
            c
            for c in numbers
            if isinstance(c, bool) or not isinstance(c, int | np.integer) or c not in known
        ]
        if not (bool(numbers) and not wrong):
            raise ValueError(
                f"unknown columns {wrong}; use numbers below {len(known)} or names of {names}"
            )
        repeated = sorted({int(c) for c in numbers if numbers.count(c) > 1})
        if repeated:
            raise ValueError(
                f"columns {repeated} occur more than once in {list(columns)} and would count twice"
            )
        return [int(c) for c in numbers]

    def _tensor(self, values: Any) -> Tensor:
        if isinstance(values, Tensor):
            return values.detach().to(self.device, torch.float64)
        return torch.as_tensor(np.require(values, np.float64, ["C", "W"]), device=self.device)

    def _targets(self, y: object) -> Tensor:
        return self._tensor(y)

    def _tensors(
        self, X: object, y: object, sample_weight: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self._tensor(X)
        shape = as_array(y).shape
        if not (inputs.ndim == 2 and shape == inputs.shape[:1] and len(inputs) > 0):
            raise ValueError(f"X must be [n, d] and y [n], got {tuple(inputs.shape)} and {shape}")
        targets = self._targets(y)
        bad = ~torch.isfinite(torch.cat([inputs, targets.view(len(inputs), -1)], dim=1))
        rows, columns = (bad.any(dim=other).nonzero().flatten().tolist()[:10] for other in (1, 0))
        where = f"columns {columns} of X" if columns and columns[0] < inputs.shape[1] else "y"
        if rows:
            raise ValueError(f"NaN or infinite values in rows {rows}, {where}; drop or impute them")
        weights = torch.ones_like(inputs[:, 0])
        if sample_weight is not None:
            weights = self._tensor(sample_weight)
            if not (weights.shape == shape and bool((weights >= 0).all())):
                raise ValueError("sample_weight must be one number ≥ 0 per example")
        if self.fit_intercept:
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        return inputs, targets, weights

    def _check_fitted(self) -> None:
        if not hasattr(self, "_fit"):
            raise ValueError(f"this {type(self).__name__} is not fitted yet; call fit(X, y) first")


class Composition:
    """Models fitted on the same examples and released with independent noise: I = Σ_k J_kᵀJ_k/σ_k².

    The models may differ (losses, λ, weights), and one model may be released several times. The
    total η² lies between the largest and the sum of the single ones; it is computed exactly.

    Args:
        releases: Pairs of a fitted model and the σ of its release.

    Example:
        >>> import numpy as np
        >>> from torchfil.glm import LinearRegression
        >>> X, y = np.eye(2), np.array([1.0, 2.0])
        >>> model = LinearRegression().fit(X, y)
        >>> once, thrice = model.fil(X, y, sigma=0.5), Composition([(model, 0.5)] * 3).fil(X, y)
        >>> bool(np.allclose(thrice, 3**0.5 * once))
        True
    """

    def __init__(self, releases: Sequence[tuple[GeneralizedLinearModel, float]]) -> None:
        if not releases:
            raise ValueError("a composition needs at least one release")
        information: dict[GeneralizedLinearModel, float] = {}
        for model, scale in releases:
            model._check_fitted()
            if not scale > 0:
                raise ValueError(
                    f"sigma={scale} must be positive: without noise the Fisher information is "
                    "infinite"
                )
            information[model] = information.get(model, 0.0) + scale**-2
        widths = {model.n_features_in_ for model in information}
        if len(widths) != 1:
            raise ValueError(
                f"the models were fitted on {sorted(widths)} columns; a composition needs the same"
            )
        self.releases = [(model, total**-0.5) for model, total in information.items()]

    def fil(
        self,
        X: object,
        y: object,
        attributes: Attributes | None = None,
        groups: Sequence[Hashable] | None = None,
        private_target: bool = True,
        kind: Kind = "spectral",
        *,
        one_hot: bool = False,
    ) -> Any:
        """As :meth:`GeneralizedLinearModel.fil`, for all releases together.

        Each model keeps its own weights.

        Args:
            X: The training inputs, [n, d].
            y: The training targets, [n], the same for all.
            attributes: {name: columns}.
            groups: One label per example.
            private_target: Whether y is private; all models must then see the same coordinates of
                it.
            kind: "spectral" or "trace".
            one_hot: Whether the attributes are one-hot, so that they move only within the simplex.
        """
        made = [
            (model.sensitivity(X, y, private_target=private_target), scale)
            for model, scale in self.releases
        ]
        if len({sensitivity.num_coordinates for sensitivity, _ in made}) != 1:
            raise ValueError(
                "a softmax's target is a point of the simplex, others' a number: pass "
                "private_target=False"
            )
        columns = self.releases[0][0]._numbered(attributes)
        return fisher_information_loss(
            [Release(*pair) for pair in made], columns, groups, kind, one_hot
        )

    def mse_bound(self, X: object, y: object, **options: Any) -> Any:
        """1/η̄² for all releases together, for an unbiased attacker.

        As :meth:`GeneralizedLinearModel.mse_bound`.
        """
        return mse_bound_from_fil(self.fil(X, y, kind="trace", **options))


def _check_names(X: object, fitted: Sequence[object]) -> None:
    """Refuse a table whose columns have other names, or another order, than in the fit."""
    given = list(getattr(X, "columns", ()))
    if (
        not (given and fitted and all(isinstance(name, str) for name in [*given, *fitted]))
        or given == fitted
    ):
        return
    place = next(
        k for k, (name, expected) in enumerate(zip(given, fitted, strict=True)) if name != expected
    )
    raise ValueError(
        f"X and y are not what the model was fitted on: column {place} is {given[place]!r}, at "
        f"the fit it was {fitted[place]!r}. Pass the columns as in feature_names_in_"
    )


def _check_minimum(objective: Objective, fit: Fit) -> None:
    """Refuse data on which w* is not a minimum, or has another curvature (which shows other weights
    without l2).

    The gradient may be as large as at the fit, plus a millionth of the sum of its terms' sizes:
    rounding the inputs to float32 changes them by 6e-8. The Hessian's diagonal may change ten times
    as much, assuming that the third derivative is about as large as the second.
    """
    u, inputs, ridge, weight = (
        fit.weights,
        objective.X,
        objective.ridge,
        objective.sample_weight[:, None],
    )
    loss, margin, gradient = objective.loss, inputs @ u, objective.gradient(u)
    residual, curvature = (
        each(margin, objective.y).abs() for each in (loss.residual, loss.curvature)
    )

    # how much rounding may change each entry
    size = inputs.abs()
    largest = 1 + size @ u.abs()  # of the margins' terms, [n, K]
    rounding = residual + torch.einsum("nkl,nl->nk", curvature, largest)
    natural = size.mT @ (weight * rounding) + ridge * u.abs()
    allowed = 2 * len(inputs) * fit.gradient_norm + 1e-6 * natural

    squares, own = inputs.square().mT, weight * curvature.diagonal(dim1=1, dim2=2)
    change = squares @ own + ridge - fit.hessian.diagonal().view_as(u)
    same = (gradient.abs() <= allowed) & (
        change.abs() <= 1e-5 * (squares @ (own * largest) + ridge)
    )
    same &= torch.isfinite(gradient) & torch.isfinite(change)
    here, there = float(gradient.abs().max()) / len(inputs), fit.gradient_norm
    if not same.all():
        raise ValueError(
            f"X and y are not what the model was fitted on: their gradient over n is {here:.2g} "
            f"at its weights ({there:.2g} at the fit), or their Hessian differs. Pass the "
            "training set as fitted"
        )


class _OwnLoss(GeneralizedLinearModel):
    """A model with its own loss."""

    def __init__(
        self,
        l2: float = 0.0,
        fit_intercept: bool = False,
        tolerance: float = 1e-10,
        max_iterations: int = 100,
        device: str = "cpu",
    ) -> None:
        self.l2, self.fit_intercept = l2, fit_intercept
        self.tolerance, self.max_iterations, self.device = tolerance, max_iterations, device


class LinearRegression(RegressorMixin, _OwnLoss):
    """Least squares, ½(wᵀx − y)²; its score is R². See :class:`GeneralizedLinearModel`."""

    loss = solvers.SQUARED
    score_name = "R²"


class _Classifier(ClassifierMixin, _OwnLoss):
    """A model of classes."""

    score_name = "accuracy"

    def decision_function(self, X: object) -> np.ndarray:
        """The margins, [n], or the logits, [n, classes]."""
        return self.margin(X)


class LogisticRegression(_Classifier):
    """Logistic regression, log(1 + e^m) − ym for targets in {0, 1}.

    See :class:`GeneralizedLinearModel`.
    """

    loss = solvers.LOGISTIC

    def fit(self, X: object, y: object, sample_weight: object = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets must be 0 or 1."""
        values = np.unique(as_array(y).astype(float))
        if not set(values.tolist()) <= {0.0, 1.0}:
            raise ValueError(f"logistic targets must be 0 or 1, got {values[:5].tolist()}")
        self.classes_ = np.array([0, 1])
        return super().fit(X, y, sample_weight)

    def predict_proba(self, X: object) -> np.ndarray:
        """The probabilities of 0 and 1, [n, 2]."""
        return special.expit(self.margin(X)[:, None] * [-1.0, 1.0])

    def predict(self, X: object) -> np.ndarray:
        """0 or 1."""
        return (self.margin(X) > 0).astype(int)


class SoftmaxRegression(_Classifier):
    """Softmax regression, −log softmax(Wx)_y for any number of classes.

    See :class:`GeneralizedLinearModel`.

    The minimisers differ by one vector added to every class; the shortest one is used: Σ_c w_c = 0.
    It is released with noise on all classes × p entries. A private target moves within the simplex:
    it has classes − 1 coordinates.

    Attributes:
        classes_: The labels.
        coef_: [classes, d].
        intercept_: [classes].
    """

    def fit(self, X: object, y: object, sample_weight: object = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets are labels."""
        classes = np.unique(as_array(y))
        if not len(classes) >= 2:
            raise ValueError(f"a classifier needs at least 2 classes, y holds {classes.tolist()}")
        self.classes_ = classes
        return super().fit(X, y, sample_weight)

    def predict_proba(self, X: object) -> np.ndarray:
        """The classes' probabilities, [n, classes]."""
        return special.softmax(self.margin(X), axis=1)

    def predict(self, X: object) -> np.ndarray:
        """The most likely label."""
        return self.classes_[self.margin(X).argmax(axis=1)]

    def _loss(self) -> Loss:
        return SoftmaxLoss(len(self.classes_))

    def _num_margins(self) -> int:
        return len(self.classes_) - 1

    def _targets(self, y: object) -> Tensor:
        labels = as_array(y)
        unknown = np.setdiff1d(labels, self.classes_).tolist()
        if unknown:
            raise ValueError(f"labels {unknown} are not among the classes {self.classes_.tolist()}")
        return self._tensor(labels[:, None] == self.classes_[None, :])

    def _parameters(self) -> Tensor:
        weights = self._fit.weights
        return SoftmaxLoss(len(self.classes_)).basis(weights) @ weights.mT


class PoissonRegression(RegressorMixin, _OwnLoss):
    """Poisson regression, e^m − ym for counts y ≥ 0; see :class:`GeneralizedLinearModel`."""

    loss = solvers.POISSON
    score_name = "D²"

    def fit(self, X: object, y: object, sample_weight: object = None) -> Any:
        """As in :class:`GeneralizedLinearModel`; targets must not be negative."""
        smallest = np.min(as_array(y).astype(float), initial=0)
        if not smallest >= 0:
            raise ValueError(f"Poisson targets are counts; the smallest is {smallest:g}")
        return super().fit(X, y, sample_weight)

    def predict(self, X: object) -> np.ndarray:
        """The expected count e^m."""
        return np.exp(self.margin(X))

    def score(self, X: object, y: object, sample_weight: object = None) -> float:
        """D², the share of the deviance explained."""
        from sklearn.metrics import d2_tweedie_score

        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))


# ----------------------------------------------------------- weights that make everybody leak alike

# They leak alike **with the weights held fixed**: η is that of a fit whose ω does not depend on the
# data. But ω was computed from the data: with its derivative, the η of single examples was 0.87 to
# 1.64 times the reported one (least squares), and up to 2.27 times (logistic, inputs only). The
# reweighted model leaks nearly alike, not exactly.


@dataclass(frozen=True)
class IRFIL:
    """A reweighted model with its history.

    Attributes:
        model: The model at the last weights.
        sample_weight: ω, [n], with mean 1. It is computed from private data and confidential, like
            η.
        etas: η of every example at each round, the unweighted fit first, ω held fixed, [rounds + 1,
            n].
        spread: The standard deviation, at each round, of the equalised numbers: η of examples, or
            mean η of groups.
        converged: Whether the spread fell to the tolerance.
    """

    model: GeneralizedLinearModel
    sample_weight: np.ndarray
    etas: np.ndarray
    spread: np.ndarray = field(repr=False)
    converged: bool


def iteratively_reweighted_fil(
    model: GeneralizedLinearModel,
    X: object,
    y: object,
    *,
    rounds: int = 15,
    groups: Literal["class"] | Sequence[Hashable] | None = None,
    attribute: Sequence[object] | slice | None = None,
    one_hot: bool = False,
    private_target: bool = True,
    kind: Kind = "spectral",
    tolerance: float = 0.0,
    clamp: tuple[float, float] = (0.0, np.inf),
    progress: bool = False,
) -> IRFIL:
    """ω ← n (ω/η) / Σ(ω/η), refit, repeat: at a fixed point all η are equal, with the weights held
    fixed.

    η does not include that ω itself depends on the data; see :mod:`torchfil.glm.model` for how much
    this matters.

    Args:
        model: An estimator; a clone of it is fitted, and the original stays unchanged.
        X: Inputs, [n, d].
        y: Targets, [n].
        rounds: The largest number of reweightings.
        groups: None equalises η over examples. One label per example (or "class": the targets)
            gives all examples of a group one weight and equalises the groups' mean η.
        attribute: The columns (numbers, names or a slice) of the attribute whose η is equalised;
            None: the whole example.
        one_hot: Whether that attribute is one-hot, so that it moves only within the simplex.
        private_target: Whether y is private (without ``attribute``).
        kind: Which η, as in :meth:`GeneralizedLinearModel.fil`.
        tolerance: Stop when the spread over the mean η falls to it.
        clamp: The smallest and largest weight, before they are scaled to mean 1.
        progress: Whether to show a progress bar (tqdm).
    """
    if not rounds >= 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    if not 0 <= clamp[0] <= 1 <= clamp[1]:
        raise ValueError(f"clamp={clamp} must hold 1, the mean weight, and no negative number")
    n = len(as_array(y))
    by_class = isinstance(groups, str) and groups == "class"
    labels = as_array(y if by_class else np.arange(n) if groups is None else groups)
    if len(labels) != n:
        raise ValueError(f"groups must give one label per example: {len(labels)} for {n}")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    member = np.array([numbers[label] for label in labels.tolist()])
    sizes = np.bincount(member)

    def fitted(weights: np.ndarray) -> tuple[GeneralizedLinearModel, np.ndarray, np.ndarray]:
        refitted = clone(model).fit(X, y, sample_weight=weights)
        attributes = None if attribute is None else {"attribute": attribute}
        eta = refitted.fil(
            X,
            y,
            1.0,
            attributes,
            None,
            private_target,
            kind,
            one_hot=one_hot,
            sample_weight=weights,
        )
        eta = eta if attribute is None else eta["attribute"]
        return refitted, eta, np.bincount(member, eta) / sizes

    weights = np.ones(n)
    reweighted, eta, level = fitted(weights)
    etas, spread = [eta], [level.std()]
    for _ in with_progress(range(rounds), progress, "IRFIL"):
        if spread[-1] <= tolerance * level.mean():
            break
        what = "an example" if groups is None else "a group"
        if not (level > 0).all():
            raise ValueError(
                f"{what} has η = 0, no influence on the model, and would get infinite weight"
            )
        weights = np.clip(weights * (level.mean() / level)[member], *clamp)
        weights *= n / weights.sum()
        reweighted, eta, level = fitted(weights)
        etas.append(eta)
        spread.append(level.std())
    converged = bool(spread[-1] <= tolerance * level.mean())
    return IRFIL(reweighted, weights, np.stack(etas), np.asarray(spread), converged)


def round_up(sigma: float) -> float:
    """The smallest power of 2^(1/4) that is at least σ.

    On this grid σ is constant almost everywhere, so that it tells nothing about single examples.
    Unrounded, it would add 2p ∇log σ ∇log σᵀ to the information, p the number of weights.

    Example:
        >>> round_up(0.3)
        0.3535533905932738
    """
    number = math.ceil(4 * math.log2(sigma))
    return float(2.0 ** (number / 4 if 2.0 ** (number / 4) >= sigma else (number + 1) / 4))

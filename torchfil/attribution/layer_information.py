"""What a family of classifiers learns from each layer's gradient about a property (Mo et al. 2021, eq. 1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from torchfil.attribution.layer_table import LayerTable

MIXING = np.linspace(0.0, 1.0, 101)


def v_information(
    gradients: Mapping[str, Tensor | np.ndarray],
    property: Sequence[Any] | Tensor | np.ndarray,
    family: Literal["logistic", "forest"] | Any = "logistic",
    *,
    test_share: float = 0.5,
    test_rows: Sequence[int] | Tensor | np.ndarray | None = None,
    width: int | Literal["auto"] | None = "auto",
    smoothing: float = 0.01,
    bootstrap: int = 200,
    seed: int = 0,
) -> LayerTable:
    """A lower estimate of each layer's V-information about a property, in nats, with a 95 % bootstrap interval.

    With f(∅) the property's frequencies in the training half and f(g) the family's best predictor fitted there,

        I_V(g → p) = mean over held-out examples of  log f(g_i)[p_i] − log f(∅)[p_i].

    0 means that the gradient is of no use to this family; the property's entropy (log 2 for a fair yes or no) means
    that it gives the property away. f(g) is λ · classifier + (1 − λ) · f(∅): V-information requires a family that may
    ignore what it sees (Xu et al. 2020), and the mixture keeps a classifier that overfits from counting as worse than
    ignorance. λ, and the strength of regularisation for "logistic", are chosen by 5-fold cross-validation within the
    training half.

    It is **biased down**, because the predictor is fitted on few examples, and more so for wider layers: if the truth
    is 0.221, 200 examples find 0.15 in 10 features, and 0.03 in 100 features of which the other 90 are noise. To make
    layers comparable, "logistic" sees all of them at **one width**: the principal components of the plain gradient,
    without labels. Both then give 0.15, if the noise varies less than the informative features. What lies outside the
    components is lost: if all 100 vary alike, it finds 0.05 (and 0.01 in random directions).

    Guarantees:
        * The result is finite: λ ≤ 1 − smoothing, so the probability 0 of a forest costs at most
          −log(smoothing · f(∅)).
        * Every layer is judged on the same split. The interval resamples only the held-out examples; it does not show
          how another training half would have done, and does not cover the bias. A value below 0 is overfitting or
          chance.

    Args:
        gradients: {layer: [n, N_l]} from :func:`layer_gradients`; features (their components) are standardised.
        property: [n] labels of two or more classes, each at least three times.
        family: "logistic" (ridge), "forest" (200 trees), or any scikit-learn classifier with ``predict_proba``.
        test_share: Share of the examples to hold out, drawn by class.
        test_rows: The held-out rows (numbers or a mask) instead; every class must occur in both parts.
        width: The number of components to project every layer to; at most the features of the narrowest layer, so leave
            out layers with very few parameters. None: all features as they are; layers of different width are then less
            comparable (for "logistic", a rotation onto the examples' span gives the same at a lower cost). "auto": 32
            for "logistic", None for others: a forest looks at features one by one, and learned 0.10 from components
            but 0.64 from the features themselves (docs/attacks-networks.md, fc1).
        smoothing: 1 − the largest λ.
        bootstrap: The number of resamples.
        seed: The seed of the split, the forest, the folds and the resamples.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: A constant property, too few examples of a class, shapes that disagree, values that are not finite.
    """
    _require_sklearn()
    names, labels = np.unique(_array(property), return_inverse=True)
    _check_gradients(gradients, labels)
    if not 0 < smoothing < 1:
        raise ValueError(f"smoothing={smoothing} must lie strictly between 0 and 1")
    if bootstrap < 1:
        raise ValueError(f"bootstrap={bootstrap} must be at least 1")
    one_width = _one_width(width, family, gradients)

    test = _test_mask(labels, names, test_share, test_rows, seed)
    candidates = _candidates(family, seed)
    gains = np.stack(
        [_gains(X, labels, test, candidates, family, one_width, smoothing, seed) for X in gradients.values()]
    )  # [layers, held-out]

    # The same resamples for every layer, so that layers can be compared.
    picks = np.random.default_rng(seed).integers(gains.shape[1], size=(bootstrap, gains.shape[1]))
    means = np.stack([gain[picks].mean(axis=1) for gain in gains])  # [layers, bootstrap]
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    error = gains.std(axis=1, ddof=1) / math.sqrt(gains.shape[1])
    which = family if isinstance(family, str) else type(family).__name__
    seen = "all features" if one_width is None else f"{one_width} components"
    measure = f"V-information ({which}, {seen}), lower estimate"
    return LayerTable(tuple(gradients), gains.mean(axis=1), low, high, error, measure, "nats")


def _one_width(
    width: int | Literal["auto"] | None, family: Any, gradients: Mapping[str, Tensor | np.ndarray]
) -> int | None:
    """The number of components that every layer is projected to; None: no projection."""
    if width == "auto":
        width = 32 if isinstance(family, str) and family == "logistic" else None
    if width is None:
        return None
    if width < 1:
        raise ValueError(f"width={width} must be at least 1")
    return min(width, *(_array(value).shape[1] for value in gradients.values()))


def _gains(
    values: Tensor | np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    candidates: list[Any],
    family: Any,
    width: int | None,
    smoothing: float,
    seed: int,
) -> np.ndarray:
    """log f(g)[p] − log f(∅)[p] of every held-out example."""
    from sklearn.model_selection import StratifiedKFold

    X = _array(values).astype(float)
    linear = isinstance(family, str) and family == "logistic"
    train_X, train_y = X[~test], labels[~test]
    prior = np.bincount(train_y) / len(train_y)

    # λ and the candidate are chosen by out-of-fold predictions.
    folds = StratifiedKFold(min(5, np.bincount(train_y).min()), shuffle=True, random_state=seed)
    foreseen = np.zeros((len(candidates), len(train_y)))  # probability of the truth, out of fold
    for fit, held in folds.split(train_X, train_y):
        inside, outside = _features(train_X[fit], train_X[held], width, linear)
        for i, candidate in enumerate(candidates):
            foreseen[i, held] = _probabilities(candidate, inside, train_y[fit], outside, len(prior))[
                np.arange(len(held)), train_y[held]
            ]
    shares = MIXING * (1 - smoothing)
    base = prior[train_y]
    scores = np.stack([np.log(share * foreseen + (1 - share) * base).mean(axis=1) for share in shares])
    share_index, best = np.unravel_index(scores.argmax(), scores.shape)

    base = prior[labels[test]]
    if share_index == 0:
        return np.zeros(int(test.sum()))
    inside, outside = _features(train_X, X[test], width, linear)
    truth = _probabilities(candidates[best], inside, train_y, outside, len(prior))[
        np.arange(len(outside)), labels[test]
    ]
    return np.log(shares[share_index] * truth / base + 1 - shares[share_index])


def _probabilities(candidate: Any, X: np.ndarray, y: np.ndarray, new: np.ndarray, classes: int) -> np.ndarray:
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():  # a fit that stops early is in the family, too; cross-validation judges it
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = clone(candidate).fit(X, y)
    result = np.zeros((len(new), classes))
    result[:, fitted.classes_] = fitted.predict_proba(new)
    return result


def _features(X: np.ndarray, new: np.ndarray, width: int | None, linear: bool) -> tuple[np.ndarray, np.ndarray]:
    """Both parts, centred by X, projected to its first principal components if requested, and standardised by X."""
    mean = X.mean(axis=0)
    X, new, size = X - mean, new - mean, np.abs(X).max(initial=0)
    if width is not None:
        X, new = _project(X, new, min(width, len(X) - 1, X.shape[1]))
        size = 1e6 * X.std(axis=0).max(initial=0)  # components below a millionth of the first are rounding
    deviation = X.std(axis=0)
    deviation = np.where(deviation > 1e-12 * size, deviation, np.inf)  # constant features say nothing
    X, new = X / deviation, new / deviation

    if linear:
        if width is None and len(X) - 1 < X.shape[1]:  # without loss
            X, new = _project(X, new, len(X) - 1)
        scale = math.sqrt((X**2).sum() / len(X)) or 1.0  # so that one grid of C suits every width
        X, new = X / scale, new / scale
    return X, new


def _project(X: np.ndarray, new: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """Principal components through the smaller of XᵀX and XXᵀ."""
    if X.shape[1] <= len(X):
        directions = np.linalg.eigh(X.T @ X)[1][:, ::-1][:, :keep]
        return X @ directions, new @ directions
    squares, left = np.linalg.eigh(X @ X.T)
    squares, left = squares[::-1][:keep], left[:, ::-1][:, :keep]
    root = np.sqrt(squares.clip(min=0))
    inverse = np.where(root > 1e-6 * root[0], 1 / np.where(root > 0, root, 1), 0)
    return left * root, (new @ X.T) @ (left * inverse)


def _candidates(family: Any, seed: int) -> list[Any]:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    if isinstance(family, str):
        if family == "logistic":
            return [LogisticRegression(C=C, max_iter=300) for C in (0.1, 3.0, 1e2, 3e3, 1e5)]
        if family == "forest":
            return [RandomForestClassifier(200, random_state=seed)]
        raise ValueError(f"family={family!r} must be 'logistic', 'forest' or a scikit-learn classifier")
    if not (hasattr(family, "fit") and hasattr(family, "predict_proba")):
        raise TypeError(
            f"family of type {type(family).__name__} has no fit and predict_proba; V-information needs probabilities "
            "(e.g. SVC(probability=True))"
        )
    return [family]


def _test_mask(labels: np.ndarray, names: np.ndarray, test_share: float, test_rows: Any, seed: int) -> np.ndarray:
    """The held-out examples, [n] of bool, with every class in both parts."""
    n = len(labels)
    test = np.zeros(n, dtype=bool)
    if test_rows is not None:
        test[_array(test_rows)] = True
    else:
        if not 0 < test_share < 1:
            raise ValueError(f"test_share={test_share} must lie strictly between 0 and 1")
        generator = np.random.default_rng(seed)
        for label in range(len(names)):
            rows = np.flatnonzero(labels == label)
            count = min(max(round(test_share * len(rows)), 1), max(len(rows) - 2, 0))
            test[generator.permutation(rows)[:count]] = True

    for label, name in enumerate(names):
        inside, outside = int((labels[~test] == label).sum()), int((labels[test] == label).sum())
        if inside < 2 or outside < 1:
            raise ValueError(
                f"property {name!r} has {inside} training and {outside} held-out examples; a class needs 2 and 1 at "
                "least. Merge rare classes, cut a continuous property into ranges, or choose another split."
            )
    return test


def _check_gradients(gradients: Mapping[str, Tensor | np.ndarray], labels: np.ndarray) -> None:
    if not isinstance(gradients, Mapping) or not gradients:
        raise TypeError("gradients must be a dict {layer: [n, features]}, as layer_gradients gives")
    if labels.ndim != 1 or len(np.unique(labels)) < 2:
        raise ValueError(
            "property must be one label per example with at least two values; a constant property has no entropy, "
            "and nothing can be learned about it"
        )
    for layer, value in gradients.items():
        array = _array(value)
        if array.ndim != 2 or len(array) != len(labels):
            raise ValueError(
                f"gradients[{layer!r}] has shape {array.shape}; it must be [{len(labels)}, features], one row for each "
                "label of property"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"gradients[{layer!r}] has NaN or infinite values; drop those examples")


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _require_sklearn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ImportError("v_information needs scikit-learn: pip install 'torchfil[glm]'") from error

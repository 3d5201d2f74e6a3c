"""Which layers leak: the gradient of every example by layer, its sensitivity, and what a classifier
learns from it.

:func:`jacobian_sensitivity` and :func:`v_information` are the measures of Mo et al. 2021 (eq. 2 and
1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from torchfil.fisher.gradients import DEFAULT_MAX_MEMORY, ExampleGradients, LossFunction
from torchfil.fisher.models import check_modules
from torchfil.private import Inputs, Private, as_call
from torchfil.private.choice import NOTHING
from torchfil.utils.errors import installed_by
from torchfil.utils.text import aligned
from torchfil.utils.trees import map_tensors
from torchfil.viz.common import as_array, new_figure

_COMPONENTS = 32  # of a layer's gradient, for the logistic family
_SHARES = 0.99 * np.linspace(0.0, 1.0, 101)  # λ


@dataclass(frozen=True, repr=False)
class LayerTable:
    """One value per layer, in the order of the network.

    Attributes:
        layers: Their names as in ``model.named_modules()``; "" is the model itself.
        value: [layers].
        low: The lower end of the 95 % interval, [layers].
        high: The upper end, [layers].
        standard_error: The standard error over examples, [layers].
        measure: What is measured.
        unit: Its unit.

    Example:
        >>> LayerTable(
        ...     ("conv", "fc"),
        ...     *np.array([[0.5, 2], [0.4, 1], [0.6, 3], [0.05, 0.5]]),
        ...     "sensitivity",
        ...     "F-norm",
        ... )
        sensitivity [F-norm]
        layer  value   low  high
        conv     0.5  0.4  0.6
        fc         2    1    3
    """

    layers: tuple[str, ...]
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    standard_error: np.ndarray
    measure: str
    unit: str

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        values = zip(self._shown, self.value, self.low, self.high, strict=True)
        rows = [[name, *(f"{number:.3g}" for number in numbers)] for name, *numbers in values]
        lines = aligned([["layer", "value", "low", "high"], *rows], left=[0])
        return "\n".join([f"{self.measure} [{self.unit}]", *lines])

    def plot(self, ax: Any = None) -> Any:
        """Draw bars with their intervals by layer, on ``ax`` or a new figure.

        Return the matplotlib figure.

        A value that is not finite is written as text.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            ax = new_figure(max(4.0, 1.6 + 0.45 * len(self)), 4.0, "constrained").subplots()
        places, drawn = np.arange(len(self)), np.isfinite(self.value)
        reach = np.stack([self.value - self.low, self.high - self.value])[:, drawn].clip(min=0)
        ax.bar(
            places[drawn], self.value[drawn], color="#0072B2", yerr=reach, ecolor="0.25", capsize=3
        )
        for place in places[~drawn]:
            ax.text(place, 0, f"{self.value[place]:g}", ha="center", va="bottom")
        ax.set_xticks(places, self._shown, rotation=45, ha="right", rotation_mode="anchor")
        ax.axhline(0, color="0.25", linewidth=0.8)
        ax.set_title(self.measure, fontsize=11)
        ax.set_ylabel(self.unit)
        return ax.figure

    @property
    def _shown(self) -> list[str]:
        return [layer or "(model)" for layer in self.layers]


def layer_gradients(
    model: nn.Module, loss_fn: LossFunction, x: Inputs, y: object, batch: int = 1
) -> dict[str, Tensor]:
    """g_l = ∂ℓ/∂θ_l by layer, or its mean over groups of examples, [n / batch, N_l].

    A layer is a module with its own trainable parameters, named as in ``model.named_modules()`` (""
    for the model itself) and in that order; modules without parameters are left out. A shared
    parameter counts once, for the first module.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss; mean and sum reduction give
            the same.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …].
        batch: Average over groups of this many consecutive examples, like a client that sends one
            gradient for its batch. To look for a property of the group, put its examples next to
            each other.

    Example:
        >>> gradients = layer_gradients(
        ...     nn.Linear(2, 1), nn.MSELoss(), torch.ones(3, 2), torch.zeros(3, 1)
        ... )
        >>> {layer: tuple(value.shape) for layer, value in gradients.items()}
        {'': (3, 3)}
    """
    whole = ExampleGradients.build(model, loss_fn, x, y, NOTHING)
    n = len(whole)
    if n == 0:
        raise ValueError("there is no example; pass at least one")
    if n % batch:
        raise ValueError(
            f"batch={batch} must divide the {n} examples into whole groups; drop the last "
            f"{n % batch}"
        )
    index = layer_index(whole.parameters)
    parts: dict[str, list[Tensor]] = {layer: [] for layer in index}
    rows_at_once = max(
        1, DEFAULT_MAX_MEMORY // (4 * batch * whole.num_parameters * whole.dtype.itemsize)
    )
    for _, piece in whole.examples.chunks(rows_at_once * batch):
        gradients = replace(whole, examples=piece).gradients()  # [rows, p]
        means = gradients.unflatten(0, (-1, batch)).mean(dim=1)
        for layer, columns in index.items():
            parts[layer].append(means[:, columns])
    return {layer: torch.cat(pieces) for layer, pieces in parts.items()}


def layer_index(parameters: dict[str, Tensor], *, bias: bool = True) -> dict[str, Tensor]:
    """For each layer, the places of its entries in the flat vector of all trainable parameters,
    [N_l].

    Example:
        >>> layer_index({"0.weight": torch.zeros(1, 2), "0.bias": torch.zeros(1)}, bias=False)
        {'0': tensor([0, 1])}
    """
    pieces: dict[str, list[Tensor]] = {}
    start = 0
    for name, value in parameters.items():
        layer, _, own = name.rpartition(".")
        places = torch.arange(start, start + value.numel(), device=value.device)
        start += value.numel()
        if bias or "bias" not in own:
            pieces.setdefault(layer, []).append(places)
    if not pieces:
        raise ValueError(
            f"every trainable parameter is a bias ({', '.join(parameters)}); use bias=True"
        )
    return {layer: torch.cat(places) for layer, places in pieces.items()}


def jacobian_sensitivity(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Tensor,
    wrt: Literal["target", "input"] | Private = "target",
    *,
    bias: bool = True,
) -> LayerTable:
    """The mean over n examples of ‖∂g_l/∂t‖_F / (sqrt(N_l) · range(g_l)) by layer, with its
    standard error.

    g_l ∈ R^{N_l} is the gradient of one example's loss with respect to layer l's parameters, t its
    target or its input, and range(g) = max g − min g. Layers are those of :func:`layer_gradients`.

    Guarantees:
        * Exact: every column of every example's Jacobian is computed, a few at a time.
        * Mean and sum reduction in ``loss_fn`` give the same numbers.
        * An example whose layer's gradient neither changes nor has a range (dead units) counts as
          0; it counts as infinite if g_l has no range but changes. Dividing by the range gives
          well-fitted examples, whose gradient is nearly 0, the largest weight.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss. With ``wrt="target"`` it
            must take continuous targets, as nn.CrossEntropyLoss (class probabilities) and
            nn.MSELoss do.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …]. With ``wrt="target"`` class numbers are turned into one-hot
            probabilities.
        wrt: "target", "input" (every floating-point input), or any :class:`torchfil.Private`, such
            as ``Private(submodule="embedding")`` for a model of integer tokens.
        bias: Whether g_l includes the layer's biases, and N_l counts them; ``bias=False`` is the
            shape that Mo et al. give to G_l in eq. 2.

    Example:
        For ℓ = (wx − t)² with w = 0: g = −2tx with two inputs, ∂g/∂t = −2x.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> x = torch.tensor([[3.0, 0.0]])
        >>> jacobian_sensitivity(
        ...     model, nn.MSELoss(), x, torch.ones(1, 1)
        ... ).value  # 6 / (sqrt(2) · 6)
        array([0.70710678])
    """
    if wrt not in ("target", "input") and not isinstance(wrt, Private):
        raise ValueError(f"wrt={wrt!r} must be 'target', 'input' or a torchfil.Private")
    check_modules(model)
    targets = _continuous(model, x, y) if wrt == "target" else y
    private = (
        wrt
        if isinstance(wrt, Private)
        else Private(inputs=(), target=True)
        if wrt == "target"
        else None
    )
    batch = ExampleGradients.build(model, loss_fn, x, targets, private)
    if len(batch) == 0:
        raise ValueError("there is no example; pass at least one")

    index = layer_index(batch.parameters, bias=bias)
    d = max(1, batch.num_coordinates)
    columns = max(1, DEFAULT_MAX_MEMORY // (4 * batch.num_parameters * batch.dtype.itemsize))
    width = min(columns, d)
    squares = torch.zeros(len(index), len(batch), dtype=torch.float64)
    ranges = torch.zeros_like(squares)
    # whole examples, some coordinates at once
    for rows, examples in batch.examples.chunks(max(1, columns // d)):
        piece = replace(batch, examples=examples)
        gradients = piece.gradients()
        for layer, places in enumerate(index.values()):
            part = gradients[:, places]
            ranges[layer, rows] = (part.amax(dim=1) - part.amin(dim=1)).double().cpu()
        for start in range(0, batch.num_coordinates, width):
            jacobian = piece.jacobian_columns(slice(start, start + width))  # [rows, p, width]
            for layer, places in enumerate(index.values()):
                squares[layer, rows] += jacobian[:, places].square().sum(dim=(1, 2)).double().cpu()
    sizes = torch.tensor([len(places) for places in index.values()], dtype=torch.float64)
    scaled = squares.sqrt() / (sizes.sqrt()[:, None] * ranges)
    values = torch.where(squares == 0, 0.0, scaled)  # [layers, n]

    # mean, standard error and 95 % Student interval over examples
    n, mean = values.shape[1], values.mean(dim=1)
    error = values.std(dim=1) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
    width_of_interval = error * float(stats.t.ppf(0.975, n - 1)) if n > 1 else error
    low, high = (mean - width_of_interval).clamp(min=0).numpy(), (mean + width_of_interval).numpy()
    what = f"the {wrt}" if isinstance(wrt, str) else "private coordinates"
    measure = f"sensitivity of gradients to {what}"
    return LayerTable(
        tuple(index), mean.numpy(), low, high, error.numpy(), measure, "F-norm / (ψ · range)"
    )


def _continuous(model: nn.Module, x: Inputs, y: Tensor) -> Tensor:
    """The targets themselves if they are floating-point, else one-hot class probabilities."""
    if y.is_floating_point() or len(y) == 0:
        return y

    # The model's output for one example shows the number of classes.
    args, kwargs = map_tensors(lambda leaf: leaf[:1], as_call(x))
    with torch.no_grad():
        output = model(*args, **kwargs)
    if not (
        isinstance(output, Tensor) and output.ndim == y.ndim + 1 and output.shape[2:] == y.shape[1:]
    ):
        raise ValueError(
            f"targets {tuple(y.shape)} and outputs {tuple(getattr(output, 'shape', ()))} of one "
            "example do not fit as class numbers; pass floating-point targets"
        )
    classes, least, most = output.shape[1], int(y.min()), int(y.max())
    if not 0 <= least <= most < classes:
        raise ValueError(
            f"class numbers {least} … {most} do not lie in the model's 0 … {classes - 1}"
        )
    return nn.functional.one_hot(y.long(), classes).movedim(-1, 1).to(output)


def v_information(
    gradients: Mapping[str, Tensor | np.ndarray],
    property: Sequence[object] | Tensor | np.ndarray,
    family: Literal["logistic", "forest"] = "logistic",
    *,
    bootstrap: int = 200,
    seed: int = 0,
) -> LayerTable:
    """A lower estimate of each layer's V-information about a property, in nats, with a 95 %
    bootstrap interval.

    With f(∅) the property's frequencies in the training half and f(g) the family's best predictor
    fitted there,

        I_V(g → p) = mean over held-out examples of  log f(g_i)[p_i] − log f(∅)[p_i].

    0 means that the gradient is of no use to this family; the property's entropy (log 2 for a fair
    yes or no) means that it gives the property away. f(g) is λ · classifier + (1 − λ) · f(∅):
    V-information requires a family that may ignore what it sees (Xu et al. 2020), and the mixture
    keeps a classifier that overfits from counting as worse than ignorance. λ, and the strength of
    regularisation for "logistic", are chosen by 5-fold cross-validation within the training half.

    It is **biased down**, because the predictor is fitted on few examples, and more so for wider
    layers: if the truth is 0.221, 200 examples find 0.15 in 10 features, and 0.03 in 100 features
    of which the other 90 are noise. To make layers comparable, "logistic" sees all of them at **one
    width**: the first 32 principal components of the plain gradient, without labels (fewer if a
    layer has fewer features, so leave out layers with very few parameters). Both then give 0.15, if
    the noise varies less than the informative features. What lies outside the components is lost:
    if all 100 vary alike, it finds 0.05 (and 0.01 in random directions). A forest looks at features
    one by one and gets all of them: it learned 0.10 from components but 0.64 from the features
    themselves (docs/attacks-networks.md, fc1).

    Guarantees:
        * The result is finite: λ ≤ 0.99, so the probability 0 of a forest costs at most −log(0.01 ·
          f(∅)).
        * Every layer is judged on the same split. The interval resamples only the held-out
          examples; it does not show how another training half would have done, and does not cover
          the bias. A value below 0 is overfitting or chance.

    Args:
        gradients: {layer: [n, N_l]} from :func:`layer_gradients`; features (their components) are
            standardised.
        property: [n] labels of two or more classes, each at least three times.
        family: "logistic" (ridge) or "forest" (200 trees).
        bootstrap: The number of resamples.
        seed: The seed of the split, the forest, the folds and the resamples.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: A constant property, too few examples of a class, shapes that disagree, values
            that are not finite.
    """
    with installed_by("glm", "v_information needs scikit-learn"):
        import sklearn  # noqa: F401
    if family not in ("logistic", "forest"):
        raise ValueError(f"family={family!r} must be 'logistic' or 'forest'")
    labels = np.unique(as_array(property), return_inverse=True)[1]
    _check_gradients(gradients, labels)
    width = (
        None
        if family == "forest"
        else min(_COMPONENTS, *(value.shape[1] for value in gradients.values()))
    )
    test = _held_out(labels, seed)
    each = [
        _gains(as_array(X).astype(float), labels, test, width, seed) for X in gradients.values()
    ]
    gains = np.stack(each)  # [layers, held-out]

    # The same resamples for every layer, so that layers can be compared.
    picks = np.random.default_rng(seed).integers(gains.shape[1], size=(bootstrap, gains.shape[1]))
    means = np.stack([gain[picks].mean(axis=1) for gain in gains])  # [layers, bootstrap]
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    error = gains.std(axis=1, ddof=1) / math.sqrt(gains.shape[1])
    seen = "all features" if width is None else f"{width} components"
    measure = f"V-information ({family}, {seen}), lower estimate"
    return LayerTable(tuple(gradients), gains.mean(axis=1), low, high, error, measure, "nats")


def _gains(
    X: np.ndarray, labels: np.ndarray, test: np.ndarray, width: int | None, seed: int
) -> np.ndarray:
    """log f(g)[p] − log f(∅)[p] of every held-out example.

    A width: the logistic family, None: forests.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    if width is None:
        candidates = [RandomForestClassifier(200, random_state=seed)]
    else:
        candidates = [LogisticRegression(C=C, max_iter=300) for C in (0.1, 3.0, 1e2, 3e3, 1e5)]
    train_X, train_y = X[~test], labels[~test]
    prior = np.bincount(train_y) / len(train_y)

    # λ and the candidate are chosen by out-of-fold predictions.
    folds = StratifiedKFold(min(5, np.bincount(train_y).min()), shuffle=True, random_state=seed)
    foreseen = np.zeros((len(candidates), len(train_y)))  # probability of the truth, out of fold
    for fit, held in folds.split(train_X, train_y):
        inside, outside = _features(train_X[fit], train_X[held], width)
        for i, candidate in enumerate(candidates):
            foreseen[i, held] = _truth_probability(
                candidate, inside, train_y[fit], outside, train_y[held]
            )
    scores = np.stack(
        [np.log(share * foreseen + (1 - share) * prior[train_y]).mean(axis=1) for share in _SHARES]
    )
    share_index, best = np.unravel_index(scores.argmax(), scores.shape)

    if share_index == 0:
        return np.zeros(int(test.sum()))
    inside, outside = _features(train_X, X[test], width)
    truth = _truth_probability(candidates[best], inside, train_y, outside, labels[test])
    return np.log(_SHARES[share_index] * truth / prior[labels[test]] + 1 - _SHARES[share_index])


def _truth_probability(
    candidate: object, X: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray
) -> np.ndarray:
    """The probability that a candidate, fitted to X and y, gives to the true classes of new
    examples, [n].
    """
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning

    # a fit that stops early is in the family, too; cross-validation judges it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = clone(candidate).fit(X, y)
    return fitted.predict_proba(new)[np.arange(len(new)), np.searchsorted(fitted.classes_, truth)]


def _features(X: np.ndarray, new: np.ndarray, width: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Both parts, centred by X, projected to its first principal components if requested, and
    standardised by X.
    """
    mean = X.mean(axis=0)
    X, new, size = X - mean, new - mean, np.abs(X).max(initial=0)
    if width is not None:
        # principal components
        _, _, directions = np.linalg.svd(X, full_matrices=False)
        directions = directions[: min(width, len(X) - 1, X.shape[1])].T
        X, new = X @ directions, new @ directions
        # components below a millionth of the first are rounding
        size = 1e6 * X.std(axis=0).max(initial=0)
    deviation = X.std(axis=0)
    # constant features say nothing
    deviation = np.where(deviation > 1e-12 * size, deviation, np.inf)
    X, new = X / deviation, new / deviation
    if width is not None:
        scale = math.sqrt((X**2).sum() / len(X)) or 1.0  # so that one grid of C suits every width
        X, new = X / scale, new / scale
    return X, new


def _held_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """The held-out half, [n] of bool, drawn by class."""
    test = np.zeros(len(labels), dtype=bool)
    generator = np.random.default_rng(seed)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < 3:
            raise ValueError(
                f"a class of the property has {len(rows)} examples and needs 3: merge classes"
            )
        test[generator.permutation(rows)[: min(round(0.5 * len(rows)), len(rows) - 2)]] = True
    return test


def _check_gradients(gradients: Mapping[str, Tensor | np.ndarray], labels: np.ndarray) -> None:
    if labels.ndim != 1 or len(np.unique(labels)) < 2:
        raise ValueError(
            "property must be one label per example, with two values at least; a constant says "
            "nothing"
        )
    for layer, value in gradients.items():
        array, n = as_array(value), len(labels)
        if array.ndim != 2 or len(array) != n:
            raise ValueError(f"gradients[{layer!r}] is {array.shape}, not [{n}, features]")
        if not np.isfinite(array).all():
            raise ValueError(f"gradients[{layer!r}] has values that are not finite; drop them")

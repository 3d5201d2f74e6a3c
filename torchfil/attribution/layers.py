"""Which layers leak: the gradient of every example by layer, its sensitivity, and what a classifier learns from it.

:func:`jacobian_sensitivity` and :func:`v_information` are the measures of Mo et al. 2021 (eq. 2 and 1).
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
from torchfil.utils.errors import installed_by, require
from torchfil.utils.tables import as_table
from torchfil.utils.text import aligned
from torchfil.utils.trees import map_tensors
from torchfil.viz.common import as_array, new_figure

Norm = Literal["fro", 1] | float
MIXING = np.linspace(0.0, 1.0, 101)


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
        >>> LayerTable(("conv", "fc"), *np.array([[0.5, 2], [0.4, 1], [0.6, 3], [0.05, 0.5]]), "sensitivity", "F-norm")
        sensitivity [F-norm]
        layer  value   low  high
        conv   0.500 0.400 0.600
        fc     2.000 1.000 3.000
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
        digits = _format(self.value)
        values = zip(self._shown, self.value, self.low, self.high, strict=True)
        rows = [[name, *map(digits.format, numbers)] for name, *numbers in values]
        lines = aligned([["layer", "value", "low", "high"], *rows], left=[0])
        return "\n".join([f"{self.measure} [{self.unit}]", *lines])

    def to_pandas(self) -> Any:
        """The columns value, low, high, standard_error by layer; a dict of arrays if pandas is not installed."""
        columns = {name: getattr(self, name) for name in ("value", "low", "high", "standard_error")}
        return as_table(list(self.layers), columns, index_name="layer")

    def plot(self, ax: Any = None) -> Any:
        """Draw bars with their intervals by layer, on ``ax`` or a new figure; return the matplotlib figure.

        A value that is not finite is written as text.

        Raises:
            ImportError: matplotlib is not installed.
        """
        # Names that would overlap are tilted, and need height.
        longest = max(map(len, self._shown))
        tilted = longest * len(self) > 40
        if ax is None:
            ax = new_figure(max(4.0, 1.6 + 0.45 * len(self)), 3.4 + 0.055 * longest * tilted, "constrained").subplots()

        places = np.arange(len(self))
        drawn = np.isfinite(self.value)
        ax.bar(places[drawn], self.value[drawn], color="#0072B2", width=0.7)
        for place in places[~drawn]:
            ax.text(place, 0, f"{self.value[place]:g}", ha="center", va="bottom")
        whiskers = drawn & np.isfinite(self.low) & np.isfinite(self.high)
        value, low, high = self.value[whiskers], self.low[whiskers], self.high[whiskers]
        reach = np.stack([value - low, high - value]).clip(min=0)
        ax.errorbar(places[whiskers], value, reach, fmt="none", ecolor="0.25", capsize=3, linewidth=1.2)

        tilt = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if tilted else {}
        ax.set_xticks(places, self._shown, **tilt)
        ax.tick_params(axis="x", length=0)
        ax.axhline(0, color="0.25", linewidth=0.8)
        ax.set_title(self.measure, fontsize=11)
        ax.set_ylabel(self.unit)
        ax.spines[["top", "right"]].set_visible(False)
        return ax.figure

    @property
    def _shown(self) -> list[str]:
        return [layer or "(model)" for layer in self.layers]


def _format(values: np.ndarray) -> str:
    """A format with two digits for the smallest value; scientific if that takes more than five decimals."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    decimals = max(3, 1 - math.floor(math.log10(sizes.min()))) if len(sizes) else 3
    return "{:.2e}" if decimals > 5 or sizes.max(initial=0) >= 1e6 else f"{{:.{decimals}f}}"


def layer_gradients(
    model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, batch: int | None = None, *, bias: bool = True
) -> dict[str, Tensor]:
    """g_l = ∂ℓ/∂θ_l by layer, [n, N_l], or its mean over groups of examples, [n / batch, N_l].

    A layer is a module with its own trainable parameters, named as in ``model.named_modules()`` ("" for the model
    itself) and in that order; modules without parameters are left out. A shared parameter counts once, for the first
    module.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss; mean and sum reduction give the same.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …].
        batch: Average over groups of this many consecutive examples, like a client that sends one gradient for its
            batch. To look for a property of the group, put its examples next to each other.
        bias: Whether a layer's gradient includes its biases. Mo et al. define it with them (A.2), but give it the shape
            of the weights alone (eq. 2); an attacker sees both.

    Example:
        >>> gradients = layer_gradients(nn.Linear(2, 1), nn.MSELoss(), torch.ones(3, 2), torch.zeros(3, 1))
        >>> {layer: tuple(value.shape) for layer, value in gradients.items()}
        {'': (3, 3)}
    """
    whole = ExampleGradients.build(model, loss_fn, x, y, NOTHING)
    n, size = len(whole), 1 if batch is None else batch
    require(n > 0, "there is no example; pass at least one")
    require(n % size == 0, f"batch={batch} must divide the {n} examples into whole groups; drop the last {n % size}")
    index = layer_index(whole.parameters, bias=bias)
    parts: dict[str, list[Tensor]] = {layer: [] for layer in index}
    rows_at_once = max(1, DEFAULT_MAX_MEMORY // (4 * size * whole.num_parameters * whole.dtype.itemsize))
    for _, piece in whole.examples.chunks(rows_at_once * size):
        gradients = replace(whole, examples=piece).gradients()  # [rows, p]
        means = gradients.unflatten(0, (-1, size)).mean(dim=1)
        for layer, columns in index.items():
            parts[layer].append(means[:, columns])
    return {layer: torch.cat(pieces) for layer, pieces in parts.items()}


def layer_index(parameters: dict[str, Tensor], *, bias: bool = True) -> dict[str, Tensor]:
    """For each layer, the places of its entries in the flat vector of all trainable parameters, [N_l].

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
    require(bool(pieces), f"every trainable parameter is a bias ({', '.join(parameters)}); use bias=True")
    return {layer: torch.cat(places) for layer, places in pieces.items()}


def jacobian_sensitivity(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    wrt: Literal["target", "input"] | Private = "target",
    norm: Norm = "fro",
    normalised: bool = True,
    chunk_size: int | None = None,
    *,
    bias: bool = True,
) -> LayerTable:
    """The mean over n examples of ‖∂g_l/∂t‖ / (ψ_l · range(g_l)) by layer, with its standard error.

    g_l ∈ R^{N_l} is the gradient of one example's loss with respect to layer l's parameters, t its target or its
    input, range(g) = max g − min g, and ψ_l = sqrt(N_l), N_l, 1 for the norms "fro", 1, ∞. Layers are those of
    :func:`layer_gradients`. ``normalised=False`` gives the mean of ‖∂g_l/∂t‖ alone.

    The norms are taken over all entries of the Jacobian [N_l, dim t]: the root of the sum of squares, the sum of
    absolute values, the largest absolute value. Mo et al. name "the 1-norm or the ∞-norm for vectors", which fits their
    ψ_l; it would fit the induced matrix norms, too.

    Guarantees:
        * Exact: every column of every example's Jacobian is computed, a few at a time.
        * Mean and sum reduction in ``loss_fn`` give the same numbers.
        * An example whose layer's gradient neither changes nor has a range (dead units) counts as 0; it counts as
          infinite if g_l has no range but changes. Dividing by the range gives well-fitted examples, whose gradient is
          nearly 0, the largest weight.

    Args:
        model: Any module without batch normalisation and active dropout; it is left unchanged.
        loss_fn: ``loss_fn(outputs, targets)``, an ordinary torch loss. With ``wrt="target"`` it must take continuous
            targets, as nn.CrossEntropyLoss (class probabilities) and nn.MSELoss do.
        x: Inputs [n, …], or a tuple or dict of them.
        y: Targets [n, …]. With ``wrt="target"`` class numbers are turned into one-hot probabilities.
        wrt: "target", "input" (every floating-point input), or any :class:`torchfil.Private`, such as
            ``Private(submodule="embedding")`` for a model of integer tokens.
        norm: "fro", 1 or ``float("inf")``.
        normalised: Whether to divide by ψ_l and the range.
        chunk_size: How many columns of length p (all parameters) to hold at once; None: as many as fit into 1 GiB.
        bias: Whether g_l includes the layer's biases, and N_l counts them; ``bias=False`` is the shape that Mo et al.
            give to G_l in eq. 2.

    Example:
        For ℓ = (wx − t)² with w = 0: g = −2tx, ∂g/∂t = −2x.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> jacobian_sensitivity(model, nn.MSELoss(), torch.tensor([[3.0]]), torch.ones(1, 1), normalised=False).value
        array([6.])
    """
    require(norm in ("fro", 1, math.inf), f"norm={norm!r} must be 'fro', 1 or float('inf')")
    known = wrt in ("target", "input") or isinstance(wrt, Private)
    require(known, f"wrt={wrt!r} must be 'target', 'input' or a torchfil.Private")
    check_modules(model)
    targets = _continuous(model, x, y) if wrt == "target" else y
    private = wrt if isinstance(wrt, Private) else Private(inputs=(), target=True) if wrt == "target" else None
    batch = ExampleGradients.build(model, loss_fn, x, targets, private)
    require(len(batch) > 0, "there is no example; pass at least one")

    index = layer_index(batch.parameters, bias=bias)
    columns = chunk_size or max(1, DEFAULT_MAX_MEMORY // (4 * batch.num_parameters * batch.dtype.itemsize))
    norms = _norms(batch, index, norm, columns)  # {layer: [n]}
    if normalised:
        for layer, spread in _ranges(batch, index, columns).items():
            size = len(index[layer])
            scale = {"fro": math.sqrt(size), 1: size, math.inf: 1.0}[norm] * spread
            norms[layer] = torch.where(norms[layer] == 0, torch.zeros_like(scale), norms[layer] / scale)
    values = torch.stack(list(norms.values())).double().cpu()  # [layers, n]
    unit = {"fro": "F", 1: "1", math.inf: "∞"}[norm] + "-norm" + (" / (ψ · range)" if normalised else "")
    what = f"the {wrt}"
    if isinstance(wrt, Private):
        what = f"the output of {' and '.join(wrt.submodules)}" if wrt.submodules else "private coordinates"
    measure = f"sensitivity of gradients to {what}"

    # mean, standard error and 95 % Student interval over examples
    n, mean = values.shape[1], values.mean(dim=1)
    error = values.std(dim=1) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
    width = error * float(stats.t.ppf(0.975, n - 1)) if n > 1 else error
    low, high = (mean - width).clamp(min=0).numpy(), (mean + width).numpy()
    return LayerTable(tuple(index), mean.numpy(), low, high, error.numpy(), measure, unit)


def _continuous(model: nn.Module, x: Inputs, y: Any) -> Tensor:
    """The targets themselves if they are floating-point, else one-hot class probabilities."""
    if y.is_floating_point() or len(y) == 0:
        return y

    # The model's output for one example shows the number of classes.
    args, kwargs = map_tensors(lambda leaf: leaf[:1], as_call(x))
    with torch.no_grad():
        output = model(*args, **kwargs)
    fits = isinstance(output, Tensor) and output.ndim == y.ndim + 1 and output.shape[2:] == y.shape[1:]
    shapes = f"{tuple(y.shape)} and outputs {tuple(getattr(output, 'shape', ()))} of one example"
    require(fits, f"targets {shapes} do not fit as class numbers; pass floating-point targets")
    classes, least, most = output.shape[1], int(y.min()), int(y.max())
    require(0 <= least <= most < classes, f"class numbers {least} … {most} do not lie in the model's 0 … {classes - 1}")
    return nn.functional.one_hot(y.long(), classes).movedim(-1, 1).to(output)


def _norms(batch: ExampleGradients, index: dict[str, Tensor], norm: Norm, columns: int) -> dict[str, Tensor]:
    norms = {layer: torch.zeros(len(batch), dtype=batch.dtype, device=batch.device) for layer in index}
    d = max(1, batch.num_coordinates)
    width = min(columns, d)
    for rows, examples in batch.examples.chunks(max(1, columns // d)):  # whole examples, some coordinates at once
        piece = replace(batch, examples=examples)
        for start in range(0, batch.num_coordinates, width):
            jacobian = piece.jacobian_columns(slice(start, start + width))  # [rows, p, width]
            for layer, places in index.items():
                part = jacobian[:, places].flatten(1)
                total = norms[layer]
                if norm == math.inf:
                    total[rows] = torch.maximum(total[rows], part.abs().amax(dim=1))
                else:
                    total[rows] += part.square().sum(dim=1) if norm == "fro" else part.abs().sum(dim=1)
    return {layer: total.sqrt() for layer, total in norms.items()} if norm == "fro" else norms


def _ranges(batch: ExampleGradients, index: dict[str, Tensor], columns: int) -> dict[str, Tensor]:
    """The range max g_l − min g_l of every example, {layer: [n]}."""
    ranges = {layer: torch.zeros(len(batch), dtype=batch.dtype, device=batch.device) for layer in index}
    for rows, examples in batch.examples.chunks(columns):
        gradients = replace(batch, examples=examples).gradients()
        for layer, places in index.items():
            part = gradients[:, places]
            ranges[layer][rows] = part.amax(dim=1) - part.amin(dim=1)
    return ranges


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
    with installed_by("glm", "v_information needs scikit-learn"):
        import sklearn  # noqa: F401
    names, labels = np.unique(as_array(property), return_inverse=True)
    _check_gradients(gradients, labels)
    require(0 < smoothing < 1, f"smoothing={smoothing} must lie strictly between 0 and 1")
    if width == "auto":
        width = 32 if isinstance(family, str) and family == "logistic" else None
    require(width is None or width >= 1, f"width={width} must be at least 1")
    one_width = None if width is None else min(width, *(value.shape[1] for value in gradients.values()))

    test = _test_mask(labels, names, test_share, test_rows, seed)
    each = [_gains(X, labels, test, family, one_width, smoothing, seed) for X in gradients.values()]
    gains = np.stack(each)  # [layers, held-out]

    # The same resamples for every layer, so that layers can be compared.
    picks = np.random.default_rng(seed).integers(gains.shape[1], size=(bootstrap, gains.shape[1]))
    means = np.stack([gain[picks].mean(axis=1) for gain in gains])  # [layers, bootstrap]
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    error = gains.std(axis=1, ddof=1) / math.sqrt(gains.shape[1])
    which = family if isinstance(family, str) else type(family).__name__
    seen = "all features" if one_width is None else f"{one_width} components"
    measure = f"V-information ({which}, {seen}), lower estimate"
    return LayerTable(tuple(gradients), gains.mean(axis=1), low, high, error, measure, "nats")


def _gains(
    values: Any, labels: np.ndarray, test: np.ndarray, family: Any, width: int | None, smoothing: float, seed: int
) -> np.ndarray:
    """log f(g)[p] − log f(∅)[p] of every held-out example."""
    from sklearn.model_selection import StratifiedKFold

    X, candidates = as_array(values).astype(float), _candidates(family, seed)
    linear = isinstance(family, str) and family == "logistic"
    train_X, train_y = X[~test], labels[~test]
    prior = np.bincount(train_y) / len(train_y)

    # λ and the candidate are chosen by out-of-fold predictions.
    folds = StratifiedKFold(min(5, np.bincount(train_y).min()), shuffle=True, random_state=seed)
    foreseen = np.zeros((len(candidates), len(train_y)))  # probability of the truth, out of fold
    for fit, held in folds.split(train_X, train_y):
        inside, outside = _features(train_X[fit], train_X[held], width, linear)
        for i, candidate in enumerate(candidates):
            foreseen[i, held] = _truth_probability(candidate, inside, train_y[fit], outside, train_y[held])
    shares = MIXING * (1 - smoothing)
    scores = np.stack([np.log(share * foreseen + (1 - share) * prior[train_y]).mean(axis=1) for share in shares])
    share_index, best = np.unravel_index(scores.argmax(), scores.shape)

    if share_index == 0:
        return np.zeros(int(test.sum()))
    inside, outside = _features(train_X, X[test], width, linear)
    truth = _truth_probability(candidates[best], inside, train_y, outside, labels[test])
    return np.log(shares[share_index] * truth / prior[labels[test]] + 1 - shares[share_index])


def _truth_probability(candidate: Any, X: np.ndarray, y: np.ndarray, new: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The probability that a candidate, fitted to X and y, gives to the true classes of new examples, [n]."""
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():  # a fit that stops early is in the family, too; cross-validation judges it
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = clone(candidate).fit(X, y)
    return fitted.predict_proba(new)[np.arange(len(new)), np.searchsorted(fitted.classes_, truth)]


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

    if not isinstance(family, str):
        return [family]
    if family == "logistic":
        return [LogisticRegression(C=C, max_iter=300) for C in (0.1, 3.0, 1e2, 3e3, 1e5)]
    require(family == "forest", f"family={family!r} must be 'logistic', 'forest' or a scikit-learn classifier")
    return [RandomForestClassifier(200, random_state=seed)]


def _test_mask(labels: np.ndarray, names: np.ndarray, test_share: float, test_rows: Any, seed: int) -> np.ndarray:
    """The held-out examples, [n] of bool, with every class in both parts."""
    test = np.zeros(len(labels), dtype=bool)
    require(0 < test_share < 1, f"test_share={test_share} must lie strictly between 0 and 1")
    generator = np.random.default_rng(seed)
    if test_rows is not None:
        test[as_array(test_rows)] = True
    for label, name in enumerate(names):
        rows = np.flatnonzero(labels == label)
        if test_rows is None:
            count = min(max(round(test_share * len(rows)), 1), max(len(rows) - 2, 0))
            test[generator.permutation(rows)[:count]] = True
        outside = int(test[rows].sum())
        inside = len(rows) - outside
        have = f"property {name!r} has {inside} training and {outside} held-out examples"
        require(inside >= 2 and outside >= 1, f"{have}; a class needs 2 and 1: merge classes, or choose another split")
    return test


def _check_gradients(gradients: Mapping[str, Tensor | np.ndarray], labels: np.ndarray) -> None:
    several = labels.ndim == 1 and len(np.unique(labels)) >= 2
    require(several, "property must be one label per example, with two values at least; a constant says nothing")
    for layer, value in gradients.items():
        array, n = as_array(value), len(labels)
        require(array.ndim == 2 and len(array) == n, f"gradients[{layer!r}] is {array.shape}, not [{n}, features]")
        require(bool(np.isfinite(array).all()), f"gradients[{layer!r}] has values that are not finite; drop them")

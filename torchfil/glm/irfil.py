"""Iteratively reweighted Fisher information loss: weights that make everybody leak alike (Hannun et al. 2021).

They leak alike **with the weights held fixed**: η is that of a fit whose ω does not depend on the data. But ω was
computed from the data: with its derivative, the η of single examples was 0.87 to 1.64 times the reported one (least
squares), and up to 2.27 times (logistic, inputs only). The reweighted model leaks nearly alike, not exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from torchfil.glm.fil import Kind
from torchfil.glm.model import GeneralizedLinearModel
from torchfil.utils.errors import require
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array


@dataclass(frozen=True)
class IRFIL:
    """A reweighted model with its history.

    Attributes:
        model: The model at the last weights.
        sample_weight: ω, [n], with mean 1. It is computed from private data and confidential, like η.
        etas: η of every example at each round, the unweighted fit first, ω held fixed, [rounds + 1, n].
        spread: The standard deviation, at each round, of the equalised numbers: η of examples, or mean η of groups.
        converged: Whether the spread fell to the tolerance.
    """

    model: Any
    sample_weight: np.ndarray
    etas: np.ndarray
    spread: np.ndarray = field(repr=False)
    converged: bool


def iteratively_reweighted_fil(
    model: GeneralizedLinearModel,
    X: Any,
    y: Any,
    *,
    rounds: int = 15,
    groups: Literal["class"] | Sequence[Hashable] | None = None,
    attribute: Sequence[Any] | slice | None = None,
    one_hot: bool = False,
    private_target: bool = True,
    kind: Kind = "spectral",
    tolerance: float = 0.0,
    clamp: tuple[float, float] = (0.0, np.inf),
    progress: bool = False,
) -> IRFIL:
    """ω ← n (ω/η) / Σ(ω/η), refit, repeat: at a fixed point all η are equal, with the weights held fixed.

    η does not include that ω itself depends on the data; see :mod:`torchfil.glm.irfil` for how much this matters.

    Args:
        model: An estimator; a clone of it is fitted, and the original stays unchanged.
        X: Inputs, [n, d].
        y: Targets, [n].
        rounds: The largest number of reweightings.
        groups: None equalises η over examples. One label per example (or "class": the targets) gives all examples of
            a group one weight and equalises the groups' mean η.
        attribute: The columns (numbers, names or a slice) of the attribute whose η is equalised; None: the whole
            example.
        one_hot: Whether that attribute is one-hot, so that it moves only within the simplex.
        private_target: Whether y is private (without ``attribute``).
        kind: Which η, as in :meth:`GeneralizedLinearModel.fil`.
        tolerance: Stop when the spread over the mean η falls to it.
        clamp: The smallest and largest weight, before they are scaled to mean 1.
        progress: Whether to show a progress bar (tqdm).
    """
    from sklearn.base import clone

    require(rounds >= 1, f"rounds={rounds} must be at least 1")
    require(0 <= clamp[0] <= 1 <= clamp[1], f"clamp={clamp} must hold 1, the mean weight, and no negative number")
    n = len(y)
    labels = as_array(
        y if isinstance(groups, str) and groups == "class" else np.arange(n) if groups is None else groups
    )
    require(len(labels) == n, f"groups must give one label per example: {len(labels)} for {n}")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    member = np.array([numbers[label] for label in labels.tolist()])
    sizes = np.bincount(member)

    def fitted(weights: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        refitted = clone(model).fit(X, y, sample_weight=weights)
        attributes = None if attribute is None else {"attribute": attribute}
        eta = refitted.fil(X, y, 1.0, attributes, None, private_target, kind, one_hot=one_hot, sample_weight=weights)
        eta = eta if attribute is None else eta["attribute"]
        return refitted, eta, np.bincount(member, eta) / sizes

    weights = np.ones(n)
    reweighted, eta, level = fitted(weights)
    etas, spread = [eta], [level.std()]
    for _ in with_progress(range(rounds), progress, "IRFIL"):
        if spread[-1] <= tolerance * level.mean():
            break
        what = "an example" if groups is None else "a group"
        require(bool((level > 0).all()), f"{what} has η = 0, no influence on the model, and would get infinite weight")
        weights = np.clip(weights * (level.mean() / level)[member], *clamp)
        weights *= n / weights.sum()
        reweighted, eta, level = fitted(weights)
        etas.append(eta)
        spread.append(level.std())
    converged = bool(spread[-1] <= tolerance * level.mean())
    return IRFIL(reweighted, weights, np.stack(etas), np.asarray(spread), converged)

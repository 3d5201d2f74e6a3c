"""Iteratively reweighted Fisher information loss: weights that make everybody leak alike (Hannun et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchfil.glm.estimators import GeneralizedLinearModel

__all__ = ["IRFIL", "iteratively_reweighted_fil"]


@dataclass(frozen=True)
class IRFIL:
    """A reweighted model with its history.

    Attributes:
        model: The model at the last weights.
        sample_weight: ω, [n], of mean 1.
        etas: η of every example at each round, the unweighted fit first, [rounds + 1, n].
        spread: The standard deviation of η at each round.
    """

    model: Any
    sample_weight: np.ndarray
    etas: np.ndarray
    spread: np.ndarray = field(repr=False)


def iteratively_reweighted_fil(
    model: GeneralizedLinearModel,
    X: Any,
    y: Any,
    *,
    rounds: int = 15,
    tolerance: float = 0.0,
    clamp: tuple[float, float] = (0.0, np.inf),
    eta: Callable[[GeneralizedLinearModel, np.ndarray], np.ndarray] | None = None,
    progress: bool = False,
) -> IRFIL:
    """ω ← n (ω/η) / Σ(ω/η), refit, repeat: at a fixed point all η are equal.

    Args:
        model: An estimator; a clone of it is fitted, itself left alone.
        X: Inputs, [n, d].
        y: Targets, [n].
        rounds: Reweightings at most.
        tolerance: Stop when the standard deviation of η over its mean falls below it.
        clamp: The smallest and largest weight, before they are scaled to mean 1.
        eta: (fitted model, weights) ↦ η of every example; by default its spectral FIL. For an attribute's:
            ``lambda m, w: m.fil(X, y, attributes={"a": columns}, sample_weight=w)["a"]``; for classes, average within.
        progress: Whether to show a progress bar (tqdm).
    """
    from sklearn.base import clone

    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    if eta is None:

        def eta(fitted: GeneralizedLinearModel, weights: np.ndarray) -> np.ndarray:
            result: np.ndarray = fitted.fil(X, y, sample_weight=weights)
            return result

    weights = np.ones(len(y))
    fitted = clone(model).fit(X, y, sample_weight=weights)
    etas = [eta(fitted, weights)]
    for _ in _counted(rounds, progress):
        if etas[-1].std() <= tolerance * etas[-1].mean():
            break
        if not (etas[-1] > 0).all():
            raise ValueError("an example has η = 0 and would get infinite weight; it does not influence the model")
        weights = np.clip(weights / etas[-1] * etas[-1].mean(), *clamp)
        weights *= len(weights) / weights.sum()
        fitted = clone(model).fit(X, y, sample_weight=weights)
        etas.append(eta(fitted, weights))
    history = np.stack(etas)
    return IRFIL(fitted, weights, history, history.std(axis=1))


def _counted(rounds: int, progress: bool) -> Any:
    if not progress:
        return range(rounds)
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return range(rounds)
    return tqdm(range(rounds), desc="IRFIL")

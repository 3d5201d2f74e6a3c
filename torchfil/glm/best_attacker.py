r"""How often the best attacker is right who has to tell m normal laws apart, N(μ_a, I) with prior π_a.

The best attacker names the answer of the largest posterior. Where a is true, its log posterior exceeds that of b by a
normal number of mean log(π_a/π_b) + d_ab²/2 and variance d_ab², d_ab = ‖μ_a − μ_b‖, so that

    P(right) = Σ_a π_a P(all of these are positive) = E[max_a posterior_a].

Two answers: Φ. Three: the positive quadrant of a bivariate normal, by Owen's T. More: quasi-Monte Carlo on the second
form, as the surplus over the likeliest answer a₀ before the model was seen, π_{a₀} + E[max_a posterior_a − posterior_{a₀}];
points in the m − 1 dimensions that the means span, under each answer in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtr, owens_t
from torch import Tensor

__all__ = ["BestAccuracy", "best_accuracy"]

_POINTS = 128  # of each scrambled sequence, for each answer
_SCRAMBLES = 4
_CHUNK_NUMBERS = 2**21
_FAR = 40.0  # deviations beyond which a normal number does not fall
_NEAR = 1e-300


class BestAccuracy(NamedTuple):
    """The best attacker's chance to be right, and its numerical error.

    Attributes:
        value: [n].
        error: The standard error of quasi-Monte Carlo, [n]; 0 for two and three answers, which are exact.
    """

    value: np.ndarray
    error: np.ndarray


def best_accuracy(distances: np.ndarray, prior: np.ndarray) -> BestAccuracy:
    """E[max_a posterior_a] for n records with m answers each; no attacker is right more often on average over π.

    Args:
        distances: d_ab, the distances of the answers' means in units of the noise, [n, m, m].
        prior: π, [n, m].

    Example:
        >>> d = np.array([[[0.0, 2.0], [2.0, 0.0]]])
        >>> best_accuracy(d, np.array([[0.5, 0.5]])).value.round(4)  # Φ(1)
        array([0.8413])
    """
    n, m = prior.shape
    exact = {1: lambda *_: np.ones(n), 2: _of_two, 3: _of_three}
    if m in exact:
        value, error = exact[m](distances, prior), np.zeros(n)
    else:
        value, error = _of_many(distances, prior)
    # no worse than without the model, whatever the rounding
    return BestAccuracy(np.clip(value, prior.max(axis=1), 1.0), error)


def _thresholds(distances: np.ndarray, prior: np.ndarray, a: int, b: int) -> np.ndarray:
    """(log(π_a/π_b) + d²/2)/d: by how many deviations a beats b where a is true, [n]; the first of equals wins."""
    d = distances[:, a, b]
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(prior[:, a]) - np.log(prior[:, b])
        result = odds / d + d / 2
    first = odds > 0 if a > b else odds >= 0
    result = np.where(d > 0, result, np.where(first, np.inf, -np.inf))
    return np.nan_to_num(result, nan=_FAR, posinf=_FAR, neginf=-_FAR).clip(-_FAR, _FAR)


def _of_two(distances: np.ndarray, prior: np.ndarray) -> np.ndarray:
    chances = [ndtr(_thresholds(distances, prior, a, 1 - a)) for a in (0, 1)]
    return (prior * np.stack(chances, axis=1)).sum(axis=1)


def _of_three(distances: np.ndarray, prior: np.ndarray) -> np.ndarray:
    result = np.zeros(len(prior))
    for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        d_ab, d_ac, d_bc = distances[:, a, b], distances[:, a, c], distances[:, b, c]
        with np.errstate(divide="ignore", invalid="ignore"):
            correlation = (d_ab**2 + d_ac**2 - d_bc**2) / (2 * d_ab * d_ac)
        # where two answers are one, one of the two conditions holds or fails for certain
        correlation = np.nan_to_num(correlation, nan=0.0, posinf=0.0, neginf=0.0).clip(-1, 1)
        first, second = _thresholds(distances, prior, a, b), _thresholds(distances, prior, a, c)
        result += prior[:, a] * _bivariate_normal(first, second, correlation)
    return result


def _bivariate_normal(h: np.ndarray, k: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    """P(X ≤ h, Y ≤ k) by Owen's T: ½(Φ(h) + Φ(k)) − T(h, ·) − T(k, ·) − ½[hk < 0]; ±40 stands for ±∞, 1e-300 for 0."""
    h, k = (np.where(np.abs(x) < _NEAR, _NEAR, x) for x in (h, k))
    root = np.sqrt(np.maximum((1 - correlation) * (1 + correlation), 1e-30))
    with np.errstate(over="ignore"):
        tails = owens_t(h, (k - correlation * h) / (h * root)) + owens_t(k, (h - correlation * k) / (k * root))
    return (ndtr(h) + ndtr(k)) / 2 - tails - np.where(h * k < 0, 0.5, 0.0)


def _of_many(distances: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n, m = prior.shape
    points = _normal_points(m - 1)  # [scrambles, points, m − 1]
    surplus = np.empty((n, len(points)))
    size = max(1, _CHUNK_NUMBERS // (points[..., 0].numel() * m))
    for start in range(0, n, size):
        rows = slice(start, start + size)
        means, chances = _coordinates(torch.as_tensor(distances[rows])), torch.as_tensor(prior[rows])
        surplus[rows] = _surplus(means, chances, points).numpy()
    return prior.max(axis=1) + surplus.mean(axis=1), surplus.std(axis=1, ddof=1) / len(points) ** 0.5


def _surplus(means: Tensor, prior: Tensor, points: Tensor) -> Tensor:
    """E[max_a posterior_a − posterior_{a₀}] by every scrambled sequence, [rows, scrambles].

    Args:
        means: [rows, m, m − 1].
        prior: [rows, m].
        points: Standard normal, [scrambles, points, m − 1].
    """
    flat, log_prior = points.flatten(0, 1), prior.log()
    before = prior.argmax(dim=1)
    result = means.new_zeros(len(means), len(points))
    for a in range(prior.shape[1]):
        apart = means - means[:, [a]]
        scores = apart @ flat.mT + (log_prior - apart.square().sum(dim=2) / 2)[:, :, None]  # [rows, m, points]
        weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
        usual = weights.gather(1, before[:, None, None].expand(-1, 1, weights.shape[2]))[:, 0]
        gained = ((1 - usual) / weights.sum(dim=1)).view(len(means), *points.shape[:2])
        result += prior[:, a, None] * gained.mean(dim=2)
    return result


def _coordinates(distances: Tensor) -> Tensor:
    """Points with these distances, the widest direction first, [rows, m, m − 1]."""
    squares = distances.square()
    centred = squares - squares.mean(dim=1, keepdim=True)
    gram = -(centred - centred.mean(dim=2, keepdim=True)) / 2
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp(min=0).sqrt()[:, None, :]).flip(2)[:, :, :-1]


def _normal_points(dimensions: int) -> Tensor:
    """Scrambled Sobol points, always the same, as normal numbers, [scrambles, points, dimensions]."""
    drawn = [
        torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed).draw(_POINTS, dtype=torch.float64)
        for seed in range(_SCRAMBLES)
    ]
    # the middle of a point's cell, so that none lies at 0
    return torch.special.ndtri((torch.stack(drawn) + 2.0**-33).clamp(max=1 - 2.0**-33))

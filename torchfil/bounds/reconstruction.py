"""Reconstruction robustness (Hayes et al. 2023): how often any attacker's guess succeeds, biased or not.

If an attacker's guess from the prior alone succeeds with probability π₀, then after seeing the run it succeeds with
probability at most sup {P_μ(E) : P_ν(E) ≤ π₀}, ν = N(0, σ²I_T), μ = N(B, σ²I_T), B ~ Bernoulli(q)^T. By Neyman and
Pearson, E is a threshold on the likelihood ratio. Its distribution is computed on a grid
(:mod:`torchfil.bounds.privacy_loss`, after Kaissis et al. 2023), so the number lies in a bracket that is proven up to
rounding in float64.

What the theorem assumes. The example Z is drawn from a prior, and π₀ = sup_z P(the guess z succeeds for Z) under it.
The attacker knows everything else: all other examples and their batches, the initial weights, n, q, σ, C, T and the
divisor, and every noisy gradient. So the prior is that of somebody who knows all this. The attacker does not know which
steps drew Z: B is secret, and independent of Z and of all that. If B is known, use q = 1 with T = the number of
participations. Nothing else in the run may depend on Z: neither settings and weights, nor who is in the batches. The
bound compares the run with Z to the run in which its gradients, of norm at most C, are left out (zero-out adjacency),
in this direction only: with P the law of the run with Z = z and Q without, P(E) ≤ f(Q(E)) for each z, where f is the
supremum above as a function of π₀. Under Q the guess is independent of Z and succeeds with probability ≤ π₀; as f is
concave, Jensen's inequality gives f(π₀). An attacker who knows less about the others is covered if Z is independent of
them; otherwise π₀ must be that of somebody who knows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import fft, special
from torch import Tensor

from torchfil.bounds.privacy_loss import StepLoss, compose, covering_window, success_of, tail_exponents

_CELLS = (2**14, 2**17, 2**20)  # sizes of the window, tried in turn
_ROW_CELLS = 2**13  # for many examples at once
_AT_ONCE = 2**23  # numbers of composed laws
_WIDEST = 500.0  # cell of a grid of losses
_NEXT_TO_NO_NOISE = 0.05  # below this σ, a step that drew the example reveals it, except with probability Φ(−10)


@dataclass(frozen=True, eq=False)
class Bracket:
    """A number that certainly lies between two others; ``float(b)`` is the upper end, which you can promise.

    Attributes:
        low: The lower end.
        high: The upper end, same shape.
    """

    low: Tensor
    high: Tensor

    def __float__(self) -> float:
        return float(self.high)


def rero(
    prior_success: float | Sequence[float],
    *,
    q: float | Sequence[float],
    noise_multiplier: float | Sequence[float],
    steps: int | Sequence[int],
    tolerance: float = 1e-4,
) -> Bracket:
    """The largest success rate of **every** attacker, biased or not; the run's batches and its noise are random.

    It may know everything except the example and, with q < 1, which steps drew it; see the module's text.

    Args:
        prior_success: π₀ in (0, 1): how often the attacker's guess succeeds without the model, given all other
            examples; several give a curve.
        q: The sampling rate, in (0, 1]; several: one per part of the run.
        noise_multiplier: σ > 0; the clipped norm must not exceed ``max_grad_norm``. Several: one per part.
        steps: T ≥ 1; several: one per part.
        tolerance: The wanted width of the bracket, relative to its upper end.

    Returns:
        The bracket, a scalar or [priors]; exact for q = 1. The grid has at most 2²⁰ cells: in extreme runs the bracket
        stays wider than ``tolerance``, but is still valid.

    Example:
        >>> bracket = rero(0.01, q=0.01, noise_multiplier=1.0, steps=1000)
        >>> round(float(bracket.low), 4), round(float(bracket.high), 4)
        (0.0291, 0.0291)

        Without subsampling it is Φ(Φ⁻¹(π₀) + sqrt(T)/σ):

        >>> exact = torch.special.ndtr(torch.special.ndtri(torch.tensor(0.1)) + 0.5).item()
        >>> abs(float(rero(0.1, q=1.0, noise_multiplier=2.0, steps=1)) - exact) < 1e-6
        True
    """
    prior = torch.as_tensor(prior_success, dtype=torch.float64)
    _check_prior(prior, prior_success)
    stretches = _stretches(q, noise_multiplier, steps)
    priors = prior.reshape(-1).numpy()
    rates, sigmas, counts = (np.asarray(column, dtype=float) for column in zip(*stretches, strict=True))
    if (rates == 1).all():
        exact = torch.as_tensor(_gaussian(priors, (counts / sigmas**2).sum())).reshape(prior.shape)
        return Bracket(exact, exact)
    if (sigmas < _NEXT_TO_NO_NOISE).any():
        return _next_to_no_noise(prior, rates, sigmas, counts, tolerance)

    steps_of_run = _steps_of(rates, sigmas, _reach(counts[None], priors))
    window = float(np.ptp([end[0, 0] for end in _windows(counts[None], steps_of_run, _log_tail(priors))]))
    low, high = np.zeros(len(priors)), np.ones(len(priors))
    for cells in _CELLS:
        low = np.maximum(low, _success(priors, steps_of_run, counts[None], window / cells, up=False)[0])
        high = np.minimum(high, _success(priors, steps_of_run, counts[None], window / cells, up=True)[0])
        if (high - low <= tolerance * high).all():
            break
    low = np.maximum(low, priors)  # a guess without the model succeeds that often
    return Bracket(*(torch.as_tensor(end).reshape(prior.shape) for end in (low, np.maximum(low, high))))


def success_by_counts(
    prior_success: Sequence[float], q: float, noise_multipliers: Sequence[float], counts: np.ndarray
) -> np.ndarray:
    """The upper end for many examples, whose effective noise differs from step to step.

    Args:
        prior_success: π₀, each in (0, 1).
        q: The sampling rate of every step.
        noise_multipliers: σC/‖g̃‖ of each level.
        counts: How many steps of an example had each level, [examples, levels].

    Returns:
        [examples, priors].

    Example:
        >>> success_by_counts([0.1], 1.0, [2.0, 4.0], np.array([[1, 0], [0, 1]])).round(3)
        array([[0.217],
               [0.151]])
    """
    priors = np.asarray(prior_success, dtype=float)
    _check_prior(torch.as_tensor(priors), prior_success)
    sigmas = np.asarray(noise_multipliers, dtype=float)
    rows, place = np.unique(np.asarray(counts, dtype=float), axis=0, return_inverse=True)
    if q == 1:
        return _gaussian(priors[None], (rows / sigmas**2).sum(axis=1)[:, None])[place.reshape(-1)]

    # steps with almost no noise reveal an example that they drew; other steps count only if all of these missed it
    bare = sigmas < _NEXT_TO_NO_NOISE
    if bare.any():
        others = success_by_counts(prior_success, q, sigmas[~bare].tolist(), rows[:, ~bare])
        missed = (1 - q) ** rows[:, bare].sum(axis=1)
        return (1 - missed[:, None] * (1 - others))[place.reshape(-1)]

    # examples with about the same window share a grid, which does not depend on the other examples
    result = np.tile(priors, (len(rows), 1))
    released = np.flatnonzero(rows.sum(axis=1) > 0)
    used = np.flatnonzero(rows.sum(axis=0) > 0)
    if not len(released):
        return result[place.reshape(-1)]
    steps = _steps_of(np.full(len(used), q), sigmas[used], _reach(rows, priors))
    low, high = _windows(rows[np.ix_(released, used)], steps, _log_tail(priors))
    scale = np.ceil(np.log(high[:, 0] - low[:, 0]) / math.log(1.5))
    for size in np.unique(scale):
        chosen = released[scale == size]
        result[chosen] = _success(priors, steps, rows[np.ix_(chosen, used)], 1.5**size / _ROW_CELLS, up=True)
    return result[place.reshape(-1)]


def _next_to_no_noise(
    prior: Tensor, rates: np.ndarray, sigmas: np.ndarray, counts: np.ndarray, tolerance: float
) -> Bracket:
    """The bracket if some steps have so little noise that no grid would hold their losses.

    More noise reveals less. The upper end assumes no noise at those steps: with probability a = 1 − Π(1 − q)^T one of
    them has drawn the example, which is then known for certain. The success is a + (1 − a) S(π₀), where S(π₀) is that
    of the other steps. The lower end assumes more noise at those steps than the run had.
    """
    bare = sigmas < _NEXT_TO_NO_NOISE
    missed = float(((1 - rates[bare]) ** counts[bare]).prod())

    def success(chosen: np.ndarray, noise: np.ndarray) -> Bracket:
        q, steps = rates[chosen].tolist(), counts[chosen].astype(int).tolist()
        return rero(prior.tolist(), q=q, noise_multiplier=noise[chosen].tolist(), steps=steps, tolerance=tolerance)

    low = success(bare | ~bare, sigmas.clip(min=_NEXT_TO_NO_NOISE)).low
    others = prior if bare.all() else success(~bare, sigmas).high
    return Bracket(low, torch.maximum(low, 1 - missed * (1 - others)))


def _success(
    priors: np.ndarray, steps: Sequence[StepLoss], counts: np.ndarray, width: float, *, up: bool
) -> np.ndarray:
    """The upper or lower end, [rows, priors], for counts [rows, steps], on a grid of that width."""
    if width > _WIDEST:  # e^width is not finite
        return np.full((len(counts), len(priors)), 1.0 if up else 0.0)
    used = np.flatnonzero(counts.sum(axis=0) > 0)
    steps, counts = [steps[place] for place in used.tolist()], counts[:, used]
    log_tail = _log_tail(priors)
    low, high = _windows(counts, steps, log_tail)

    # rounding widens the distribution, so the window is that of the rounded one
    laws = [step.rounded_up(width) if up else step.rounded_down(width) for step in steps]
    exponents = np.unique([low[low[:, 0].argmin(), 1], high[high[:, 0].argmax(), 1]])
    low, high = covering_window(counts @ np.stack([law.log_moments(exponents) for law in laws]), exponents, log_tail)
    offsets = counts @ np.asarray([law.offset for law in laws])
    start = math.floor((low[:, 0] - offsets).min() / width) - 1
    size = fft.next_fast_len(math.ceil((high[:, 0] - offsets).max() / width) - start + 2, real=True)
    size += size % 2

    # mass beyond the window or the reach, or lost to rounding in float64, may be anywhere
    most = counts.sum(axis=1).max()
    slack = 2 * math.exp(log_tail) + 2 * most * special.ndtr(-steps[0].reach) + (most + 1000) * np.finfo(float).eps
    at_once = max(1, _AT_ONCE // size)
    success = np.empty((len(counts), len(priors)))
    for first in range(0, len(counts), at_once):
        rows = slice(first, first + at_once)
        law = compose(laws, counts[rows], start, size)
        success[rows] = success_of(law, offsets[rows] + start * width, width, priors)
    return (success + slack).clip(max=1) if up else (success - slack).clip(min=0)


def _windows(counts: np.ndarray, steps: Sequence[StepLoss], log_tail: float) -> tuple[np.ndarray, np.ndarray]:
    exponents = tail_exponents()
    return covering_window(counts @ np.stack([step.log_moments(exponents) for step in steps]), exponents, log_tail)


def _steps_of(rates: np.ndarray, sigmas: np.ndarray, reach: float) -> list[StepLoss]:
    return [StepLoss(float(q), float(sigma), reach) for q, sigma in zip(rates, sigmas, strict=True)]


def _log_tail(priors: np.ndarray) -> float:
    """The logarithm of a probability that is small compared with every success."""
    return math.log(1e-8 * priors.min())


def _reach(counts: np.ndarray, priors: np.ndarray) -> float:
    return float(-special.ndtri(math.exp(_log_tail(priors)) / max(1.0, counts.sum(axis=1).max())))


def _gaussian(priors: np.ndarray, squared_distance: np.ndarray) -> np.ndarray:
    """Φ(Φ⁻¹(π₀) + ‖distance‖): two normal laws of unit variance."""
    return np.asarray(special.ndtr(special.ndtri(priors) + np.sqrt(squared_distance)))


def _stretches(
    q: float | Sequence[float], noise_multiplier: float | Sequence[float], steps: int | Sequence[int]
) -> list[tuple[float, float, int]]:
    """(q, σ, T) of every part of the run; equal ones are combined."""
    given = [np.atleast_1d(np.asarray(each, dtype=float)) for each in (q, noise_multiplier, steps)]
    lengths = {len(each) for each in given if len(each) != 1}
    if len(lengths) > 1 or any(each.ndim != 1 or not len(each) for each in given):
        raise ValueError(
            f"q, noise_multiplier and steps have {[len(each) for each in given]} entries; give one number for the "
            "whole run, or one for each part of it"
        )
    total: dict[tuple[float, float], int] = {}
    for rate, sigma, count in zip(*np.broadcast_arrays(*given), strict=True):
        if not 0 < rate <= 1:
            raise ValueError(f"q={rate:g} must lie in (0, 1]")
        if not sigma > 0:
            raise ValueError(f"noise_multiplier={sigma:g} must be positive: without noise nothing is robust")
        if count < 1 or count != int(count):
            raise ValueError(f"steps={count:g} must be a whole number ≥ 1")
        total[float(rate), float(sigma)] = total.get((float(rate), float(sigma)), 0) + int(count)
    return [(rate, sigma, count) for (rate, sigma), count in total.items()]


def _check_prior(prior: Tensor, given: object) -> None:
    if not bool(((prior > 0) & (prior < 1)).all()) or prior.numel() == 0:
        raise ValueError(f"prior_success={given} must lie strictly between 0 and 1")

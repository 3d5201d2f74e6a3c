"""Reconstruction robustness (Hayes et al. 2023): how often any attacker's guess succeeds, biased or
not.

If an attacker's guess from the prior alone succeeds with probability π₀, then after seeing the run
it succeeds with probability at most sup {P_μ(E) : P_ν(E) ≤ π₀}, ν = N(0, σ²I_T), μ = N(B, σ²I_T), B
~ Bernoulli(q)^T. By Neyman and Pearson, E is a threshold on the likelihood ratio. Its distribution
is computed on a grid (after Kaissis et al. 2023), so the number lies in a bracket that is proven up
to rounding in float64.

What the theorem assumes. The example Z is drawn from a prior, and π₀ = sup_z P(the guess z succeeds
for Z) under it. The attacker knows everything else: all other examples and their batches, the
initial weights, n, q, σ, C, T and the divisor, and every noisy gradient. So the prior is that of
somebody who knows all this. The attacker does not know which steps drew Z: B is secret, and
independent of Z and of all that. If B is known, use q = 1 with T = the number of participations.
Nothing else in the run may depend on Z: neither settings and weights, nor who is in the batches.
The bound compares the run with Z to the run in which its gradients, of norm at most C, are left out
(zero-out adjacency), in this direction only: with P the law of the run with Z = z and Q without,
P(E) ≤ f(Q(E)) for each z, where f is the supremum above as a function of π₀. Under Q the guess is
independent of Z and succeeds with probability ≤ π₀; as f is concave, Jensen's inequality gives
f(π₀). An attacker who knows less about the others is covered if Z is independent of them; otherwise
π₀ must be that of somebody who knows them.

How it is computed. One step releases x ~ N(0, σ²) without the example (ν), and x ~ q N(1, σ²) +
(1−q) N(0, σ²) with it (μ). Its privacy loss

    L(x) = log dμ/dν = log(1 − q + q e^{(2x−1)/2σ²})

adds up over steps. The distribution of the sum under μ determines everything that an attacker can
achieve, because

    δ(ε) = E_μ (1 − e^{ε−L})₊,   sup {P_μ(E) : P_ν(E) ≤ π₀} = min over ε of  δ(ε) + e^ε π₀.

Both brackets of the distribution are on the grid k·h and are off by O(h²) per step. **Up**: a loss
in a cell moves to the cell's two ends, and its masses under μ and ν stay the same: a finer
experiment, which reveals more. **Down**: parts of neighbouring cells are pooled so that their mean
ratio is that of the end between them: a coarser experiment, which reveals less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import fft, signal, special
from torch import Tensor

Numbers = float | Sequence[float]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)
_PANEL = 0.05  # the widest panel of the quadrature, in σ
_CELLS = (2**14, 2**17, 2**20)  # sizes of the window, tried in turn
_ROW_CELLS = 2**13  # for many examples at once
_AT_ONCE = 2**23  # numbers of composed laws
_WIDEST = 500.0  # cell of a grid of losses
# below this σ, a step that drew the example reveals it, except with probability Φ(−10)
_NEXT_TO_NO_NOISE = 0.05


@dataclass(frozen=True, eq=False)
class Bracket:
    """A number that certainly lies between two others; ``float(b)`` is the upper end, which you can
    promise.

    Attributes:
        low: The lower end.
        high: The upper end, same shape.
    """

    low: Tensor
    high: Tensor

    def __float__(self) -> float:
        return float(self.high)


def rero(
    prior_success: Numbers,
    *,
    q: Numbers,
    noise_multiplier: Numbers,
    steps: Numbers,
    tolerance: float = 1e-4,
) -> Bracket:
    """The largest success rate of **every** attacker, biased or not.

    The run's batches and its noise are random.

    It may know everything except the example and, with q < 1, which steps drew it; see the module's
    text.

    Args:
        prior_success: π₀ in (0, 1): how often the attacker's guess succeeds without the model,
            given all other examples; several give a curve.
        q: The sampling rate, in (0, 1]; several: one per part of the run.
        noise_multiplier: σ > 0; the clipped norm must not exceed ``max_grad_norm``. Several: one
            per part.
        steps: T ≥ 1; several: one per part.
        tolerance: The wanted width of the bracket, relative to its upper end.

    Returns:
        The bracket, a scalar or [priors]; exact for q = 1. The grid has at most 2²⁰ cells: in
        extreme runs the bracket stays wider than ``tolerance``, but is still valid.

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
    priors = prior.reshape(-1).numpy()
    _check_prior(priors)
    stretches = _stretches(q, noise_multiplier, steps)
    rates, sigmas, counts = (
        np.asarray(column, dtype=float) for column in zip(*stretches, strict=True)
    )
    if (rates == 1).all():
        exact = torch.as_tensor(_gaussian(priors, (counts / sigmas**2).sum())).reshape(prior.shape)
        return Bracket(exact, exact)
    if (sigmas < _NEXT_TO_NO_NOISE).any():
        return _next_to_no_noise(prior, rates, sigmas, counts, tolerance)

    steps_of_run = _steps_of(rates, sigmas, _reach(counts[None], priors))
    window = float(
        np.ptp([end[0, 0] for end in _windows(counts[None], steps_of_run, _log_tail(priors))])
    )
    low, high = np.zeros(len(priors)), np.ones(len(priors))
    for cells in _CELLS:
        low = np.maximum(
            low, _success(priors, steps_of_run, counts[None], window / cells, up=False)[0]
        )
        high = np.minimum(
            high, _success(priors, steps_of_run, counts[None], window / cells, up=True)[0]
        )
        if (high - low <= tolerance * high).all():
            break
    low = np.maximum(low, priors)  # a guess without the model succeeds that often
    return Bracket(
        *(torch.as_tensor(end).reshape(prior.shape) for end in (low, np.maximum(low, high)))
    )


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
    _check_prior(priors)
    sigmas = np.asarray(noise_multipliers, dtype=float)
    rows, place = np.unique(np.asarray(counts, dtype=float), axis=0, return_inverse=True)
    if q == 1:
        return _gaussian(priors[None], (rows / sigmas**2).sum(axis=1)[:, None])[place.reshape(-1)]

    # steps with almost no noise reveal an example that they drew; other steps count only if all of
    # these missed it
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
        result[chosen] = _success(
            priors, steps, rows[np.ix_(chosen, used)], 1.5**size / _ROW_CELLS, up=True
        )
    return result[place.reshape(-1)]


def _next_to_no_noise(
    prior: Tensor, rates: np.ndarray, sigmas: np.ndarray, counts: np.ndarray, tolerance: float
) -> Bracket:
    """The bracket if some steps have so little noise that no grid would hold their losses.

    More noise reveals less. The upper end assumes no noise at those steps: with probability a = 1 −
    Π(1 − q)^T one of them has drawn the example, which is then known for certain. The success is a
    + (1 − a) S(π₀), where S(π₀) is that of the other steps. The lower end assumes more noise at
    those steps than the run had.
    """
    bare = sigmas < _NEXT_TO_NO_NOISE
    missed = float(((1 - rates[bare]) ** counts[bare]).prod())

    def success(chosen: np.ndarray, noise: np.ndarray) -> Bracket:
        q, steps = rates[chosen].tolist(), counts[chosen].astype(int).tolist()
        return rero(
            prior.tolist(),
            q=q,
            noise_multiplier=noise[chosen].tolist(),
            steps=steps,
            tolerance=tolerance,
        )

    low = success(bare | ~bare, sigmas.clip(min=_NEXT_TO_NO_NOISE)).low
    others = prior if bare.all() else success(~bare, sigmas).high
    return Bracket(low, torch.maximum(low, 1 - missed * (1 - others)))


def _success(
    priors: np.ndarray, steps: list[StepLoss], counts: np.ndarray, width: float, *, up: bool
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
    low, high = covering_window(
        counts @ np.stack([law.log_moments(exponents) for law in laws]), exponents, log_tail
    )
    offsets = counts @ np.asarray([law.offset for law in laws])
    start = math.floor((low[:, 0] - offsets).min() / width) - 1
    size = fft.next_fast_len(math.ceil((high[:, 0] - offsets).max() / width) - start + 2, real=True)
    size += size % 2

    # mass beyond the window or the reach, or lost to rounding in float64, may be anywhere
    most = counts.sum(axis=1).max()
    slack = (
        2 * math.exp(log_tail)
        + 2 * most * special.ndtr(-steps[0].reach)
        + (most + 1000) * np.finfo(float).eps
    )
    at_once = max(1, _AT_ONCE // size)
    success = np.empty((len(counts), len(priors)))
    for first in range(0, len(counts), at_once):
        rows = slice(first, first + at_once)
        law = compose(laws, counts[rows], start, size)
        success[rows] = success_of(law, offsets[rows] + start * width, width, priors)
    return (success + slack).clip(max=1) if up else (success - slack).clip(min=0)


def _windows(
    counts: np.ndarray, steps: Sequence[StepLoss], log_tail: float
) -> tuple[np.ndarray, np.ndarray]:
    sizes = 2.0 ** np.arange(-6, 15)
    # λ for Chernoff's bound on both tails, of which the best is used
    exponents = np.concatenate([-sizes, sizes])
    return covering_window(
        counts @ np.stack([step.log_moments(exponents) for step in steps]), exponents, log_tail
    )


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
    q: Numbers, noise_multiplier: Numbers, steps: Numbers
) -> list[tuple[float, float, int]]:
    """(q, σ, T) of every part of the run; equal ones are combined."""
    given = [np.atleast_1d(np.asarray(each, dtype=float)) for each in (q, noise_multiplier, steps)]
    lengths = {len(each) for each in given if len(each) != 1}
    if not (len(lengths) <= 1 and all(each.ndim == 1 and len(each) for each in given)):
        raise ValueError(
            f"q, noise_multiplier and steps have {[len(each) for each in given]} entries; give "
            "one number for the whole run, or one for each part of it"
        )
    total: dict[tuple[float, float], int] = {}
    for rate, sigma, count in zip(*np.broadcast_arrays(*given), strict=True):
        if not 0 < rate <= 1:
            raise ValueError(f"q={rate:g} must lie in (0, 1]")
        if not sigma > 0:
            raise ValueError(
                f"noise_multiplier={sigma:g} must be positive: without noise nothing is robust"
            )
        if not (count >= 1 and count == int(count)):
            raise ValueError(f"steps={count:g} must be a whole number ≥ 1")
        total[float(rate), float(sigma)] = total.get((float(rate), float(sigma)), 0) + int(count)
    return [(rate, sigma, count) for (rate, sigma), count in total.items()]


def _check_prior(prior: np.ndarray) -> None:
    if not (prior.size > 0 and bool(((prior > 0) & (prior < 1)).all())):
        raise ValueError(f"prior_success={prior.tolist()} must lie strictly between 0 and 1")


@dataclass(frozen=True)
class GridLaw:
    """A distribution of losses on its own grid: ``mass[i]`` lies at offset + (first + i)·width."""

    first: int
    mass: np.ndarray
    width: float
    offset: float

    def log_moments(self, exponents: np.ndarray) -> np.ndarray:
        """log E e^{λL} for each λ, [λ]."""
        losses = self.offset + (self.first + np.arange(len(self.mass))) * self.width
        return _log_moments(losses, self.mass, exponents)


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step with sampling rate q in (0, 1] and noise multiplier σ, both for
    sensitivity 1.

    Outputs farther than ``reach``·σ from both means are left out; their mass is at most 2Φ(−reach)
    under μ.

    Example:
        >>> step = StepLoss(q=0.1, sigma=2.0, reach=8.0)
        >>> up, down = step.rounded_up(1e-3), step.rounded_down(1e-3)
        >>> [round(float(law.mass.sum()), 12) for law in (up, down)]
        [1.0, 1.0]
    """

    q: float
    sigma: float
    reach: float

    @property
    def least(self) -> float:
        """log(1 − q), the infimum of the loss; 0, which does not matter, for q = 1."""
        return math.log1p(-self.q) if self.q < 1 else 0.0

    def loss(self, x: np.ndarray) -> np.ndarray:
        """L(x), which grows with x."""
        exponent = (2 * x - 1) / (2 * self.sigma**2)
        if self.q == 1:
            return exponent
        near = np.log1p(self.q * np.expm1(np.minimum(exponent, 30.0)))
        return np.where(
            exponent < 30, near, np.logaddexp(math.log1p(-self.q), math.log(self.q) + exponent)
        )

    def output(self, loss: np.ndarray) -> np.ndarray:
        """The x with L(x) = loss; −∞ or NaN if there is none."""
        if self.q == 1:
            return self.sigma**2 * loss + 0.5
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.log(-np.expm1(math.log1p(-self.q) - loss)) - math.log(self.q)
        return self.sigma**2 * (loss + part) + 0.5

    def density(self, x: np.ndarray) -> np.ndarray:
        """The density of x under μ."""
        inside, outside = (np.exp(-(((x - mean) / self.sigma) ** 2) / 2) for mean in (1.0, 0.0))
        return (self.q * inside + (1 - self.q) * outside) / (self.sigma * math.sqrt(2 * math.pi))

    def log_moments(self, exponents: np.ndarray) -> np.ndarray:
        """log E_μ e^{λL} for each λ, [λ]."""
        loss, weight, _ = self._quadrature(np.empty(0))
        return _log_moments(loss, weight, exponents)

    def rounded_up(self, width: float) -> GridLaw:
        """The distribution of the loss, moved to both ends of its cell.

        The least loss lies on the grid.
        """
        first, _, over, under = self._cells(width, self.least)
        mass = np.zeros(len(over) + 1)
        mass[1:] += over / -math.expm1(-width)
        mass[:-1] += under / math.expm1(width)
        return GridLaw(first, mass, width, self.least)

    def rounded_down(self, width: float) -> GridLaw:
        """The distribution of the loss, with parts of neighbouring cells pooled at the end between
        them.
        """
        offset = self.least
        # most mass is at the smallest losses: place the grid so that the least is left over there
        if self.q < 1:
            for spread in (1.0, 0.1):
                tried = offset + spread * width * np.linspace(-0.5, 0.5, 17)
                offset = min(tried.tolist(), key=lambda place: self._pools(width, place, 200)[3])
        first, mass, to_upper, _ = self._pools(width, offset)
        moved = mass * to_upper
        return GridLaw(first, np.append(mass - moved, 0.0) + np.append(0.0, moved), width, offset)

    def _pools(
        self, width: float, offset: float, most: int | None = None
    ) -> tuple[int, np.ndarray, np.ndarray, float]:
        """The number of the first cell, each cell's mass and the share that moves up, and the cost
        of rounding down.

        With β_{k−1} of cell k − 1 and α_k of cell k at their common end, β_{k−1} under_{k−1} = α_k
        over_k and α_k + β_k ≤ 1; the rest of a cell goes to its lower end. From both tails towards
        the mode the recursion contracts.

        Args:
            width: The width of a cell.
            offset: The position of the grid.
            most: How many of the lowest cells to use; None: all.
        """
        first, mass, over, under = self._cells(width, offset, most)
        mode, last = int(mass.argmax()), len(mass) - 1
        above, below = over.tolist(), under.tolist()
        to_lower, to_upper = [0.0] * len(mass), [0.0] * len(mass)  # α and β

        def meet(k: int, flow: float) -> None:
            """Pool cells k − 1 and k at their common end."""
            to_upper[k - 1] = flow / below[k - 1] if below[k - 1] > 0 else 0.0
            to_lower[k] = flow / above[k] if above[k] > 0 else 0.0

        for k in range(1, mode + 1):
            meet(k, min((1 - to_lower[k - 1]) * below[k - 1], above[k]))
        for k in range(last, mode + 1, -1):
            meet(k, min((1 - to_upper[k]) * above[k], below[k - 1]))
        if mode < last:  # something is left over at the place where both recursions meet
            meet(
                mode + 1,
                min((1 - to_upper[mode + 1]) * above[mode + 1], (1 - to_lower[mode]) * below[mode]),
            )

        left = (1 - np.asarray(to_lower) - np.asarray(to_upper)) * over
        return first, mass, np.asarray(to_upper), float(left[: mode + 8].sum())

    def _cells(
        self, width: float, offset: float, most: int | None = None
    ) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The number of the first cell; ∫ dμ, ∫ (1 − e^{a−L}) dμ and ∫ (e^{b−L} − 1) dμ over each
        cell [a, b].
        """
        ends = self.loss(np.asarray([-self.reach * self.sigma, 1 + self.reach * self.sigma]))
        first, last = math.floor((ends[0] - offset) / width), math.ceil((ends[1] - offset) / width)
        end = last if most is None else min(last, first + most)
        borders = self.output(offset + width * np.arange(first + 1, min(last, end + 1)))
        loss, weight, middle = self._quadrature(borders, borders[-1] if end < last else None)
        last = end

        # every panel lies in one cell
        cell = np.floor((self.loss(middle) - offset) / width).clip(first, last - 1)
        inside = (loss - offset - width * cell[:, None]).clip(0, width)
        place = np.repeat((cell - first).astype(np.int64), len(_NODES))
        integrands = (weight, weight * -np.expm1(-inside), weight * np.expm1(width - inside))
        mass, over, under = (np.bincount(place, part.ravel(), last - first) for part in integrands)
        return first, mass, over, under

    def _quadrature(
        self, borders: np.ndarray, end: float | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses and weights under μ, [panels, nodes], and the panels' middles.

        No panel crosses a border.
        """
        low, high = -self.reach * self.sigma, 1 + self.reach * self.sigma
        ends = np.linspace(low, high, math.ceil((high - low) / (_PANEL * self.sigma)) + 1)
        ends = np.unique(np.concatenate([ends, borders[(borders > low) & (borders < high)]]))
        ends = ends if end is None else ends[ends <= end]
        middle, half = (ends[1:] + ends[:-1]) / 2, (ends[1:] - ends[:-1]) / 2
        x = middle[:, None] + half[:, None] * _NODES
        return self.loss(x), half[:, None] * _WEIGHTS * self.density(x), middle


def covering_window(
    log_moments: np.ndarray, exponents: np.ndarray, log_tail: float
) -> tuple[np.ndarray, np.ndarray]:
    """Ends between which a sum lies, except with probability e^{log_tail} beyond each, by Chernoff.

    Args:
        log_moments: log E e^{λ·sum}, [rows, λ].
        exponents: λ, of both signs.
        log_tail: The logarithm of that probability.

    Returns:
        The lower and the upper ends, [rows] each, as pairs (end, its λ): [rows, 2].
    """
    ends = (log_moments - log_tail) / exponents
    lower, upper = np.where(exponents < 0, ends, -np.inf), np.where(exponents > 0, ends, np.inf)
    low, high = lower.argmax(axis=1), upper.argmin(axis=1)
    rows = np.arange(len(ends))
    pairs = (lower[rows, low], exponents[low]), (upper[rows, high], exponents[high])
    return np.stack(pairs[0], axis=1), np.stack(pairs[1], axis=1)


def compose(laws: Sequence[GridLaw], counts: np.ndarray, start: int, size: int) -> np.ndarray:
    """The distribution of sums of ``counts[:, j]`` independent losses of law j, [rows, size], from
    point ``start`` on.

    Grid point k of a row lies at k·width + Σ_j counts[j]·offset_j. Sums beyond the window reappear
    at its other end.
    """
    log_spectra = np.empty((len(laws), size // 2 + 1), dtype=complex)
    for log_spectrum, law in zip(log_spectra, laws, strict=True):
        spectrum = fft.rfft(
            np.bincount((law.first + np.arange(len(law.mass))) % size, law.mass, size)
        )
        spectrum[np.abs(spectrum) < 1e-300] = 1e-300
        log_spectrum[:] = np.log(spectrum)

    # sums of many steps have no high frequencies
    real = counts @ log_spectra.real
    kept = 1 + int(np.flatnonzero((real > -50).any(axis=0))[-1])
    spectra = np.exp(real[:, :kept]) * np.exp(1j * (counts @ log_spectra.imag[:, :kept]))
    return np.roll(fft.irfft(spectra, size, axis=-1), -start, axis=-1)


def success_of(
    mass: np.ndarray, first: np.ndarray, width: float, priors: Iterable[float]
) -> np.ndarray:
    """min over ε of δ(ε) + e^ε π₀, [rows, priors], for laws [rows, size] of losses first[row] +
    k·width.

    δ is linear in e^ε between grid points, so the minimum lies on one of them, or below all of
    them, where it is 1.
    """
    after = np.concatenate([mass[:, 1:], np.zeros_like(mass[:, :1])], axis=1)[:, ::-1]
    decay = math.exp(-width)
    # Σ_{j>k} P_j e^{(k−j)h}
    discounted = signal.lfilter([decay], [1, -decay], after, axis=1)[:, ::-1]
    delta = after.cumsum(axis=1)[:, ::-1] - discounted
    ratio = np.exp((first[:, None] + width * np.arange(mass.shape[1])).clip(max=700.0))
    return np.stack([(delta + prior * ratio).min(axis=1, initial=1.0) for prior in priors], axis=1)


def _log_moments(losses: np.ndarray, weights: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """log Σ w e^{λL} for each λ, [λ]."""
    losses, log_weights = losses[weights > 0], np.log(weights[weights > 0])
    return np.asarray(
        [special.logsumexp(log_weights + exponent * losses) for exponent in exponents]
    )

"""The privacy loss of a subsampled Gaussian run on a grid, rounded up and rounded down, composed by FFT.

One step releases x ~ N(0, σ²) without the example (ν), and x ~ q N(1, σ²) + (1−q) N(0, σ²) with it (μ). Its privacy
loss

    L(x) = log dμ/dν = log(1 − q + q e^{(2x−1)/2σ²})

adds up over steps. The distribution of the sum under μ determines everything that an attacker can achieve, because

    δ(ε) = E_μ (1 − e^{ε−L})₊,   sup {P_μ(E) : P_ν(E) ≤ π₀} = min over ε of  δ(ε) + e^ε π₀.

Both brackets of the distribution are on the grid k·h and are off by O(h²) per step. **Up**: a loss in a cell moves to
the cell's two ends, and its masses under μ and ν stay the same: a finer experiment, which reveals more. **Down**: parts
of neighbouring cells are pooled so that their mean ratio is that of the end between them: a coarser experiment, which
reveals less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft, signal

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)
_PANEL = 0.05  # the widest panel of the quadrature, in σ


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
    """The loss of one step with sampling rate q in (0, 1] and noise multiplier σ, both for sensitivity 1.

    Outputs farther than ``reach``·σ from both means are left out; their mass is at most 2Φ(−reach) under μ.

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
        return np.where(exponent < 30, near, np.logaddexp(math.log1p(-self.q), math.log(self.q) + exponent))

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
        """The distribution of the loss, moved to both ends of its cell; the least loss lies on the grid."""
        first, _, over, under = self._cells(width, self.least)
        mass = np.zeros(len(over) + 1)
        mass[1:] += over / -math.expm1(-width)
        mass[:-1] += under / math.expm1(width)
        return GridLaw(first, mass, width, self.least)

    def rounded_down(self, width: float) -> GridLaw:
        """The distribution of the loss, with parts of neighbouring cells pooled at the end between them."""
        offset = self.least
        if self.q < 1:  # most mass is at the smallest losses: place the grid so that the least is left over there
            for spread in (1.0, 0.1):
                tried = offset + spread * width * np.linspace(-0.5, 0.5, 17)
                offset = min(tried.tolist(), key=lambda place: self._pools(width, place, 200)[3])
        first, mass, to_upper, _ = self._pools(width, offset)
        moved = mass * to_upper
        return GridLaw(first, np.append(mass - moved, 0.0) + np.append(0.0, moved), width, offset)

    def _pools(self, width: float, offset: float, most: int | None = None) -> tuple[int, np.ndarray, np.ndarray, float]:
        """The number of the first cell, each cell's mass and the share that moves up, and the cost of rounding down.

        With β_{k−1} of cell k − 1 and α_k of cell k at their common end, β_{k−1} under_{k−1} = α_k over_k and α_k + β_k
        ≤ 1; the rest of a cell goes to its lower end. From both tails towards the mode the recursion contracts.

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
            meet(mode + 1, min((1 - to_upper[mode + 1]) * above[mode + 1], (1 - to_lower[mode]) * below[mode]))

        left = (1 - np.asarray(to_lower) - np.asarray(to_upper)) * over
        return first, mass, np.asarray(to_upper), float(left[: mode + 8].sum())

    def _cells(
        self, width: float, offset: float, most: int | None = None
    ) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The number of the first cell; ∫ dμ, ∫ (1 − e^{a−L}) dμ and ∫ (e^{b−L} − 1) dμ over each cell [a, b]."""
        ends = self.loss(np.asarray([-self.reach * self.sigma, 1 + self.reach * self.sigma]))
        first, last = math.floor((ends[0] - offset) / width), math.ceil((ends[1] - offset) / width)
        borders = self.output(
            offset + width * np.arange(first + 1, last if most is None else min(last, first + most + 1))
        )
        loss, weight, middle = self._quadrature(borders, None if most is None or first + most >= last else borders[-1])
        last = last if most is None else min(last, first + most)

        # every panel lies in one cell
        cell = np.floor((self.loss(middle) - offset) / width).clip(first, last - 1)
        inside = (loss - offset - width * cell[:, None]).clip(0, width)
        place = np.repeat((cell - first).astype(np.int64), len(_NODES))
        integrands = (weight, weight * -np.expm1(-inside), weight * np.expm1(width - inside))
        mass, over, under = (np.bincount(place, part.ravel(), last - first) for part in integrands)
        return first, mass, over, under

    def _quadrature(self, borders: np.ndarray, end: float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses and weights under μ, [panels, nodes], and the panels' middles; no panel crosses a border."""
        low, high = -self.reach * self.sigma, 1 + self.reach * self.sigma
        ends = np.linspace(low, high, math.ceil((high - low) / (_PANEL * self.sigma)) + 1)
        ends = np.unique(np.concatenate([ends, borders[(borders > low) & (borders < high)]]))
        ends = ends if end is None else ends[ends <= end]
        middle, half = (ends[1:] + ends[:-1]) / 2, (ends[1:] - ends[:-1]) / 2
        x = middle[:, None] + half[:, None] * _NODES
        return self.loss(x), half[:, None] * _WEIGHTS * self.density(x), middle


def tail_exponents() -> np.ndarray:
    """Values of λ for Chernoff's bound on both tails, of which :func:`covering_window` uses the best."""
    sizes = 2.0 ** np.arange(-6, 15)
    return np.concatenate([-sizes, sizes])


def covering_window(log_moments: np.ndarray, exponents: np.ndarray, log_tail: float) -> tuple[np.ndarray, np.ndarray]:
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
    return (
        np.stack([lower[rows, low], exponents[low]], axis=1),
        np.stack([upper[rows, high], exponents[high]], axis=1),
    )


def compose(laws: Sequence[GridLaw], counts: np.ndarray, start: int, size: int) -> np.ndarray:
    """The distribution of sums of ``counts[:, j]`` independent losses of law j, [rows, size], from point ``start`` on.

    Grid point k of a row lies at k·width + Σ_j counts[j]·offset_j. Sums beyond the window reappear at its other end.
    """
    log_spectra = np.empty((len(laws), size // 2 + 1), dtype=complex)
    for log_spectrum, law in zip(log_spectra, laws, strict=True):
        places = (law.first + np.arange(len(law.mass))) % size
        spectrum = fft.rfft(np.bincount(places, law.mass, size))
        spectrum[np.abs(spectrum) < 1e-300] = 1e-300
        log_spectrum[:] = np.log(spectrum)

    # sums of many steps have no high frequencies
    real = counts @ log_spectra.real
    kept = 1 + int(np.flatnonzero((real > -50).any(axis=0))[-1])
    spectra = np.exp(real[:, :kept]) * np.exp(1j * (counts @ log_spectra.imag[:, :kept]))
    return np.roll(fft.irfft(spectra, size, axis=-1), -start, axis=-1)


def success_of(mass: np.ndarray, first: np.ndarray, width: float, priors: Iterable[float]) -> np.ndarray:
    """min over ε of δ(ε) + e^ε π₀, [rows, priors], for laws [rows, size] of losses first[row] + k·width.

    δ is linear in e^ε between grid points, so the minimum lies on one of them, or below all of them, where it is 1.
    """
    after = np.concatenate([mass[:, 1:], np.zeros_like(mass[:, :1])], axis=1)[:, ::-1]
    decay = math.exp(-width)
    discounted = signal.lfilter([decay], [1, -decay], after, axis=1)[:, ::-1]  # Σ_{j>k} P_j e^{(k−j)h}
    delta = after.cumsum(axis=1)[:, ::-1] - discounted
    ratio = np.exp((first[:, None] + width * np.arange(mass.shape[1])).clip(max=700.0))
    return np.stack([(delta + prior * ratio).min(axis=1, initial=1.0) for prior in priors], axis=1)


def _log_moments(losses: np.ndarray, weights: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """log Σ w e^{λL} for each λ, [λ]."""
    losses, log_weights = losses[weights > 0], np.log(weights[weights > 0])

    def log_moment(exponent: float) -> float:
        terms = log_weights + exponent * losses
        largest = terms.max()
        return float(largest + np.log(np.exp(terms - largest).sum()))

    return np.asarray([log_moment(exponent) for exponent in exponents])

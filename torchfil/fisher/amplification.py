r"""What an attacker loses by not knowing which steps used the example: factors on the Fisher information.

An example that takes part in a step adds (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / s² to its Fisher information;
this module gives κ⊥ and κ∥. With ρ = ‖g̃‖/s, ξ ~ N(0, 1) and w(ξ) = q / (q + (1−q) exp(−ρξ − ρ²/2)),

    exact, Poisson sampling:   κ⊥ = E[w(ξ)],   κ∥ = E[ξ² w(ξ)]
    Theorem 4 (Guo et al. 2022):  κ⊥ = κ∥ = q / (q + (1−q) e^{−ε}), which fails with probability δ
    none:                      κ⊥ = κ∥ = 1

Threat model of the exact factors: the attacker sees every noisy gradient and knows every other example,
the hyper-parameters and who else is in each batch, but not which steps used the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy import optimize, special
from torch import Tensor

from torchfil.fisher.rules.tracing import has_no_value_yet

__all__ = [
    "Adjacency",
    "Amplification",
    "NoAmplification",
    "PoissonAmplification",
    "Theorem4Amplification",
    "analytic_gaussian_epsilon",
    "classical_gaussian_epsilon",
    "poisson_amplification",
]

Adjacency = Literal["replace-one", "add-remove"]


class Amplification(Protocol):
    """Maps ρ = ‖g̃‖/s, [batch], to the factors (κ⊥, κ∥), [batch] each."""

    def factors(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """κ⊥ and κ∥ at each ρ."""
        ...


@dataclass(frozen=True)
class NoAmplification:
    """κ⊥ = κ∥ = 1: the attacker knows which batches held the example, or the sampler is not Poisson."""

    def factors(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Ones."""
        return torch.ones_like(rho), torch.ones_like(rho)


@dataclass(frozen=True)
class PoissonAmplification:
    """The exact factors of Poisson sampling with rate q; no δ, no failure probability.

    Attributes:
        q: The probability with which an example is in a batch, in (0, 1].
    """

    q: float

    def __post_init__(self) -> None:
        _check_rate(self.q)

    def factors(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """κ⊥ = E[w(ξ)], κ∥ = E[ξ² w(ξ)]."""
        return poisson_amplification(rho, self.q)


@dataclass(frozen=True)
class Theorem4Amplification:
    """Guo et al. 2022, Theorem 4: κ = q / (q + (1−q) e^{−ε}), valid up to a failure probability δ a step.

    Attributes:
        q: The sampling rate, in (0, 1].
        noise_multiplier: σ, noise standard deviation over ``max_grad_norm``.
        delta: The chance that the bound fails in one step.
        epsilon_method: "analytic" (Balle & Wang 2018, exact for every σ) or "classical" (the paper's
            sqrt(2 ln(1.25/δ)) Δ/σ, a theorem only where it comes out below 1).
        adjacency: "replace-one" (the paper's; sensitivity 2C) or "add-remove" (sensitivity C).
        norm_bound: The largest clipped norm over C: 1 for a calibrated clip, 1.11522 for "gelu-paper".

    Example:
        >>> amplification = Theorem4Amplification(0.01, 5.0, 1e-9, epsilon_method="classical", norm_bound=1.115)
        >>> round(amplification.epsilon, 3)
        2.887
        >>> round(amplification.kappa, 4)
        0.1534
    """

    q: float
    noise_multiplier: float
    delta: float
    epsilon_method: Literal["analytic", "classical"] = "analytic"
    adjacency: Adjacency = "replace-one"
    norm_bound: float = 1.0
    epsilon: float = field(init=False)

    def __post_init__(self) -> None:
        _check_rate(self.q)
        factors = {"replace-one": 2.0, "add-remove": 1.0}
        methods = {"analytic": analytic_gaussian_epsilon, "classical": classical_gaussian_epsilon}
        if self.adjacency not in factors:
            raise ValueError(f"adjacency={self.adjacency!r} must be one of {list(factors)}")
        if self.epsilon_method not in methods:
            raise ValueError(f"epsilon_method={self.epsilon_method!r} must be one of {list(methods)}")
        sensitivity = factors[self.adjacency] * self.norm_bound
        object.__setattr__(
            self, "epsilon", methods[self.epsilon_method](self.noise_multiplier / sensitivity, self.delta)
        )

    @property
    def kappa(self) -> float:
        """κ = q / (q + (1−q) e^{−ε})."""
        return self.q / (self.q + (1 - self.q) * math.exp(-self.epsilon))

    def factors(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """κ for both."""
        return torch.full_like(rho, self.kappa), torch.full_like(rho, self.kappa)


def classical_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """ε = sqrt(2 ln(1.25/δ)) / σ for sensitivity 1; a theorem only where it is below 1 (Dwork & Roth 2014)."""
    _check_noise_and_delta(noise_multiplier, delta)
    return math.sqrt(2 * math.log(1.25 / delta)) / noise_multiplier


def analytic_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) ≤ δ, for sensitivity 1.

    Exact for every σ (Balle & Wang 2018).

    Example:
        >>> round(analytic_gaussian_epsilon(1.0, 1e-5), 4)
        4.3772
    """
    _check_noise_and_delta(noise_multiplier, delta)
    sigma = noise_multiplier

    def excess(epsilon: float) -> float:
        log_first = special.log_ndtr(0.5 / sigma - epsilon * sigma)
        log_second = epsilon + special.log_ndtr(-0.5 / sigma - epsilon * sigma)
        log_delta = log_first + math.log1p(-math.exp(min(log_second - log_first, -1e-300)))
        return float(log_delta - math.log(delta))

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))


def poisson_amplification(rho: Tensor | float, q: float) -> tuple[Tensor, Tensor]:
    """The exact factors (κ⊥, κ∥) of Poisson subsampling, elementwise in ρ.

    Interpolated from a table made once per q (piecewise Chebyshev polynomials in ρ); relative error below
    1e-9 for ρ ≥ 0 and q from 1e-6 to 1. Not differentiable.

    Args:
        rho: ‖g̃‖/s ≥ 0, any shape.
        q: The sampling rate, in (0, 1].

    Returns:
        κ⊥ and κ∥ in (0, 1], of ρ's shape, dtype and device (float64 where ρ is a number). Both tend to q
        for ρ → 0 and to 1 for ρ → ∞.

    Example:
        >>> perp, par = poisson_amplification(0.5, q=0.01)  # σ = 2, a gradient at the clip
        >>> round(perp.item(), 4), round(par.item(), 4)
        (0.0128, 0.0158)
    """
    _check_rate(q)
    rho = torch.as_tensor(rho, dtype=None if isinstance(rho, Tensor) else torch.float64).detach()
    if not has_no_value_yet(rho) and bool((~(rho >= 0)).any()):
        raise ValueError(f"rho must be ≥ 0, got {rho[~(rho >= 0)].flatten()[0].item()}")
    table = _table(float(q), rho.device)  # [2, pieces, degree + 1]
    position = (rho.double() / _PIECE).clamp(max=_PIECES - 1e-9)
    piece = position.long()
    local = (2 * (position - piece) - 1).clamp(-1, 1)
    order = torch.arange(_DEGREE + 1, device=rho.device, dtype=torch.float64)
    basis = torch.cos(order * torch.acos(local)[..., None])  # Chebyshev polynomials, [..., degree + 1]
    perp, par = ((table[which][piece] * basis).sum(dim=-1).exp() for which in (0, 1))
    beyond = rho >= _PIECE * _PIECES
    one = torch.ones_like(perp)
    return (
        torch.where(beyond, one, perp).clamp(max=1).to(rho.dtype),
        torch.where(beyond, one, par).clamp(max=1).to(rho.dtype),
    )


_PIECE = 0.5
_PIECES = 100  # the table ends at ρ = 50, where both factors are 1 to double precision
_DEGREE = 16


@lru_cache(maxsize=64)
def _table(q: float, device: torch.device) -> Tensor:
    """Chebyshev coefficients of log κ⊥ and log κ∥ on each piece of ρ, [2, pieces, degree + 1]."""
    nodes = np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
    coefficients = np.empty((2, _PIECES, _DEGREE + 1))
    inverse = np.linalg.inv(chebyshev.chebvander(nodes, _DEGREE))
    for piece in range(_PIECES):
        rho = _PIECE * (piece + 0.5 * (nodes + 1))
        for which, kappa in enumerate(_quadrature(rho, q)):
            coefficients[which, piece] = inverse @ np.log(kappa)
    return torch.from_numpy(coefficients).to(device)


def _quadrature(rho: np.ndarray, q: float) -> tuple[np.ndarray, np.ndarray]:
    """E[w] and E[ξ²w] by the trapezoidal rule, whose error for this integrand is exp(−2π²/(ρh)).

    The integrand's mass lies within 9 of ξ = 0 or, where q is small, of ξ = ρ before w saturates (ρ ≤ 6 for
    q ≥ 1e-6; smaller q moves this out slowly).
    """
    reach = 9.5 + math.sqrt(2 * max(0.0, -math.log(q)))
    step = 0.6 / max(1.0, float(rho.max()))
    xi = np.arange(-9.5, reach + step, step)
    density = np.exp(-0.5 * xi**2) / math.sqrt(2 * math.pi)
    logit = math.log(q) - (math.log1p(-q) if q < 1 else -math.inf)
    weight = special.expit(logit + rho[:, None] * xi + 0.5 * rho[:, None] ** 2)
    return step * (weight @ density), step * (weight @ (density * xi**2))


def _check_rate(q: float) -> None:
    if not 0 < q <= 1:
        raise ValueError(f"q={q} must lie in (0, 1]: it is the probability that an example is in a batch")


def _check_noise_and_delta(noise_multiplier: float, delta: float) -> None:
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be positive: without noise no ε is finite")
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")

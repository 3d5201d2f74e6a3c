r"""What an attacker loses by not knowing which steps used the example: factors on the Fisher
information.

An example that takes part in a step adds (κ⊥ (J̃ᵀJ̃ − a aᵀ) + κ∥ a aᵀ) / s² to its Fisher
information; this module gives κ⊥ and κ∥. With ρ = ‖g̃‖/s, ξ ~ N(0, 1) and w(ξ) = q / (q + (1−q)
exp(−ρξ − ρ²/2)),

    exact, Poisson sampling:   κ⊥ = E[w(ξ)],   κ∥ = E[ξ² w(ξ)]
    none:                      κ⊥ = κ∥ = 1

Threat model of the exact factors: the attacker sees every noisy gradient and knows every other
example, the hyper-parameters and who else is in each batch, but not which steps used the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy import optimize, special
from torch import Tensor

_PIECE = 0.5
_PIECES = 100  # the table of Poisson's factors ends at ρ = 50, where both are 1 to double precision
_DEGREE = 16


@runtime_checkable
class Amplification(Protocol):
    """Maps ρ = ‖g̃‖/s, the sampling rate q and the noise multiplier σ to the factors (κ⊥, κ∥).

    :class:`torchfil.fisher.Mechanism` passes q and σ at every use, so that the factors follow a
    noise scheduler.

    Attributes:
        secret_batches: Whether the attacker does not know who was in a batch. If so, which batches
            draw an example is part of the randomness of a run, and q must be known.
    """

    @property
    def secret_batches(self) -> bool:
        """Whether the attacker does not know who was in a batch."""

    def factors(self, rho: Tensor, q: float | None, sigma: float) -> tuple[Tensor, Tensor]:
        """κ⊥ and κ∥ at each ρ, [batch] each.

        Args:
            rho: ‖g̃‖/s, [batch].
            q: The rate at which examples are drawn; None: unknown, which secret batches do not
                allow.
            sigma: The noise multiplier.
        """


@dataclass(frozen=True)
class NoAmplification:
    """κ⊥ = κ∥ = 1: the attacker knows which batches held the example, or the sampler is not
    Poisson.
    """

    secret_batches: ClassVar[bool] = False

    def factors(
        self, rho: Tensor, q: float | None = None, sigma: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ones."""
        return torch.ones_like(rho), torch.ones_like(rho)


@dataclass(frozen=True)
class PoissonAmplification:
    """The exact factors of Poisson sampling with rate q; no δ, no failure probability.

    Attributes:
        q: The probability with which an example is in a batch, in (0, 1]; None: that of the
            mechanism.

    Example:
        >>> perp, par = PoissonAmplification(q=0.01).factors(torch.tensor([0.5]))
        >>> round(perp.item(), 4), round(par.item(), 4)
        (0.0128, 0.0158)
    """

    q: float | None = None
    secret_batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.q is not None:
            check_rate(self.q)

    def factors(
        self, rho: Tensor, q: float | None = None, sigma: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """κ⊥ = E[w(ξ)], κ∥ = E[ξ² w(ξ)]."""
        return poisson_amplification(rho, agreed_rate(self, q))


def agreed_rate(amplification: Amplification, q: float | None) -> float:
    """The rate of an amplification or, if it has none, the rate q.

    Raises:
        ValueError: Neither is known, or they differ.
    """
    own: float | None = getattr(amplification, "q", None)
    name, rate = type(amplification).__name__, q if own is None else own
    if rate is None:
        raise ValueError(
            f"{name} needs the sampling rate, which is unknown: give it as {name}(q=…), or as "
            "sample_rate"
        )
    if q is not None and not math.isclose(rate, q, rel_tol=1e-9):
        raise ValueError(
            f"{name}(q={rate:g}) does not fit: examples are drawn at rate {q:g}; leave q out"
        )
    return rate


def get_amplification(amplification: str | Amplification) -> Amplification:
    """The amplification of that name; an object is checked and returned.

    Example:
        >>> get_amplification("poisson")
        PoissonAmplification(q=None)
    """
    if isinstance(amplification, str):
        if amplification not in _NAMED:
            known = " or ".join(map(repr, _NAMED))
            raise ValueError(
                f"amplification={amplification!r} is unknown; use {known}, or pass your own object"
            )
        return _NAMED[amplification]
    if not isinstance(amplification, Amplification):
        raise TypeError(
            f"amplification={amplification!r} needs factors(rho, q, sigma) and a flag "
            "secret_batches"
        )
    return amplification


def name_of_amplification(amplification: Amplification) -> str:
    """The name of the amplification's class; of one of your own, its description.

    Example:
        >>> name_of_amplification(NoAmplification())
        'none'
    """
    same = (name for name, named in _NAMED.items() if type(named) is type(amplification))
    return next(same, repr(amplification))


def poisson_amplification(rho: Tensor | float, q: float) -> tuple[Tensor, Tensor]:
    """The exact factors (κ⊥, κ∥) of Poisson subsampling, elementwise in ρ.

    Interpolated from a table made once per q (piecewise Chebyshev polynomials in ρ); relative error
    below 1e-9 for ρ ≥ 0 and q from 1e-6 to 1. Not differentiable.

    Args:
        rho: ‖g̃‖/s ≥ 0, any shape; NaN gives NaN.
        q: The sampling rate, in (0, 1].

    Returns:
        κ⊥ and κ∥ in (0, 1], with ρ's shape, dtype and device (float64 if ρ is a number). Both tend
        to q for ρ → 0 and to 1 for ρ → ∞.

    Example:
        >>> perp, par = poisson_amplification(0.5, q=0.01)  # σ = 2, a gradient at the clip
        >>> round(perp.item(), 4), round(par.item(), 4)
        (0.0128, 0.0158)
    """
    check_rate(q)
    rho = torch.as_tensor(rho, dtype=None if isinstance(rho, Tensor) else torch.float64).detach()
    # then its numbers cannot be read
    capturing = rho.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((rho < 0).any()):
        raise ValueError(f"rho must be ≥ 0, got {rho[rho < 0].flatten()[0].item()}")

    # Chebyshev polynomials on the piece that holds ρ; T_k(x) = cos(k arccos x)
    table = _table(float(q), rho.device)  # [2, pieces, degree + 1]
    position = (rho.double().nan_to_num(nan=0.0) / _PIECE).clamp(max=_PIECES - 1e-9)
    piece = position.long()
    local = (2 * (position - piece) - 1).clamp(-1, 1)
    order = torch.arange(_DEGREE + 1, device=rho.device, dtype=torch.float64)
    basis = torch.cos(order * torch.acos(local)[..., None])  # [..., degree + 1]
    factors = (table[:, piece] * basis).sum(dim=-1).exp().clamp(max=1)  # [2, ...]
    factors = factors.masked_fill(rho >= _PIECE * _PIECES, 1).masked_fill(rho.isnan(), math.nan)
    perp, par = factors.to(rho.dtype)
    return perp, par


@lru_cache(maxsize=64)
def _table(q: float, device: torch.device) -> Tensor:
    """Chebyshev coefficients of log κ⊥ and log κ∥ on each piece of ρ, [2, pieces, degree + 1]."""
    nodes = np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
    inverse = np.linalg.inv(chebyshev.chebvander(nodes, _DEGREE))
    factors = [_quadrature(_PIECE * (piece + 0.5 * (nodes + 1)), q) for piece in range(_PIECES)]
    coefficients = [
        [inverse @ np.log(kappa) for kappa in of_all] for of_all in zip(*factors, strict=True)
    ]
    return torch.from_numpy(np.array(coefficients)).to(device)


def _quadrature(rho: np.ndarray, q: float) -> tuple[np.ndarray, np.ndarray]:
    """E[w] and E[ξ²w] by the trapezoidal rule, whose error for this integrand is exp(−2π²/(ρh)).

    The integrand's mass lies within 9 of ξ = 0 or, if q is small, of ξ = ρ before w saturates (ρ ≤
    6 for q ≥ 1e-6; a smaller q raises this limit slowly).
    """
    reach = 9.5 + math.sqrt(2 * max(0.0, -math.log(q)))
    step = 0.6 / max(1.0, float(rho.max()))
    xi = np.arange(-9.5, reach + step, step)
    density = np.exp(-0.5 * xi**2) / math.sqrt(2 * math.pi)
    logit = math.log(q) - (math.log1p(-q) if q < 1 else -math.inf)
    weight = special.expit(logit + rho[:, None] * xi + 0.5 * rho[:, None] ** 2)
    return step * (weight @ density), step * (weight @ (density * xi**2))


def check_rate(q: float) -> None:
    """Raise unless q is a sampling rate."""
    if not 0 < q <= 1:  # at every step
        raise ValueError(
            f"q={q} must lie in (0, 1]: it is the probability that an example is in a batch"
        )


def analytic_gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ) ≤ δ, for sensitivity 1.

    Exact for every σ (Balle & Wang 2018).

    Example:
        >>> round(analytic_gaussian_epsilon(1.0, 1e-5), 4)
        4.3772
    """
    if not noise_multiplier > 0:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be positive: without noise no ε is finite"
        )
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie strictly between 0 and 1")
    sigma = noise_multiplier

    def excess(epsilon: float) -> float:
        log_first = special.log_ndtr(0.5 / sigma - epsilon * sigma)
        log_second = epsilon + special.log_ndtr(-0.5 / sigma - epsilon * sigma)
        return float(
            (log_first + math.log1p(-math.exp(min(log_second - log_first, -1e-300))))
            - math.log(delta)
        )

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))


_NAMED: dict[str, Amplification] = {"none": NoAmplification(), "poisson": PoissonAmplification()}

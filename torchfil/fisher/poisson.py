r"""The exact factors of Poisson sampling on the Fisher information of one participation.

With ρ = ‖g̃‖/s, ξ ~ N(0, 1) and w(ξ) = q / (q + (1−q) exp(−ρξ − ρ²/2)),

    κ⊥ = E[w(ξ)],   κ∥ = E[ξ² w(ξ)].
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy import special
from torch import Tensor

__all__ = ["check_rate", "poisson_amplification"]

_PIECE = 0.5
_PIECES = 100  # the table ends at ρ = 50, where both factors are 1 to double precision
_DEGREE = 16


def poisson_amplification(rho: Tensor | float, q: float) -> tuple[Tensor, Tensor]:
    """The exact factors (κ⊥, κ∥) of Poisson subsampling, elementwise in ρ.

    Interpolated from a table made once per q (piecewise Chebyshev polynomials in ρ); relative error below
    1e-9 for ρ ≥ 0 and q from 1e-6 to 1. Not differentiable.

    Args:
        rho: ‖g̃‖/s ≥ 0, any shape.
        q: The sampling rate, in (0, 1].

    Returns:
        κ⊥ and κ∥ in (0, 1], with ρ's shape, dtype and device (float64 if ρ is a number). Both tend to q
        for ρ → 0 and to 1 for ρ → ∞.

    Example:
        >>> perp, par = poisson_amplification(0.5, q=0.01)  # σ = 2, a gradient at the clip
        >>> round(perp.item(), 4), round(par.item(), 4)
        (0.0128, 0.0158)
    """
    check_rate(q)
    rho = torch.as_tensor(rho, dtype=None if isinstance(rho, Tensor) else torch.float64).detach()
    capturing = rho.is_cuda and torch.cuda.is_current_stream_capturing()  # then its numbers cannot be read
    if not capturing and bool((~(rho >= 0)).any()):
        raise ValueError(f"rho must be ≥ 0, got {rho[~(rho >= 0)].flatten()[0].item()}")

    # Chebyshev polynomials on the piece that holds ρ; T_k(x) = cos(k arccos x)
    table = _table(float(q), rho.device)  # [2, pieces, degree + 1]
    position = (rho.double() / _PIECE).clamp(max=_PIECES - 1e-9)
    piece = position.long()
    local = (2 * (position - piece) - 1).clamp(-1, 1)
    order = torch.arange(_DEGREE + 1, device=rho.device, dtype=torch.float64)
    basis = torch.cos(order * torch.acos(local)[..., None])  # [..., degree + 1]
    perp, par = ((table[which][piece] * basis).sum(dim=-1).exp() for which in (0, 1))

    beyond = rho >= _PIECE * _PIECES
    one = torch.ones_like(perp)
    return (
        torch.where(beyond, one, perp).clamp(max=1).to(rho.dtype),
        torch.where(beyond, one, par).clamp(max=1).to(rho.dtype),
    )


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

    The integrand's mass lies within 9 of ξ = 0 or, if q is small, of ξ = ρ before w saturates (ρ ≤ 6 for q ≥ 1e-6; a
    smaller q raises this limit slowly).
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
    if not 0 < q <= 1:
        raise ValueError(f"q={q} must lie in (0, 1]: it is the probability that an example is in a batch")

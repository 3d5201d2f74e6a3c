r"""How well one private step distinguishes an example from an alternative: a Kullback–Leibler divergence.

Let u = g̃(x)/s and v = g̃(x')/s be the clipped gradients of the true example and of the alternative, s = σC, φ = N(0, I).
Under Poisson sampling with rate q, and after subtracting the other examples' part, the step releases a draw from

    P = (1−q) φ(·) + q φ(· − u)  with x in the data set,   P' = (1−q) φ(·) + q φ(· − v)  with x' in it,

and E_P Σ_t KL_t(P ‖ P') is the divergence D of the transcripts (:mod:`torchfil.guessing` says what D means).

Let A = 1−q + q e^{⟨u,o⟩ − ‖u‖²/2}, and B likewise for v (the densities divided by φ). Then KL = (1−q) E₀ log A/B +
q E_u log A/B, with the means over o ~ φ and o ~ φ(· − u). log A and log B each depend on a single normal number, so
the mean of their difference may be taken as if both numbers came from the same ξ ~ N(0, 1). This is one integral over a
line instead of one over the plane, and its integrand is small if u is close to v. Let y be the exponent in B and y + Δ
the exponent in A:

    under φ:         y = −‖v‖²/2 + ‖v‖ξ,           Δ = (‖v‖² − ‖u‖²)/2 + (‖u‖ − ‖v‖)ξ
    under φ(· − u):  y = ⟨u,v⟩ − ‖v‖²/2 + ‖v‖ξ,    Δ = ‖u − v‖²/2 + (‖u‖ − ‖v‖)ξ

    log A/B = log(1 + w (e^Δ − 1)),   w = q e^y / (1−q + q e^y)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchfil.fisher.amplification import check_rate

__all__ = ["step_divergence"]

_REACH = 9.0  # of the nodes, in standard deviations of ξ
_NODES = 129
_TINY = 1e-8  # of ‖u‖² and ‖v‖²: below, KL is q²‖u − v‖²/2 to eight digits
_FAR = 200.0  # from z = 0: log(1 + e^z) is 0 below, and z above


def step_divergence(squared_true: Tensor, squared_other: Tensor, product: Tensor, sample_rate: float | None) -> Tensor:
    """KL_t = KL(P ‖ P') between one step on the true example and one on the alternative, elementwise.

    Args:
        squared_true: ‖u‖², u = g̃(x)/(σC), any shape.
        squared_other: ‖v‖², v = g̃(x')/(σC), of the same shape; 0 for an alternative without the example ("absent").
        product: ⟨u, v⟩, of the same shape.
        sample_rate: q of Poisson sampling, in (0, 1], if the attacker does not know who was in a batch; None: the
            attacker knows, and the example is in this step's batch: KL_t = ‖u − v‖²/2.

    Returns:
        KL_t ≥ 0 in float64; exactly 0 if ‖u‖² = ‖v‖² = ⟨u, v⟩. Swap the squares for KL(P' ‖ P).

    Guarantees:
        * For norms up to 5 and q from 1e-5 to 1, the error is below 1e-8, and below 1e-6 of the value; for norms up to
          50, below 1e-4 of the value. ‖u − v‖² is computed from the three arguments and has their rounding errors.
        * It is a fixed number of tensor operations on the arguments' device, none of which reads a value. It is not
          differentiable.

    Example:
        >>> one = torch.ones(1)
        >>> step_divergence(one, one, 0.5 * one, None)
        tensor([0.5000], dtype=torch.float64)
        >>> round(step_divergence(one, 0 * one, 0 * one, 0.01).item() / 0.01**2, 3)  # (e − 1)/2 for q → 0
        0.838
    """
    true, other, inner = (value.detach().double() for value in (squared_true, squared_other, product))
    norm, other_norm = true.sqrt(), other.sqrt()
    slope = (true - other) / (norm + other_norm).clamp(min=torch.finfo(torch.float64).tiny)  # ‖u‖ − ‖v‖
    gap = torch.maximum(true + other - 2 * inner, slope.square())  # ‖u − v‖², which rounding may make too small
    if sample_rate is None:
        return gap / 2
    check_rate(sample_rate)
    if sample_rate == 1:
        return gap / 2

    # the trapezoidal rule errs by exp(−2π²/(spacing·norm)) if a logarithm bends within 1/norm
    spacing = 2 * _REACH / (_NODES - 1)
    xi = spacing * torch.arange(-(_NODES // 2), _NODES // 2 + 1, device=true.device, dtype=torch.float64)
    weight = spacing / math.sqrt(2 * math.pi) * (-xi.square() / 2).exp()

    # both components at once, [2, ..., nodes]: without the example, and with it
    drift = torch.stack([(other - true) / 2, gap / 2])
    offset = torch.stack([-other / 2, (true - gap) / 2]) + math.log(sample_rate) - math.log1p(-sample_rate)
    delta = drift[..., None] + slope[..., None] * xi
    log_odds = offset[..., None] + other_norm[..., None] * xi
    absent, present = (_log_ratio(log_odds, delta) * weight).sum(dim=-1)

    divergence = (1 - sample_rate) * absent + sample_rate * present
    tiny = torch.maximum(true, other) < _TINY
    return torch.where(tiny, sample_rate**2 * gap / 2, divergence).clamp(min=0)


def _log_ratio(log_odds: Tensor, delta: Tensor) -> Tensor:
    """log((1 + e^{z + Δ})/(1 + e^z)), z the log odds, to full relative precision however small Δ is.

    The smaller of z and z + Δ is the base, so that log(1 + …) is never taken near 0.
    """
    base = log_odds + delta.clamp(max=0)

    # so that nothing overflows: 1 + e^z is 1 far below 0, and log(1 + e^z) is z far above
    lifted = base.clamp(min=-_FAR)
    size = (delta.abs() - (lifted - base)).clamp(min=0)
    curved = size.clamp(max=2 * _FAR)
    ratio = torch.log1p(lifted.sigmoid() * curved.expm1()) + (size - curved)
    return ratio.copysign(delta)

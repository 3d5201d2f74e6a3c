r"""How well one private step tells a true example from an alternative: a Kullback–Leibler divergence, no derivative.

With u = g̃(x)/s and v = g̃(x')/s the clipped gradients of the true example and of the alternative over s = σC, φ = N(0, I)
and Poisson sampling with rate q, the step releases (the others' part taken away)

    P = (1−q) φ(·) + q φ(· − u)   where x is in the data set,   P' = (1−q) φ(·) + q φ(· − v)   where x' is,

and KL(P ‖ P') is what the step adds to D = KL of the two transcripts (:mod:`torchfil.guessing` says what D means).

With A = 1−q+q e^{⟨u,o⟩ − ‖u‖²/2} and B alike for v, both densities over φ, KL = (1−q) E₀ log A/B + q E_u log A/B. Each of
log A and log B depends on o through one normal number, so that any coupling of the two does; the one that lets both be
driven by the same ξ ~ N(0, 1) makes each expectation one-dimensional and its integrand small wherever u is close to v:

    under φ(·):      A at −‖u‖²/2 + ‖u‖ξ,   B at −‖v‖²/2 + ‖v‖ξ,        log of the ratio of the exponentials: Δ₀ = (‖v‖² − ‖u‖²)/2 + (‖u‖ − ‖v‖)ξ
    under φ(· − u):  A at +‖u‖²/2 + ‖u‖ξ,   B at ⟨u,v⟩ − ‖v‖²/2 + ‖v‖ξ,  Δ_u = ‖u − v‖²/2 + (‖u‖ − ‖v‖)ξ
    log A/B = log(1 + w expm1 Δ),  w = 1 − (1−q)/B.
"""  # noqa: E501

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from torchfil.fisher.poisson import check_rate

__all__ = ["step_divergence"]

_REACH = 9.5  # of the nodes, in standard deviations: the normal density there is 1e-20
_NODES = 161
_TINY = 1e-8  # squared norms below which KL is q²‖u − v‖²/2 to eight digits


def step_divergence(squared_true: Tensor, squared_other: Tensor, product: Tensor, sample_rate: float | None) -> Tensor:
    """KL_t between one step on the true example and one on the alternative, elementwise.

    Args:
        squared_true: ‖u‖², u = g̃(x)/(σC), any shape.
        squared_other: ‖v‖², v = g̃(x')/(σC), of the same shape; 0 for an alternative without the example ("absent").
        product: ⟨u, v⟩, of the same shape.
        sample_rate: q of Poisson sampling, in (0, 1], where the attacker does not know who was in a batch; None: it
            does know, and this is a step whose batch holds the example.

    Returns:
        KL(P ‖ P') ≥ 0 in float64; exactly 0 where ‖u‖² = ‖v‖² = ⟨u, v⟩. Swapped arguments give KL(P' ‖ P).

    Guarantees:
        * Error below 1e-8, and below 1e-6 of the value, for norms up to 5 and q from 1e-5 to 1; below 1e-4 of the value
          for norms up to 50.
        * A fixed number of tensor operations on the inputs' device, which never looks at a value. Not differentiable.

    Example:
        >>> one, half = torch.tensor([1.0]), torch.tensor([0.5])
        >>> step_divergence(one, one, half, None)
        tensor([0.5000], dtype=torch.float64)
        >>> round(step_divergence(one, 0 * one, 0 * one, 0.01).item() / 1e-4, 3)  # about (e − 1)/2
        0.838
    """
    true, other, inner = (value.detach().double() for value in (squared_true, squared_other, product))
    norm, other_norm = true.clamp(min=0).sqrt(), other.clamp(min=0).sqrt()
    total = norm + other_norm
    slope = torch.where(total > 0, (true - other) / total.where(total > 0, 1.0), 0.0)  # ‖u‖ − ‖v‖
    gap = torch.maximum(true + other - 2 * inner, slope.square())  # ‖u − v‖², by Cauchy and Schwarz
    if sample_rate is None or sample_rate == 1:
        return gap / 2
    check_rate(sample_rate)

    # the trapezoidal rule, whose error is exp(−2π²/(step·norm)) for a logarithm that turns within 1/norm
    step = 2 * _REACH / (_NODES - 1)
    xi = step * torch.arange(-(_NODES // 2), _NODES // 2 + 1, device=true.device, dtype=torch.float64)
    weight = step / math.sqrt(2 * math.pi) * (-xi.square() / 2).exp()

    # Δ, and the log odds of the example's part in B, under both components
    drift = torch.stack([(other - true) / 2, gap / 2])
    offset = torch.stack([-other / 2, (true - gap) / 2]) + math.log(sample_rate) - math.log1p(-sample_rate)
    delta = drift[..., None] + slope[..., None] * xi
    odds = offset[..., None] + other_norm[..., None] * xi
    absent, present = (_log_ratio(odds, delta) * weight).sum(dim=-1)

    found = (1 - sample_rate) * absent + sample_rate * present
    small = torch.maximum(true, other) < _TINY
    return torch.where(small, sample_rate**2 * gap / 2, found).clamp(min=0)


def _log_ratio(odds: Tensor, delta: Tensor) -> Tensor:
    """log((1 + e^{z + Δ})/(1 + e^z)) without cancellation where Δ is small, and without overflow where it is large."""
    near = delta.abs() <= 1
    close = torch.log1p(odds.sigmoid() * delta.where(near, 0.0).expm1())
    return torch.where(near, close, F.softplus(odds + delta, threshold=40) - F.softplus(odds, threshold=40))

"""One private step as a mechanism: clip to C, sum, add N(0, (σC)² I), over a (sub)sampled batch.

How well such a step distinguishes an example from an alternative is a Kullback–Leibler divergence.

Let u = g̃(x)/s and v = g̃(x')/s be the clipped gradients of the true example and of the
alternative, s = σC, φ = N(0, I). Under Poisson sampling with rate q, and after subtracting the
other examples' part, the step releases a draw from

    P  = (1−q) φ(·) + q φ(· − u)  with x in the data set,
    P' = (1−q) φ(·) + q φ(· − v)  with x' in it,

and E_P Σ_t KL_t(P ‖ P') is the divergence D of the transcripts (:mod:`torchfil.guessing` says what
D means).

Let A = 1−q + q e^{⟨u,o⟩ − ‖u‖²/2}, and B likewise for v (the densities divided by φ). Then KL =
(1−q) E₀ log A/B + q E_u log A/B, with the means over o ~ φ and o ~ φ(· − u). log A and log B each
depend on a single normal number, so the mean of their difference may be taken as if both numbers
came from the same ξ ~ N(0, 1). This is one integral over a line instead of one over the plane, and
its integrand is small if u is close to v. Let y be the exponent in B and y + Δ the exponent in A:

    under φ:         y = −‖v‖²/2 + ‖v‖ξ,           Δ = (‖v‖² − ‖u‖²)/2 + (‖u‖ − ‖v‖)ξ
    under φ(· − u):  y = ⟨u,v⟩ − ‖v‖²/2 + ‖v‖ξ,    Δ = ‖u − v‖²/2 + (‖u‖ − ‖v‖)ξ

    log A/B = log(1 + w (e^Δ − 1)),   w = q e^y / (1−q + q e^y)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.fisher.amplification import (
    Amplification,
    NoAmplification,
    agreed_rate,
    check_rate,
    get_amplification,
)

_REACH = 9.0  # of the nodes, in standard deviations of ξ
_NODES = 129
_TINY = 1e-8  # of ‖u‖² and ‖v‖²: below, KL is q²‖u − v‖²/2 to eight digits
_FAR = 200.0  # from z = 0: log(1 + e^z) is 0 below, and z above


@dataclass(frozen=True)
class Mechanism:
    """How a step turns per-example gradients into a noisy release.

    With s = σC (not σ alone), one participation adds the Fisher information

        I = (κ⊥ φ² JᵀPJ + κ∥ a aᵀ) / s².

    Guarantees:
        * The amplification is called at each use, with the mechanism's own q and σ.
        * σ = 0 is refused, unless ``allow_zero_noise``: then the weights are infinite, and so is
          the Fisher information about every example whose gradient depends on it; it is 0 about an
          example whose gradient does not.

    Attributes:
        max_grad_norm: C > 0.
        noise_multiplier: σ > 0, or 0 if allowed.
        clip: The clip function.
        amplification: Gives κ⊥ and κ∥.
        sample_rate: q, the rate at which examples are drawn; None: unknown, or not Poisson
            sampling.
        shares: C_l/C by parameter name, if each parameter's gradient is clipped separately, to C_l;
            their squares sum to 1. None: the gradient is clipped as a whole.

    Example:
        >>> Mechanism.build(1.0, 2.0).weights(torch.tensor([0.5]))  # κ/(σC)²
        (tensor([0.2500]), tensor([0.2500]))
    """

    max_grad_norm: float
    noise_multiplier: float
    clip: ClipFunction
    amplification: Amplification
    sample_rate: float | None = None
    shares: Mapping[str, float] | None = field(default=None, hash=False)

    @classmethod
    def build(
        cls,
        max_grad_norm: float,
        noise_multiplier: float,
        clip: str | ClipFunction = DEFAULT_CLIP,
        amplification: str | Amplification | None = None,
        sample_rate: float | None = None,
        *,
        shares: Mapping[str, float] | None = None,
        allow_zero_noise: bool = False,
    ) -> Mechanism:
        """Check the numbers and look up the clip function and the amplification.

        None means κ = 1.
        """
        if not 0 < max_grad_norm < math.inf:
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive and finite")
        enough = noise_multiplier >= 0 if allow_zero_noise else noise_multiplier > 0
        least = (
            "0 or more" if allow_zero_noise else "positive (without noise, all information leaks)"
        )
        if not (math.isfinite(noise_multiplier) and enough):
            raise ValueError(f"noise_multiplier={noise_multiplier} must be {least}, and finite")
        chosen = NoAmplification() if amplification is None else get_amplification(amplification)
        if chosen.secret_batches:
            sample_rate = agreed_rate(chosen, sample_rate)
            check_rate(sample_rate)
        return cls(max_grad_norm, noise_multiplier, get_clip(clip), chosen, sample_rate, shares)

    @property
    def noise_std(self) -> float:
        """s = σC, the standard deviation of the noise on each coordinate of the summed gradient."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def noiseless(self) -> bool:
        """Whether the step adds no noise and so reveals the gradients' sum exactly."""
        return self.noise_multiplier == 0

    def divergence(self, products: Tensor, clip_weights: Tensor | None = None) -> Tensor:
        """What one participation adds to KL(P ‖ P′), P′ the release with g′ in place of g, [batch],
        in float64.

        Without subsampling this is ‖g̃ − g̃′‖²/2s²; with secret batches it is KL_t/q of the two
        mixtures (:func:`step_divergence`), because the step counts whenever the example is drawn.
        It is infinite without noise, unless g̃ = g̃′.

        Args:
            products: ‖g‖², ‖g′‖² and ⟨g, g′⟩ of the gradients before clipping, [3, batch]; [3,
                batch, parameters] if each parameter's gradient is clipped separately.
            clip_weights: ω, [batch]; both clipped gradients are multiplied by it. None: 1.
        """
        rounding = 1e-10 if products.dtype == torch.float64 else 1e-5
        products = products.double()
        # [parameters]
        shares = 1.0 if self.shares is None else products.new_tensor(list(self.shares.values()))
        own, other = self.clip.scale(products[:2].clamp(min=0).sqrt(), self.max_grad_norm * shares)
        products = products * torch.stack([own * own, other * other, own * other])
        products = products if self.shares is None else products.sum(dim=2)
        weights = 1.0 if clip_weights is None else clip_weights.double().square()
        squared, squared_other, product = products * weights

        if self.noiseless:
            apart = squared + squared_other - 2 * product
            return torch.where(apart > rounding * (squared + squared_other), math.inf, 0.0).double()
        rate = self.sample_rate if self.amplification.secret_batches else None
        variance = self.noise_std**2
        step = step_divergence(
            squared / variance, squared_other / variance, product / variance, rate
        )
        return step if rate is None else step / rate

    def weights(self, clipped_norm: Tensor) -> tuple[Tensor, Tensor]:
        """κ⊥/s² and κ∥/s², [batch] each, for the clipped norms ‖g̃‖, [batch].

        Infinite without noise.
        """
        if self.noiseless:
            return torch.full_like(clipped_norm, math.inf), torch.full_like(clipped_norm, math.inf)
        perp, par = self.amplification.factors(
            clipped_norm / self.noise_std, self.sample_rate, self.noise_multiplier
        )
        return perp / self.noise_std**2, par / self.noise_std**2


def step_divergence(
    squared_true: Tensor, squared_other: Tensor, product: Tensor, sample_rate: float | None
) -> Tensor:
    """KL_t = KL(P ‖ P') between one step on the true example and one on the alternative,
    elementwise.

    Args:
        squared_true: ‖u‖², u = g̃(x)/(σC), any shape.
        squared_other: ‖v‖², v = g̃(x')/(σC), of the same shape; 0 for an alternative without the
            example ("absent").
        product: ⟨u, v⟩, of the same shape.
        sample_rate: q of Poisson sampling, in (0, 1], if the attacker does not know who was in a
            batch; None: the attacker knows, and the example is in this step's batch: KL_t = ‖u −
            v‖²/2.

    Returns:
        KL_t ≥ 0 in float64; exactly 0 if ‖u‖² = ‖v‖² = ⟨u, v⟩. Swap the squares for KL(P' ‖ P).

    Guarantees:
        * For norms up to 5 and q from 1e-5 to 1, the error is below 1e-8, and below 1e-6 of the
          value; for norms up to 50, below 1e-4 of the value. ‖u − v‖² is computed from the three
          arguments and has their rounding errors.
        * It is a fixed number of tensor operations on the arguments' device, none of which reads a
          value. It is not differentiable.

    Example:
        >>> one = torch.ones(1)
        >>> step_divergence(one, one, 0.5 * one, None)
        tensor([0.5000], dtype=torch.float64)
        >>> round(
        ...     step_divergence(one, 0 * one, 0 * one, 0.01).item() / 0.01**2, 3
        ... )  # (e − 1)/2 for q → 0
        0.838
    """
    true, other, inner = (
        value.detach().double() for value in (squared_true, squared_other, product)
    )
    norm, other_norm = true.sqrt(), other.sqrt()
    # ‖u‖ − ‖v‖
    slope = (true - other) / (norm + other_norm).clamp(min=torch.finfo(torch.float64).tiny)
    # ‖u − v‖², which rounding may make too small
    gap = torch.maximum(true + other - 2 * inner, slope.square())
    if sample_rate is None:
        return gap / 2
    check_rate(sample_rate)
    if sample_rate == 1:
        return gap / 2

    # the trapezoidal rule errs by exp(−2π²/(spacing·norm)) if a logarithm bends within 1/norm
    spacing = 2 * _REACH / (_NODES - 1)
    xi = spacing * torch.arange(
        -(_NODES // 2), _NODES // 2 + 1, device=true.device, dtype=torch.float64
    )
    weight = spacing / math.sqrt(2 * math.pi) * (-xi.square() / 2).exp()

    # both components at once, [2, ..., nodes]: without the example, and with it
    drift = torch.stack([(other - true) / 2, gap / 2])
    offset = (
        torch.stack([-other / 2, (true - gap) / 2])
        + math.log(sample_rate)
        - math.log1p(-sample_rate)
    )
    delta = drift[..., None] + slope[..., None] * xi
    log_odds = offset[..., None] + other_norm[..., None] * xi
    absent, present = (_log_ratio(log_odds, delta) * weight).sum(dim=-1)

    divergence = (1 - sample_rate) * absent + sample_rate * present
    return torch.where(
        torch.maximum(true, other) < _TINY, sample_rate**2 * gap / 2, divergence
    ).clamp(min=0)


def largest_divergences(releases: Sequence[tuple[float, float, int]]) -> tuple[float, float]:
    """The largest D of membership and of any other question over these steps, whatever the
    gradients are.

    KL_t grows with ‖u‖ for v = 0: a smaller shift is a larger one, scaled down with noise added. Of
    two examples it is largest for u = −v (Lebeda et al. 2024), both at the clipping threshold: ‖u‖
    = ‖v‖ = 1/σ.

    Args:
        releases: (σ, q, steps) each, with secret batches.

    Example:
        >>> [round(largest, 3) for largest in largest_divergences([(2.0, 0.05, 100)])]
        [0.035, 0.124]
    """
    largest = [0.0, 0.0]
    for sigma, rate, steps in releases:
        if sigma == 0:
            return math.inf, math.inf
        square = torch.tensor([sigma**-2.0], dtype=torch.float64)
        for place, other in enumerate((0.0, 1.0)):
            largest[place] += (
                steps * step_divergence(square, other * square, -other * square, rate).item()
            )
    return largest[0], largest[1]


def _log_ratio(log_odds: Tensor, delta: Tensor) -> Tensor:
    """log((1 + e^{z + Δ})/(1 + e^z)), z the log odds, to full relative precision however small Δ
    is.

    The smaller of z and z + Δ is the base, so that log(1 + …) is never taken near 0.
    """
    base = log_odds + delta.clamp(max=0)

    # so that nothing overflows: 1 + e^z is 1 far below 0, and log(1 + e^z) is z far above
    lifted = base.clamp(min=-_FAR)
    size = (delta.abs() - (lifted - base)).clamp(min=0)
    curved = size.clamp(max=2 * _FAR)
    ratio = torch.log1p(lifted.sigmoid() * curved.expm1()) + (size - curved)
    return ratio.copysign(delta)

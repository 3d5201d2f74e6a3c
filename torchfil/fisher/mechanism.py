"""One private step as a mechanism: clip to C, sum, add N(0, (σC)² I), over a (sub)sampled batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchfil.clipping import DEFAULT_CLIP, ClipFunction, get_clip
from torchfil.fisher.amplification import Amplification, NoAmplification, agreed_rate, get_amplification
from torchfil.fisher.divergence import step_divergence

__all__ = ["Mechanism"]


@dataclass(frozen=True)
class Mechanism:
    """How a step turns per-example gradients into a noisy release.

    With s = σC (not σ alone), one participation adds the Fisher information

        I = (κ⊥ φ² JᵀPJ + κ∥ a aᵀ) / s².

    Guarantees:
        * The amplification is called at each use, with the mechanism's own q and σ.
        * σ = 0 is refused, unless ``allow_zero_noise``: then the weights are infinite, and so is the Fisher information
          about every example whose gradient depends on it; it is 0 about an example whose gradient does not.

    Attributes:
        max_grad_norm: C > 0.
        noise_multiplier: σ > 0, or 0 if allowed.
        clip: The clip function.
        amplification: Gives κ⊥ and κ∥.
        sample_rate: q, the rate at which examples are drawn; None: unknown, or not Poisson sampling.
        shares: C_l/C by parameter name, if each parameter's gradient is clipped separately, to C_l; their squares
            sum to 1. None: the gradient is clipped as a whole.

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
        """Check the numbers and look up the clip function and the amplification; None means κ = 1."""
        if not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive and finite")
        enough = noise_multiplier >= 0 if allow_zero_noise else noise_multiplier > 0
        if not (math.isfinite(noise_multiplier) and enough):
            raise ValueError(
                f"noise_multiplier={noise_multiplier} must be positive and finite: without noise the step releases "
                "its gradients exactly, and the Fisher information about every example is infinite"
            )

        chosen = NoAmplification() if amplification is None else get_amplification(amplification)
        if chosen.secret_batches:
            sample_rate = agreed_rate(chosen, sample_rate)
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
        """What one participation adds to KL(P ‖ P′), P′ the release with g′ in place of g, [batch], in float64.

        Without subsampling this is ‖g̃ − g̃′‖²/2s²; with secret batches it is KL_t/q of the two mixtures
        (:func:`step_divergence`), because the step counts whenever the example is drawn. It is infinite without noise,
        unless g̃ = g̃′.

        Args:
            products: ‖g‖², ‖g′‖² and ⟨g, g′⟩ of the gradients before clipping, [3, batch]; [3, batch, parameters] if
                each parameter's gradient is clipped separately.
            clip_weights: ω, [batch]; both clipped gradients are multiplied by it. None: 1.
        """
        rounding = 1e-10 if products.dtype == torch.float64 else 1e-5
        products = products.double()
        own, other = self.clip.scale(products[:2].clamp(min=0).sqrt(), self._thresholds_like(products))
        products = products * torch.stack([own * own, other * other, own * other])
        squared, squared_other, product = products if self.shares is None else products.sum(dim=2)
        if clip_weights is not None:
            share = clip_weights.double().square()
            squared, squared_other, product = share * squared, share * squared_other, share * product
        if self.noiseless:
            apart = squared + squared_other - 2 * product
            return torch.where(apart > rounding * (squared + squared_other), math.inf, 0.0).double()
        rate = self.sample_rate if self.amplification.secret_batches else None
        variance = self.noise_std**2
        step = step_divergence(squared / variance, squared_other / variance, product / variance, rate)
        return step if rate is None else step / rate

    def _thresholds_like(self, values: Tensor) -> float | Tensor:
        """C, or C_l of each parameter, [parameters]."""
        if self.shares is None:
            return self.max_grad_norm
        return self.max_grad_norm * values.new_tensor(list(self.shares.values()))

    def weights(self, clipped_norm: Tensor) -> tuple[Tensor, Tensor]:
        """κ⊥/s² and κ∥/s², [batch] each, for the clipped norms ‖g̃‖, [batch]; infinite without noise."""
        if self.noiseless:
            return torch.full_like(clipped_norm, math.inf), torch.full_like(clipped_norm, math.inf)
        perp, par = self.amplification.factors(clipped_norm / self.noise_std, self.sample_rate, self.noise_multiplier)
        return perp / self.noise_std**2, par / self.noise_std**2

"""One private step as a mechanism: clip to C, sum, add N(0, (σC)² I), over a (sub)sampled batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from torchfil.clipping import ClipFunction, get_clip
from torchfil.fisher.amplification import Amplification, NoAmplification

__all__ = ["Mechanism"]


@dataclass(frozen=True)
class Mechanism:
    """How a step turns per-example gradients into what is released.

    The Fisher information that one participation adds is, with s = σC (not σ alone),

        I = (κ⊥ φ² JᵀPJ + κ∥ a aᵀ) / s².

    Attributes:
        max_grad_norm: C > 0.
        noise_multiplier: σ > 0.
        clip: The clip function.
        amplification: Gives κ⊥ and κ∥.
    """

    max_grad_norm: float
    noise_multiplier: float
    clip: ClipFunction
    amplification: Amplification

    @classmethod
    def build(
        cls,
        max_grad_norm: float,
        noise_multiplier: float,
        clip: str | ClipFunction = "gelu",
        amplification: Amplification | None = None,
    ) -> Mechanism:
        """Check the numbers and look up the clip function; no amplification means κ = 1."""
        if not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm={max_grad_norm} must be positive and finite")
        if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise ValueError(
                f"noise_multiplier={noise_multiplier} must be positive and finite: without noise the step releases "
                "its gradients exactly, and the Fisher information about every example is infinite"
            )
        return cls(max_grad_norm, noise_multiplier, get_clip(clip), amplification or NoAmplification())

    @property
    def noise_std(self) -> float:
        """S = σC, the standard deviation of the noise on each coordinate of the summed gradient."""
        return self.noise_multiplier * self.max_grad_norm

    def weights(self, clipped_norm: Tensor) -> tuple[Tensor, Tensor]:
        """κ⊥/s² and κ∥/s², [batch] each, for the clipped norms ‖g̃‖, [batch]."""
        perp, par = self.amplification.factors(clipped_norm / self.noise_std)
        return perp / self.noise_std**2, par / self.noise_std**2

r"""A bound as a picture: what estimates of one example's private values x, [d], look like at the bound.

    unbiased      x̂ = x + N(0, V), V = diag(1/I_jj) where the diagonal was tracked, else isotropic, d/tr I.
    with beliefs  m + S(S + V)⁻¹(x̂ − m): x̂ in the hands of somebody who knows what such examples look like. m and S
                  are the mean and the covariance of other examples with the same public label.
    blind guess   m, which needs no model.

diag(1/I_jj) is at most the diagonal of I⁻¹: an efficient unbiased attacker's estimate is at least this blurred. The
isotropic variance is right on average over coordinates only; single pixels may be sharper. I is the run's estimate of
it. A normal prior is an illustration and no bound: other beliefs may help more.

S is shrunk towards a multiple of the identity by the oracle approximating shrinkage (OAS; Chen, Wiesel, Eldar and Hero
2010, without their terms in 2/d, as scikit-learn has it). With C the covariance of n others,

    S = (1 − ρ)C + ρ (tr C/d) 1,   ρ = min(1, (tr C² + tr² C) / ((n + 1)(tr C² − tr² C/d))),

which is never singular, however few they are, unless all of them are equal. Nothing of size [d, d] is formed:
S = a·1 + YᵀY with Y of shape [n, d], and for a diagonal D = a·1 + V, by Woodbury,

    (S + V)⁻¹ = D⁻¹ − D⁻¹Yᵀ (1 + Y D⁻¹Yᵀ)⁻¹ Y D⁻¹.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LEAST = 1e-100  # variance of a belief that is certain: an estimate without any noise still moves it


@dataclass(frozen=True, eq=False)
class Beliefs:
    """A normal law N(m, S), S = a·1 + YᵀY.

    Attributes:
        mean: m, [d].
        isotropic: a.
        factor: Y, [n, d].
    """

    mean: Tensor
    isotropic: float
    factor: Tensor

    @classmethod
    def fitted(cls, others: Tensor) -> Beliefs:
        """Mean and shrunk covariance of these examples.

        Args:
            others: Their values, float64 [n, d], n ≥ 1.

        Example:
            >>> law = Beliefs.fitted(torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double())
            >>> law.mean.tolist(), round(law.isotropic, 3)  # C = [[1, 1], [1, 1]], ρ = 1
            ([1.0, 1.0], 1.0)
        """
        (n, d), mean = others.shape, others.mean(dim=0)
        centred = others - mean
        gram = centred @ centred.T / n  # the nonzero eigenvalues of C
        trace, square = float(gram.trace()), float(gram.square().sum())
        apart = (n + 1) * (square - trace**2 / d)
        shrinkage = min(1.0, (square + trace**2) / apart) if apart > 0 else 1.0
        return cls(mean, max(shrinkage * trace / d, _LEAST), centred * math.sqrt((1 - shrinkage) / n))

    def combined_with(self, estimate: Tensor, variance: Tensor) -> Tensor:
        """The posterior mean m + S(S + V)⁻¹(x̂ − m), [d].

        Guarantees: it tends to x̂ as V → 0, and is m where V = ∞ everywhere. A coordinate of infinite variance is
        inferred from the others.

        Args:
            estimate: x̂, [d]; not used where V is infinite.
            variance: The diagonal of V, [d], from 0 to ∞.
        """
        inverse = 1 / (self.isotropic + variance)  # D⁻¹, 0 where nothing leaked
        apart = torch.where(variance.isinf(), 0.0, estimate - self.mean) * inverse
        scaled = self.factor * inverse  # Y D⁻¹, [n, d]
        inner = scaled @ self.factor.T
        inner.diagonal().add_(1)
        weights = apart - scaled.T @ torch.linalg.solve(inner, self.factor @ apart)
        return self.mean + self.isotropic * weights + self.factor.T @ (self.factor @ weights)


def estimates_at_the_bound(x: Tensor, variance: Tensor, others: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The unbiased estimate, the same with beliefs, and the blind guess, [3, d], with their errors, [3].

    The errors are root mean squares over coordinates: of the unbiased estimate the expected one, sqrt(mean V); with
    beliefs, that of this draw; of the blind guess its own, rms(x − m).

    Args:
        x: The example's private values, float64 [d].
        variance: The diagonal of V, [d]; ∞ where nothing leaked, and the unbiased estimate is ±∞ there.
        others: Values of other examples like it, float64 [n, d].
        seed: Of the draw: the same noise, scaled, whatever V is.
    """
    beliefs = Beliefs.fitted(others)
    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal(len(x)))
    unbiased = x + variance.sqrt() * noise
    posterior = beliefs.combined_with(unbiased, variance)
    errors = [variance.mean(), *((each - x).square().mean() for each in (posterior, beliefs.mean))]
    return torch.stack([unbiased, posterior, beliefs.mean]), torch.stack(errors).sqrt()

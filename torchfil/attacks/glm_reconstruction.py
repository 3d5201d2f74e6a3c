r"""Reconstruction of one training example of a generalised linear model (Balle et al. 2022; Guo et
al. 2022, § 7.2).

At the minimum, the gradients of all examples and the penalty sum to zero, so an attacker who knows
the others knows the last one's gradient: with G the objective's gradient at the released weights θ
= w* + σξ, ξ ~ N(0, I), b_i = ℓ′(m_i, y_i) and the margin m_i = θᵀx_i,

    v_i = −(Σ_{j≠i} ω_j b_j x_j + nλθ)/ω_i = b_i x_i − G/ω_i ≈ b_i x_i.

G = σHξ + … is the noise; without noise it is 0. The intercept's column is known to be 1, so that
v_i's last entry is b̂, and the guess is x̂ = v_i / b̂. It is the only example that explains v_i.

A guess divides by b̂, which noise can bring close to 0, so its mean squared error is dominated by
the worst releases, or not even finite. An attacker who knows the range of the inputs moves each
guess into it. This is the attack to measure, and it is biased: it may beat a bound on unbiased
attackers (:func:`torchfil.bounds.mse_biased`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchfil.attacks.base import AttackResult, release_noise
from torchfil.glm.refits import GLMView, numbers_at_once
from torchfil.utils.text import with_progress
from torchfil.viz.common import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchfil.glm import GeneralizedLinearModel

_CHUNK_NUMBERS = 2**18  # numbers of a chunk of guesses, which fits into a cache
_CHUNK_ARRAYS = 8


class GLMReconstruction:
    """The attack on every training example in turn, in closed form.

    Threat model: the attacker knows the released weights, the training procedure and all other
    training examples; not the target of the example under attack.

    Args:
        model: A fitted model of one margin, with an intercept.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        value_range: The smallest and the largest value of an input, known to the attacker; None:
            guesses are not limited.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self,
        model: GeneralizedLinearModel,
        X: object,
        y: object,
        *,
        value_range: tuple[float, float] | None = None,
        progress: bool = False,
    ) -> None:
        self.view = GLMView.build(model, X, y)
        self.value_range, self.progress = value_range, progress
        if not len(self.view.weights) > self.view.num_inputs:
            raise ValueError(
                "a model without an intercept does not reveal an example's length: "
                "fit_intercept=True"
            )
        if value_range is not None and not value_range[0] < value_range[1]:
            raise ValueError(f"value_range={value_range} must be (smallest, largest)")
        if not (self.view.sample_weight > 0).all():
            raise ValueError(
                "an example of weight 0 has no influence on the model and cannot be reconstructed"
            )

    @property
    def threat_model(self) -> str:
        """What the attacker knows."""
        values = ", the range of the inputs" if self.value_range is not None else ""
        return (
            "knows the released weights, the training procedure, all other training "
            f"examples{values}"
        )

    def run(
        self,
        sigma: float,
        trials: int = 1000,
        *,
        rows: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> AttackResult:
        """Attack examples in each of ``trials`` releases w* + N(0, σ²I).

        Args:
            sigma: σ.
            trials: The number of releases.
            rows: Which examples, [m]; None: all.
            seed: The seed of the noise.

        Returns:
            Measure "mse", per input coordinate, with the squared bias (minus its own sampling
            error); ``guesses`` holds the mean guess over the trials, [m, d].
        """
        view, d = self.view, self.view.num_inputs
        chosen = torch.arange(len(view.X)) if rows is None else torch.as_tensor(rows)
        inputs = view.X[chosen, :d]

        # sums over releases, in parts that fit into memory
        releases = view.weights + sigma * release_noise(sigma, trials, view.weights, seed)
        total, squares = inputs.new_zeros(2, len(inputs))
        mean_error = torch.zeros_like(inputs)
        size = max(1, numbers_at_once(inputs.device, _CHUNK_NUMBERS, _CHUNK_ARRAYS) // d)
        many = max(1, size // len(view.X))
        for part in with_progress(releases.split(many), self.progress, "reconstruction"):
            slopes, gradients = self._explained(part)
            for places in torch.arange(len(chosen)).split(max(1, size // len(part))):
                guesses = self._guesses(slopes[chosen[places]], gradients, chosen[places])
                errors = guesses - inputs[places, None]
                mse = errors.square().mean(dim=2)
                total[places] += mse.sum(dim=1)
                squares[places] += mse.square().sum(dim=1)
                mean_error[places] += errors.sum(dim=1) / trials

        # The squared mean error contains 1/trials of the variance besides the bias, which is
        # subtracted.
        achieved = total / trials
        variance = (squares / trials - achieved.square()).clamp(min=0) / max(trials - 1, 1)
        bias = mean_error.square().mean(dim=1)
        unbiased = ((trials * bias - achieved) / max(trials - 1, 1)).clamp(min=0)
        blind = (inputs - view.X[:, :d].mean(dim=0)).square().mean(dim=1)
        return AttackResult(
            "GLM reconstruction",
            self.threat_model,
            chosen.tolist(),
            as_array(achieved),
            "mse",
            trials,
            standard_error=as_array(variance.sqrt()) if trials > 1 else None,
            squared_bias=as_array(unbiased) if trials > 1 else None,
            guesses=as_array(inputs + mean_error),
            sigma=sigma,
            blind=as_array(blind),
        )

    def guesses(self, releases: Tensor, rows: Sequence[int]) -> Tensor:
        """What k releases [k, p] reveal about some examples [m]: the guessed inputs, [m, k, d]."""
        slopes, gradients = self._explained(releases.to(self.view.weights))
        chosen = torch.as_tensor(rows)
        return self._guesses(slopes[chosen], gradients, chosen)

    def _explained(self, releases: Tensor) -> tuple[Tensor, Tensor]:
        """b of every example, [n, k], and G of every release, [k, p]."""
        return self.view.first(self.view.X @ releases.mT), self.view.gradients(releases)

    def _guesses(self, slopes: Tensor, gradients: Tensor, rows: Tensor) -> Tensor:
        """v/b̂ of examples [m] in k releases, whose slopes are [m, k]: [m, k, d]."""
        x, weight = self.view.X[rows], self.view.sample_weight[rows]
        v = slopes[:, :, None] * x[:, None] - gradients / weight[:, None, None]
        guesses = v[:, :, : self.view.num_inputs] / v[:, :, -1:]
        return guesses if self.value_range is None else guesses.clamp_(*self.value_range)

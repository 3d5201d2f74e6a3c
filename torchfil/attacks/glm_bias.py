r"""The Fisher bound that does apply to a biased attacker of a released linear model (Guo et al. 2022, Theorem 2).

The mean guess μ(x) = E[x̂(θ)], θ = w*(x) + σξ, depends on the example only through w*. Gaussian integration by parts
gives its Jacobian from the guesses themselves, without a derivative of the attack and without a refit:

    J_μ = ∂μ/∂x = E[(x̂ − x) ξᵀ] J / σ,    J = ∂w*/∂x,

and :func:`torchfil.bounds.mse_biased` gives the bound, (tr(J_μ I⁻¹ J_μᵀ) + ‖μ − x‖²)/d with I = JᵀJ/σ². For an unbiased
attacker J_μ is the identity. An attacker who always gives the same answer has J_μ = 0, and only bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchfil import bounds
from torchfil.attacks.base import release_noise
from torchfil.attacks.glm_reconstruction import GLMReconstruction
from torchfil.glm.fil import Sensitivity
from torchfil.glm.view import numbers_at_once
from torchfil.utils.progress import with_progress

_CHUNK_NUMBERS = 2**23
_CHUNK_ARRAYS = 16


@dataclass(frozen=True, eq=False)
class BiasedBound:
    """The bound by example, [m] each. Confidential: it depends on private data.

    Attributes:
        bound: The least mean squared error per coordinate of an attacker with this bias. Its own sampling error is
            subtracted, so that it is unbiased and can fall below 0 if few releases were drawn.
        response: tr(J_μ)/d: how much the mean guess follows the example; 1 for an unbiased attacker.
    """

    bound: np.ndarray
    response: np.ndarray


def biased_bound(
    attack: GLMReconstruction,
    sigma: float,
    rows: Any,
    trials: int = 4000,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> BiasedBound:
    """The bound on the mean squared error of this attack, including its bias, for some examples.

    J_μ and μ are estimated on two halves of the releases. The bound is quadratic in them; subtracting the value at half
    their difference from the value at their mean leaves the product of two independent estimates, which has no bias.

    Args:
        attack: Preferably one with a ``value_range``: without it, the mean of the guesses need not exist.
        sigma: σ of the release.
        rows: Which examples, [m]; takes 16·m·d·p bytes.
        trials: The number of releases, at least 2.
        seed: The seed of the noise.
        generator: Instead of a seed.
    """
    if not sigma > 0 or trials < 2:
        raise ValueError(f"sigma={sigma} must be positive and trials={trials} at least 2")
    view, d = attack.view, attack.view.num_inputs
    chosen = torch.as_tensor(rows, device=view.X.device)

    # The moments of each half of the releases: E[(x̂ − x) ξᵀ] and E[x̂ − x].
    halves = release_noise(2 * (trials // 2), view.weights, seed, generator).chunk(2)
    numbers = numbers_at_once(view.X.device, _CHUNK_NUMBERS, _CHUNK_ARRAYS)
    size = max(1, numbers // (len(view.X) + len(chosen) * d))
    covariances = view.X.new_zeros(2, len(chosen), d, len(view.weights))
    biases = view.X.new_zeros(2, len(chosen), d)
    parts = [(number, part) for number, half in enumerate(halves) for part in half.split(size)]
    for number, noise in with_progress(parts, attack.progress, "releases"):
        error = attack.guesses(view.weights + sigma * noise, chosen) - view.X[chosen, None, :d]  # [m, part, d]
        covariances[number] += error.mT @ noise / len(halves[number])
        biases[number] += error.sum(dim=1) / len(halves[number])

    sensitivity = Sensitivity.build(
        view.loss,
        view.X,
        view.y,
        view.sample_weight,
        view.weights[:, None],
        view.hessian,
        num_inputs=d,
        private_target=False,
    )

    # The value at the halves' mean, minus that at half their difference, has no sampling bias.
    unbiased, responses = [], []
    for place, row in enumerate(chosen.tolist()):
        jacobian = sensitivity.jacobian(row) / sigma
        fim = (jacobian.mT @ jacobian)[None]
        first, second = covariances[:, place] @ jacobian  # J_μ, [d, d] each
        bias = biases[:, place]
        mean = bounds.mse_biased(fim, (first + second) / 2, bias.mean(dim=0))
        unbiased.append(float(mean - bounds.mse_biased(fim, (first - second) / 2, (bias[0] - bias[1]) / 2)))
        responses.append(float((first + second).trace()) / (2 * d))
    return BiasedBound(np.array(unbiased), np.array(responses))

"""Attribute inversion on generalised linear models (Hannun et al. 2021, § 6.4): which level does an
attribute have?

:func:`prior_inversion` never sees the model; :class:`WhiteBoxInversion` knows everything but the
attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchfil.attacks.base import AttackResult, Seed, mean_of_trials, release_noise
from torchfil.glm.guesses import NominalAttribute, ask
from torchfil.glm.refits import GLMView, minimiser_changes, numbers_at_once
from torchfil.utils.text import with_progress

if TYPE_CHECKING:
    from torchfil.glm import GeneralizedLinearModel

_CHUNK_NUMBERS = 2**23
_ARRAYS = 8  # of that size, at the most expensive moment


class WhiteBoxInversion:
    """The closest refit: argmin over levels v of ‖w′ − w*(x_i with level v)‖, w′ = w* + N(0, σ²I).

    Threat model: the attacker knows the released weights, how they were trained, and the whole
    training set except the attribute of the example under attack.

    The refits are made once, at construction (see :mod:`torchfil.glm.refits`); every release then
    costs one product.

    Args:
        model: A fitted model of one margin.
        X: The training inputs, [n, d].
        y: The training targets, [n].
        attribute: What to infer.
        progress: Whether to show progress bars.
    """

    def __init__(
        self,
        model: GeneralizedLinearModel,
        X: object,
        y: object,
        attribute: NominalAttribute,
        *,
        progress: bool = False,
    ) -> None:
        view = GLMView.build(model, X, y)
        self.weights, self.progress = view.weights, progress
        self.truth = torch.as_tensor(attribute.levels(X), device=view.X.device)
        # [n, k, p]
        self.changes = minimiser_changes(view, ask(attribute, view).alternatives, progress=progress)

    def run(self, sigma: float, trials: int = 100, *, seed: Seed = None) -> AttackResult:
        """Attack every example in each of ``trials`` releases w* + N(0, σ²I).

        The closest refit has the smallest ‖w′ − w* − Δ_v‖² = ‖Δ_v‖² − 2σ⟨ξ, Δ_v⟩ + const, for the
        noise σξ.

        Args:
            sigma: σ.
            trials: The number of releases.
            seed: The seed of the noise.

        Returns:
            Measure "accuracy"; ``guesses`` holds the guessed level of every example in every trial,
            [n, trials].
        """
        noise = sigma * release_noise(sigma, trials, self.weights, seed)
        numbers = numbers_at_once(noise.device, _CHUNK_NUMBERS, _ARRAYS)
        parts = noise.split(max(1, numbers // self.changes[:, :, 0].numel()))
        squares = self.changes.square().sum(dim=2)[:, :, None]
        guesses = [
            (squares - 2 * self.changes @ part.mT).argmin(dim=1)
            for part in with_progress(parts, self.progress, "releases")
        ]
        known = (
            "knows the released weights, the training and all training data but the "
            "attribute under attack"
        )
        return accuracies(
            "white-box attribute inversion", known, torch.cat(guesses, dim=1), self.truth
        )


def prior_inversion(X: object, attribute: NominalAttribute) -> AttackResult:
    """The most common level for everybody.

    Threat model: the attacker knows how common each level is, and nothing else.

    Args:
        X: The training inputs, [n, d].
        attribute: What to infer.
    """
    truth = attribute.levels(X)
    guess = np.bincount(truth).argmax()
    guesses = torch.full((len(truth), 1), int(guess))
    return accuracies("prior", "knows how common each level is", guesses, torch.as_tensor(truth))


def accuracies(name: str, threat_model: str, guesses: Tensor, truth: Tensor) -> AttackResult:
    """The result of guessed levels, [n, trials]."""
    correct = (guesses == truth[:, None]).double()  # [n, trials]
    return mean_of_trials(
        name, threat_model, range(len(truth)), correct, "accuracy", guesses=guesses.to(torch.int16)
    )

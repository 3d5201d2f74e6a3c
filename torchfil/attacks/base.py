"""The result of an attack: for each example, what was achieved, by whom, in which unit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from torchfil.viz.common import as_array

Seed = int | Generator | None


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack achieved, by example. Confidential: it depends on private data.

    Attributes:
        name: The attack's name.
        threat_model: What the attacker knew, in plain words.
        ids: The attacked examples, [m].
        achieved: What was achieved for each, a mean over trials, [m], in the unit that ``measure``
            names.
        measure: "mse" (mean squared error per private coordinate, what a Fisher bound bounds),
            "accuracy", "auc", …
        trials: The number of repetitions in each mean.
        standard_error: The standard error of ``achieved``, [m], or None if there is only one trial.
        squared_bias: ‖E[guess] − truth‖² per coordinate, [m], if the measure is "mse" and it was
            estimated.
        guesses: The guesses of one trial, or whatever the attack documents, [m, …].
        sigma: The noise on the weights, if one release of them was attacked;
            :func:`torchfil.compare_with_bounds` reads it.
        blind: What somebody who never saw the model achieves by the same measure, e.g. by naming
            the mean of the data, [m], or None if it was not computed.
        saw_model: Whether the attacker saw any result of the training. A guess from the data alone
            says nothing about the model, and can neither keep nor break a bound.

    Example:
        >>> AttackResult(
        ...     "coin", "knows nothing", [7, 9], [0.5, 0.5], measure="accuracy", trials=10
        ... ).achieved
        array([0.5, 0.5])
    """

    name: str
    threat_model: str
    ids: Sequence[Hashable]
    achieved: np.ndarray
    measure: str
    trials: int
    standard_error: np.ndarray | None = None
    squared_bias: np.ndarray | None = None
    guesses: np.ndarray | None = None
    sigma: float | None = None
    blind: np.ndarray | None = None
    saw_model: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "ids",
            as_array(self.ids).tolist() if hasattr(self.ids, "shape") else list(self.ids),
        )
        for name in ("achieved", "standard_error", "squared_bias", "guesses", "blind"):
            value = getattr(self, name)
            if value is None:
                continue
            array = as_array(value)
            object.__setattr__(self, name, array)
            if not (len(array) == len(self.ids) and (name == "guesses" or array.ndim == 1)):
                raise ValueError(
                    f"{name} has shape {list(array.shape)} for {len(self.ids)} ids; it must have "
                    "one for each"
                )

    @property
    def untestable(self) -> str:
        """Why the attack can neither keep nor break a bound; "" if it can."""
        if not self.saw_model:
            return "never saw the model"
        return "" if self.trials > 1 and self.standard_error is not None else "one trial"


def mean_of_trials(
    name: str, threat_model: str, ids: Sequence[Hashable], values: Tensor, measure: str, **more: Any
) -> AttackResult:
    """The result of an attack that achieved ``values`` in each of several trials, [m, trials]."""
    trials = values.shape[1]
    error = values.std(dim=1) / trials**0.5 if trials > 1 else None
    return AttackResult(
        name, threat_model, ids, as_array(values.mean(dim=1)), measure, trials, error, **more
    )


def make_generator(seed: Seed, device: torch.device | str = "cpu") -> Generator:
    """The given generator.

    Else a new one on the device, with this seed or, without one, a random seed.
    """
    if isinstance(seed, Generator):
        return seed
    made = Generator(device)
    return made.manual_seed(made.seed() if seed is None else seed)


def release_noise(sigma: float, trials: int, weights: Tensor, seed: Seed) -> Tensor:
    """ξ of ``trials`` releases, on the weights' device, [trials, p].

    Drawn together, however they are cut up later.

    Raises:
        ValueError: σ, by which the attack multiplies it, is negative, or there is no release.
    """
    if not (sigma >= 0 and trials >= 1):
        raise ValueError(f"sigma={sigma} must be ≥ 0 and trials={trials} at least 1")
    source = make_generator(seed, weights.device)
    drawn = torch.randn(
        trials, len(weights), generator=source, dtype=weights.dtype, device=source.device
    )
    return drawn.to(weights.device)

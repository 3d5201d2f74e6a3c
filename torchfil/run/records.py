"""What a saved run holds beside its columns: attributes, questions, pictures, texts, attacks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from torchfil.guessing import largest_success, largest_true_positive_rate
from torchfil.run.parted import ByExample

__all__ = ["AttackRecord", "Attributes", "Pictures", "QuestionRecord", "Spread", "Texts", "Yardsticks"]


@dataclass(frozen=True, eq=False)
class Attributes:
    """How well single attributes could be inferred.

    Attributes:
        names: k names.
        units: k units, "" where there is none.
        error: 1/sqrt(I_jj) in the attribute's own unit, [n, k]: an unbiased guess is off by at least this, on average.
            An estimate from one run; infinite where nothing leaked.
        error_low: The lower end of its 95 % interval, [n, k], or None where it is not known.
        pixels: Row and column of each in the image, int64 [k, 2], or None where attributes are no pixels.
    """

    names: list[str]
    units: list[str]
    error: ByExample
    error_low: ByExample | None = None
    pixels: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, count in Counter(self.names).most_common(1):
            if count > 1:
                raise ValueError(
                    f"attribute {name!r} is named {count} times; names must differ, such as '{name} = …' for each "
                    "level of a one-hot attribute"
                )

    @property
    def shown(self) -> ByExample:
        """What is shown, [n, k]: the lower end; the error itself, an estimate, where that end is not known."""
        return self.error if self.error_low is None else self.error_low


@dataclass(frozen=True, eq=False)
class Spread:
    """How values are spread over examples: mean, standard deviation and range, of one thing or [k] each.

    NaN where it is not known. Of a categorical attribute ``std`` alone is: the root mean squared error, over levels, of
    answering every level's share.
    """

    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False)
class Yardsticks:
    """How the data is spread, for somebody who guesses without the model. Private: never part of a public page.

    Attributes:
        examples: How many examples it was read from.
        inputs: Of all private inputs together: the mean over them, the root of their mean variance, the whole range.
        attributes: Of each attribute, [k], in its own unit; [0] where attributes were not tracked.
        levels: By categorical attribute, the share of each level.
    """

    examples: int
    inputs: Spread
    attributes: Spread
    levels: dict[str, dict[str, float]]


@dataclass(frozen=True, eq=False)
class QuestionRecord:
    """How well any attacker could tell the true answer of a question from others.

    Attributes:
        name: Of the question.
        answers: m names.
        complete: Whether the answers are all that are possible, the true one among them (with D = 0).
        divergence: D = KL(P ‖ P′), [n, m].
        divergence_high: The upper end of its 95 % interval, [n, m].
        law: "normal" where P and P′ are normal laws of one covariance, as in a linear model's release, so that D tells
            what the best attacker attains; "any": D bounds it.
    """

    name: str
    answers: list[str]
    complete: bool
    divergence: ByExample
    divergence_high: ByExample
    law: str = "any"

    def rate(self, false_positive_rate: float = 0.01) -> np.ndarray:
        """The largest true-positive rate of any attacker, over all answers, at the upper ends, [n].

        Φ(Φ⁻¹(FPR) + sqrt(2D)) between normal laws.
        """
        worst = np.asarray(self.divergence_high, dtype=np.float64).max(axis=1)
        if self.law == "normal":
            return ndtr(ndtri(false_positive_rate) + np.sqrt(2 * worst))
        return largest_true_positive_rate(torch.from_numpy(worst), false_positive_rate).numpy()

    def success(self, noise: float = 1.0) -> np.ndarray:
        """How often any attacker tells the true answer from the worst other one, equally likely, at most, [n].

        Φ(sqrt(D/2)) between normal laws.

        Args:
            noise: (σ′/σ)²: with σ′ for σ, and all else the same, D is D/noise at most.
        """
        worst = np.asarray(self.divergence_high, dtype=np.float64).max(axis=1) / noise
        if self.law == "normal":
            return ndtr(np.sqrt(worst / 2))
        known = ~np.isnan(worst)
        success = np.full(len(worst), np.nan)
        success[known] = largest_success(torch.from_numpy(worst[known]), 0.5).numpy()
        return success


@dataclass(frozen=True, eq=False)
class Pictures:
    """Some examples as images.

    Attributes:
        rows: Places in ``ids``, [m].
        images: uint8, [m, H, W] or [m, H, W, 3].
        maps: PLIS, float32, [m, H, W], or None.
    """

    rows: np.ndarray
    images: np.ndarray
    maps: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Texts:
    """Some examples as words or tokens, with how much of each leaks.

    Attributes:
        rows: Places in ``ids``, [m].
        words: m lists of words.
        fil: η_t = sqrt(Σ_j I_jj / w) over the w coordinates of word t, [m, T]; NaN behind a text's end.
        plis: ‖∂PL/∂z_t‖ over the same coordinates, at the weights when it was saved, [m, T]; None: not known.
    """

    rows: np.ndarray
    words: list[list[str]]
    fil: np.ndarray
    plis: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class AttackRecord:
    """What an attack achieved beside what the bound allows; made by ``BoundComparison.record``.

    Attributes:
        name: Of the attack.
        threat_model: What the attacker knows, in a sentence.
        rows: The attacked examples' places in ``ids``, [m].
        predicted: The bound, [m].
        achieved: The attack's error in the same unit, [m].
        violated: Whether ``achieved`` lies below the bound beyond chance, [m] booleans.
        testable: Whether the attack saw the model, in more than one trial, so that it could have violated a bound.
        untestable: Why not, in words; "" where it could, and in earlier files.
        blind: The error of a guess without the model, [m], or None where it is not known.
    """

    name: str
    threat_model: str
    rows: np.ndarray
    predicted: np.ndarray
    achieved: np.ndarray
    violated: np.ndarray
    testable: bool = True
    untestable: str = ""
    blind: np.ndarray | None = None

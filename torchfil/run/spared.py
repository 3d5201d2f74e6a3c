"""Who was trained with a smaller clip weight, as numbers about all examples together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchfil.run.aggregates import published_count
from torchfil.run.saved_run import SavedRun

__all__ = ["SparedSummary", "is_spared", "summarise_spared"]


@dataclass(frozen=True)
class SparedSummary:
    """How many examples had ω < 1, and the rounds of training that chose the weights.

    Attributes:
        examples: How many.
        smallest_weight: The smallest ω; None in a redacted summary, for it is one example's.
        rounds: The columns of ``SavedRun.rounds``; of a redacted summary only how many were spared, rounded as all
            counts are: the worst bound is one example's, a mean over a group may be, and what a score is made from is
            not known.
    """

    examples: int | str
    smallest_weight: float | None
    rounds: dict[str, list[float | int | str | bool]]


def is_spared(run: SavedRun) -> np.ndarray:
    """Which examples were trained with ω < 1, [n] booleans.

    Example:
        >>> run = SavedRun(about={}, ids=np.arange(3), columns={"clip_weight": np.array([1.0, 0.5, 1.0])})
        >>> is_spared(run).tolist()
        [False, True, False]
    """
    return np.asarray(run.clip_weights, dtype=np.float64) < 1


def summarise_spared(run: SavedRun, smallest: int) -> SparedSummary | None:
    """The summary; None where no weights were given.

    Args:
        run: A saved run.
        smallest: The least number of examples that a number rests on; 1: not redacted.
    """
    if "clip_weight" not in run.columns and not run.rounds:
        return None
    redacted = smallest > 1
    kept = [name for name in run.rounds if not redacted or name in ("num_spared", "fresh")]
    rounds = {name: run.rounds[name].tolist() for name in kept}
    if "num_spared" in rounds:
        rounds["num_spared"] = [published_count(int(count), smallest) for count in rounds["num_spared"]]
    return SparedSummary(
        examples=published_count(int(is_spared(run).sum()), smallest),
        smallest_weight=None if redacted else float(np.min(run.clip_weights, initial=1.0)),
        rounds=rounds,
    )

"""How σ and the clip weights of a run were chosen from its data, as stored in a run file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.leakage import Leakage
from torchfil.planning.calibration import NoiseChoice
from torchfil.planning.equalised import Equalised

__all__ = ["check_trained_with", "columns_of_rounds", "equalised_in_short", "noise_choice_in_short"]

_OF_A_ROUND = (
    "worst",
    "worst_end",
    "spread",
    "num_below",
    "num_spared",
    "smallest_weight",
    "group_ratio",
    "score",
    "epsilon",
    "seconds",
    "fresh",
)


def noise_choice_in_short(choice: NoiseChoice, leakage: Leakage) -> dict[str, Any]:
    """How pilots chose σ, and how the run so far compares with their target (met if the headroom is at least 1)."""
    check = choice.target.check(leakage)
    return {
        "target": choice.target.wanted,
        "confidence": choice.target.confidence,
        "of": choice.target.of,
        "num_pilots": len(choice.pilots),
        "headroom": check.headroom,
        "measured": check.measured,
    }


def check_trained_with(equalised: Equalised, clip_weights: Tensor | None) -> None:
    """Raise if the rounds chose other clip weights than the run was trained with.

    Raises:
        ValueError: This is not the run that the rounds chose.
    """
    chosen = equalised.weights.double().cpu()
    own = torch.ones_like(chosen) if clip_weights is None else clip_weights.cpu()
    if not torch.equal(own, chosen):
        raise ValueError(
            "equalised= has other clip weights than this run was trained with; save the run that it chose: "
            "result.engine.save_run(…, equalised=result)"
        )


def equalised_in_short(equalised: Equalised) -> dict[str, Any]:
    """What the rounds aimed at, and whether they reached it."""
    return {
        "question": equalised.question,
        "target": equalised.target,
        "met": equalised.met,
        "stopped": equalised.stopped,
        "epsilon_of_all_rounds": equalised.epsilon_of_all_rounds,
    }


def columns_of_rounds(equalised: Equalised) -> dict[str, np.ndarray]:
    """The rounds as columns, [rounds] each; NaN if a round does not have the number."""
    columns = {name: [getattr(each, name) for each in equalised.history] for name in _OF_A_ROUND}
    return {
        name: np.asarray([math.nan if value is None else value for value in values]) for name, values in columns.items()
    }

"""What the report says of one attack: how it did beside the bound, and beside a guess without the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchfil.run.saved_run import AttackRecord
from torchfil.run.statistics import levels_of, published_count, rounded_count

__all__ = ["AttackSummary", "summarise_attack"]


@dataclass(frozen=True)
class AttackSummary:
    """An attack: achieved error over the bound, by level; below 1 the attack did better than the bound.

    Examples whose bound is not finite have no ratio: they were not measured, or nothing of them leaked.

    Attributes:
        name: Of the attack.
        threat_model: What the attacker knows.
        targets: How many examples were attacked.
        violated: For how many the error lies below the bound beyond chance.
        ratio: Achieved error over the bound, by level.
        testable: Whether the attack could have violated a bound.
        untestable: Why not, in words.
        below: For how many the error lies below the bound, by chance or not; None: too few to tell.
        blind_below: The same of a guess without the model; None: not known.
    """

    name: str
    threat_model: str
    targets: int | str
    violated: int | str
    ratio: dict[str, float] = field(default_factory=dict)
    testable: bool = True
    untestable: str = ""
    below: int | str | None = None
    blind_below: int | str | None = None


def summarise_attack(attack: AttackRecord, smallest: int) -> AttackSummary:
    """One attack, of which nothing rests on fewer than ``smallest`` examples."""
    targets, predicted = len(attack.rows), np.asarray(attack.predicted, dtype=np.float64)
    violated = published_count(int(np.asarray(attack.violated).sum()), smallest)
    why = attack.untestable or ("" if attack.testable else "one trial")
    if targets < smallest:
        shown = published_count(targets, smallest)
        return AttackSummary(
            attack.name, attack.threat_model, shown, violated, testable=attack.testable, untestable=why
        )

    bounded = np.isfinite(predicted)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(attack.achieved, dtype=np.float64)[bounded] / predicted[bounded]
    below = int((attack.achieved < predicted)[bounded].sum())
    blind = None if attack.blind is None else int((attack.blind < predicted)[bounded].sum())
    return AttackSummary(
        attack.name,
        attack.threat_model,
        rounded_count(targets, smallest),
        violated,
        levels_of(ratio[~np.isnan(ratio)], smallest, levels=(0.0, 0.5)),
        attack.testable,
        why,
        published_count(below, smallest),
        None if blind is None else published_count(blind, smallest),
    )

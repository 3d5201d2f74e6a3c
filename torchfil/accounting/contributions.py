"""What the ledger adds for the measurement of one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from torchfil.accounting.quantities import Track, tracked
from torchfil.fisher.batch import Measurement

__all__ = ["Contribution", "additions"]


@dataclass(frozen=True)
class Contribution:
    """What one (physical) batch adds: row k belongs to example ``rows[k]``.

    Attributes:
        rows: Example numbers, [batch].
        squared_norm: ‖g̃‖², [batch].
        measured: Whether Fisher information was measured, or skipped at random; otherwise the step was paused for these
            examples.
        additions: What is added to each of the tracked quantities' sums, by name, [batch, …] each, already weighted by
            1/π; empty if the step was skipped at random.
        num_coordinates: How many private coordinates each example has, [batch], or one number for all; None: as many
            as the ledger.
    """

    rows: Tensor
    squared_norm: Tensor
    measured: bool = True
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    num_coordinates: Tensor | int | None = None


def additions(
    measurement: Measurement, rate: float | Tensor, *, skipping: bool, track: Collection[Track] = ()
) -> dict[str, Tensor]:
    """What a measured step adds to the sums of the trace and of the tracked quantities, [batch, …] each, in float64.

    Args:
        measurement: The measurement of a step.
        rate: π, the probability that it was measured.
        skipping: Whether π < 1.
        track: The names of the quantities.
    """
    result: dict[str, Tensor] = {}
    for quantity in tracked(track):
        result |= quantity.measure(measurement, rate, skipping=skipping)
    return result

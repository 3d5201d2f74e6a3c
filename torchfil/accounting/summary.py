"""A run in a few numbers, for logs, ``print`` and notebooks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchfil.fisher.results import Estimate, Kind

__all__ = ["LeakageSummary", "summarise"]


class _Read(Protocol):
    """The part of a :class:`torchfil.accounting.leakage.Leakage` that is read."""

    @property
    def ledger(self) -> Any: ...

    @property
    def ids(self) -> Any: ...

    def was_measured(self) -> Tensor: ...

    def get_fil(self) -> Estimate: ...

    def get_guess(self, question: str) -> Any: ...


@dataclass(frozen=True)
class LeakageSummary:
    """What a run says about all of its measured examples together; confidential, like all measurements.

    Attributes:
        examples: n.
        measured: For how many of them the run says anything.
        steps: Private steps so far.
        kind: The kind of the numbers: "exact", "estimate" or "lower bound" (of the FIL, if steps were paused).
        median_fil: The median of η̄ over the measured examples; NaN if there are none, like the next two.
        largest_fil: The largest η̄.
        smallest_mse_bound: 1/η̄² of the most exposed example: unbiased attackers, on average over runs; an estimate.
        divergences: By question, the largest D over examples and answers: every attacker; an estimate.
    """

    examples: int
    measured: int
    steps: int
    kind: Kind
    median_fil: float
    largest_fil: float
    smallest_mse_bound: float
    divergences: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """The numbers by name, as floats; unknown ones are left out."""
        numbers = {
            "steps": float(self.steps),
            "measured_share": self.measured / self.examples,
            "median_fil": self.median_fil,
            "largest_fil": self.largest_fil,
            "smallest_mse_bound": self.smallest_mse_bound,
            **{f"largest_divergence/{question}": value for question, value in self.divergences.items()},
        }
        return {name: value for name, value in numbers.items() if not math.isnan(value)}

    def lines(self) -> list[tuple[str, str]]:
        """The content as (name, text)."""
        lines = [("steps", f"{self.steps:,}"), ("examples measured", f"{self.measured:,} of {self.examples:,}")]
        if self.measured:
            fil = f"median {self.median_fil:.3g}, largest {self.largest_fil:.3g} ({self.kind})"
            bound = f"{self.smallest_mse_bound:.3g} (unbiased attackers; from one run, an estimate)"
            lines += [("FIL η̄", fil), ("smallest MSE bound", bound)]
            lines += [
                (f"D of {name!r}", f"largest {value:.3g} (every attacker; from one run, an estimate)")
                for name, value in self.divergences.items()
            ]
        return lines


def summarise(leakage: _Read) -> LeakageSummary:
    """Read the run once: a few operations on [n] numbers and one transfer from a GPU."""
    measured = leakage.was_measured()
    estimate = leakage.get_fil()
    fil = estimate.value[measured]
    worst = {name: leakage.get_guess(name).divergence.value[measured] for name in leakage.ledger.questions}

    # read together, because every float() of a tensor on a GPU waits for it
    if len(fil):
        numbers = [fil.median(), fil.max(), *(divergence.max() for divergence in worst.values())]
        median, largest, *divergences = torch.stack([number.double() for number in numbers]).tolist()
    else:
        median, largest, divergences = math.nan, math.nan, [math.nan] * len(worst)
    return LeakageSummary(
        examples=leakage.ids.num_examples,
        measured=len(fil),
        steps=leakage.ledger.steps,
        kind=estimate.kind,
        median_fil=median,
        largest_fil=largest,
        smallest_mse_bound=math.inf if largest == 0 else largest**-2,
        divergences=dict(zip(worst, divergences, strict=True)),
    )

"""D = KL(P ‖ P′) of a question, summed per example and alternative over a run.

By the chain rule D = E Σ_t KL_t, so that the sum of KL_t over the steps that used the example (KL_t/q where batches are
secret) is unbiased for it, as with Fisher information.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from torchfil.accounting.quantities import Reading, Sum, TrackedQuantity
from torchfil.fisher.batch import Measurement
from torchfil.guessing import Guess

__all__ = ["Asked", "Divergence"]


class Asked(NamedTuple):
    """What a ledger has to know of a question: its answers, and whether the true one is always among them."""

    answers: tuple[str, ...]
    complete: bool = False


class Divergence(TrackedQuantity):
    """D of every alternative of one question, [m] per example.

    Unlike other quantities it belongs to a run: the run's questions say which there are, and their answers how many
    numbers each has.

    Args:
        question: The question's name.
        asked: Its answers.
    """

    variances: Mapping[str, str]  # type: ignore[misc]
    unless_told: ClassVar[Mapping[str, float]] = {}

    def __init__(self, question: str, asked: Asked) -> None:
        self.question = question
        self.asked = asked
        self.name = f"question {question}"  # type: ignore[misc]
        self.variances = {self._sum("divergence"): self._sum("variance")}

    def _sum(self, part: str) -> str:
        return f"{self.name}: {part}"

    def sums(self, num_coordinates: int, sketch_rank: int) -> dict[str, Sum]:
        """D, its variance from steps that were skipped, and Σ KL_t², [m] each."""
        shape = (len(self.asked.answers),)
        return {self._sum(part): Sum(shape) for part in ("divergence", "variance", "square")}

    def measure(self, measurement: Measurement, rate: float | Tensor, *, skipping: bool) -> dict[str, Tensor]:
        """Nothing: what a step adds needs no measurement of Fisher information, see :meth:`added`."""
        return {}

    def added(self, divergences: Tensor, rate: float | Tensor, *, skipping: bool) -> dict[str, Tensor]:
        """What a step adds to the sums, for KL_t of its examples and alternatives, [batch, m], measured at rate π."""
        weighted = divergences / rate if skipping else divergences
        square = divergences.square()
        result = {self._sum("divergence"): weighted, self._sum("square"): square / rate}
        if skipping:
            result[self._sum("variance")] = square * ((1 - rate) / rate**2)
        return result

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Guess:
        """What D says about every attacker, [ids, m]; [ids] for one alternative."""
        value, variance = sums[self._sum("divergence")], sums[self._sum("variance")]
        if len(self.asked.answers) == 1:
            value, variance = value[:, 0], variance[:, 0]
        return Guess(reading.estimate(value, variance), *self.asked)

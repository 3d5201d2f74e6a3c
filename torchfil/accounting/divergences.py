"""D = KL(P ‖ P′) of a question, summed per example and alternative over a run.

By the chain rule D = E Σ_t KL_t, so the sum of KL_t over the steps that used the example (KL_t/q if batches are secret)
is an unbiased estimate of D, as for Fisher information.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchfil.accounting.path import path_additions
from torchfil.accounting.quantities import ERROR, Reading, Sum, TrackedQuantity, path_layout
from torchfil.fisher.batch import Measurement
from torchfil.guessing import Guess

__all__ = ["Asked", "Divergence"]


class Asked(NamedTuple):
    """What a ledger needs to know about a question: its answers, and whether they always include the true one."""

    answers: tuple[str, ...]
    complete: bool = False


class Divergence(TrackedQuantity):
    """D of every alternative of one question, [m] per example.

    Unlike other quantities it belongs to a run: there is one for each of the run's questions, with as many numbers as
    the question has answers.

    Args:
        question: The question's name.
        asked: Its answers.
    """

    variances: Mapping[str, str]  # type: ignore[misc]
    followed: tuple[str, ...]  # type: ignore[misc]

    def __init__(self, question: str, asked: Asked) -> None:
        self.asked = asked
        self.name = f"question {question}"  # type: ignore[misc]
        self.followed = (self.name,)
        self.variances = {self.name: f"{self.name}_variance"}

    def sums(self, num_coordinates: int, sketch_rank: int) -> dict[str, Sum]:
        """D, its variance from skipped steps, and the sums that show how far one run can be off, [m] each."""
        shape = (len(self.asked.answers),)
        variance = self.variances[self.name]
        return {self.name: Sum(shape), variance: Sum(shape, ERROR), **path_layout(self.name, shape)}

    def measure(self, measurement: Measurement, rate: float | Tensor, *, skipping: bool) -> dict[str, Tensor]:
        """Nothing: these additions do not come from a measurement of Fisher information, see :meth:`added`."""
        return {}

    def added(self, divergences: Tensor, rate: float | Tensor, *, skipping: bool) -> dict[str, Tensor]:
        """What a step adds to the sums, for KL_t of its examples and alternatives, [batch, m], measured at rate π."""
        weighted = divergences / rate if skipping else divergences
        added = {self.name: weighted, **path_additions(self.name, divergences, torch.zeros_like(divergences), rate)}
        if skipping:
            added[self.variances[self.name]] = divergences.square() * ((1 - rate) / rate**2)
        return added

    def read(self, sums: Mapping[str, Tensor], reading: Reading) -> Guess:
        """What D says about every attacker, [ids, m]; [ids] for one alternative."""
        value, variance = sums[self.name], sums[self.variances[self.name]]
        run_error = reading.run_error.get(self.name)
        if len(self.asked.answers) == 1:
            value, variance = value[:, 0], variance[:, 0]
            run_error = None if run_error is None else run_error[:, 0]
        estimate = reading.estimate(value, variance, run_error)
        if reading.degrees_of_freedom is None:  # from skipped steps, not from probes
            estimate = replace(estimate, degrees_of_freedom=math.inf)
        return Guess(estimate, *self.asked)

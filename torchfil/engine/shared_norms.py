"""The norm history of a run with several ranks: each notes the norms that it sees, and all enter all of them, in order.

An example's history goes by steps, and its last seen norm stands in until it is drawn again, on whatever rank. So the
ranks exchange what they noted (12 bytes a participation) once a pass over the data and before reading, and every rank
enters it step by step as a single process would: the history is the same on all ranks, and exact for any sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.epsilon import NormHistory
from torchfil.engine.ranks import Ranks

__all__ = ["SharedNormHistory"]


class SharedNormHistory(NormHistory):
    """A norm history whose steps are entered when all ranks come together.

    Args:
        num_examples: n.
        device: Where the table lies.
        ranks: The processes.
        every: After how many steps all enter what was noted.
        clip_weights: As in :class:`NormHistory`.
        own_steps: As in :class:`NormHistory`.

    Attributes:
        steps: All that were taken, also where they are not entered yet.
    """

    def __init__(
        self,
        num_examples: int,
        device: torch.device | str | Path,
        ranks: Ranks,
        every: int,
        clip_weights: Tensor | None = None,
        *,
        own_steps: bool = False,
    ) -> None:
        super().__init__(num_examples, device, clip_weights, own_steps=own_steps)
        self._ranks, self._every = ranks, every
        self._entered = 0
        self._releases: list[tuple[float, float]] = []  # σ and q of each step that is not entered
        self._notes: list[tuple[int, Tensor, Tensor]] = []  # when, rows, ratios

    @property
    def is_complete(self) -> bool:
        """Whether nothing is noted that was not entered."""
        return not self._notes and self._entered == self.steps

    def step(self, rows: Tensor, ratio: Tensor, noise_multiplier: float, sample_rate: float) -> None:
        """Note one released step, of which this rank had the examples ``rows``; now and then enter all (collective)."""
        self._notes.append((2 * self.steps + 1, rows, ratio.float()))
        self._releases.append((noise_multiplier, sample_rate))
        self.steps += 1
        if self.steps % self._every == 0:
            self.enter()

    def replace(self, rows: Tensor, ratio: Tensor) -> None:
        """Note norms of a refresh pass: before those of the next step."""
        self._notes.append((2 * self.steps, rows, ratio.float()))

    def enter(self) -> None:
        """Enter what all ranks have noted (collective)."""
        when, rows, ratios = self._joined_notes()
        order = when.argsort(stable=True)
        when, rows, ratios = when[order], rows[order].to(self.device), ratios[order].to(self.device)
        steps, self.steps = self.steps, self._entered

        def noted(moment: int) -> tuple[Tensor, Tensor]:
            first, end = torch.searchsorted(when, torch.tensor([moment, moment + 1])).tolist()
            return rows[first:end], ratios[first:end]

        # what was noted before a step comes first, and what came after the last one at the end
        for release in self._releases:
            self.set_ratios(*noted(2 * self.steps))
            super().step(*noted(2 * self.steps + 1), *release)
        assert self.steps == steps
        self.set_ratios(*noted(2 * self.steps))
        self._entered = self.steps
        self._notes.clear()
        self._releases.clear()

    def _joined_notes(self) -> tuple[Tensor, Tensor, Tensor]:
        """When, rows and ratios, of all ranks, [notes] each."""
        empty = [(0, torch.zeros(0, dtype=torch.long), torch.zeros(0))]
        notes = self._notes or empty
        when = torch.cat([torch.full((len(rows),), moment, dtype=torch.int32) for moment, rows, _ in notes])
        rows = torch.cat([rows.cpu() for _, rows, _ in notes]).int()
        ratios = torch.cat([ratio.cpu() for *_, ratio in notes])
        packed = torch.stack([when, rows, ratios.view(torch.int32)], dim=1)
        when, rows, ratios = self._ranks.joined(packed).unbind(dim=1)
        return when.contiguous(), rows.long(), ratios.contiguous().view(torch.float32)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, which is taken when all is entered."""
        super().load_state_dict(state)
        self._entered = self.steps
        self._notes.clear()
        self._releases.clear()

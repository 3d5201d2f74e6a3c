"""The norm history of a run with several ranks: each notes its own norms, and all enter everybody's, in order.

An example's history counts steps, and its last known norm holds until it is drawn again, on whatever rank. So the ranks
exchange their notes (12 bytes per participation) once per pass over the data and before reading, and every rank enters
them step by step as a single process would. The history is the same on all ranks, and exact for any sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.engine.distributed.ranks import Ranks
from torchfil.engine.epsilon import NormHistory

__all__ = ["SharedNormHistory"]


class SharedNormHistory(NormHistory):
    """A norm history whose steps are entered when all ranks exchange their notes.

    Args:
        num_examples: n.
        device: The device of the table.
        ranks: The processes.
        every: After how many steps all enter their notes.
        clip_weights: As in :class:`NormHistory`.
        own_steps: As in :class:`NormHistory`.

    Attributes:
        steps: The number of steps taken, including those not entered yet.
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
        """Whether all notes have been entered."""
        return not self._notes and self._entered == self.steps

    def step(self, rows: Tensor, ratio: Tensor, noise_multiplier: float, sample_rate: float) -> None:
        """Note one released step with this rank's examples ``rows``; now and then enter all notes (collective)."""
        self._notes.append((2 * self.steps + 1, rows, ratio.float()))
        self._releases.append((noise_multiplier, sample_rate))
        self.steps += 1
        if self.steps % self._every == 0:
            self.enter()

    def replace(self, rows: Tensor, ratio: Tensor) -> None:
        """Note the norms of a refresh pass, which come before those of the next step."""
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

        # notes from before a step come first; notes from after the last step come at the end
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
        """The inverse of :meth:`state_dict`, which is taken when everything is entered."""
        super().load_state_dict(state)
        self._entered = self.steps
        self._notes.clear()
        self._releases.clear()

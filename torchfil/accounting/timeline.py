"""How the leakage grew over training time, in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["MAX_POINTS", "Timeline"]

MAX_POINTS = 200


class Timeline:
    """The median, the 95 % quantile and the maximum of η̄ = sqrt(tr(I)/d) over all examples, at some of the steps.

    Every ``stride``-th step is noted at first. Whenever there are 200 points, every second one is dropped, and from
    then on half as many steps are noted. So a run of any length keeps at most 200 equally spaced points, and rarely
    reads the ledger. Examples that were not drawn yet count as 0.

    Args:
        stride: The initial number of steps between two points.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self.steps: list[int] = []
        self.points: list[Tensor] = []  # [3] each, on the ledger's device: no waiting for a GPU

    def is_due(self, step: int) -> bool:
        """Whether this step is to be noted."""
        return step % self.stride == 0

    def note(self, step: int, trace: Tensor, num_coordinates: Tensor | int) -> None:
        """Note the traces and d of the examples, [n] each, after ``step`` steps, if this step is due."""
        if not self.is_due(step):
            return
        self.steps.append(step)
        self.points.append(summary(trace, num_coordinates))
        if len(self.steps) >= MAX_POINTS:
            self.stride *= 2
            kept = [place for place, noted in enumerate(self.steps) if noted % self.stride == 0]
            self.steps = [self.steps[place] for place in kept]
            self.points = [self.points[place] for place in kept]

    def table(self, step: int, trace: Tensor, num_coordinates: Tensor | int) -> tuple[list[int], Tensor]:
        """The noted steps and their points, [t, 3], ending with the current one."""
        steps, points = list(self.steps), list(self.points)
        if step and (not steps or steps[-1] != step):
            steps.append(step)
            points.append(summary(trace, num_coordinates))
        return steps, torch.stack(points).cpu() if points else torch.zeros(0, 3, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain numbers."""
        points = torch.stack(self.points) if self.points else torch.zeros(0, 3, dtype=torch.float64)
        return {"stride": self.stride, "steps": list(self.steps), "points": points}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | str) -> Timeline:
        """The inverse of :meth:`state_dict`."""
        timeline = cls()
        timeline.stride, timeline.steps = int(state["stride"]), [int(step) for step in state["steps"]]
        timeline.points = list(state["points"].to(device).unbind())
        return timeline


def summary(trace: Tensor, num_coordinates: Tensor | int) -> Tensor:
    """Median, 95 % quantile and maximum of sqrt(trace/d), [3]; quantiles are values that occur (the higher one)."""
    ordered = (trace / num_coordinates).sort().values
    median, high = math.ceil(0.5 * len(trace)), math.ceil(0.95 * len(trace))
    return torch.stack([ordered[max(0, median - 1)], ordered[max(0, high - 1)], ordered[-1]]).clamp(min=0).sqrt()

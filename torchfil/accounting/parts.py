"""Combines a ledger that several processes have kept in parts, each for the examples that it drew.

Sums are added. The squared changes between participations of an example (:mod:`torchfil.accounting.path`) depend on
their order and were followed within each part. If only one part has seen an example, because each process draws from
its own part of the data, all of its changes are there. If the parts changed in between, the changes between the parts'
last values replace the missing ones, without subtracting the probes' noise: this can only make the run's error larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchfil.accounting.ledger import Ledger
from torchfil.accounting.path import compared, path_state

__all__ = ["Parts", "changes_between", "whole_ledger"]


class Parts(Protocol):
    """How values are combined over all parts; each method returns tensors on the CPU."""

    def sum(self, value: Tensor) -> Tensor:
        """Σ over the parts."""
        ...

    def maximum(self, value: Tensor) -> Tensor:
        """The largest over the parts."""
        ...

    def each(self, value: Tensor) -> list[Tensor]:
        """The values of each part, in order."""
        ...


def whole_ledger(part: Ledger, parts: Parts) -> Ledger:
    """The ledger of all parts together, on the CPU; the part itself is unchanged."""
    whole: Ledger | None = None
    for name, value in part.sums.items():
        total = parts.maximum(value) if name == "num_coordinates" else parts.sum(value)
        whole = Ledger.like(part, len(total)) if whole is None else whole  # of all rows, or of this process's block
        whole.sums[name] = total
    assert whole is not None
    for quantity in part.quantities:
        for name in quantity.followed:
            last, changes = path_state(name)
            values = parts.each(part.sums[last])
            measured = parts.each(part.sums[f"{name}_measured"])
            between, whole.sums[last] = changes_between(values, measured)
            missing = compared(whole.sums[f"{name}_measured"]) - sum(compared(count) for count in measured)
            whole.sums[changes] += between * missing.clamp(min=4)
    return whole


def changes_between(last: Sequence[Tensor], measured: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean square of the changes from one part's last value to the next part's, and the last of all, [n, …] each.

    Args:
        last: For each part, the value at the last compared participation.
        measured: For each part, how often it was measured; parts with 0 are skipped.

    Example:
        >>> last, measured = torch.tensor([[1.0, 5.0], [0.0, 0.0], [4.0, 0.0]]), torch.tensor([[2, 1], [0, 0], [1, 0]])
        >>> changes_between(last.unbind(), measured.unbind())
        (tensor([9., 0.]), tensor([4., 5.]))
    """
    before, seen = torch.zeros_like(last[0]), torch.zeros_like(measured[0])
    changes = torch.zeros_like(last[0])
    for value, count in zip(last, measured, strict=True):
        here = count > 0
        changes += torch.where(here & (seen > 0), (value - before).square(), 0.0)
        before, seen = torch.where(here, value, before), seen + here
    return changes / (seen - 1).clamp(min=1), before

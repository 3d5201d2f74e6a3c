"""Several ledgers as one: the parts that several processes kept, or the mean over repeated runs.

Several processes keep a ledger in parts, each for the examples that it drew. Sums are added. The squared changes
between participations of an example (:mod:`torchfil.accounting.path`) depend on their order and were followed within
each part. If only one part has seen an example, because each process draws from its own part of the data, all of its
changes are there. If the parts changed in between, the changes between the parts' last values replace the missing ones,
without subtracting the probes' noise: this can only make the run's error larger.

The mean over repeated runs on the same data is one ledger whose errors are the spread between the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.path import compared, path_state

__all__ = ["Parts", "changes_between", "check_repetitions", "mean_ledger", "whole_ledger"]


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


def check_repetitions(ids: Sequence[ExampleIds], ledgers: Sequence[Ledger]) -> None:
    """Raise unless all runs are about the same examples and keep the same quantities."""
    first = ledgers[0]
    for names, ledger in zip(ids[1:], ledgers[1:], strict=True):
        same_data = names.all() == ids[0].all() and _same_coordinates(ledger, first)
        if not same_data or _kept(ledger) != _kept(first):
            told = [
                (each.num_examples, ledger.num_coordinates, ledger.track, ledger.questions)
                for each, ledger in zip(ids, ledgers, strict=True)
            ]
            raise ValueError(
                f"runs to average must share data set, private coordinates, track and questions; got {told}"
            )


def mean_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The mean of several runs' sums, as a new ledger; with two or more runs, their variances are Var/runs.

    Participations are rounded up: 0 only for an example that no run has drawn.
    """
    mean = Ledger.from_state_dict(ledgers[0].state_dict(), ledgers[0].device, lazy=False)
    mean.steps = max(ledger.steps for ledger in ledgers)
    mean.missed_steps = sum(ledger.missed_steps for ledger in ledgers)

    def by_run(name: str) -> Tensor:
        """[runs, n, …]."""
        return torch.stack([ledger.sums.kept(name).to(mean.device) for ledger in ledgers])

    # sums become means, but participations missed in any run stay missing
    for name in mean.sums:
        target, values = mean.sums.kept(name), by_run(name)
        if name == "missed":
            target.copy_(values.sum(dim=0))
        elif name == "num_coordinates":
            target.copy_(values.amax(dim=0))
        else:
            value = values.double().mean(dim=0)
            target.copy_(value if target.is_floating_point() else value.ceil())

    # errors come from the spread between runs, and cover everything random in a run
    variances = [pair for quantity in mean.quantities for pair in quantity.variances.items()]
    for name, variance in variances if len(ledgers) > 1 else ():
        mean.sums.kept(variance).copy_(by_run(name).double().var(dim=0) / len(ledgers))
    return mean


def _same_coordinates(one: Ledger, other: Ledger) -> bool:
    """Whether two runs have the same private coordinates; for texts, one run may not have seen the longest."""
    if one.num_coordinates == other.num_coordinates:
        return True
    return not (one.by_coordinate or one.same_coordinates or other.same_coordinates)


def _kept(ledger: Ledger) -> Any:
    """What a ledger keeps, for comparing."""
    chosen = {name: examples.tolist() for name, examples in ledger.chosen.items()}
    return ledger.track, ledger.questions, chosen

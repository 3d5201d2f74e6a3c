"""The mean over repeated runs on the same data: one ledger whose errors are the spread between the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.ids import ExampleIds
from torchfil.accounting.ledger import Ledger
from torchfil.accounting.row_reading import Conditions

__all__ = ["check_repetitions", "mean_conditions", "mean_ledger"]


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


def mean_conditions(runs: Sequence[Conditions]) -> Conditions:
    """How the sums of :func:`mean_ledger` are read."""
    mean = replace(runs[0], skipping=any(run.skipping for run in runs))
    if len(runs) == 1:
        return mean
    rate = None if mean.sample_rate is None else 1.0
    return replace(mean, exact=False, sample_rate=rate, degrees_of_freedom=len(runs) - 1.0)


def _same_coordinates(one: Ledger, other: Ledger) -> bool:
    """Whether two runs have the same private coordinates; for texts, one run may not have seen the longest."""
    if one.num_coordinates == other.num_coordinates:
        return True
    return not (one.by_coordinate or one.same_coordinates or other.same_coordinates)


def _kept(ledger: Ledger) -> Any:
    """What a ledger keeps, for comparing."""
    chosen = {name: examples.tolist() for name, examples in ledger.chosen.items()}
    return ledger.track, ledger.questions, chosen

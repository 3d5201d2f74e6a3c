"""A run in a few numbers, for logs, ``print`` and notebooks; or a few numbers for each group of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchfil.fisher.results import Estimate, Kind

__all__ = ["LeakageSummary", "group_columns"]


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


def group_columns(
    get_fil: Callable[[list[Hashable]], Estimate],
    group_of: Mapping[Hashable, Hashable],
    threshold: float | None,
    quantiles: Sequence[float],
) -> tuple[list[Hashable], dict[str, list[Any]]]:
    """The groups and their columns; see :meth:`torchfil.accounting.leakage.Leakage.groups`."""
    columns: dict[str, list[Any]] = {}
    members = _members(group_of)
    for ids in members.values():
        fil = get_fil(ids)
        values: dict[str, Any] = {
            "count": len(ids),
            "mean": fil.value.mean().item(),
            "mean_error": fil.standard_error.mean().item(),
            "max": fil.value.max().item(),
        }
        for level in quantiles:
            values[f"q{100 * level:g}"] = _quantile(fil.value, level)
        if threshold is not None:
            values["share_above"] = (fil.value > threshold).double().mean().item()
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return list(members), columns


def _members(group_of: Mapping[Hashable, Hashable]) -> dict[Hashable, list[Hashable]]:
    """The ids of each group."""
    if not hasattr(group_of, "items"):
        raise TypeError(f"group_of is a {type(group_of).__name__}; map ids to groups: dict(zip(ids, labels))")
    group_of = dict(group_of.items())
    if not group_of:
        raise ValueError("group_of is empty; map at least one example id to a group")
    nameless = [key for key, group in group_of.items() if group != group]
    if nameless:
        raise ValueError(f"group_of has NaN for {nameless[:5]}; leave these ids out, or name their group")
    members: dict[Hashable, list[Hashable]] = {}
    for key, group in group_of.items():
        members.setdefault(group, []).append(key)
    return members


def _quantile(values: Tensor, level: float) -> float:
    """:func:`torch.quantile` by linear interpolation, for values that may be infinite."""
    place = level * (len(values) - 1)
    low, high = values.sort().values[[math.floor(place), math.ceil(place)]].tolist()
    return low if low == high else low + (place - math.floor(place)) * (high - low)

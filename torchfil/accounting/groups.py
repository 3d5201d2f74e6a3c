"""Summaries of FIL by group of examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchfil.fisher.results import Estimate

__all__ = ["group_columns"]


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

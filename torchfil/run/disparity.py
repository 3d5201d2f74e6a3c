"""How differently groups leak: one statistic, which the page shows and the gate judges.

The level of a group is the geometric mean of its members' η̄, and the disparity of a grouping the largest level over the
smallest. Geometric means carry over to errors exactly (the typical 1/η̄ is one over the typical η̄), they are what the
page's intervals are about, and every member moves them, where a median says nothing of a group's exposed half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchfil.run.aggregates import geometric_mean

__all__ = ["SMALLEST_EFFECT", "SMALLEST_GROUP", "Disparity", "disparity_of", "group_levels", "positive_fil"]

SMALLEST_EFFECT = 1.1  # levels that differ by a smaller factor are not called different
SMALLEST_GROUP = 10  # a level of fewer is mostly theirs, not the group's


@dataclass(frozen=True)
class Disparity:
    """The most and the least exposed of some groups, and how far they are apart.

    Attributes:
        ratio: The largest level over the smallest, at least 1; infinite where one is 0 or one has no noise.
        most: The group with the largest level.
        least: The group with the smallest.
    """

    ratio: float
    most: str
    least: str


def positive_fil(fil: np.ndarray) -> np.ndarray:
    """η̄ with zeros as the least that was measured: log 0 would take a whole group's mean with it.

    Example:
        >>> positive_fil(np.array([0.0, 0.2, 0.5])).tolist()
        [0.2, 0.2, 0.5]
    """
    values = np.asarray(fil, dtype=np.float64)
    positive = values[values > 0]
    return np.maximum(values, positive.min() if len(positive) else 1.0)


def group_levels(
    fil: np.ndarray, codes: np.ndarray, names: list[str], smallest: int = SMALLEST_GROUP, *, public: bool = False
) -> dict[str, float]:
    """The level of every group of ``smallest`` members or more: the geometric mean of :func:`positive_fil`.

    A group in which nothing leaked at all has level 0.

    Args:
        fil: η̄ of the measured examples, [n].
        codes: The place of each one's group among ``names``, [n].
        names: The groups.
        smallest: The least size of a group.
        public: Whether values are :func:`~torchfil.run.aggregates.capped`.

    Example:
        >>> group_levels(np.array([1.0, 4.0, 3.0]), np.array([0, 0, 1]), ["a", "b"], 2)
        {'a': 2.0}
    """
    values, levels = positive_fil(fil), {}
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    for code, name in enumerate(names):
        members = order[starts[code] : starts[code + 1]]
        if len(members) >= max(smallest, 1):
            level = geometric_mean(values[members], smallest if public else 1)
            levels[name] = level if fil[members].any() else 0.0
    return levels


def disparity_of(levels: Mapping[str, float]) -> Disparity | None:
    """The disparity of groups by their levels; None for fewer than two.

    Example:
        >>> disparity_of({"a": 2.0, "b": 3.0, "c": 2.5})
        Disparity(ratio=1.5, most='b', least='a')
    """
    if len(levels) < 2:
        return None
    most, least = max(levels, key=levels.__getitem__), min(levels, key=levels.__getitem__)
    if levels[most] == levels[least]:  # as 0 and infinity may be
        return Disparity(1.0, most, least)
    return Disparity(levels[most] / levels[least] if levels[least] > 0 else math.inf, most, least)

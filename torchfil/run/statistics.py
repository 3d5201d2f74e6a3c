"""Statistics of many examples: how differently groups leak, who was down-weighted, whom a page
shows one by one. What may be published of them: :mod:`torchfil.run.disclosure`.

The level of a group is the geometric mean of its members' η̄, and the disparity of a grouping the
largest level over the smallest. Geometric means carry over to errors exactly (the typical 1/η̄ is
one over the typical η̄), they are what the page's intervals are about, and every member moves them,
where a median says nothing of a group's exposed half. The page shows this statistic, and the gate
judges it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchfil.run.disclosure import published_mean
from torchfil.run.saved_run import SavedRun

SMALLEST_EFFECT = 1.1  # levels that differ by a smaller factor are not called different
# of which a run file keeps the values, at most
TYPICAL_EXAMPLES, RECORDED_EXAMPLES, RECORDED_ATTRIBUTES = 3, 10, 64
SMALLEST_GROUP = 10  # a level of fewer is mostly theirs, not the group's


@dataclass(frozen=True)
class Disparity:
    """The most and the least exposed of some groups, and how far they are apart.

    Attributes:
        ratio: The largest level over the smallest, at least 1; infinite where one is 0 or one has
            no noise.
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
    fil: np.ndarray,
    codes: np.ndarray,
    names: list[str],
    smallest: int = SMALLEST_GROUP,
    public: int = 1,
) -> dict[str, float]:
    """The level of every group of ``smallest`` members or more: the geometric mean of
    :func:`positive_fil`.

    A group in which nothing leaked at all has level 0; one of whose members too few are known, NaN.

    Args:
        fil: η̄ of the measured examples, [n]; NaN: not known.
        codes: The place of each one's group among ``names``, [n].
        names: The groups.
        smallest: The least size of a group.
        public: m of a level that is published (:mod:`torchfil.run.disclosure`); 1: it is not.

    Example:
        >>> group_levels(np.array([1.0, 4.0, 3.0]), np.array([0, 0, 1]), ["a", "b"], 2)
        {'a': 2.0}
    """
    values, levels = positive_fil(fil), {}
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
    for code, name in enumerate(names):
        members = order[starts[code] : starts[code + 1]]
        known = members[~np.isnan(fil[members])]
        if len(members) < max(smallest, 1):
            continue
        if len(known) < smallest:
            levels[name] = math.nan
        else:
            levels[name] = published_mean(values[known], public) if fil[known].any() else 0.0
    return levels


def disparity_of(levels: Mapping[str, float]) -> Disparity | None:
    """The disparity of groups by their levels; None for fewer than two, or where one is not known.

    Example:
        >>> disparity_of({"a": 2.0, "b": 3.0, "c": 2.5})
        Disparity(ratio=1.5, most='b', least='a')
    """
    if len(levels) < 2 or any(map(math.isnan, levels.values())):
        return None
    most, least = max(levels, key=levels.__getitem__), min(levels, key=levels.__getitem__)
    if levels[most] == levels[least]:  # as 0 and infinity may be
        return Disparity(1.0, most, least)
    return Disparity(levels[most] / levels[least] if levels[least] > 0 else math.inf, most, least)


def is_spared(run: SavedRun) -> np.ndarray:
    """Which examples were trained with ω < 1, [n] booleans.

    Example:
        >>> run = SavedRun(
        ...     about={}, ids=np.arange(3), columns={"clip_weight": np.array([1.0, 0.5, 1.0])}
        ... )
        >>> is_spared(run).tolist()
        [False, True, False]
    """
    return np.asarray(run.clip_weights, dtype=np.float64) < 1


def most_exposed_and_typical(
    fil: np.ndarray, measured: np.ndarray, most: int
) -> tuple[np.ndarray, int]:
    """Which examples a page shows one by one: the ``most`` exposed first, then up to three others
    next to the median.

    Args:
        fil: η̄, [n].
        measured: Which examples count, [n] booleans.
        most: How many of the most exposed.

    Returns:
        Their places, int64 [m], and how many of them, the last ones, are typical.

    Example:
        >>> rows, typical = most_exposed_and_typical(np.arange(9.0), np.arange(9) < 8, 2)
        >>> rows.tolist(), typical
        ([7, 6, 4, 3, 5], 3)
    """
    drawn = np.flatnonzero(measured)
    order = drawn[np.argsort(-np.asarray(fil, dtype=np.float64)[drawn], kind="stable")]
    from_median = np.abs(np.arange(len(order)) - (len(order) - 1) / 2)[most:]
    typical = order[most:][np.argsort(from_median, kind="stable")[:TYPICAL_EXAMPLES]]
    return np.concatenate([order[:most], typical]).astype(np.int64), len(typical)

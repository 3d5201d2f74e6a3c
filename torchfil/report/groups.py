"""Groups beside each other: how much each leaks, and how far they are apart.

Which groups may be published beside each other is a rule of :mod:`torchfil.run.disclosure`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from torchfil.run import statistics
from torchfil.run.disclosure import (
    Split,
    capped,
    joined,
    published_mean,
    rounded,
    rounded_count,
    split_beside,
)
from torchfil.run.saved_run import SavedRun

MOST_GROUPS = 60


@dataclass(frozen=True)
class GroupSummary:
    """η̄ of a group: geometric mean and its simultaneous 95 % interval.

    ``compared`` is "more" or "less" where the interval lies above or below all examples' mean and
    the two differ by the factor :data:`~torchfil.run.statistics.SMALLEST_EFFECT` or more, otherwise
    "". ``fil_before`` is of a run without clip weights; None: not known.
    """

    name: str
    examples: int
    measured: int | str
    fil: float
    low: float
    high: float
    compared: str
    fil_before: float | None = None


@dataclass(frozen=True)
class Grouping:
    """One way to split the examples.

    Attributes:
        name: Of the grouping.
        fil: Of all examples.
        groups: The most exposed first.
        merged: How many small groups stand together in one row.
        left_out: How many groups are not shown.
        disparity: The statistic that the gate judges (:mod:`torchfil.run.statistics`), of groups of
            ``SMALLEST_GROUP`` measured examples or more; None: fewer than two.
        disparity_before: The same in a run without clip weights; None: not known.
        withheld: Whether it is not shown because of the groupings before it.
    """

    name: str
    fil: float
    groups: list[GroupSummary]
    merged: int
    left_out: int
    disparity: statistics.Disparity | None = None
    disparity_before: statistics.Disparity | None = None
    withheld: bool = False

    @property
    def ends(self) -> tuple[GroupSummary, GroupSummary] | None:
        """The most and the least exposed group.

        None for small effects, and for what may be chance.
        """
        rows, found = {group.name: group for group in self.groups}, self.disparity
        if (
            found is None
            or found.ratio < statistics.SMALLEST_EFFECT
            or not {found.most, found.least} <= rows.keys()
        ):
            return None
        most, least = rows[found.most], rows[found.least]
        return (most, least) if math.isinf(found.ratio) or most.low > least.high else None


def summarise_groups(run: SavedRun, measured: np.ndarray, smallest: int) -> list[Grouping]:
    """Each in turn, beside those before it: their groups together must not single out fewer than
    ``smallest``.

    Args:
        run: A saved run.
        measured: Which examples it says something about, [n] booleans.
        smallest: The least number of examples that a number rests on; 1: not redacted.
    """
    unknown = np.full(len(run), math.nan)
    fil, before = (
        np.asarray(run.columns.get(column, unknown), np.float64)[measured]
        for column in ("fil", "fil_before")
    )
    # zeros as the least that was measured
    positive, positive_before = map(statistics.positive_fil, (fil, before))
    overall = float(np.log(capped(positive, smallest)).mean()) if len(fil) else math.nan
    groupings, cells = [], None
    for name in run.groups:
        labels, group_of = run.coded_group(name)
        split = split_beside(group_of[measured], smallest, cells)
        cells = joined(cells, split)
        alone = np.bincount(group_of, minlength=len(labels))[split.names].tolist()
        sizes = [*alone, len(run) - sum(alone)]  # of everybody, measured or not
        split = replace(split, names=[str(labels[code]) for code in split.names])
        groups = _groups_of(split, sizes, positive, positive_before, overall, smallest)
        groupings.append(
            Grouping(
                name,
                rounded(math.exp(overall), smallest),
                groups[:MOST_GROUPS],
                split.merged,
                len(labels) - len(alone) - split.merged + len(groups[MOST_GROUPS:]),
                _disparity(fil, smallest, split),
                _disparity(before, smallest, split),
                split.withheld,
            )
        )
    return groupings


def _groups_of(
    split: Split,
    sizes: list[int],
    fil: np.ndarray,
    before: np.ndarray,
    overall: float,
    smallest: int,
) -> list[GroupSummary]:
    """Geometric means of η̄ by group, with Student's intervals on log η̄, widened for their number
    (Bonferroni), the most exposed first.

    Args:
        split: The groups.
        sizes: How many examples each has, measured or not.
        fil: η̄ of the measured examples, [n].
        before: The same of a run without clip weights; NaN: not known.
        overall: The mean of log η̄.
        smallest: The least number of examples that a number rests on.
    """
    names, rows = split.shown(), list[GroupSummary]()
    for code, name in enumerate(names):
        own = split.codes == code
        logs = np.log(capped(fil[own], smallest))
        centre, count, half = float(logs.mean()), len(logs), math.inf
        if count > 1 and math.isfinite(centre):  # infinite where there was no noise
            spread = float(logs.std(ddof=1)) / math.sqrt(count)
            half = float(stats.t.ppf(1 - 0.025 / len(names), count - 1)) * spread

        # called different only where chance does not explain it and it is of some size
        compared = ""
        if not abs(centre - overall) < math.log(statistics.SMALLEST_EFFECT):
            compared = "more" * (centre - half > overall) + "less" * (centre + half < overall)
        low, high = (0.0, math.inf)
        if math.isfinite(half):
            low, high = math.exp(centre - half), math.exp(centre + half)
        known = before[own]
        known = known[~np.isnan(known)]
        rows.append(
            GroupSummary(
                name=name,
                examples=rounded_count(sizes[code], smallest),
                measured=rounded_count(count, smallest),
                fil=rounded(math.exp(centre), smallest),
                low=rounded(low, smallest),
                high=rounded(high, smallest),
                compared=compared,
                fil_before=published_mean(known, smallest) if len(known) >= smallest else None,
            )
        )
    return sorted(rows, key=lambda row: -row.fil)


def _disparity(values: np.ndarray, smallest: int, split: Split) -> statistics.Disparity | None:
    """Of the groups that stand by themselves.

    None for fewer than two, and where one of them is not known.
    """
    size = max(smallest, statistics.SMALLEST_GROUP)
    levels = statistics.group_levels(values, split.codes, split.names, size, smallest)
    found = statistics.disparity_of(levels)
    return found and replace(found, ratio=rounded(found.ratio, smallest))

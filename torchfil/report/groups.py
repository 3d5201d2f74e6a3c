"""Groups beside each other, as numbers about many examples that cannot be subtracted until one
example is left.

Two groupings that differ by one example give that example away: the sum over a group of the one,
less the sum over the same group of the other, is its value. Groupings are therefore looked at
together. All published groups are unions of **cells**, the sets of examples that share their group
in every grouping (left-out examples are a cell as well). Where every cell is empty or holds
``smallest`` examples or more, whatever is computed from the groups' sums, be it a difference, a
complement or an intersection, is a function of sums over cells, and so of ``smallest`` examples or
more.

That is what is kept: a grouping is added only if all cells stay so large, small groups put together
where that helps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy import stats

from torchfil.run import statistics
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
    groupings, cells = [], None
    for name in run.groups:
        levels, group_of = run.coded_group(name)
        split = split_beside(group_of[measured], smallest, cells)
        split = replace(split, names=[str(levels[int(code)]) for code in split.names])
        cells = joined(cells, split)
        sizes = dict(
            zip(levels.tolist(), np.bincount(group_of, minlength=len(levels)).tolist(), strict=True)
        )
        groupings.append(_grouping(run, name, measured, smallest, split, sizes))
    return groupings


def _grouping(
    run: SavedRun,
    name: str,
    measured: np.ndarray,
    smallest: int,
    split: Split,
    sizes: dict[str, int],
) -> Grouping:
    """Geometric means of η̄ by group, with Student's intervals on log η̄, widened for their number
    (Bonferroni).
    """
    codes, names, merged = split.codes, split.names, split.merged
    if merged:
        names = [*names, f"{merged} small groups together" if merged > 1 else "one more group"]

    unknown = np.full(len(run), math.nan)
    both = [
        np.asarray(run.columns.get(column, unknown), np.float64)[measured]
        for column in ("fil", "fil_before")
    ]
    fil, before = map(statistics.positive_fil, both)  # zeros as the least that was measured
    overall = float(np.log(statistics.capped(fil, smallest)).mean()) if len(fil) else math.nan

    rows = []
    for code, group in enumerate(names):
        own = np.log(statistics.capped(fil[codes == code], smallest))
        everyone = (
            sizes[group]
            if code < len(split.names)
            else len(run) - sum(sizes[kept] for kept in split.names)
        )
        row = _group(group, own, everyone, overall, len(names), smallest)
        rows.append(replace(row, fil_before=_typical(before[codes == code], smallest)))
    rows.sort(key=lambda row: -row.fil)
    left_out = len(sizes) - (len(names) - (merged > 0)) - merged + max(len(names) - MOST_GROUPS, 0)
    typical = statistics.rounded(math.exp(overall), smallest)
    now, then = (_disparity(values, smallest, split) for values in both)
    return Grouping(name, typical, rows[:MOST_GROUPS], merged, left_out, now, then, split.withheld)


def _disparity(values: np.ndarray, smallest: int, split: Split) -> statistics.Disparity | None:
    """Of the groups that stand by themselves.

    None for fewer than two, and where one of them is not known.
    """
    known, size = ~np.isnan(values), max(smallest, statistics.SMALLEST_GROUP)
    levels = statistics.group_levels(
        values[known], split.codes[known], split.names, size, public=smallest > 1
    )
    # −1 stands for left out
    members = np.bincount(split.codes + 1, minlength=len(split.names) + 1)[1:]
    if len(levels) < int((members[: len(split.names)] >= size).sum()):
        return None
    disparity = statistics.disparity_of(
        {name: statistics.rounded(level, smallest) for name, level in levels.items()}
    )
    return (
        None
        if disparity is None
        else replace(disparity, ratio=statistics.rounded(disparity.ratio, smallest))
    )


def _typical(fil: np.ndarray, smallest: int) -> float | None:
    """The geometric mean of those that are known; None where they are too few."""
    fil = fil[~np.isnan(fil)]
    return (
        statistics.rounded(statistics.geometric_mean(fil, smallest), smallest)
        if len(fil) >= smallest
        else None
    )


def _group(
    name: str, logs: np.ndarray, everyone: int, overall: float, groups: int, smallest: int
) -> GroupSummary:
    """One of ``groups`` groups, from log η̄ of its measured examples and the mean over all
    examples.
    """
    centre, count, half = float(logs.mean()), len(logs), math.inf
    if count > 1 and math.isfinite(centre):  # infinite where there was no noise
        spread = float(logs.std(ddof=1)) / math.sqrt(count)
        half = float(stats.t.ppf(1 - 0.025 / groups, count - 1)) * spread
    # called different only where chance does not explain it and it is of some size
    above, below = centre - half > overall, centre + half < overall
    sized = abs(centre - overall) >= math.log(statistics.SMALLEST_EFFECT) or not math.isfinite(
        centre
    )
    ends = (
        (math.exp(centre - half), math.exp(centre + half))
        if math.isfinite(half)
        else (0.0, math.inf)
    )
    examples, measured = (statistics.rounded_count(each, smallest) for each in (everyone, count))
    fil, low, high = (statistics.rounded(each, smallest) for each in (math.exp(centre), *ends))
    compared = ("more" if above else "less" if below else "") if sized else ""
    return GroupSummary(name, examples, measured, fil, low, high, compared)


@dataclass(frozen=True, eq=False)
class Split:
    """A grouping as it may be published.

    Attributes:
        codes: The group of every example, [n]; −1: left out.
        names: The groups that stand by themselves, by code.
        merged: How many groups were put together; their code is ``len(names)``.
        withheld: Whether groups had to go because of the groupings before.
    """

    codes: np.ndarray
    names: list[str]
    merged: int
    withheld: bool = False


def split_beside(labels: np.ndarray, smallest: int, cells: np.ndarray | None = None) -> Split:
    """The groups of ``labels`` that may be published, beside groupings whose cells are given.

    Groups that would cut a cell into parts below ``smallest`` are put together, the smallest first,
    and more of them until none does: a sum that is too small by itself could be had as a
    difference.

    Args:
        labels: [n].
        smallest: The least size of a cell.
        cells: The cell of every example, [n], of the groupings that are published already; None:
            none are.

    Example:
        >>> split_beside(np.array(["f"] * 20 + ["m"] * 30 + ["x"] * 3), 10).names
        ['m']
        >>> site = np.array(["A"] * 24 + ["B"] * 29)
        >>> first = split_beside(site, 10)
        >>> cells = joined(None, first)
        >>> site[3] = "B"  # the same grouping but for one example
        >>> split_beside(site, 10, cells).names
        []
    """
    names, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    before = np.zeros(len(labels), dtype=np.int64) if cells is None else cells
    num_cells = int(before.max(initial=0)) + 1

    # how many examples each group has in each cell: the pairs that occur alone, for there may be
    # many of both
    pairs, sizes = np.unique(own * num_cells + before, return_counts=True)
    starts = np.searchsorted(pairs, np.arange(len(names) + 1) * num_cells)
    # of the pairs, by group
    parts = [slice(first, last) for first, last in pairwise(starts.tolist())]
    too_small = np.zeros(len(names), dtype=bool)
    too_small[pairs[sizes < smallest] // num_cells] = True

    # groups that cut a cell too small are put together, and others with them until those together
    # do not
    order = np.argsort(counts, kind="stable")
    hidden, kept = order[too_small[order]].tolist(), order[~too_small[order]].tolist()
    together = np.bincount(before[too_small[own]], minlength=num_cells)
    while hidden and kept and bool(((together > 0) & (together < smallest)).any()):
        hidden.append(kept.pop(0))
        together[pairs[parts[hidden[-1]]] % num_cells] += sizes[parts[hidden[-1]]]
    kept.sort()

    if hidden and counts[hidden].sum() < smallest:
        return Split(np.full(len(labels), -1), [], 0)
    if cells is not None and not kept and (counts >= smallest).sum() > 1:
        return Split(np.full(len(labels), -1), [], 0, withheld=True)
    target = np.empty(len(names), dtype=np.int64)
    target[kept] = np.arange(len(kept))
    target[hidden] = len(kept)
    return Split(target[own], [str(names[group]) for group in kept], len(hidden))


def joined(cells: np.ndarray | None, split: Split) -> np.ndarray:
    """The cells once ``split`` is published too, [n]."""
    before = 0 if cells is None else cells * (int(split.codes.max(initial=0)) + 2)
    return np.unique(before + split.codes + 1, return_inverse=True)[1]

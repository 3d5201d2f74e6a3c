"""Statistics of many examples: what may be published of them, how differently groups leak, who was
down-weighted.

``smallest`` is the least number of examples that a published number rests on. With ``smallest=1``
every function gives the plain statistic: order statistics, exact counts, unrounded values.

Who knows all members of a mean but one can compute the last from it. Published means are therefore
winsorised: no value counts for more than ten times, or less than a tenth of, the median of those it
is averaged with, so that a mean says of the last one, at most, where between these limits it lies,
or that it lies beyond one.

The level of a group is the geometric mean of its members' η̄, and the disparity of a grouping the
largest level over the smallest. Geometric means carry over to errors exactly (the typical 1/η̄ is
one over the typical η̄), they are what the page's intervals are about, and every member moves them,
where a median says nothing of a group's exposed half. The page shows this statistic, and the gate
judges it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchfil.run.saved_run import SavedRun

LARGEST_FACTOR = 10.0  # from the median to a value of a published mean
SMALLEST_EFFECT = 1.1  # levels that differ by a smaller factor are not called different
# of which a run file keeps the values, at most
TYPICAL_EXAMPLES, RECORDED_EXAMPLES, RECORDED_ATTRIBUTES = 3, 10, 64
SMALLEST_GROUP = 10  # a level of fewer is mostly theirs, not the group's


@dataclass(frozen=True)
class Histogram:
    """Counts between edges of a fixed grid.

    Attributes:
        edges: [k + 1], ascending.
        counts: [k].
        outside: How many values are infinite or, on a logarithmic grid, zero.
    """

    edges: list[float]
    counts: list[int]
    outside: int


def rounded(value: float, smallest: int, digits: int = 2) -> float:
    """The value, with so many significant digits where ``smallest`` > 1."""
    return float(f"{value:.{digits}g}") if smallest > 1 else float(value)


def rounded_count(count: int, smallest: int) -> int:
    """The count, to the nearest multiple of ``smallest``.

    Example:
        >>> rounded_count(127, 10), rounded_count(127, 1), rounded_count(3, 10)
        (130, 127, 0)
    """
    return smallest * math.floor(count / smallest + 0.5)


def published_count(count: int, smallest: int) -> int | str:
    """The rounded count, or in words where there are some, but fewer than ``smallest``.

    Example:
        >>> published_count(0, 10), published_count(3, 10), published_count(127, 10)
        (0, 'fewer than 10', 130)
    """
    return f"fewer than {smallest}" if 0 < count < smallest else rounded_count(count, smallest)


def capped(values: np.ndarray, smallest: int, power: int = 1) -> np.ndarray:
    """The values ≥ 0, where ``smallest`` > 1 none beyond a factor of 10^power from their median
    (that of their logs).

    Args:
        values: [n]; NaN stays.
        smallest: See above.
        power: 2 for squared errors, which then remain 1/η̄² of what η̄ is capped at.

    Example:
        >>> capped(np.array([1.0, 2.0, 4.0, 1e4, 0.0]), 5).tolist()
        [1.0, 2.0, 4.0, 20.0, 0.2]
    """
    values = np.asarray(values, dtype=np.float64)
    known = values[~np.isnan(values)]
    if smallest == 1 or not len(known):
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = float(np.exp(np.median(np.log(known))))
    factor = LARGEST_FACTOR**power
    return np.clip(values, centre / factor, centre * factor) if 0 < centre < math.inf else values


def geometric_mean(values: np.ndarray, smallest: int = 1, power: int = 1) -> float:
    """exp(mean(log x)) of :func:`capped` values; exact where all are equal.

    It carries η̄ over to 1/η̄² exactly, and one large value moves it little. With ``smallest=1`` it
    is 0 where one value is 0, and infinite where one is infinite.
    """
    values = capped(values, smallest, power)
    largest = float(values.max(initial=0.0))
    # logs of shares: three equal threes have the mean 3
    scale = largest if 0 < largest < math.inf else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return scale * float(np.exp(np.log(values / scale).mean()))


def windows(count: int, levels: Sequence[float], smallest: int) -> dict[float, slice]:
    """Disjoint runs of ``smallest`` consecutive ranks around each level of a sorted list of
    ``count``.

    A level whose window would overlap an earlier one's is left out: two overlapping means differ by
    few examples. So is one that would leave fewer than ``smallest`` ranks outside all windows, and
    not none: the mean of everybody, beside those of the windows, would tell theirs.

    Args:
        count: The list's length.
        levels: In [0, 1], the most important first.
        smallest: The length of each window.

    Example:
        >>> windows(100, [0.0, 0.5, 0.05], 10)
        {0.0: slice(0, 10, None), 0.5: slice(45, 55, None)}
    """
    chosen: dict[float, slice] = {}
    for level in levels:
        start = min(
            max(math.floor(level * (count - 1) - (smallest - 1) / 2 + 0.5), 0), count - smallest
        )
        left = count - smallest * (len(chosen) + 1)
        overlaps = any(
            start < other.stop and other.start < start + smallest for other in chosen.values()
        )
        if start < 0 or overlaps or 0 < left < smallest:
            continue
        chosen[level] = slice(start, start + smallest)
    return dict(sorted(chosen.items(), key=lambda item: item[1].start))


def levels_of(
    values: np.ndarray,
    smallest: int,
    *,
    sign: int = 1,
    levels: Sequence[float] = (0.0, 0.5, 0.05),
    power: int = 1,
    by: np.ndarray | None = None,
) -> dict[str, float]:
    """Level ↦ geometric mean of |values| around it, in ascending order of ``by`` (None: of the
    values themselves).

    ``power``: :func:`capped`.
    """
    ordered = values[np.argsort(values if by is None else by, kind="stable")]
    return {
        f"{level:g}": rounded(geometric_mean(sign * ordered[window], smallest, power), smallest)
        for level, window in windows(len(ordered), levels, smallest).items()
    }


def histogram(
    values: np.ndarray, smallest: int, *, fineness: float = 8, origin: float | None = None
) -> Histogram | None:
    """Counts on a logarithmic grid that does not depend on single values.

    None where there are too few.

    Neighbouring bins are merged until each holds ``smallest`` values or more. With ``smallest`` > 1
    the outer ends are not the grid's next to the least and the largest value, which would tell
    these: each outermost bin is laid around the mean of its values, :func:`capped` as squared
    errors.

    Args:
        values: [n].
        smallest: The least count of a bin; counts are rounded to a multiple of it.
        fineness: Bins a factor of ten.
        origin: A point of the grid; a value that equals it is counted below it.
    """
    values = np.asarray(values, dtype=np.float64)
    inside = values[np.isfinite(values) & (values > 0)]
    if len(inside) < max(smallest, 1):
        return None

    # the grid: fixed steps from the origin, made wider only where there would be more than 400
    # bins; of outliers, which would tell of themselves by the grid's width, a public one knows that
    # they lie outside
    zero, usual = math.log10(origin) if origin else 0.0, np.log10(capped(inside, smallest, 2))
    step = max(1, math.ceil(float(np.ptp(usual)) * fineness / 400)) / fineness
    # bins are closed at the right
    places = (
        np.ceil((np.log10(inside) - zero) / step - 1e-9).clip(-(2.0**40), 2.0**40).astype(np.int64)
        - 1
    )
    places = np.clip(places, np.median(places) - 400, np.median(places) + 400).astype(np.int64)
    edges, merged = _merged_bins(places, smallest)

    # the outermost bins end where their mean puts them, not next to the extreme value
    if smallest > 1:
        if len(merged) < 2:
            return None
        ends = [
            capped(inside[rows], smallest, 2) for rows in (places < edges[1], places >= edges[-2])
        ]
        below, above = ((float(np.log10(end).mean()) - zero) / step for end in ends)
        edges[0] = min(math.floor(2 * below - edges[1]), edges[1] - 1)
        end = max(math.ceil(2 * above - edges[-2]), edges[-2] + 1)
        edges[-1] = min(end, 0) if origin is not None and edges[-1] <= 0 else end

    points = [10 ** (zero + edge * step) for edge in edges]
    outside = rounded_count(len(values) - len(inside), smallest)
    return Histogram(points, [rounded_count(count, smallest) for count in merged], outside)


def _merged_bins(places: np.ndarray, smallest: int) -> tuple[list[int], list[int]]:
    """Neighbouring bins put together from the left until each holds ``smallest``: k + 1 edges and k
    counts.
    """
    first = int(places.min())
    counts = np.bincount(places - first).tolist()
    edges, merged = [first], list[int]()
    waiting = 0
    for place, count in enumerate(counts):
        waiting += count
        if waiting >= smallest or smallest == 1:
            merged.append(waiting)
            edges.append(first + place + 1)
            waiting = 0
    if waiting:  # too few to stand alone: they join the last bin
        merged[-1] += waiting
        edges[-1] = first + len(counts)
    return edges, merged


def round_step(step: float) -> float:
    """The next larger 1, 2 or 5 times a power of ten."""
    if not step > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-12))


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
    *,
    public: bool = False,
) -> dict[str, float]:
    """The level of every group of ``smallest`` members or more: the geometric mean of
    :func:`positive_fil`.

    A group in which nothing leaked at all has level 0.

    Args:
        fil: η̄ of the measured examples, [n].
        codes: The place of each one's group among ``names``, [n].
        names: The groups.
        smallest: The least size of a group.
        public: Whether values are :func:`capped`.

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
            levels[name] = (
                geometric_mean(values[members], smallest if public else 1)
                if fil[members].any()
                else 0.0
            )
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


@dataclass(frozen=True)
class SparedSummary:
    """How many examples had ω < 1, and the rounds of training that chose the weights.

    Attributes:
        examples: How many.
        smallest_weight: The smallest ω; None in a redacted summary, for it is one example's.
        rounds: The columns of ``SavedRun.rounds``; of a redacted summary only how many were spared,
            rounded as all counts are: the worst bound is one example's, a mean over a group may be,
            and what a score is made from is not known.
    """

    examples: int | str
    smallest_weight: float | None
    rounds: dict[str, list[float | int | str | bool]]


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


def summarise_spared(run: SavedRun, smallest: int) -> SparedSummary | None:
    """The summary; None where no weights were given.

    Args:
        run: A saved run.
        smallest: The least number of examples that a number rests on; 1: not redacted.
    """
    if "clip_weight" not in run.columns and not run.rounds:
        return None
    redacted = smallest > 1
    kept = [name for name in run.rounds if not redacted or name in ("num_spared", "fresh")]
    rounds = {name: run.rounds[name].tolist() for name in kept}
    if "num_spared" in rounds:
        rounds["num_spared"] = [
            published_count(int(count), smallest) for count in rounds["num_spared"]
        ]
    return SparedSummary(
        examples=published_count(int(is_spared(run).sum()), smallest),
        smallest_weight=None if redacted else float(np.min(run.clip_weights, initial=1.0)),
        rounds=rounds,
    )


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

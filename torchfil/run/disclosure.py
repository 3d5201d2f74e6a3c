"""What may be published of a run: in public pages, cards, comparisons and dashboards.

``smallest``, m, is the least number of examples that a published number rests on. With m = 1
everything may be shown, and every function gives the plain statistic: order statistics, exact
counts, unrounded values. There are five rules.

**Facts** are published by name (:data:`PUBLIC`); what is not named stays out.

**Counts** are rounded to multiples of m, and below m are none ("fewer than 10").

**Means** rest on m examples or more, and no two on nearly the same. Who knows all members of a mean
but one can compute the last from it. Published means are therefore winsorised: no value counts for
more than ten times, or less than a tenth of, the median of those it is averaged with, so that a
mean says of the last one, at most, where between these limits it lies, or that it lies beyond one.

**Groups** cannot be subtracted until one example is left. Two groupings that differ by one example
give that example away: the sum over a group of the one, less the sum over the same group of the
other, is its value. Groupings are therefore looked at together. All published groups are unions of
**cells**, the sets of examples that share their group in every grouping (left-out examples are a
cell as well). Where every cell is empty or holds m examples or more, whatever is computed from the
groups' sums, be it a difference, a complement or an intersection, is a function of sums over cells,
and so of m examples or more. That is what is kept: a grouping is added only if all cells stay so
large, small groups put together where that helps.

**Counts over the course of training** are held apart. Who sees a count at two steps sees their
difference, and between two steps of a log only one batch may have taken part. A count is that of a
set of examples, such as {i : 0.1 < bound_i ≤ 1} at step 40. Let 𝒮 be all sets whose counts were
ever published, the empty set among them. A count is published only if for all S, T in 𝒮, of
whatever step and scale,

    |S Δ T| and n − |S Δ T| are 0 or at least m,

so that every sum and difference of two counts rests on nobody or on m examples or more (n is
public). Otherwise it is left out, and may return when more examples have moved.

Somebody who knows all examples but one, or combines many numbers, could still learn something about
single ones: no noise is added. ``tests/report/test_disclosure.py`` attacks every rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from torchfil.run.saved_run import audited_epsilon
from torchfil.run.unit import Facts

LARGEST_FACTOR = 10.0  # from the median to a value of a published mean


def smallest_group(redacted: bool, min_group: int) -> int:
    """m: ``min_group`` of what is redacted, otherwise 1.

    Raises:
        ValueError: A number of one example is asked for.
    """
    if not min_group >= 2:
        raise ValueError(f"min_group={min_group} must be at least 2: a group of one is an example")
    return min_group if redacted else 1


# ---------------------------------------------------------------------- facts

_MECHANISM = """unit unit_names row_reduction rows_per_owner
    sigma l2 releases noise_multiplier max_grad_norm clip noise sample_rate expected_batch_size
    steps poisson stream amplification estimator num_probes probe_precision fil_rate rel_error
    steps_paused loss"""
PUBLIC = {
    **dict.fromkeys(
        ("kind", "title", "created", "epsilon", "delta", "accountant", "exact", "unit_of_inputs")
    ),
    "model": ("class", "name", "num_parameters", "not_smooth"),
    "dataset": ("num_examples", "num_coordinates", "input_shape", "input_range"),
    "mechanism": tuple(_MECHANISM.split()),
    "versions": ("torchfil", "torch", "opacus", "python"),
    # neither how many pilots there were nor whether their target was met: both rest on the most
    # exposed example; nothing of "equalised", whose target may be read off an example
    "noise_choice": ("target", "confidence"),
    "merged": ("runs", "epsilon_of_all"),
    # canaries are not people; but some copy an example's inputs, and a rate may rest on few of them
    "audit": (
        "epsilon",
        "claimed",
        "num_canaries",
        "kind",
        "confidence",
        "p_value",
        "exceeds_claim",
        "ceiling",
    ),
}
# over training: a median or a maximum is one example's value
PUBLIC_HISTORY = ("step", "epsilon")


def public_facts(about: Facts) -> Facts:
    """Only what is known to say nothing about single examples."""
    kept: Facts = {}
    for key, inner in PUBLIC.items():
        value = about.get(key)
        if inner is not None and isinstance(value, dict):
            kept[key] = {name: value[name] for name in inner if name in value}
        elif inner is None and isinstance(value, str | int | float | bool):
            kept[key] = value
    if audit := kept.get("audit"):
        audit["epsilon"] = audited_epsilon(audit)
    return kept


def check_enough(sizes: tuple[int, int], matched: int, smallest: int) -> None:
    """A public number over all, beside the same of the run's own public page, tells of those that
    differ.
    """
    if not matched >= smallest:
        raise ValueError(
            f"{matched} examples are in both runs, fewer than min_group={smallest}: nothing may "
            "be told"
        )
    for size in sizes:
        if 0 < size - matched < smallest:
            raise ValueError(
                f"{size - matched} of {size:,} examples of one run are not compared (no partner, "
                "or not measured): beside that run's own public page, numbers would tell of "
                f"fewer than min_group={smallest}"
            )


# ---------------------------------------------------------------------- counts


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


def how_many(which: np.ndarray, smallest: int) -> int | str:
    """:func:`published_count` of the examples that are marked, [n] booleans."""
    return published_count(int(np.count_nonzero(which)), smallest)


# ---------------------------------------------------------------------- means


def rounded(value: float, smallest: int) -> float:
    """The value, with two significant digits where ``smallest`` > 1."""
    return float(f"{value:.2g}") if smallest > 1 else float(value)


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


def published_mean(values: np.ndarray, smallest: int, power: int = 1) -> float:
    """:func:`geometric_mean`, rounded."""
    return rounded(geometric_mean(values, smallest, power), smallest)


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
    levels: Sequence[float] = (0.0, 0.5, 0.05),
    power: int = 1,
    by: np.ndarray | None = None,
) -> dict[str, float]:
    """Level ↦ geometric mean of the values ≥ 0 around it, in ascending order of ``by`` (None: of
    the values themselves).

    ``power``: :func:`capped`.
    """
    ordered = values[np.argsort(values if by is None else by, kind="stable")]
    return {
        f"{level:g}": published_mean(ordered[window], smallest, power)
        for level, window in windows(len(ordered), levels, smallest).items()
    }


# ---------------------------------------------------------------------- histograms


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


# ---------------------------------------------------------------------- groups


@dataclass(frozen=True, eq=False)
class Split:
    """A grouping as it may be published.

    Attributes:
        codes: The group of every example, [n]; −1: left out.
        names: The labels of the groups that stand by themselves, by code.
        merged: How many groups were put together; their code is ``len(names)``.
        withheld: Whether groups had to go because of the groupings before.
    """

    codes: np.ndarray
    names: list[Any]
    merged: int
    withheld: bool = False

    def shown(self) -> list[str]:
        """All groups by code, with a name for those that were put together."""
        together = f"{self.merged} small groups together" if self.merged > 1 else "one more group"
        return [*map(str, self.names), *([together] if self.merged else [])]


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
    return Split(target[own], names[kept].tolist(), len(hidden))


def joined(cells: np.ndarray | None, split: Split) -> np.ndarray:
    """The cells once ``split`` is published too, [n]."""
    before = 0 if cells is None else cells * (int(split.codes.max(initial=0)) + 2)
    return np.unique(before + split.codes + 1, return_inverse=True)[1]


# ---------------------------------------------------------------------- counts over time


@dataclass(frozen=True, eq=False)
class Levels:
    """A number of each example on a scale that was fixed beforehand.

    Attributes:
        codes: The place of each example on the scale, [n], from 0 to ``count`` − 1.
        count: How many places there are, at most 255.
        with_empty: Whether it may be told that nobody lies between two levels; where the scale is
            fine this would tell the least and the largest number.
    """

    codes: np.ndarray
    count: int
    with_empty: bool = True


@dataclass(eq=False)
class CountSeries:
    """Counts over time, see above.

    It keeps a byte for each example and :class:`Levels` that were published.

    Attributes:
        smallest: m.
        kept: Of everything published: each example's level, uint8 [n], and the sets that were
            counted, [k, 2]: (a, b) stands for the examples at the levels a … b − 1.
    """

    smallest: int
    kept: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def publish(self, levels: Mapping[str, Levels]) -> dict[str, dict[int, int]]:
        """Those counts of a step that may be published: by name, level ↦ how many examples are at
        most there.

        What is so told are these counts, and those of the examples between two levels that follow
        each other.

        Args:
            levels: By name; the first ones come first where two counts would differ by a few
                examples.

        Example:
            >>> series, ages = CountSeries(10), np.repeat([0, 1], [30, 70])
            >>> series.publish({"age": Levels(ages, 2)})
            {'age': {0: 30}}
            >>> ages[:3] = 1  # three have moved: neither 27 nor 30 is told
            >>> series.publish({"age": Levels(ages, 2)})
            {'age': {}}
            >>> ages[:12] = 1
            >>> series.publish({"age": Levels(ages, 2)})
            {'age': {0: 20}}
        """
        return {name: self._admitted(each) for name, each in levels.items()}

    def _admitted(self, levels: Levels) -> dict[int, int]:
        """The admissible counts, which are kept."""
        codes, n, count, top = (
            levels.codes.astype(np.uint8),
            len(levels.codes),
            levels.count,
            levels.count - 1,
        )
        # below each level, [levels + 1]
        counts = np.append(0, np.bincount(codes, minlength=count).cumsum())
        shared = np.concatenate(
            [counts[:, None] * 0, *(self._shared(codes, count, *own) for own in self.kept)], 1
        )

        def apart(low: int, high: int) -> np.ndarray:
            """How many examples are at these levels or in a set that was counted, but not in both,
            for each set.
            """
            distances: np.ndarray = (
                counts[high] - counts[low] + shared[-1] - 2 * (shared[high] - shared[low])
            )
            return distances

        def far(low: int, high: int) -> bool:
            """Whether the examples at these levels are far from every set that was counted, and
            from its complement.
            """
            sizes = apart(low, high)
            close = (sizes > 0) & (sizes < self.smallest) | (n - self.smallest < sizes) & (
                sizes < n
            )
            return not close.any()

        # the highest level comes first: of levels up to which everybody lies, another would show
        # the largest number
        ends = [top] if far(0, top) else []
        last, whole = 0, counts[top] if ends else n
        for level in range(1, top):
            empty = counts[level] == counts[last] or counts[level] == whole
            if (
                far(0, level)
                and far(last, level)
                and far(level, top if ends else top + 1)
                and not (empty and not levels.with_empty)
            ):
                ends, last = [*ends, level], level
        # a set that was counted already forbids nothing more
        ends.sort()
        sets = {*((0, end) for end in ends), *((end, count) for end in ends), *pairwise([0, *ends])}
        if new := [each for each in sorted(sets) if apart(*each).all()]:
            self.kept.append((codes, np.asarray(new)))
        return {end - 1: min(rounded_count(int(counts[end]), self.smallest), n) for end in ends}

    def _shared(
        self, codes: np.ndarray, count: int, other: np.ndarray, sets: np.ndarray
    ) -> np.ndarray:
        """How many examples below each level are in each of these sets, [count + 1, k].

        New examples are in none.
        """
        if not len(other) <= len(codes):
            raise ValueError(
                f"the log's state is of {len(other)} examples and the run has {len(codes)}; load "
                "the state of this run"
            )
        other = np.pad(other, (0, len(codes) - len(other)), constant_values=255)
        size = max(int(other.max(initial=0)) + 1, int(sets.max()))
        both = np.bincount(codes.astype(np.int64) * size + other, minlength=count * size).reshape(
            count, size
        )
        below = np.pad(both.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
        return below[:, sets[:, 1]] - below[:, sets[:, 0]]

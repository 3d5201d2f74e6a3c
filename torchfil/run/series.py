"""Counts of examples over the course of training, of which no two published ones differ by a few
examples.

Who sees a count at two steps sees their difference, and between two steps of a log only one batch
may have taken part. A count is that of a set of examples, such as {i : 0.1 < bound_i ≤ 1} at step
40. Let 𝒮 be all sets whose counts were ever published, the empty set among them. A count is
published only if for all S, T in 𝒮, of whatever step and scale,

    |S Δ T| and n − |S Δ T| are 0 or at least m,

so that every sum and difference of two counts rests on nobody or on m examples or more (n is
public). Otherwise it is left out, and may return when more examples have moved. Counts are rounded
to multiples of m. It is the rule of the public page (:mod:`torchfil.run.statistics`), for every two
steps. Somebody who knows all examples but one, or combines many counts, could still learn something
about single ones: no noise is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from torchfil.run.statistics import rounded_count


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

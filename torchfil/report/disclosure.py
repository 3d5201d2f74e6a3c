"""Groups whose published means cannot be subtracted from each other until one example is left.

Two groupings that differ by one example give that example away: the sum over a group of the one, less the sum over the
same group of the other, is its value. Groupings are therefore looked at together. All published groups are unions of
**cells**, the sets of examples that share their group in every grouping (left-out examples are a cell as well). Where
every cell is empty or holds ``smallest`` examples or more, whatever is computed from the groups' sums, be it a
difference, a complement or an intersection, is a function of sums over cells, and so of ``smallest`` examples or more.

That is what is kept: a grouping is added only if all cells stay so large, small groups put together where that helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Split", "joined", "split_beside"]


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

    Groups that would cut a cell into parts below ``smallest`` are put together, the smallest first, and more of them
    until none does: a sum that is too small by itself could be had as a difference.

    Args:
        labels: [n].
        smallest: The least size of a cell.
        cells: The cell of every example, [n], of the groupings that are published already; None: none are.

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

    # how many examples each group has in each cell: the pairs that occur alone, for there may be many of both
    pairs, sizes = np.unique(own * num_cells + before, return_counts=True)
    starts = np.searchsorted(pairs, np.arange(len(names) + 1) * num_cells)
    parts = [slice(first, last) for first, last in pairwise(starts.tolist())]  # of the pairs, by group
    too_small = np.zeros(len(names), dtype=bool)
    too_small[pairs[sizes < smallest] // num_cells] = True

    # groups that cut a cell too small are put together, and others with them until those together do not
    order = [int(group) for group in np.argsort(counts, kind="stable")]
    hidden = [group for group in order if too_small[group]]
    kept = [group for group in order if not too_small[group]]
    together = np.bincount(before[too_small[own]], minlength=num_cells)
    while hidden and kept and bool(((together > 0) & (together < smallest)).any()):
        hidden.append(kept.pop(0))
        together[pairs[parts[hidden[-1]]] % num_cells] += sizes[parts[hidden[-1]]]
    kept.sort()

    if hidden and counts[hidden].sum() < smallest:
        return Split(np.full(len(labels), -1), [], 0)
    alone = [group for group in order if counts[group] >= smallest]
    withheld = cells is not None and not kept and len(alone) > 1
    if withheld:
        return Split(np.full(len(labels), -1), [], 0, withheld=True)
    target = np.empty(len(names), dtype=np.int64)
    target[kept] = np.arange(len(kept))
    target[hidden] = len(kept)
    return Split(target[own], [str(names[group]) for group in kept], len(hidden))


def joined(cells: np.ndarray | None, split: Split) -> np.ndarray:
    """The cells once ``split`` is published too, [n]."""
    if cells is None:
        return np.unique(split.codes, return_inverse=True)[1]
    pairs = cells * (int(split.codes.max(initial=0)) + 2) + split.codes + 1
    return np.unique(pairs, return_inverse=True)[1]

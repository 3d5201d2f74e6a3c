"""Who owns which rows: the unit of privacy is a person, and a person may have several rows of a
data set.

Owner o has the rows R_o. How many rows an owner has counts as public; which values they hold does
not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.ids import plain_key


class Owners:
    """The owners of the rows of a data set, numbered in the order of their first rows.

    Args:
        by_row: The owner of every row, [rows].

    Attributes:
        keys: The owners' names, [owners].
        of_row: The number of each row's owner, [rows].
        counts: How many rows each owner has, [owners].

    Raises:
        ValueError: A row has no owner (None or NaN), or several.

    Example:
        >>> owners = Owners(["anna", "ben", "anna"])
        >>> owners.keys, owners.counts.tolist(), owners.place.tolist(), owners.rows([1, 0])
        (['anna', 'ben'], [2, 1], [0, 0, 1], [1, 0, 2])
    """

    def __init__(self, by_row: Sequence[Hashable] | Tensor | np.ndarray) -> None:
        listed = by_row.tolist() if isinstance(by_row, Tensor | np.ndarray) else by_row
        names = [plain_key(key) for key in listed]
        for row, name in enumerate(names):
            if isinstance(name, list | tuple | set | frozenset | Tensor | np.ndarray):
                raise ValueError(
                    f"row {row} has several owners, {name!r}; name those who share rows as one "
                    "owner (a copy for each would still hold the others' data)"
                )
            if not (name is not None and name == name):
                raise ValueError(f"row {row} has no owner ({name!r}); name one, or leave it out")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.keys = list(numbers)
        self.of_row = torch.tensor([numbers[name] for name in names], dtype=torch.long)
        self.counts = torch.bincount(self.of_row, minlength=len(self.keys))

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The rows of the first owner, then those of the second, …, [rows].

        Where those of each begin, [owners].
        """
        return self.of_row.argsort(stable=True), self.counts.cumsum(0) - self.counts

    @cached_property
    def place(self) -> Tensor:
        """Which of its owner's rows each row is, from 0 on, [rows]."""
        order, starts = self._sorted
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) - starts[self.of_row[order]]
        return place

    def rows(self, owners: Sequence[int], most: int | None = None) -> list[int]:
        """The rows of these owners, one owner after the other.

        At most ``most`` of each, drawn at random.
        """
        order, starts = self._sorted
        found: list[int] = []
        for owner in owners:
            own = order[starts[owner] : starts[owner] + self.counts[owner]]
            if most is not None and len(own) > most:
                own = own[torch.randperm(len(own))[:most].sort().values]
            found += own.tolist()
        return found

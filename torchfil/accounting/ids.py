"""The examples' names, and their rows in the ledger."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchfil.utils.errors import require
from torchfil.utils.tables import plain_names


class ExampleIds:
    """The examples' names: their numbers in the data set, or the user's own keys, one per example.

    Args:
        num_examples: n.
        keys: n distinct keys; None: 0 … n−1.

    Attributes:
        most: The largest number of participations of any example; counted only after :meth:`count_from`.

    Example:
        >>> ids = ExampleIds(3)
        >>> ids.count_from([0, 4, 0])
        >>> ids.enter([0, 2]), ids.most, ids.most_after([1])
        ([0, 2], 4, 5)
    """

    known_as = "the keys of id_of"

    def __init__(self, num_examples: int, keys: Sequence[Hashable] | None = None) -> None:
        self.num_examples = num_examples
        given = keys.tolist() if isinstance(keys, Tensor) else keys
        self.keys = [plain_key(key) for key in given] if given is not None else None
        self._row_of: dict[Hashable, int] = {}
        if self.keys is not None:
            count = len(self.keys)
            require(count == num_examples, f"id_of gives {count} keys for {num_examples} examples; give one for each")
            self._row_of = {key: row for row, key in enumerate(self.keys)}
            if len(self._row_of) != num_examples:
                twice = Counter(self.keys).most_common(1)[0][0]
                remedy = "give each its own key; if a person has several rows, pass owner_of= with these keys"
                raise ValueError(f"id_of gives {twice!r} to more than one example: {remedy}")

    def all(self) -> list[Hashable]:
        """Every id, in the order of the data set."""
        return list(self.keys) if self.keys is not None else list(range(self.num_examples))

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the keys in their order; of their number, if they are 0 … n−1."""
        keys = f"{self.num_examples}" if self.keys is None else "\0".join(map(repr, self.keys))
        return hashlib.sha256(keys.encode()).hexdigest()

    def count_from(self, participations: Sequence[int]) -> None:
        """Count how often each example takes part, from these numbers on, [n]."""
        self._participations = array("l", participations)
        self.most = max(self._participations, default=0)

    def most_after(self, examples: Sequence[Any]) -> int:
        """:attr:`most` once these distinct examples, given by their rows, have taken part."""
        return max(self.most, *(self._participations[row] + 1 for row in examples), 0)

    def enter(self, examples: Sequence[Any]) -> list[int]:
        """The rows of these distinct examples, given by their rows, which take part now."""
        for row in examples:
            self._participations[row] += 1
            self.most = max(self.most, self._participations[row])
        return list(examples)

    def as_array(self) -> np.ndarray:
        """Every id, [n]: numbers as int64; anything else as text, with repr() if two texts would be the same.

        Example:
            >>> ExampleIds(3, ["a", 1, "1"]).as_array().tolist()
            ["'a'", '1', "'1'"]
        """
        return plain_names(range(self.num_examples) if self.keys is None else self.keys)

    def places(self, ids: Iterable[Hashable] | Tensor | None) -> Tensor:
        """The rows of the ids, [ids], in the given order; None: all."""
        return torch.arange(self.num_examples) if ids is None else self.rows(ids)[1]

    def rows(self, ids: Iterable[Hashable] | Tensor | None) -> tuple[Sequence[Hashable], Tensor]:
        """The ids and their rows, in the given order; an id given twice appears twice."""
        if ids is None:
            return self.keys or range(self.num_examples), torch.arange(self.num_examples)
        listed = ids.tolist() if isinstance(ids, Tensor) else ids
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise TypeError(f"ids={listed!r} must be a list of ids; for one example: [{listed!r}]")
        wanted = [plain_key(key) for key in listed]
        row_of = self._row_of
        if self.keys is None:
            row_of = {key: key for key in wanted if type(key) is int and 0 <= key < self.num_examples}
        unknown = [key for key in wanted if key not in row_of]
        if unknown:
            valid = self.known_as if self.keys is not None else f"0 to {self.num_examples - 1}"
            raise KeyError(f"unknown example ids {unknown[:5]}{' …' if len(unknown) > 5 else ''}; ids are {valid}")
        return wanted, torch.tensor([row_of[key] for key in wanted], dtype=torch.long)


class GrowingIds(ExampleIds):
    """The names of the examples of a stream, in the order in which they first took part.

    Args:
        keys: The keys of those that already took part.

    Example:
        >>> ids = GrowingIds()
        >>> ids.enter(["a", "b"]), ids.enter(["c", "a"])
        ([0, 1], [2, 0])
        >>> ids.all(), ids.most, ids.most_after(["a", "b"])
        (['a', 'b', 'c'], 2, 3)
    """

    known_as = "those that took part"

    def __init__(self, keys: Sequence[Hashable] = ()) -> None:
        self.num_examples = len(keys)
        self.keys: list[Hashable] = list(keys)
        self._row_of = {key: row for row, key in enumerate(keys)}
        self.count_from([0] * len(keys))

    def count_new(self, keys: Iterable[Hashable]) -> int:
        """How many of these have never taken part."""
        return sum(key not in self._row_of for key in keys)

    def most_after(self, examples: Sequence[Hashable]) -> int:
        """:attr:`most` once these distinct keys have taken part."""
        known = [self._row_of[key] for key in examples if key in self._row_of]
        return max(super().most_after(known), int(len(examples) > 0))

    def enter(self, examples: Sequence[Hashable]) -> list[int]:
        """The rows of these distinct keys, which take part now; new ones get the next rows."""
        for key in examples:
            if self._row_of.setdefault(key, len(self.keys)) == len(self.keys):
                self.keys.append(key)
                self._participations.append(0)
        self.num_examples = len(self.keys)
        return super().enter([self._row_of[key] for key in examples])


def plain_key(key: Hashable) -> Hashable:
    """NumPy's numbers and strings, and tensors of one number, as Python objects."""
    return key.item() if isinstance(key, np.generic) or (isinstance(key, Tensor) and key.ndim == 0) else key

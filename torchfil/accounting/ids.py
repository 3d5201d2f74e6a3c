"""The examples' names, and their rows in the ledger."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from torchfil.utils.tables import plain_names


class ExampleIds:
    """The examples' names: their numbers in the data set, or the user's own keys, one per example.

    Args:
        num_examples: n.
        keys: n distinct keys; None: 0 … n−1.
        grows: Whether more examples may arrive (:meth:`rows_of`), as those of a stream do.

    Attributes:
        most: The largest number of participations of any example; counted only after
            :meth:`count_from`.

    Example:
        >>> ids = ExampleIds(0, [], grows=True)
        >>> ids.count_from([])
        >>> ids.rows_of(["a", "b"]), ids.rows_of(["c", "a"]), ids.all()
        ([0, 1], [2, 0], ['a', 'b', 'c'])
        >>> ids.count([2])
        >>> ids.most, ids.most_after([2, 0])
        (1, 2)
    """

    def __init__(
        self, num_examples: int, keys: Sequence[Hashable] | None = None, *, grows: bool = False
    ) -> None:
        self.num_examples, self.grows = num_examples, grows
        given = keys.tolist() if isinstance(keys, Tensor) else keys
        self.keys = [plain_key(key) for key in given] if given is not None else None
        self._row_of: dict[Hashable, int] = {}
        if self.keys is not None:
            count = len(self.keys)
            if count != num_examples:
                raise ValueError(
                    f"id_of gives {count} keys for {num_examples} examples; give one for each"
                )
            self._row_of = {key: row for row, key in enumerate(self.keys)}
            if len(self._row_of) != num_examples:
                twice = Counter(self.keys).most_common(1)[0][0]
                raise ValueError(
                    f"id_of gives {twice!r} to more than one example: give each its own key; if a "
                    "person has several rows, pass owner_of= with these keys"
                )

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

    def most_after(self, rows: Iterable[int]) -> int:
        """:attr:`most` once these distinct examples have taken part."""
        return max(self.most, *(self._participations[row] + 1 for row in rows), 0)

    def count(self, rows: Iterable[int]) -> None:
        """Count that these distinct examples take part now."""
        for row in rows:
            self._participations[row] += 1
            self.most = max(self.most, self._participations[row])

    def count_new(self, keys: Iterable[Hashable]) -> int:
        """How many of these examples of a stream have not arrived before."""
        return sum(key not in self._row_of for key in set(keys))

    def rows_of(self, keys: Sequence[Hashable]) -> list[int]:
        """The rows of these examples of a stream.

        Those that arrive for the first time get the next ones.
        """
        assert self.keys is not None
        for key in keys:
            if self._row_of.setdefault(key, len(self.keys)) == len(self.keys):
                self.keys.append(key)
                self._participations.append(0)
        self.num_examples = len(self.keys)
        return [self._row_of[key] for key in keys]

    def as_array(self) -> np.ndarray:
        """Every id, [n]: numbers as int64.

        Anything else as text, with repr() if two texts would be the same.

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
            row_of = {
                key: key for key in wanted if type(key) is int and 0 <= key < self.num_examples
            }
        unknown = [key for key in wanted if key not in row_of]
        if unknown:
            valid = (
                "the keys of id_of" if self.keys is not None else f"0 to {self.num_examples - 1}"
            )
            raise KeyError(
                f"unknown example ids {unknown[:5]}{' …' if len(unknown) > 5 else ''}; ids are "
                f"{valid}"
            )
        return wanted, torch.tensor([row_of[key] for key in wanted], dtype=torch.long)


def plain_key(key: Hashable) -> Hashable:
    """NumPy's numbers and strings, and tensors of one number, as Python objects."""
    return (
        key.item()
        if isinstance(key, np.generic) or (isinstance(key, Tensor) and key.ndim == 0)
        else key
    )

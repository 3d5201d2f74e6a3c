"""Numbers by example, [n, …] each: all in place from the start, or given a row when an example is first drawn.

A large data set has many examples that no batch has drawn yet. With ``lazy=True`` these share row 0, which holds what
holds for all of them, and an example that is drawn gets a copy of it: n places of 4 bytes, and a whole row only for
whom the run knows something.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchfil.accounting.quantities import Sum

__all__ = ["LAZY_FROM", "RowTable", "bytes_per_row"]

LAZY_FROM = 2**20  # examples from which on a table on the CPU gives rows when they are needed
_GROWTH = 1.5


class RowTable(Mapping[str, Tensor]):
    """Tensors by name, with a row for every example; ``table[name]`` is [n, …].

    Guarantees:
        * Without ``lazy``, ``table[name]`` is the tensor itself: what is written into it stays.
        * With it, ``table[name]`` is put together when it is read, and :meth:`at` reads some rows without that.

    Args:
        layout: Shape and dtype of a row, by name.
        num_examples: n.
        where: A device, or a folder: the rows then lie in files there, mapped into memory and gone with the process.
        lazy: Whether rows are given when they are needed; on CPUs only. None: from 2²⁰ examples on.
        chosen: By name, the only examples (distinct numbers) that have some tensors; all others read NaN there.

    Example:
        >>> table = RowTable({"sum": Sum()}, 5, lazy=True)
        >>> places = table.give(torch.tensor([3, 1]))
        >>> table.own("sum")[places] += torch.tensor([1.0, 2.0])
        >>> table["sum"].tolist(), table.num_rows
        ([0.0, 2.0, 0.0, 1.0, 0.0], 3)
    """

    def __init__(
        self,
        layout: Mapping[str, Sum],
        num_examples: int,
        where: torch.device | str | Path = "cpu",
        *,
        lazy: bool | None = None,
        chosen: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.layout = dict(layout)
        self.num_examples = num_examples
        self._where = where
        on_cpu = not isinstance(where, Path) and torch.device(where).type == "cpu"
        self.lazy = on_cpu and num_examples >= LAZY_FROM if lazy is None else lazy and on_cpu
        self._places = torch.zeros(num_examples, dtype=torch.int32) if self.lazy else None
        self.num_rows = 1 if self.lazy else num_examples
        indices = {id(examples): self._index(examples) for examples in (chosen or {}).values()}  # sums may share one
        self._chosen = {name: indices[id(examples)] for name, examples in (chosen or {}).items()}
        self._tensors = {
            name: self._zeros(len(chosen[name]) + 1 if chosen and name in chosen else self.num_rows, each)
            for name, each in self.layout.items()
        }
        for name in self._chosen:
            self._tensors[name][0] = math.nan  # of everybody else, whatever is added

    def __getitem__(self, name: str) -> Tensor:
        places = self._chosen.get(name, self._places)
        values = self._tensors[name]
        return values if places is None else values.index_select(0, places)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Put the numbers of all examples, [n, …], in the place of those there are."""
        values = values.to(self.layout[name].dtype)
        if self._places is not None:
            places = self.give(torch.arange(self.num_examples))
            self._tensors[name][places] = values
        else:
            self._tensors[name] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return next(iter(self._tensors.values())).device

    @property
    def num_bytes(self) -> int:
        """What it takes, in bytes."""
        indices = {id(each): each.nbytes for each in (self._places, *self._chosen.values()) if each is not None}
        return sum(indices.values()) + sum(values.nbytes for values in self._tensors.values())

    def own(self, name: str) -> Tensor:
        """All rows that there are, to be written at places of :meth:`give`; 0, where lazy, is everybody else's."""
        return self._tensors[name]

    def kept(self, name: str) -> Tensor:
        """What a state holds: [n, …]; of chosen examples row 0, everybody else's, and theirs."""
        return self._tensors[name] if name in self._chosen else self[name]

    def at(self, name: str, examples: Tensor) -> Tensor:
        """The numbers of some examples, [examples, …]."""
        places = self._chosen.get(name, self._places)
        return self._tensors[name][examples if places is None else places[examples].long()]

    def add(self, name: str, examples: Tensor, places: Tensor, values: Tensor) -> None:
        """Add numbers of some examples, at the places that :meth:`give` returned, [examples, …]."""
        if name in self._chosen:
            places = self._chosen[name][examples].long()
        self._tensors[name].index_add_(0, places, values.to(self._tensors[name].dtype))

    def distinct(self, examples: Tensor) -> tuple[Tensor, Tensor | None]:
        """Some of these examples, no two of which share a row, and for each of all the place of its like among them.

        The places are None if each has its own row. What is read from a row need only be computed once.
        """
        if self._places is None or self._chosen:
            return examples, None
        _, place = self._places[examples].unique(return_inverse=True)
        first = torch.empty(int(place.max()) + 1 if len(place) else 0, dtype=torch.long)
        first[place] = examples
        return first, place

    def give(self, examples: Tensor) -> Tensor:
        """The places of some distinct examples, each with its own row from now on, [examples]."""
        if self._places is None:
            return examples
        places = self._places[examples].long()
        is_new = places == 0
        first, count = self.num_rows, int(is_new.sum())
        if count:
            self._grow(first + count)
            places[is_new] = torch.arange(first, first + count)
            self._places[examples] = places.int()
            for name, values in self._tensors.items():
                if name not in self._chosen:
                    values[first : first + count] = values[0]
        return places

    def extend(self, num_examples: int) -> None:
        """Make room for so many examples, the new ones with 0 or, where lazy, with what nobody's own row holds.

        Guarantees:
            * Growing example by example to n costs O(n) in all: memory is taken for half as many rows again.
            * Fewer than there are changes nothing.
        """
        more = num_examples - self.num_examples
        if more <= 0:
            return
        self.num_examples = num_examples
        if self._places is not None:
            self._places = torch.cat([self._places, self._places.new_zeros(more)])
            return
        for name, values in self._tensors.items():
            room = values if values._base is None else values._base
            if len(room) < num_examples:
                room = self._zeros(int(_GROWTH * num_examples), self.layout[name])
                room[: len(values)] = values
            self._tensors[name] = room[:num_examples]
        self.num_rows = num_examples

    def keep_only(self, is_kept: Tensor) -> None:
        """Set the rows of all other examples to 0; [n] booleans."""
        others = (~is_kept).to(self.device)
        if self._places is not None:
            others = self._places[others].unique().long()
        for values in self._tensors.values():
            values[others] = 0

    def load(self, state: Mapping[str, Tensor], is_known: Tensor) -> None:
        """Take over numbers of all examples, as :meth:`kept` gives them, by name.

        Args:
            state: What to take over; dtypes are those of the table.
            is_known: Who needs a row, [n] booleans; the numbers of all others are row 0's.
        """
        examples = torch.arange(self.num_examples) if self._places is None else is_known.cpu().nonzero()[:, 0]
        places = self.give(examples)
        for name, values in self._tensors.items():
            if self._places is None or name in self._chosen:
                values.copy_(state[name])
            else:
                values[places] = state[name].cpu()[examples].to(values.dtype)

    def _grow(self, rows: int) -> None:
        """Make room for so many rows: half as many again as there were, so that growing is rare."""
        self.num_rows = rows
        for name, values in self._tensors.items():
            room = min(max(rows, int(_GROWTH * len(values))), self.num_examples + 1)
            if len(values) < rows and name not in self._chosen:
                larger = self._zeros(room, self.layout[name])
                larger[: len(values)] = values
                self._tensors[name] = larger

    def _index(self, examples: Tensor) -> Tensor:
        """Each example's place among the chosen ones, counted from 1; 0: it is none of them."""
        where = "cpu" if isinstance(self._where, Path) else self._where
        index = torch.zeros(self.num_examples, dtype=torch.int32, device=where)
        index[examples.to(where)] = torch.arange(1, len(examples) + 1, dtype=torch.int32, device=where)
        return index

    def _zeros(self, rows: int, each: Sum) -> Tensor:
        shape = (rows, *each.shape)
        if isinstance(self._where, Path):
            return _mapped(shape, each.dtype, self._where)
        return torch.zeros(shape, dtype=each.dtype, device=self._where)


def bytes_per_row(layout: Mapping[str, Sum]) -> int:
    """What an example takes.

    Example:
        >>> bytes_per_row({"sum": Sum(), "counts": Sum((3,), torch.int32)})
        20
    """
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in layout.values())


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Zeros in a file that has no name any more: the disk is free again when the tensor is."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".torchfil-rows-", suffix=".tmp")
    try:
        size = torch.Size(shape).numel()
        os.ftruncate(handle, size * dtype.itemsize)
        if size == 0:
            return torch.zeros(shape, dtype=dtype)
        return torch.from_file(name, shared=True, size=size, dtype=dtype).reshape(shape)
    finally:
        os.close(handle)
        os.unlink(name)

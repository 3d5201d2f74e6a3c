"""The numbers of an example side by side in one row, so that those of a batch are read and written together.

A row of 68 bytes lies in one or two cache lines, and the rows of a batch need one gather and one scatter for each
table, however many numbers an example has. Separate tensors would need one of each, and a cache line, for every number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchfil.accounting.quantities import Sum

__all__ = ["BatchRows", "Packing", "bytes_per_row"]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Packing:
    """The place of each number of an example: in one of a few tables, [rows, words] each.

    Guarantees:
        * A row takes as many bytes as its numbers; there is no padding.
        * Every number is a strided view of its table: wide numbers come first, and if the bytes of a row are not a
          multiple of the widest, those have a separate table.

    Args:
        layout: Shape and dtype of a row, by name.

    Attributes:
        words: For each table, the dtype in which rows are copied, and the number of words of a row.
        row_bytes: The bytes of a row in all tables.

    Example:
        >>> packing = Packing({"count": Sum(dtype=torch.int32), "sum": Sum(), "levels": Sum((4,), torch.uint8)})
        >>> packing.words, packing.row_bytes
        ([(torch.int64, 2)], 16)
        >>> tables = packing.tables(torch.zeros(3 * 16, dtype=torch.uint8))
        >>> packing.view("sum", tables)[1] = 0.5
        >>> packing.view("sum", tables).tolist(), packing.view("levels", tables).shape
        ([0.0, 0.5, 0.0], torch.Size([3, 4]))
    """

    def __init__(self, layout: Mapping[str, Sum]) -> None:
        self.layout = dict(layout)
        self.words: list[tuple[torch.dtype, int]] = []
        self.row_bytes = bytes_per_row(layout)
        self._columns: dict[str, tuple[int, int]] = {}  # table, and position in items of the number's own dtype
        names = sorted(layout, key=lambda name: -layout[name].dtype.itemsize)
        while names:
            widest = layout[names[0]].dtype
            fits = bytes_per_row({name: layout[name] for name in names}) % widest.itemsize == 0
            here = [name for name in names if fits or layout[name].dtype.itemsize == widest.itemsize]
            end = 0
            for name in here:
                self._columns[name] = len(self.words), end // layout[name].dtype.itemsize
                end += bytes_per_row({name: layout[name]})
            self.words.append((_WORDS.get(widest.itemsize, widest), end // widest.itemsize))
            names = names[len(here) :]

    def view(self, name: str, tables: Sequence[Tensor]) -> Tensor:
        """The numbers of that name in these tables, [rows, …], for reading and writing."""
        (table, first), each = self._columns[name], self.layout[name]
        items = tables[table].view(each.dtype)
        if not each.shape:
            return items[:, first]
        return items[:, first : first + torch.Size(each.shape).numel()].view(len(items), *each.shape)

    def tables(self, buffer: Tensor) -> list[Tensor]:
        """Bytes, [rows · row_bytes], as tables one after the other."""
        rows = len(buffer) // max(1, self.row_bytes)
        parts = buffer.split([rows * count * word.itemsize for word, count in self.words])
        return [part.view(word).view(rows, count) for part, (word, count) in zip(parts, self.words, strict=True)]


class BatchRows(Mapping[str, Tensor]):
    """The rows of some examples on one device; ``rows[name]`` is [examples, …], for reading and changing in place.

    Args:
        packing: Where the numbers lie.
        tables: The tables that hold them.
        apart: Sums that are only added to, and are not in the tables.
        added: Called for additions to these sums: name, which of the examples, values.
        first: The number of the first example here.
    """

    def __init__(
        self,
        packing: Packing,
        tables: Sequence[Tensor],
        apart: Mapping[str, Sum],
        added: list[tuple[str, slice, Tensor]],
        first: int = 0,
    ) -> None:
        self._packing, self._tables, self._apart = packing, tables, apart
        self._added, self._rows = added, slice(first, first + len(tables[0]))

    def __getitem__(self, name: str) -> Tensor:
        return self._packing.view(name, self._tables)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packing.layout)

    def __len__(self) -> int:
        return len(self._packing.layout)

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return len(self._tables[0])

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._tables[0].device

    def add(self, name: str, values: Tensor) -> None:
        """Add numbers of these examples, [examples, …], in the dtype of their sum."""
        if name in self._packing.layout:
            self[name].add_(values.to(self.device, self._packing.layout[name].dtype))
        else:
            each = self._apart[name]
            self._added.append((name, self._rows, values.to(each.dtype).expand(self.num_rows, *each.shape)))

    def split(self, sizes: Sequence[int]) -> list[BatchRows]:
        """The same rows in parts of this many examples."""
        parts, first = [], self._rows.start
        for tables in zip(*(table.split(list(sizes)) for table in self._tables), strict=True):
            parts.append(BatchRows(self._packing, tables, self._apart, self._added, first))
            first += len(tables[0])
        return parts


def bytes_per_row(layout: Mapping[str, Sum]) -> int:
    """The bytes of an example.

    Example:
        >>> bytes_per_row({"sum": Sum(), "counts": Sum((3,), torch.int32)})
        20
    """
    return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in layout.values())

"""Numbers by example, [n, …] each, in memory or on a GPU.

What steps add is booked for many steps at once. An example may take part in several of them, and
some numbers depend on the order of its participations, so the entries are dealt into rounds
(:func:`in_rounds`): round r has each example's r-th participation. A round then changes every row
at most once, just as a single step does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchfil.accounting.sums import Sum

_GROWTH = 1.5


@dataclass(frozen=True)
class Rows:
    """The numbers of some examples side by side: one gather and one scatter for each dtype, however
    many there are.

    ``rows[name]`` is a view, [examples, …], for reading and changing.

    Attributes:
        layout: Shape and dtype of the numbers of one example, by name.
        blocks: One tensor for each dtype, [examples, columns], with the numbers in the order of the
            layout.
        columns: The columns of each number in the block of its dtype.
    """

    layout: Mapping[str, Sum]
    blocks: Mapping[torch.dtype, Tensor]
    columns: Mapping[str, slice]

    def __getitem__(self, name: str) -> Tensor:
        each = self.layout[name]
        numbers = self.blocks[each.dtype][:, self.columns[name]]
        return numbers.view(len(numbers), *each.shape)

    def side_by_side(self, dtype: torch.dtype, numbers: Mapping[str, Tensor]) -> Tensor:
        """Numbers by name, [entries, …] each, in the columns of this dtype's block, [entries,
        columns].
        """
        columns = [
            numbers[name].to(dtype) for name, each in self.layout.items() if each.dtype == dtype
        ]
        return torch.cat([column.reshape(len(column), -1) for column in columns], dim=1)


class RowTable(Mapping[str, Tensor]):
    """Tensors by name, with a row for every example; ``table[name]`` is a view, [n, …], for reading
    and changing.

    Args:
        layout: Shape and dtype of a row, by name.
        num_examples: n.
        device: Where the rows lie.
        only_added: The large sums, which steps add to but do not read.

    Attributes:
        apart: The names of the sums that are only added to, by :meth:`add`; they are not in
            :meth:`rows_of`.

    Example:
        >>> table = RowTable({"sum": Sum()}, 5)
        >>> with table.rows_of(torch.tensor([3, 1])) as rows:
        ...     rows["sum"].add_(torch.tensor([1.0, 2.0]))
        tensor([1., 2.], dtype=torch.float64)
        >>> table["sum"].tolist()
        [0.0, 2.0, 0.0, 1.0, 0.0]
    """

    def __init__(
        self,
        layout: Mapping[str, Sum],
        num_examples: int,
        device: torch.device | str = "cpu",
        *,
        only_added: Collection[str] = (),
    ) -> None:
        self.layout = dict(layout)
        self.num_examples = num_examples
        self.device = torch.device(device)

        # numbers that steps read lie side by side
        self.apart = tuple(name for name in layout if name in only_added)
        widths: dict[torch.dtype, int] = {}
        columns = {}
        for name, each in layout.items():
            if name not in self.apart:
                first = widths.get(each.dtype, 0)
                widths[each.dtype] = first + math.prod(each.shape)
                columns[name] = slice(first, widths[each.dtype])
        blocks = {
            dtype: self._zeros((num_examples, width), dtype) for dtype, width in widths.items()
        }
        self._rows = Rows({name: layout[name] for name in columns}, blocks, columns)

        # large sums
        shapes = {name: (num_examples, *layout[name].shape) for name in self.apart}
        self._apart = {
            name: self._zeros(shape, layout[name].dtype) for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return (self._apart if name in self._apart else self._rows)[name][: self.num_examples]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    @property
    def num_bytes(self) -> int:
        """Its memory in bytes."""
        return sum(each.nbytes for each in (*self._rows.blocks.values(), *self._apart.values()))

    @property
    def blocks(self) -> list[Tensor]:
        """The numbers that lie side by side, [n, columns] each, for reading and changing."""
        return [block[: self.num_examples] for block in self._rows.blocks.values()]

    # ------------------------------------------------------------------ some rows

    @contextlib.contextmanager
    def rows_of(self, examples: Tensor) -> Iterator[Rows]:
        """The rows of some distinct examples, [examples], for changing.

        Written back unless something is raised.
        """
        places = self._places(examples)
        found = {dtype: block.index_select(0, places) for dtype, block in self._rows.blocks.items()}
        yield replace(self._rows, blocks=found)
        for dtype, block in self._rows.blocks.items():
            block.index_copy_(0, places, found[dtype])

    def add(self, name: str, examples: Tensor, values: Tensor | float) -> None:
        """Add to one of the sums :attr:`apart` of some distinct examples, [examples, …]."""
        shape, dtype = self.layout[name]
        added = torch.as_tensor(values, dtype=dtype, device=self.device).expand(
            len(examples), *shape
        )
        self._apart[name].index_add_(0, self._places(examples), added)

    def at(self, name: str, examples: Tensor) -> Tensor:
        """The numbers of some examples, [examples, …]."""
        return self[name][self._places(examples)]

    def _places(self, examples: Tensor) -> Tensor:
        return examples.to(self.device, non_blocking=self.device.type == "cuda")

    def extend(self, num_examples: int) -> None:
        """Make room for this many examples.

        The new ones have 0, and a smaller number changes nothing.

        Growing example by example to n costs O(n) in total: memory is reserved for half as many
        rows again.
        """

        def grown(values: Tensor) -> Tensor:
            if len(values) >= num_examples:
                return values
            larger = self._zeros(
                (max(num_examples, int(_GROWTH * len(values))), *values.shape[1:]), values.dtype
            )
            larger[: len(values)] = values
            return larger

        self.num_examples = max(self.num_examples, num_examples)
        self._rows = replace(
            self._rows, blocks={dtype: grown(block) for dtype, block in self._rows.blocks.items()}
        )
        self._apart = {name: grown(each) for name, each in self._apart.items()}

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def bytes_per_row(layout: Mapping[str, Sum]) -> int:
    """The bytes of an example.

    Example:
        >>> bytes_per_row({"sum": Sum(), "counts": Sum((3,), torch.int32)})
        20
    """
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in layout.values())


def in_rounds(examples: Tensor) -> tuple[Tensor, Tensor, list[tuple[int, slice]]]:
    """Entries in the order of time, dealt into rounds in which each example occurs at most once.

    Args:
        examples: The example of each entry, [entries], on the CPU.

    Returns:
        The distinct examples, those with most entries first; the entries in a new order, one round
        after the other and in each round in the order of the examples; for each round, how many of
        the examples it has (the first ones), and which of the reordered entries.

    Example:
        >>> distinct, order, rounds = in_rounds(torch.tensor([7, 4, 4, 7, 9, 4]))
        >>> distinct.tolist(), order.tolist()
        ([4, 7, 9], [1, 0, 4, 2, 3, 5])
        >>> rounds
        [(3, slice(0, 3, None)), (2, slice(3, 5, None)), (1, slice(5, 6, None))]
    """
    ids = examples.numpy()
    ordered, by_example = _sorted_with_places(ids)
    first = np.flatnonzero(np.diff(ordered, prepend=-1))  # entry of each example
    counts = np.diff(first, append=len(ids))
    by_count = _sorted_with_places(-counts)[1]
    place = np.empty_like(by_count)  # of each example among the distinct ones
    place[by_count] = np.arange(len(by_count))

    # round r has the examples with more than r entries, which are the first ones
    sizes = np.bincount(counts)[::-1].cumsum()[::-1][1:]
    starts = sizes.cumsum() - sizes
    earlier = np.arange(len(ids)) - first.repeat(counts)  # entries of the same example
    order = np.empty_like(by_example)
    order[starts[earlier] + place.repeat(counts)] = by_example
    rounds = [
        (size, slice(start, start + size))
        for size, start in zip(sizes.tolist(), starts.tolist(), strict=True)
    ]
    return torch.from_numpy(ordered[first][by_count]), torch.from_numpy(order), rounds


def first_of_equal(equal: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries to compute if all ``equal`` ones have the same result, and where each entry
    finds its result.

    Example:
        >>> needed, places = first_of_equal(torch.tensor([False, True, True, False]))
        >>> needed.tolist(), places.tolist()
        ([0, 3, 1], [0, 2, 2, 1])
    """
    others = (~equal).nonzero()[:, 0]
    places = torch.full_like(equal, len(others), dtype=torch.int64)
    places[others] = torch.arange(len(others), device=equal.device)
    return torch.cat([others, equal.nonzero()[:1, 0]]), places


def _sorted_with_places(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers in ascending order and their places, equal numbers in the order of their places.

    Sorting numbers and places as one integer is three times as fast as a stable argsort.
    """
    size = max(1, len(numbers))
    ordered, places = np.divmod(np.sort(numbers * size + np.arange(len(numbers))), size)
    return ordered, places

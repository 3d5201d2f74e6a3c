"""Numbers by example, [n, …] each: rows for all from the start, or a row when an example is first drawn.

A large data set has many examples that no batch has drawn yet. With ``lazy=True`` these share row 0, and an example
gets a copy of it when it is drawn: n places of 4 bytes, and a whole row only for examples that the run knows something
about.

A step reads and writes the rows of its batch together (:meth:`RowTable.rows_of`). If the table is in main memory and
the step runs on a GPU, only these rows travel there and back, and nobody waits for them: they are put in place when the
table is next read or written.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchfil.accounting.packed import BatchRows, Packing
from torchfil.accounting.quantities import Sum
from torchfil.utils.deferred import copy_later, pinned_bytes, read_later

__all__ = ["LAZY_FROM", "RowTable"]

LAZY_FROM = 2**20  # with this many examples, a table on the CPU creates rows when needed
_GROWTH = 1.5
_Added = list[tuple[str, slice, Tensor]]


class RowTable(Mapping[str, Tensor]):
    """Tensors by name, with a row for every example; ``table[name]`` is [n, …].

    Guarantees:
        * Without ``lazy``, ``table[name]`` is a view of the rows: changes made to it before the next step stay.
        * With ``lazy``, ``table[name]`` is assembled when it is read, and :meth:`at` reads some rows without that.
        * Every reader sees everything booked before, even rows still on their way from a GPU.

    Args:
        layout: Shape and dtype of a row, by name.
        num_examples: n.
        where: A device, or a folder: the rows are then in memory-mapped files there, which disappear with the process.
        lazy: Whether rows are created when needed; only on CPUs. None: with 2²⁰ examples or more.
        chosen: By name, the only examples (distinct numbers) that have some tensors; all others read NaN there.
        only_added: The sums that steps add to but do not read; large ones need not travel.

    Example:
        >>> table = RowTable({"sum": Sum()}, 5, lazy=True)
        >>> with table.rows_of(torch.tensor([3, 1])) as rows:
        ...     rows.add("sum", torch.tensor([1.0, 2.0]))
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
        only_added: Collection[str] = (),
    ) -> None:
        self.layout = dict(layout)
        self.num_examples = num_examples
        self._where = where
        on_cpu = not isinstance(where, Path) and torch.device(where).type == "cpu"
        self.lazy = on_cpu and num_examples >= LAZY_FROM if lazy is None else lazy and on_cpu
        self._places = torch.zeros(num_examples, dtype=torch.int32) if self.lazy else None
        self.num_rows = 1 if self.lazy else num_examples

        # numbers that batches read lie side by side
        chosen = chosen or {}
        self._packing = Packing({name: layout[name] for name in layout if name not in {*chosen, *only_added}})
        self._tables = [self._zeros((self.num_rows, count), word) for word, count in self._packing.words]
        apart = [name for name in layout if name not in self._packing.layout]
        sizes = {name: len(chosen[name]) + 1 if name in chosen else self.num_rows for name in apart}
        self._apart = {name: self._zeros((sizes[name], *layout[name].shape), layout[name].dtype) for name in apart}
        indices = {id(examples): self._index(examples) for examples in chosen.values()}  # sums may share one
        self._chosen = {name: indices[id(examples)] for name, examples in chosen.items()}
        for name in self._chosen:
            self._apart[name][0] = math.nan  # of everybody else, whatever is added

        # the rows of one step on their way back, and the memory they travel through
        self._arrive: Callable[[], None] | None = None
        self._buffer: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        places = self._chosen.get(name, self._places)
        values = self.own(name)
        return values if places is None else values.index_select(0, places)

    def __setitem__(self, name: str, values: Tensor) -> None:
        """Replace the numbers of all examples, [n, …]."""
        if self._places is None:
            self.own(name).copy_(values)
        else:
            places = self.give(torch.arange(self.num_examples))
            self.own(name)[places] = values.to(self.layout[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, in this process or another."""
        self.flush()
        return {**vars(self), "_buffer": None}

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return next(iter((*self._tables, *self._apart.values()))).device

    @property
    def num_bytes(self) -> int:
        """Its memory in bytes."""
        indices = {id(each): each.nbytes for each in (self._places, *self._chosen.values()) if each is not None}
        return sum(indices.values()) + sum(values.nbytes for values in (*self._tables, *self._apart.values()))

    # ------------------------------------------------------------------ a batch's rows

    @contextlib.contextmanager
    def rows_of(self, examples: Tensor, device: torch.device | None = None) -> Iterator[BatchRows]:
        """The rows of some distinct examples, [examples], for changing; written back at the end.

        Guarantees:
            * After an exception inside, the table reads as before.
            * Nothing waits for a GPU, except for earlier bookings; pass ``examples`` on the CPU for this.

        Args:
            examples: Their numbers.
            device: The step's device; if it is a GPU without these rows, they are sent there. None: they stay.
        """
        self.flush()
        examples = examples.to(self.device)
        places = self.give(examples)
        is_far = device is not None and len(places) > 0 and self._is_far_from(device)
        sent = self._sent(places, device) if is_far else None
        tables = self._gathered(places) if sent is None else self._packing.tables(sent)
        added: _Added = []
        yield BatchRows(self._packing, tables, self.layout, added)

        if sent is None:
            self._put(examples, places, tables, [(name, rows, values.to(self.device)) for name, rows, values in added])
        else:
            self._put_later(examples, places, sent, added)

    @contextlib.contextmanager
    def rows_at(self, places: Tensor) -> Iterator[BatchRows]:
        """The same for the rows at these places (if lazy, place 0 is everybody else's); no separate additions."""
        self.flush()
        tables = self._gathered(places)
        yield BatchRows(self._packing, tables, {}, [])
        self._put(places, places, tables, [])

    def flush(self) -> None:
        """Put rows that are on their way in place; every reader and writer does this first."""
        if self._arrive is not None:
            self._arrive()
            self._arrive = None

    def _is_far_from(self, device: torch.device) -> bool:
        """Whether rows must travel to a step on that device."""
        return device.type == "cuda" and self.device.type == "cpu"

    def _gathered(self, places: Tensor) -> list[Tensor]:
        return [table.index_select(0, places) for table in self._tables]

    def _sent(self, places: Tensor, device: torch.device | None) -> Tensor:
        """The rows at some places, sent to a device as bytes through free pinned memory."""
        size = len(places) * self._packing.row_bytes
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = pinned_bytes(int(_GROWTH * size))
        buffer = self._buffer[:size]
        for table, rows in zip(self._tables, self._packing.tables(buffer), strict=True):
            torch.index_select(table, 0, places, out=rows)
        return torch.empty(size, dtype=torch.uint8, device=device).copy_(buffer, non_blocking=True)

    def _put_later(self, examples: Tensor, places: Tensor, sent: Tensor, added: _Added) -> None:
        """Fetch rows from their device, and put them in place when the table is needed."""
        assert self._buffer is not None
        buffer = self._buffer[: len(sent)]  # read before it is overwritten: the GPU keeps the order
        wait = copy_later(sent, buffer)
        reads = [(name, rows, read_later(values)) for name, rows, values in added]

        def arrive() -> None:
            wait()
            tables = self._packing.tables(buffer)
            self._put(examples, places, tables, [(name, rows, read()) for name, rows, read in reads])

        self._arrive = arrive
        _travelling[id(self)] = self

    def _put(self, examples: Tensor, places: Tensor, tables: Sequence[Tensor], added: _Added) -> None:
        """Write rows at their places, and apply the separate additions."""
        for table, rows in zip(self._tables, tables, strict=True):
            table.index_copy_(0, places, rows)
        for name, which, values in added:
            where = self._chosen[name][examples[which]].long() if name in self._chosen else places[which]
            self._apart[name].index_add_(0, where, values)

    # ------------------------------------------------------------------ all rows

    def own(self, name: str) -> Tensor:
        """All existing rows, for writing at places of :meth:`give`; if lazy, place 0 is everybody else's."""
        self.flush()
        if name in self._apart:
            return self._apart[name] if name in self._chosen else self._apart[name][: self.num_rows]
        return self._packing.view(name, self._tables)[: self.num_rows]

    def kept(self, name: str) -> Tensor:
        """The content for a state: [n, …]; for chosen examples, row 0 (everybody else's) and their rows."""
        return self.own(name) if name in self._chosen else self[name]

    def at(self, name: str, examples: Tensor) -> Tensor:
        """The numbers of some examples, [examples, …]."""
        places = self._chosen.get(name, self._places)
        return self.own(name)[examples if places is None else places[examples].long()]

    def distinct(self, examples: Tensor) -> tuple[Tensor, Tensor | None]:
        """A subset of these examples without shared rows, and for each example the place of its row in the subset.

        The places are None if each has its own row. A value per row then needs to be computed only once.
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
            self._reserve(first + count)
            self.num_rows = first + count
            places[is_new] = torch.arange(first, first + count)
            self._places[examples] = places.int()
            for rows in self._of_all():
                rows[first : first + count] = rows[0]
        return places

    def extend(self, num_examples: int) -> None:
        """Make room for this many examples; the new ones have 0 or, if lazy, the shared row.

        Guarantees:
            * Growing example by example to n costs O(n) in total: memory is reserved for half as many rows again.
            * A smaller number changes nothing.
        """
        more = num_examples - self.num_examples
        if more <= 0:
            return
        self.num_examples = num_examples
        if self._places is not None:
            self._places = torch.cat([self._places, self._places.new_zeros(more)])
            return
        self._reserve(num_examples)
        self.num_rows = num_examples

    def keep_only(self, is_kept: Tensor) -> None:
        """Set the rows of all other examples to 0; [n] booleans."""
        others = (~is_kept).to(self.device)
        if self._places is not None:
            others = self._places[others].unique().long()
        for name in self.layout:
            self.own(name)[others] = 0

    def load(self, state: Mapping[str, Tensor], is_known: Tensor) -> None:
        """Load the numbers of all examples by name, as :meth:`kept` returns them.

        Args:
            state: The numbers; they are converted to the table's dtypes.
            is_known: Which examples need a row, [n] booleans; all others share row 0.
        """
        examples = torch.arange(self.num_examples) if self._places is None else is_known.cpu().nonzero()[:, 0]
        places = self.give(examples)
        for name in self.layout:
            values = self.own(name)
            if self._places is None or name in self._chosen:
                values.copy_(state[name])
            else:
                values[places] = state[name].cpu()[examples].to(values.dtype)

    def _of_all(self) -> list[Tensor]:
        """The tensors that have a row at every place."""
        return [*self._tables, *(values for name, values in self._apart.items() if name not in self._chosen)]

    def _reserve(self, rows: int) -> None:
        """Make room for this many rows, with half as many again, so that growing is rare."""

        def grown(values: Tensor) -> Tensor:
            if len(values) >= rows:
                return values
            most = self.num_examples + 1 if self.lazy else math.inf
            larger = self._zeros((int(min(max(rows, _GROWTH * len(values)), most)), *values.shape[1:]), values.dtype)
            larger[: len(values)] = values
            return larger

        self._tables = [grown(table) for table in self._tables]
        self._apart = {name: each if name in self._chosen else grown(each) for name, each in self._apart.items()}

    def _index(self, examples: Tensor) -> Tensor:
        """Each example's place among the chosen ones, counted from 1; 0: not chosen."""
        where = "cpu" if isinstance(self._where, Path) else self._where
        index = torch.zeros(self.num_examples, dtype=torch.int32, device=where)
        index[examples.to(where)] = torch.arange(1, len(examples) + 1, dtype=torch.int32, device=where)
        return index

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if isinstance(self._where, Path):
            return _mapped(shape, dtype, self._where)
        return torch.zeros(shape, dtype=dtype, device=self._where)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Zeros in an unnamed file: the disk space is freed with the tensor."""
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


_travelling: weakref.WeakValueDictionary[int, RowTable] = weakref.WeakValueDictionary()  # tables in use by a step


def _flush_all() -> None:
    """Flush all tables before a fork: a forked process cannot use the GPU."""
    for table in list(_travelling.values()):
        table.flush()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_flush_all)

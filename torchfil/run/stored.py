"""Columns of a run file as arrays that are read from the disk when they are asked for."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike
from pyarrow import parquet

from torchfil.utils.tables import as_texts

# bytes of memory that any run may take, and for each byte of its file
_FLOOR, _MULTIPLE = 2**26, 64
_CODECS = ("SNAPPY", "UNCOMPRESSED")  # of which no byte becomes more than a few dozen
_DICTIONARY = {"RLE_DICTIONARY", "PLAIN_DICTIONARY"}
_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED"} | _DICTIONARY


class ColumnFile(parquet.ParquetFile):
    """An open run file whose columns fit into 64 MiB and 64 bytes of memory for each byte of the
    file.

    Its footer shows it, before a column is read. Of the runs that torchfil writes, those take most
    in which all numbers are alike: about 50 bytes for each byte of the file.

    Args:
        source: The open file.
        texts: The columns with a text for each example, which may be dictionary-coded; each text is
            read once.
        **options: Those of ``pyarrow.parquet.ParquetFile``.

    Raises:
        ValueError: The columns take more, or are packed as torchfil packs none.
    """

    def __init__(self, source: pa.NativeFile, texts: Sequence[str], **options: bool) -> None:
        super().__init__(source, read_dictionary=list(texts), **options)
        self._claimed, needed = set[str](), 0
        for number in range(self.num_row_groups):
            group = self.metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            for chunk, kind in zip(chunks, self.schema, strict=True):
                name, rows = chunk.path_in_schema, max(chunk.num_values, group.num_rows)
                if not (chunk.compression in _CODECS and _ENCODINGS.issuperset(chunk.encodings)):
                    raise ValueError(
                        f"column {name!r} is packed as no run's is ({chunk.compression}, "
                        f"{', '.join(chunk.encodings)})"
                    )

                size = max(0, chunk.total_uncompressed_size)
                if chunk.physical_type != "BYTE_ARRAY":
                    needed += size + rows * (
                        4 if chunk.physical_type in ("INT32", "FLOAT") else max(8, kind.length)
                    )
                    continue
                # a text has 4 bytes more than its length on the disk, and as Python's up to 64 more
                # than 4 times it
                is_repeated = name not in texts and not _DICTIONARY.isdisjoint(chunk.encodings)
                size *= rows if is_repeated else 1
                needed += 16 * rows + 4 * size + min(64 * rows, 16 * size)
        most = _FLOOR + _MULTIPLE * source.size()
        if not needed <= most:
            raise ValueError(
                f"its columns would take {needed:,} bytes of memory, more than {most:,} for its "
                "size"
            )

    def claim(self, names: Sequence[str]) -> None:
        """Raise if a part of the run has one of these columns already: names alone would multiply
        its memory.
        """
        for name in names:
            if name in self._claimed:
                raise ValueError(f"column {name!r} is named twice")
            self._claimed.add(name)


class StoredArray:
    """One column of a Parquet file as [n], or several as [n, k].

    ``array[rows]`` and ``array[rows, columns]`` read no more row groups and columns than they need,
    and ``np.asarray(array)`` reads everything. Nothing is kept.

    Args:
        file: The file.
        names: The name of a column, or a list of them.

    Raises:
        KeyError: The file has no such column.
        ValueError: Several do not hold numbers of one type.
    """

    def __init__(self, file: ColumnFile, names: str | Sequence[str]) -> None:
        self._file, self._names = file, cast(Any, names)
        schema, listed = file.schema_arrow, [names] if isinstance(names, str) else list(names)
        file.claim(listed)
        kinds = {schema.field(name).type for name in listed} or {pa.float32()}
        kind = kinds.pop()
        is_text = pa.types.is_string(kind) or pa.types.is_dictionary(kind)
        self.dtype = np.dtype(object if is_text else kind.to_pandas_dtype())
        if not (not kinds and (isinstance(names, str) or self.dtype.kind in "iuf")):
            raise ValueError(f"columns {listed} do not hold numbers of one type")
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self.shape: tuple[int, ...] = (
            int(self._starts[-1]),
            *(() if isinstance(names, str) else (len(names),)),
        )
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, key: Any) -> Any:
        """Rows by number, slice, numbers or booleans; with a second entry, columns of them."""
        rows, *columns = key if isinstance(key, tuple) else (key,)
        names = np.asarray(self._names, dtype=object)[columns[0]] if columns else self._names
        if isinstance(rows, slice) and rows.indices(len(self))[2] == 1:
            start, stop, _ = rows.indices(len(self))
            first, last = (
                np.searchsorted(self._starts, [start, max(start, stop - 1)], side="right") - 1
            )
            values = self._read(range(first, last + 1 if stop > start else first), names)
            return values[start - self._starts[first] : max(start, stop) - self._starts[first]]
        groups, places = self._groups_with(np.arange(len(self))[rows])
        return self._read(groups, names)[places]

    def _groups_with(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row groups that hold these rows, and where the rows stand in these groups end to
        end.
        """
        group_of = np.searchsorted(self._starts, rows, side="right") - 1
        groups, number = np.unique(group_of, return_inverse=True)
        before = np.cumsum([0, *np.diff(self._starts)[groups]])[number.reshape(rows.shape)]
        return groups, rows - self._starts[group_of] + before

    def _read(
        self, groups: Sequence[int] | np.ndarray | range, names: str | np.ndarray
    ) -> np.ndarray:
        """These row groups of one column, [rows], or of several, [rows, columns]."""
        if isinstance(names, str):
            return _as_numpy(self._read_arrow(groups, names))
        columns = [_as_numpy(self._read_arrow(groups, name)) for name in names]
        return np.stack(columns, axis=1) if columns else np.empty((len(self), 0), self.dtype)

    def _read_arrow(self, groups: Sequence[int] | np.ndarray | range, name: str) -> pa.ChunkedArray:
        """These row groups of a column, as a ``pyarrow.ChunkedArray``.

        A page that is damaged raises an error.
        """
        return self._file.read_row_groups([int(group) for group in groups], columns=[name]).column(
            name
        )

    def cells(self, rows: np.ndarray, kind: pa.DataType) -> list[Any]:
        """A column's cells of these different rows, as Python's values of this Arrow type.

        None may be empty.
        """
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"column {self._names!r} has an entry for one example twice")
        groups, places = self._groups_with(np.arange(len(self))[rows])
        column = self._read_arrow(groups, self._names).take(places).cast(kind)
        _check_not_empty(column)
        return column.to_pylist()

    def whole(self) -> pa.ChunkedArray:
        """A column as a ``pyarrow.ChunkedArray``."""
        return self._read_arrow(range(len(self._starts) - 1), self._names)

    def not_empty(self, kind: pa.DataType) -> tuple[np.ndarray, np.ndarray]:
        """The rows in which a column's cells are not empty, [m], and their values of this Arrow
        type, [m].
        """
        column = self.whole().cast(kind)
        return np.flatnonzero(column.is_valid().to_numpy()), column.drop_null().to_numpy()


class StoredColumns(UserDict[str, Any]):
    """Columns by name, each read whole when it is asked for; ``data`` has the stored arrays, [n]
    each.
    """

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.data[name])


def coded(labels: np.ndarray | StoredArray) -> tuple[np.ndarray, np.ndarray]:
    """The different labels, sorted, and the place of each example's among them, [n].

    Example:
        >>> levels, codes = coded(np.array(["b", "a", "b"]))
        >>> levels.tolist(), codes.tolist()
        (['a', 'b'], [1, 0, 1])
    """
    if isinstance(labels, StoredArray):
        return _sorted_codes(labels.whole())
    return _sorted_codes(
        pa.chunked_array([as_texts(labels).tolist()], pa.string()).dictionary_encode()
    )


def _sorted_codes(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Of a column of dictionary-coded texts: the texts that occur, sorted, and the place of each
    row's among them.
    """
    chunks = column.unify_dictionaries().chunks
    if not chunks:
        return np.empty(0, object), np.empty(0, np.int64)
    levels = np.asarray(chunks[0].dictionary.to_pylist(), dtype=object)
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in chunks])
    occurs = np.bincount(codes, minlength=len(levels)) > 0
    order = np.argsort(levels, kind="stable")
    order = order[occurs[order]]
    place = np.empty(len(levels), np.int64)
    place[order] = np.arange(len(order))
    return levels[order], place[codes]


def _as_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column without empty cells, [rows]."""
    _check_not_empty(column)
    if pa.types.is_dictionary(column.type):
        levels, codes = _sorted_codes(column)
        return levels[codes]
    if pa.types.is_string(column.type):
        return np.asarray(column.to_pylist(), dtype=object)
    return column.to_numpy()


def _check_not_empty(column: pa.ChunkedArray) -> None:
    if column.null_count:
        raise ValueError(f"{column.null_count:,} cells are empty that hold a value in every run")

"""Arrays by example whose rows lie in several files, mapped into memory and read when they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["ByExample", "PartedArray", "PartedColumns", "PartedTexts", "checked_offsets", "coded", "layout_of"]

_AT_ONCE = 2**20  # labels that are Python's texts at a time


class PartedArray:
    """Arrays end to end, as one: ``array[rows]`` reads only the parts that hold them, ``np.asarray(array)`` all.

    Args:
        parts: [n_k, …] each, of one dtype.

    Example:
        >>> array = PartedArray([np.arange(3), np.arange(10, 14)])
        >>> array.shape, array[4], array[2:5].tolist(), array[np.array([6, 0])].tolist()
        ((7,), np.int64(11), [2, 10, 11], [13, 0])
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self._parts]).tolist()
        self.dtype = self._parts[0].dtype
        self.shape = (self._ends[-1], *self._parts[0].shape[1:])
        self.ndim = len(self.shape)
        self._scattered_dtype: Any = self.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, key: Any) -> Any:
        """Rows by number, slice, numbers or booleans; with a second entry, columns of them."""
        rows, *rest = key if isinstance(key, tuple) else (key,)
        others = tuple(rest)
        if isinstance(rows, int | np.integer):
            row = range(len(self))[int(rows)]
            part = bisect_right(self._ends, row)
            return self._read(part, slice(row - self._first(part), row - self._first(part) + 1), others)[0]
        if isinstance(rows, slice) and rows.indices(len(self))[2] == 1:
            start, stop, _ = rows.indices(len(self))
            pieces = [
                self._read(part, slice(max(start - self._first(part), 0), stop - self._first(part)), others)
                for part, end in enumerate(self._ends)
                if start < end and (stop > self._first(part))
            ]
            return np.concatenate(pieces) if pieces else self._read(0, slice(0, 0), others)
        return self._scattered(np.arange(len(self))[rows], others)

    def _scattered(self, rows: np.ndarray, others: tuple[Any, ...]) -> np.ndarray:
        """Rows in any order."""
        found: np.ndarray | None = None
        for part, end in enumerate(self._ends):
            inside = np.flatnonzero((rows >= self._first(part)) & (rows < end))
            if len(inside):
                values = self._read(part, rows[inside] - self._first(part), others)
                if found is None:
                    found = np.empty((len(rows), *values.shape[1:]), dtype=self._scattered_dtype)
                found[inside] = values
        return self._read(0, slice(0, 0), others) if found is None else found

    def _first(self, part: int) -> int:
        return int(self._ends[part - 1]) if part else 0

    def _read(self, part: int, rows: Any, others: tuple[Any, ...]) -> np.ndarray:
        return self._parts[part][(rows, *others)]


class PartedTexts(PartedArray):
    """Texts, kept as UTF-8 bytes end to end and where each begins and the last one ends.

    Args:
        parts: Of each part its bytes and its n_k + 1 offsets.
    """

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._parts = list(parts)  # type: ignore[arg-type]
        for content, offsets in parts:
            checked_offsets("ids", offsets, len(content))
        self._ends = np.cumsum([len(offsets) - 1 for _, offsets in parts]).tolist()
        self.dtype, self.shape, self.ndim = np.dtype(str), (self._ends[-1],), 1
        self._scattered_dtype = object  # texts of another part may be longer

    def _scattered(self, rows: np.ndarray, others: tuple[Any, ...]) -> np.ndarray:
        return super()._scattered(rows, others).astype(str)

    def _read(self, part: int, rows: Any, others: tuple[Any, ...]) -> np.ndarray:
        content, offsets = self._parts[part]
        chosen = np.arange(len(offsets) - 1)[rows]
        starts, ends = offsets[chosen].tolist(), offsets[chosen + 1].tolist()
        return np.asarray(
            [content[start:end].tobytes().decode() for start, end in zip(starts, ends, strict=True)], dtype=str
        )


ByExample = np.ndarray | PartedArray


class PartedColumns(Mapping[str, np.ndarray]):
    """Columns by name, each put together when it is read and not kept; labels from codes and the texts they stand for.

    Args:
        arrays: By name, [n] each.
        levels: By name the texts that codes are places in; None: the arrays are what is read.
    """

    def __init__(self, arrays: Mapping[str, PartedArray], levels: Mapping[str, np.ndarray] | None = None) -> None:
        self._arrays, self._levels = dict(arrays), levels

    def __getitem__(self, name: str) -> np.ndarray:
        return self.take(name, slice(None))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self, name: str, rows: Any) -> np.ndarray:
        """Some rows of a column."""
        values: np.ndarray = self._arrays[name][rows]
        return values if self._levels is None else self._levels[name][values]

    def layout(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape by name, without reading anything."""
        text = np.dtype(str)
        return {name: (text if self._levels else each.dtype, each.shape) for name, each in self._arrays.items()}

    def coded(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Of labels: the different ones that occur, sorted, and the place of each among them, [n]."""
        assert self._levels is not None
        codes = self._arrays[name][:]
        occurs = np.bincount(codes, minlength=len(self._levels[name])) > 0
        return self._levels[name][occurs], (np.cumsum(occurs) - 1)[codes]


def checked_offsets(name: str, offsets: np.ndarray, length: int) -> np.ndarray:
    """Where texts begin and the last one ends, once they divide so many bytes from the first to the last."""
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets of {name} do not divide its {length:,} bytes")
    return offsets


def layout_of(columns: Mapping[str, np.ndarray]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Dtype and shape of columns by name."""
    if isinstance(columns, PartedColumns):
        return columns.layout()
    return {name: (values.dtype, values.shape) for name, values in columns.items()}


def coded(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different labels, sorted, and the place of each among them, [n]: as np.unique gives them, without sorting n.

    Example:
        >>> levels, codes = coded(np.array(["b", "a", "b"]))
        >>> levels.tolist(), codes.tolist()
        (['a', 'b'], [1, 0, 1])
    """
    starts = range(0, len(labels), _AT_ONCE)
    different: set[str] = set()
    for start in starts:
        different.update(labels[start : start + _AT_ONCE].tolist())
    levels = sorted(different)
    place = {label: code for code, label in enumerate(levels)}
    codes = np.empty(len(labels), dtype=np.int64)
    for start in starts:
        part = labels[start : start + _AT_ONCE].tolist()
        codes[start : start + len(part)] = [place[label] for label in part]
    return np.asarray(levels, dtype=str), codes

"""A CSV file as columns of numbers or texts, read in pieces: a million rows take a few bytes per entry.

While a column has few different entries, they are kept as codes of texts (``levels``); beyond that, only as numbers: a
linear model cannot use a column with more different texts than ``MOST_LEVELS``.
"""

from __future__ import annotations

import csv
import difflib
import math
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchfil.glm.csv_format import Format, detect_format, lines_of, read_content

__all__ = ["Column", "CsvTable", "check_column", "read_table"]

MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
MOST_LEVELS = 10_000
_PIECE = 4000  # rows held as texts at a time; few enough for a processor's cache
_MOST_OTHERS = 1000  # entries that are not numbers, kept for a column with many different entries


@dataclass(frozen=True, eq=False)
class Column:
    """The entries of one column.

    Attributes:
        numbers: [n]; NaN if an entry is missing or not a number.
        missing: Whether there is no entry, [n].
        codes: Which of the ``levels`` each entry is, [n]; None if there are too many.
        levels: The different entries, as texts; empty if there are too many.
        others: The first entries that are not numbers, by row, if ``codes`` is None.
    """

    numbers: np.ndarray
    missing: np.ndarray
    codes: np.ndarray | None
    levels: tuple[str, ...]
    others: dict[int, str]

    def of_rows(self, rows: np.ndarray) -> Column:
        """The column with only these rows, [m] row numbers in ascending order."""
        place = {int(row): k for k, row in enumerate(rows)} if self.others else {}
        return Column(
            self.numbers[rows],
            self.missing[rows],
            None if self.codes is None else self.codes[rows],
            self.levels,
            {place[row]: text for row, text in self.others.items() if row in place},
        )

    def wrong_entries(self) -> tuple[int, dict[int, str]]:
        """How many entries are present but not numbers, and the first of them by row."""
        rows = np.flatnonzero(np.isnan(self.numbers) & ~self.missing)
        if self.codes is None:
            return len(rows), self.others
        return len(rows), {int(row): self.levels[self.codes[row]] for row in rows[:_MOST_OTHERS]}

    def texts(self) -> np.ndarray:
        """Every entry as text, [n]; only if there are ``codes``."""
        return np.asarray(self.levels)[self.codes]


@dataclass(frozen=True, eq=False)
class CsvTable:
    """A CSV file by columns.

    Attributes:
        where: Its path.
        format: How it is written.
        columns: The columns by name, without those that were left out.
        names: The names of all columns, in order.
        rows: The number of every row, from 0, [n].
        lines: The line of the file at which each row ends, from 1, [n].
        ids: The names of the rows: an entry each, or their number.
    """

    where: str
    format: Format
    columns: dict[str, Column]
    names: list[str]
    rows: np.ndarray
    lines: np.ndarray
    ids: Sequence[str | int]

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, name: str) -> np.ndarray:
        """A column's entries as the labels of groups, [n] texts; "(none)" for a missing entry.

        Raises:
            ValueError: There is no such column, or it has more than 10,000 different entries.
        """
        check_column(name, list(self.columns))
        column = self.columns[name]
        if column.codes is None:
            raise ValueError(f"column {name!r} has more than {MOST_LEVELS:,} different entries: these are no groups")
        return np.where(column.missing, "(none)", column.texts())

    def without(self, names: Collection[str]) -> CsvTable:
        """The table without these columns."""
        return replace(self, columns={name: own for name, own in self.columns.items() if name not in names})

    def complete_rows(self, used: Sequence[str]) -> CsvTable:
        """The table without rows that miss an entry in one of these columns.

        Raises:
            ValueError: No row is left.
        """
        complete = ~np.logical_or.reduce([self.columns[name].missing for name in used])
        if complete.all():
            return self
        kept = np.flatnonzero(complete)
        if not len(kept):
            raise ValueError(f"every one of the {len(self)} rows of {self.where} misses an entry")
        return replace(
            self,
            columns={name: column.of_rows(kept) for name, column in self.columns.items()},
            rows=self.rows[kept],
            lines=self.lines[kept],
            ids=[self.ids[row] for row in kept.tolist()],
        )


def read_table(
    path: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = (),
    id_column: str | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    decimal: str | None = None,
) -> CsvTable:
    """The columns of a CSV file with a line of names, gzipped or not.

    Args:
        path: The file.
        ignore: Columns to leave out.
        id_column: The column that names the rows; it is also left out.
        encoding: The encoding; None: detected from the content, like the next two.
        separator: The separator between columns.
        decimal: "." or ",".

    Raises:
        ValueError: It is empty, damaged, not text, ambiguous, has a name twice, or has a row of another length.
    """
    content = read_content(path)
    form = detect_format(content, path, encoding=encoding, separator=separator, decimal=decimal)
    lines = lines_of(content, form.encoding, form.separator)
    try:
        names = _names(next(lines, (0, []))[1], path)
        for name in (*ignore, *([] if id_column is None else [id_column])):
            check_column(name, names)
        readers = {name: _Entries(form.decimal) for name in names if name not in ignore and name != id_column}
        ids: list[str] = []
        numbers = list[int]()

        # piece by piece: a row as a list of texts takes ten times the memory of its numbers
        piece: list[list[str]] = []
        for line, fields in lines:
            if len(fields) != len(names):
                raise ValueError(
                    f"{path}, line {line}: row {len(numbers) + 1} has {len(fields)} entries for {len(names)} columns"
                )
            piece.append(fields)
            numbers.append(line)
            if len(piece) == _PIECE:
                _hand_out(piece, names, readers, id_column, ids)
        _hand_out(piece, names, readers, id_column, ids)
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}; see to its quotes") from error

    if not numbers:
        raise ValueError(f"{path} must have a line of column names and at least one row")
    columns = {name: entries.column() for name, entries in readers.items()}
    named: Sequence[str | int] = range(len(numbers)) if id_column is None else ids
    rows = np.arange(len(numbers))
    return CsvTable(os.fspath(path), form, columns, names, rows, np.asarray(numbers, dtype=np.int64), named)


def check_column(name: str, names: Sequence[str]) -> None:
    """Raise, with the nearest name, for a column that does not exist."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise ValueError(f"no column {name!r}; {hint} {', '.join(names)}")


def _names(fields: Sequence[str], where: str | os.PathLike[str]) -> list[str]:
    """The columns' names; a column without a name (an index saved with a table) gets its position."""
    names = [field.strip() or f"unnamed {place}" for place, field in enumerate(fields, start=1)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{where} has the columns {sorted(twice)} more than once")
    return names


def _hand_out(
    piece: list[list[str]], names: Sequence[str], readers: dict[str, _Entries], id_column: str | None, ids: list[str]
) -> None:
    """Give each column its entries of these rows, and discard the rows."""
    for name, texts in zip(names, zip(*piece, strict=True), strict=False):
        if name in readers:
            readers[name].add(_stripped(texts))
        elif name == id_column:
            ids.extend(_stripped(texts))
    piece.clear()


def _stripped(texts: Sequence[str]) -> Sequence[str]:
    """The texts without surrounding blanks; most have none, which a single check of all of them shows."""
    together = "".join(texts)
    plain = together.isascii() and not any(blank in together for blank in " \t\r\n\f\v")
    return texts if plain else [text.strip() for text in texts]


class _Entries:
    """Collects a column: codes and levels while these are few, then numbers."""

    def __init__(self, decimal: str) -> None:
        self.decimal = decimal
        self.levels: defaultdict[str, int] | None = defaultdict()
        self.levels.default_factory = self.levels.__len__
        self.codes: list[np.ndarray] = []
        self.numbers: list[np.ndarray] = []
        self.missing: list[np.ndarray] = []
        self.others: dict[int, str] = {}
        self.length = 0

    def add(self, texts: Sequence[str]) -> None:
        """The next entries."""
        if self.levels is not None:
            self.codes.append(np.fromiter(map(self.levels.__getitem__, texts), np.int32, len(texts)))
            if len(self.levels) > MOST_LEVELS:
                self._forget_levels()
        else:
            self._add_numbers(texts)
        self.length += len(texts)

    def column(self) -> Column:
        """The whole column."""
        if self.levels is None:
            return Column(np.concatenate(self.numbers), np.concatenate(self.missing), None, (), self.others)
        codes = np.concatenate(self.codes) if self.codes else np.zeros(0, np.int32)
        levels = tuple(self.levels)
        values = np.asarray([_number(text, self.decimal) for text in levels])
        absent = np.asarray([_is_missing(text) for text in levels])
        return Column(values[codes], absent[codes], codes, levels, {})

    def _forget_levels(self) -> None:
        """Switch to numbers: there are too many different entries for categories."""
        levels, codes = list(self.levels or ()), self.codes
        self.levels, self.codes, self.length = None, [], 0
        for part in codes:
            self._add_numbers([levels[code] for code in part.tolist()])
            self.length += len(part)
        self.length -= len(codes[-1])  # `add` counts the last part

    def _add_numbers(self, texts: Sequence[str]) -> None:
        values = _numbers(texts, self.decimal)
        absent = np.zeros(len(texts), dtype=bool)
        for row in np.flatnonzero(np.isnan(values)).tolist():
            absent[row] = _is_missing(texts[row])
            if not absent[row] and len(self.others) < _MOST_OTHERS:
                self.others[self.length + row] = texts[row]
        self.numbers.append(values)
        self.missing.append(absent)


def _numbers(texts: Sequence[str], decimal: str) -> np.ndarray:
    """The texts as numbers, [m], NaN if a text is not a number; converted together if all are."""
    together = "".join(texts)
    if "_" not in together and (decimal == "." or "." not in together):
        plain = texts if decimal == "." else [text.replace(",", ".") for text in texts]
        try:
            values = np.fromiter(map(float, plain), float, len(plain))
        except ValueError:
            pass
        else:
            if np.isfinite(values).all():
                return values
    return np.fromiter((_number(text, decimal) for text in texts), float, len(texts))


def _number(text: str, decimal: str) -> float:
    """The text as a number; NaN if it is not one: infinite, with a "_", or with another decimal sign."""
    if "_" in text or (decimal == "," and "." in text):
        return math.nan
    try:
        value = float(text if decimal == "." else text.replace(",", "."))
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _is_missing(text: str) -> bool:
    return text.lower() in MISSING

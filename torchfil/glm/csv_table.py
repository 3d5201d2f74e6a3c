"""From a CSV file to the numbers that a linear model takes: columns by name, texts one-hot."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchfil.datasets.tasks import levels_of, one_hot

__all__ = ["EncodedTable", "check_column", "encode", "is_complete", "read_rows"]

_MISSING = ("", "?", "na", "n/a", "nan", "null", "none")


@dataclass(frozen=True)
class EncodedTable:
    """A table as a linear model takes it.

    Attributes:
        inputs: [n, d]; text columns are one-hot without their first level.
        targets: [n] numbers, or labels for a classifier.
        target: The target's name.
        columns: The d columns' names.
        attributes: Each attribute's columns.
        levels: Each one-hot attribute's levels, the first of which has no column.
        few_values: Columns of 3 to 12 different whole numbers, which could be codes, and how many.
    """

    inputs: np.ndarray
    targets: np.ndarray
    target: str
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]
    few_values: dict[str, int]


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV file with a header, gzipped or not, by column name.

    Raises:
        ValueError: It is empty, damaged, not text, separated by semicolons or tabs, has a name twice, or a row of
            another length.
    """
    where = Path(path)
    content = where.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{where} is a gzip file that is cut short or damaged ({error}); copy it anew") from error

    try:
        text = content.decode("utf-8-sig")
        _check_separators(where, text)
        lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        table = [fields for fields in lines if fields]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{where} is not a CSV file in UTF-8: {error}") from error

    if len(table) < 2:
        raise ValueError(f"{where} must have a line of column names and at least one row")
    names = [name.strip() for name in table[0]]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{where} has the columns {sorted(twice)} more than once")
    for number, fields in enumerate(table[1:], start=1):
        if len(fields) != len(names):
            raise ValueError(f"{where}: row {number} has {len(fields)} entries for {len(names)} columns")
    return [dict(zip(names, (field.strip() for field in fields), strict=True)) for fields in table[1:]]


def encode(
    rows: Sequence[Mapping[str, str]], target: str, *, categorical: Sequence[str] = (), ignore: Sequence[str] = ()
) -> EncodedTable:
    """The rows as numbers; a column with anything that is no number is categorical.

    Args:
        rows: Of :func:`read_rows`.
        target: The column to predict.
        categorical: Columns of numbers that are codes, not quantities.
        ignore: Columns to leave out, e.g. names.

    Raises:
        ValueError: A column does not exist, has one value only, or misses entries; the target is left out or
            categorical, or is the only column.
    """
    used = _used_columns(list(rows[0]), target, categorical, ignore)
    _check_complete(rows, used)

    # texts, and numbers that are codes, become 0/1 columns; the first level of each has none
    features = [name for name in used if name != target]
    nominal = [name for name in features if name in categorical or not all(_is_number(row[name]) for row in rows)]
    levels = {name: levels_of(rows, name) for name in nominal}
    _check_levels(rows, features, levels)
    columns, attributes, inputs = one_hot(rows, features, levels, {name: values[0] for name, values in levels.items()})

    texts = [row[target] for row in rows]
    targets = np.asarray([float(text) for text in texts]) if all(map(_is_number, texts)) else np.asarray(texts)
    different = {name: {float(row[name]) for row in rows} for name in features if name not in levels}
    few = {name: len(v) for name, v in different.items() if 3 <= len(v) <= 12 and all(x.is_integer() for x in v)}
    return EncodedTable(inputs, targets, target, columns, attributes, levels, few)


def _used_columns(names: list[str], target: str, categorical: Sequence[str], ignore: Sequence[str]) -> list[str]:
    """The columns that are not left out, the target among them; raises where they make no model."""
    for name in (target, *categorical, *ignore):
        check_column(name, names)
    if target in ignore:
        raise ValueError(f"{target!r} is the target; it cannot be left out (--ignore) or name the rows (--id)")
    if target in categorical:
        raise ValueError(
            f"{target!r} is the target; only inputs are categorical (--categorical). A logistic or softmax model "
            "(--model) predicts codes"
        )

    used = [name for name in names if name not in ignore]
    if used == [target]:
        raise ValueError(f"there is no column to predict {target!r} from: it is the only one that is not left out")
    return used


def _check_complete(rows: Sequence[Mapping[str, str]], used: Sequence[str]) -> None:
    missing = {name: sum(row[name].lower() in _MISSING for row in rows) for name in used}
    missing = {name: count for name, count in missing.items() if count}
    if missing:
        raise ValueError(
            "entries are missing: "
            + ", ".join(f"{count} in {name!r}" for name, count in missing.items())
            + ". Leave out or impute these rows first (--drop-missing leaves them out)."
        )


def _check_levels(
    rows: Sequence[Mapping[str, str]], features: Sequence[str], levels: Mapping[str, Sequence[str]]
) -> None:
    for name in features:
        if len({row[name] for row in rows}) == 1:
            raise ValueError(f"column {name!r} has the value {rows[0][name]!r} in every row; leave it out")
        if name in levels and len(levels[name]) > max(50, len(rows) // 2):
            raise ValueError(
                f"column {name!r} has {len(levels[name])} different texts in {len(rows)} rows; it looks like a name or "
                "an identifier. Leave it out (--ignore), or name it as the id (--id)."
            )


def check_column(name: str, names: Sequence[str]) -> None:
    """Raise, with the nearest name, for a column that does not exist."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        hint = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise ValueError(f"no column {name!r}; {hint} {', '.join(names)}")


def is_complete(row: Mapping[str, str], names: Sequence[str]) -> bool:
    """Whether no entry of these columns is missing."""
    return not any(row[name].lower() in _MISSING for name in names)


def _check_separators(where: Path, text: str) -> None:
    header = text.lstrip("\r\n").partition("\n")[0]
    separators = [name for sign, name in ((";", "semicolons"), ("\t", "tabs")) if sign in header]
    if separators and "," not in header:
        raise ValueError(
            f"the first line of {where} is one column with {separators[0]} in it, {header.strip()[:60]!r}; the columns "
            "must be separated by commas: save the file anew with these"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False

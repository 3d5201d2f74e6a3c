"""Encodes the columns of a CSV file for a linear model: texts become one-hot, doubtful columns are refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchfil.glm.csv_columns import Column, CsvTable, check_column

__all__ = ["EncodedTable", "encode"]

_MOST_NUMBERS = 2**28  # of the inputs: 2 GiB
_FEWEST_IN_ORDER = 10  # with this many rows, a column that counts them is not a coincidence
_LIKE_NUMBERS = re.compile(r"[+-]?\d[\d.,' ]*")  # digits with separators of any kind


@dataclass(frozen=True)
class EncodedTable:
    """A table in the form that a linear model takes.

    Attributes:
        inputs: [n, d]; text columns are one-hot without their first level.
        targets: [n] numbers, or labels for a classifier.
        target: The target's name.
        columns: The d columns' names.
        attributes: Each attribute's columns.
        levels: Each one-hot attribute's levels; the first one has no column.
        few_values: Columns of 3 to 12 different whole numbers, which could be codes, and their number of values.
        different: Columns of whole numbers that differ in every row, which could be identifiers.
    """

    inputs: np.ndarray
    targets: np.ndarray
    target: str
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]
    few_values: dict[str, int] = field(default_factory=dict)
    different: tuple[str, ...] = ()


def encode(
    table: CsvTable, target: str, *, categorical: Sequence[str] = (), quantities: Sequence[str] = ()
) -> EncodedTable:
    """The rows as numbers; a column without numbers, or with only a few, is categorical.

    Args:
        table: From :func:`torchfil.glm.csv_columns.read_table`.
        target: The column to predict.
        categorical: Columns of numbers that are codes, not quantities.
        quantities: Columns of numbers that are quantities, though they look like codes or count the rows.

    Raises:
        ValueError: A column does not exist, has only one value, misses entries, has some entries that are not numbers
            although most are, or counts the rows; the target is left out or categorical, or is the only column.
    """
    features = _features(table, target, categorical, quantities)
    _check_complete(table)

    # texts, and numbers that are codes, become 0/1 columns; the first level of each has none
    nominal = [name for name in features if name in categorical or _is_text(table, name)]
    levels = {name: _levels_of(table, name) for name in nominal}
    _check_values(table, features, levels)
    numerical = [name for name in features if name not in levels]
    _check_no_index(table, [name for name in numerical if name not in quantities])

    own = table.columns[target]
    targets = _checked_labels(table, target) if _is_text(table, target) else own.numbers
    few, different = _doubtful(table, [name for name in numerical if name not in quantities])
    columns, attributes, inputs = _one_hot(table, features, levels)
    return EncodedTable(inputs, targets, target, columns, attributes, levels, few, different)


def _features(table: CsvTable, target: str, categorical: Sequence[str], quantities: Sequence[str]) -> list[str]:
    """The columns to predict from; raises if they cannot make a model."""
    for name in (target, *categorical, *quantities):
        check_column(name, table.names)
    if target not in table.columns:
        raise ValueError(f"{target!r} is the target; it cannot be left out (--ignore) or name the rows (--id)")
    if target in categorical:
        raise ValueError(
            f"{target!r} is the target; only inputs are categorical (--categorical). A logistic or softmax model "
            "(--model) predicts codes"
        )
    left_out = [name for name in (*categorical, *quantities) if name not in table.columns]
    both = [name for name in categorical if name in quantities]
    if left_out or both:
        what = f"is left out ({left_out[0]!r})" if left_out else f"is a category and a quantity ({both[0]!r})"
        raise ValueError(f"a column of --categorical or --quantity {what}; say one thing of it")

    features = [name for name in table.columns if name != target]
    if not features:
        raise ValueError(f"there is no column to predict {target!r} from: it is the only one that is not left out")
    return features


def _check_complete(table: CsvTable) -> None:
    missing = {name: int(column.missing.sum()) for name, column in table.columns.items()}
    missing = {name: count for name, count in missing.items() if count}
    if missing:
        raise ValueError(
            "entries are missing: "
            + ", ".join(f"{count} in {name!r}" for name, count in missing.items())
            + ". Leave out or impute these rows first (--drop-missing leaves them out)."
        )


def _is_text(table: CsvTable, name: str) -> bool:
    """Whether a column holds categories; raises if it holds numbers and a few entries that are not.

    One entry that cannot be read would turn a column of numbers into as many categories as it has values. Texts of
    digits, such as 1,234 with a decimal point, are also meant as numbers.
    """
    wrong, first = table.columns[name].wrong_entries()
    if wrong and (2 * wrong < len(table) or all(map(_LIKE_NUMBERS.fullmatch, first.values()))):
        rows = sorted(first)[:3]
        shown = ", ".join(f"{first[row]!r} in line {table.lines[row]}" for row in rows)
        sign = "comma" if table.format.decimal == "," else "point"
        raise ValueError(
            f"column {name!r} holds numbers, but {wrong:,} of {len(table):,} entries cannot be read as such: {shown}"
            f"{', …' if wrong > len(rows) else ''}. Correct them (the decimal sign is a {sign}, without separators of "
            f"thousands) or, if the column holds categories, say so: --categorical {shlex.quote(name)}"
        )
    return wrong > 0


def _levels_of(table: CsvTable, name: str) -> tuple[str, ...]:
    """The levels that occur, sorted."""
    column, n = table.columns[name], len(table)
    if column.codes is None:
        raise ValueError(_looks_like_name(name, "more than 10,000", n))
    return tuple(sorted(column.levels[code] for code in np.unique(column.codes)))


def _checked_labels(table: CsvTable, name: str) -> np.ndarray:
    if table.columns[name].codes is None:
        raise ValueError(f"the target {name!r} has more than 10,000 different texts: these are no classes")
    return table.columns[name].texts()


def _looks_like_name(name: str, count: str, rows: int) -> str:
    return (
        f"column {name!r} has {count} different texts in {rows} rows; it looks like a name or an identifier. Leave it "
        f"out (--ignore {shlex.quote(name)}), or name it as the id (--id {shlex.quote(name)})."
    )


def _check_values(table: CsvTable, features: Sequence[str], levels: Mapping[str, Sequence[str]]) -> None:
    """Refuse columns without information, in one message, and texts that are names."""
    constant = [name for name in features if _is_constant(table.columns[name], levels.get(name))]
    if constant:
        first = table.columns[constant[0]]
        value = first.levels[first.codes[0]] if first.codes is not None else f"{first.numbers[0]:g}"
        which = f"column {constant[0]!r} has the value {value!r}"
        if len(constant) > 1:
            which = f"columns {', '.join(map(repr, constant))} have one value each"
        raise ValueError(f"{which} in every row; leave out constant columns: --ignore {listed(constant)}")

    for name, texts in levels.items():
        if len(texts) > max(50, len(table) // 2):
            raise ValueError(_looks_like_name(name, str(len(texts)), len(table)))
    width = len(features) + sum(len(texts) - 2 for texts in levels.values())
    if width * len(table) > _MOST_NUMBERS:
        most = max(levels, key=lambda name: len(levels[name]), default=features[0])
        raise ValueError(
            f"{len(table):,} rows of {width:,} columns take {8 * width * len(table) / 2**30:.0f} GiB; put levels of "
            f"{most!r} together, or leave it out: --ignore {listed([most])}"
        )


def _is_constant(column: Column, levels: Sequence[str] | None) -> bool:
    return len(levels) == 1 if levels is not None else bool((column.numbers == column.numbers[0]).all())


def _check_no_index(table: CsvTable, numerical: Sequence[str]) -> None:
    """Refuse columns that count the rows: an index saved with a table would be fitted as a quantity."""
    if len(table) < _FEWEST_IN_ORDER:
        return
    for name in numerical:
        if np.ptp(table.columns[name].numbers - table.rows) == 0:
            raise ValueError(
                f"column {name!r} counts the rows ({table.columns[name].numbers[0]:g}, "
                f"{table.columns[name].numbers[1]:g}, …): it looks like an index. Leave it out (--ignore "
                f"{listed([name])}), name the rows by it (--id {shlex.quote(name)}) or, if it is a quantity, say so: "
                f"--quantity {listed([name])}"
            )


def listed(names: Sequence[str]) -> str:
    """Names in the form of a command-line option.

    Example:
        >>> print(listed(["age", "height, cm"]))
        'age,"height, cm"'
    """
    quoted = [f'"{name}"' if "," in name else name for name in names]
    return shlex.quote(",".join(quoted))


def _doubtful(table: CsvTable, numerical: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Columns of few different whole numbers (with their number), and columns that differ in every row."""
    few, different = dict[str, int](), list[str]()
    for name in numerical:
        values = np.unique(table.columns[name].numbers)
        if not bool((values == np.floor(values)).all()):
            continue
        if 3 <= len(values) <= 12:
            few[name] = len(values)
        elif len(values) == len(table):
            different.append(name)
    return few, tuple(different)


def _one_hot(
    table: CsvTable, features: Sequence[str], levels: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], np.ndarray]:
    """The columns' names, each attribute's columns, and the entries, [n, d]."""
    columns: list[str] = []
    attributes: dict[str, tuple[int, ...]] = {}
    for name in features:
        titles = [f"{name}={level}" for level in levels[name][1:]] if name in levels else [name]
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles

    inputs = np.zeros((len(table), len(columns)))
    for name, places in attributes.items():
        column = table.columns[name]
        if name not in levels:
            inputs[:, places[0]] = column.numbers
            continue
        # from the number of a text to its column; the first level's rows stay 0
        place_of = dict(zip(levels[name][1:], places, strict=True))
        target = np.asarray([place_of.get(text, -1) for text in column.levels])[column.codes]
        rows = np.flatnonzero(target >= 0)
        inputs[rows, target[rows]] = 1.0
    return tuple(columns), attributes, inputs

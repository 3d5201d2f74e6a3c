"""What the release of a linear model leaks about every row of a CSV file: private columns and
questions, by name.

Pandas holds the table, and makes texts one-hot. Encoding, separator and decimal sign are not
guessed: a number that the decimal sign does not explain is refused, because a decimal comma read as
a thousands separator changes every number by a factor of 1,000.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from torchfil.glm import model as models
from torchfil.glm.guesses import BestGuess, NominalAttribute, Shift, guess
from torchfil.glm.model import GeneralizedLinearModel
from torchfil.questions import Absent, Label, Question
from torchfil.utils.text import nearest

MODELS: dict[str, type[Any]] = {
    "linear": models.LinearRegression,
    "logistic": models.LogisticRegression,
    "softmax": models.SoftmaxRegression,
    "poisson": models.PoissonRegression,
}
FALSE_POSITIVE_RATE = 0.01  # the false-positive rate for the true-positive rates

MISSING = ("", "?", "na", "n/a", "nan", "null", "none")
MOST_LEVELS = 10_000
_MOST_ANSWERS = 12
_LIKE_NUMBERS = re.compile(r"[+-]?\d[\d.,' ]*([eE][+-]?\d+)?")  # digits with separators of any kind


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
        ids: The names of the rows: an entry each, or their number from 0, [n].
        groups: The rows' labels by each grouping column, [n] texts; "(none)" for a missing entry.
        left_out: How many rows were left out because they miss an entry.
        few_values: Columns of 3 to 12 different whole numbers, which could be codes, and their
            number of values.
    """

    inputs: np.ndarray
    targets: np.ndarray
    target: str
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]
    ids: list[str | int]
    groups: dict[str, np.ndarray]
    left_out: int
    few_values: dict[str, int]


def read_table(
    path: Path,
    target: str,
    *,
    categorical: Sequence[str] = (),
    ignore: Sequence[str] = (),
    group: Sequence[str] = (),
    id_column: str | None = None,
    drop_missing: bool = False,
    encoding: str = "utf-8-sig",
    separator: str = ",",
    decimal: str = ".",
) -> EncodedTable:
    """The rows of a CSV file, gzipped (.gz) or not, as numbers.

    A column without or with few numbers is categorical.

    Args:
        path: The file; its first line names the columns.
        target: The column to predict.
        categorical: Columns of numbers that are codes, not quantities.
        ignore: Columns that are not inputs.
        group: Columns by which rows are compared; they are inputs, too, unless in ``ignore``.
        id_column: The column that names the rows; it is no input.
        drop_missing: Leave out rows that miss an entry in a used column.
        encoding: The encoding.
        separator: The separator between columns; "tab": a tab.
        decimal: "." or ",".

    Raises:
        ValueError: The file is empty, damaged, not text, has a name twice, one column, or a row of
            another length. A column does not exist, has only one value, misses entries, or has some
            entries that are not numbers although most are, or look like some. The target is left
            out or categorical, or is the only column.
    """
    table = _read_entries(path, encoding, separator)
    rows = len(table)

    # what each column is for
    left_out = {*ignore, *([] if id_column is None else [id_column])}
    for name in (target, *categorical, *group, *left_out):
        _check_column(name, list(table.columns))
    inputs = [name for name in table.columns if name not in left_out and name != target]
    if target in {*left_out, *categorical}:
        raise ValueError(
            f"{target!r} is the target; it cannot be left out (--ignore), name the rows (--id) or "
            "be --categorical: a logistic or softmax model (--model) predicts codes"
        )
    if not inputs:
        raise ValueError(
            f"there is no column to predict {target!r} from: it is the only one that is not left "
            "out"
        )
    table = _complete_rows(table, [*inputs, target], path, drop_missing)
    ids = (table.index if id_column is None else table[id_column]).tolist()
    groups = {name: _labels(table[name]) for name in group}

    # numbers, and the texts that become one-hot
    for name in [each for each in (*inputs, target) if each not in categorical]:
        table[name] = _numbers_or_texts(table[name], decimal)
    texts = [name for name in (*inputs, target) if table[name].dtype != float]
    counts = table[[*inputs, target]].nunique()
    _check_counts(table, counts, inputs, texts)
    numbers = [name for name in inputs if name not in texts]
    few = {
        name: int(counts[name])
        for name in numbers
        if 3 <= counts[name] <= 12 and (table[name] % 1 == 0).all()
    }

    columns, attributes, levels, X = _one_hot(table, inputs, texts)
    y = (
        table[target].to_numpy(dtype=object).astype(str)
        if target in texts
        else table[target].to_numpy()
    )
    return EncodedTable(
        X, y, target, columns, attributes, levels, ids, groups, rows - len(table), few
    )


def _check_column(name: str, names: Sequence[str]) -> None:
    """Raise, with the nearest name, for a column that does not exist."""
    if name not in names:
        raise ValueError(f"there is no column {name!r}{nearest(name, names)}")


def _read_entries(path: Path, encoding: str, separator: str) -> pandas.DataFrame:
    """All entries as texts, by row number and column name; a missing one is empty."""
    try:
        table = pandas.read_csv(
            path,
            header=None,  # with a line of names, pandas would take entries beyond them for an index
            dtype=str,
            keep_default_na=False,
            sep={"\\t": "\t", "tab": "\t"}.get(separator, separator),
            skipinitialspace=separator != " ",
            encoding=encoding,
            encoding_errors="strict",
        )
    except (pandas.errors.EmptyDataError, pandas.errors.ParserError) as error:
        raise ValueError(
            f"{path} is not a CSV file: {error}; see to its quotes and --separator"
        ) from error
    except LookupError as error:
        raise ValueError(
            f"--encoding {encoding!r} is no encoding that Python knows, such as cp1252"
        ) from error
    except UnicodeError as error:
        raise ValueError(
            f"{path} is not text in {encoding}; if it is a table in another encoding, name that: "
            "--encoding cp1252 (Windows) or utf-16"
        ) from error
    table = table.fillna("").apply(lambda column: column.str.strip())
    names, entries = table.iloc[0].tolist(), table.iloc[1:].reset_index(drop=True)
    if not len(names) > 1:
        raise ValueError(
            f"{path} has one column, {names}: if another sign than {separator!r} separates "
            "columns, name that: --separator ';'"
        )
    if not len(entries) > 0:
        raise ValueError(f"{path} must have a line of column names and at least one row")
    names = [name or f"unnamed {place}" for place, name in enumerate(names, start=1)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has the columns {twice} more than once")
    return entries.set_axis(names, axis=1)


def _complete_rows(
    entries: pandas.DataFrame, used: Sequence[str], path: Path, drop: bool
) -> pandas.DataFrame:
    """The rows that miss no entry of the used columns."""
    missing = entries[list(used)].apply(lambda column: column.str.lower().isin(MISSING))
    if drop:
        entries = entries[~missing.any(axis=1)].copy()
        if not len(entries) > 0:
            raise ValueError(f"every one of the {len(missing)} rows of {path} misses an entry")
        return entries
    counts = ", ".join(f"{count} in {name!r}" for name, count in missing.sum().items() if count)
    if counts:
        raise ValueError(
            f"entries are missing: {counts}. Impute these rows, or leave them out (--drop-missing)."
        )
    return entries


def _numbers_or_texts(column: pandas.Series, decimal: str) -> pandas.Series:
    """The entries as numbers, or as they are if they are categories.

    Raises if few of them are not numbers.

    One entry that cannot be read would turn a column of numbers into as many categories as it has
    values. Texts of digits, such as 1,234 with a decimal point, are also meant as numbers.
    """
    plain = column
    if decimal == ",":
        plain = column.mask(column.str.contains(".", regex=False), "").str.replace(
            ",", ".", regex=False
        )
    numbers = pandas.to_numeric(plain, errors="coerce").astype(float)
    wrong = column[~np.isfinite(numbers)]
    if len(wrong) and (2 * len(wrong) < len(column) or all(map(_LIKE_NUMBERS.fullmatch, wrong))):
        shown = ", ".join(f"{entry!r} in row {row}" for row, entry in wrong[:3].items())
        raise ValueError(
            f"column {column.name!r} holds numbers, but {len(wrong):,} of {len(column):,} entries "
            f"cannot be read as such: {shown}. Correct them (no separators of thousands), name "
            f"the decimal sign if it is not {decimal!r} (--decimal) or, if the column holds "
            f"categories, say so: --categorical {shlex.quote(str(column.name))}"
        )
    return column if len(wrong) else numbers


def _check_counts(
    table: pandas.DataFrame, counts: pandas.Series, inputs: Sequence[str], texts: Sequence[str]
) -> None:
    """Refuse columns without information, in one message, and texts that are names."""
    constant = [name for name in inputs if counts[name] == 1]
    if constant:
        raise ValueError(
            f"one value in all rows; leave out constant columns: --ignore {_listed(constant)}"
        )
    most = min(max(50, len(table) // 2), MOST_LEVELS)
    for name in texts:
        if not counts[name] <= most:
            raise ValueError(
                f"column {name!r} has {counts[name]:,} different texts in {len(table):,} rows; it "
                f"looks like a name or an identifier. Leave it out (--ignore {_listed([name])}), "
                "or name it as the id (--id)."
            )


def _listed(names: Sequence[str]) -> str:
    """Names in the form of a command-line option.

    Example:
        >>> print(_listed(["age", "height, cm"]))
        'age,"height, cm"'
    """
    return shlex.quote(",".join(f'"{name}"' if "," in name else name for name in names))


def _one_hot(
    table: pandas.DataFrame, inputs: Sequence[str], texts: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], dict[str, tuple[str, ...]], np.ndarray]:
    """The d columns' names, each attribute's columns, the levels of texts, and the inputs, [n,
    d].
    """
    columns, attributes, levels, parts = list[str](), {}, {}, []
    for name in inputs:
        titles, part = [name], table[[name]].to_numpy()
        if name in texts:
            one_hot = pandas.get_dummies(table[name], dtype=float)
            levels[name], part = tuple(one_hot.columns), one_hot.to_numpy()[:, 1:]
            titles = [f"{name}={level}" for level in levels[name][1:]]
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles
        parts.append(part)
    return tuple(columns), attributes, levels, np.concatenate(parts, axis=1)


def _labels(column: pandas.Series) -> np.ndarray:
    if not column.nunique() <= MOST_LEVELS:
        raise ValueError(
            f"column {column.name!r} has more than {MOST_LEVELS:,} different entries: these are "
            "no groups"
        )
    return (
        column.mask(column.str.lower().isin(MISSING), "(none)").to_numpy(dtype=object).astype(str)
    )


@dataclass(frozen=True)
class LeakageTable:
    """Leakage by row.

    Attributes:
        columns: For each private attribute ``<name>_fil`` (η) and ``<name>_error`` (the least root
            mean squared error of an unbiased attacker, in the attribute's own unit, or of its 0/1
            columns if it is one-hot), [n] each. For each question ``<question>_guess`` (how often
            the best attacker is right), ``<question>_divergence`` and ``<question>_tpr`` (its
            true-positive rate at a false-positive rate of 1 %).
        score: The score of the fitted model on the table: R², accuracy or D².
        released_score: The same for the released model: the mean over the noise.
        blind_score: The same for a model without inputs.
        guesses: What any attacker can infer, by question.
        model: The fitted model.
        targets: The targets of the fit, [n].
    """

    columns: dict[str, np.ndarray]
    score: float
    released_score: float
    blind_score: float
    guesses: dict[str, BestGuess]
    model: GeneralizedLinearModel
    targets: np.ndarray


def leakage_table(
    table: EncodedTable,
    private: Sequence[str] = (),
    *,
    questions: Sequence[str] = (),
    model: str = "linear",
    l2: float = 1e-2,
    sigma: float,
    intercept: bool = True,
) -> LeakageTable:
    """Fit the model to all rows, and compute what releasing w* + N(0, σ²I) leaks about each.

    Args:
        table: From :func:`read_table`.
        private: The attributes that an attacker wants who knows everything else; none: everything,
            including the target.
        questions: The questions of an attacker who knows everything else; see
            :func:`_question_about`.
        model: "linear", "logistic" (two labels), "softmax" or "poisson".
        l2: λ, the penalty.
        sigma: σ.
        intercept: Whether to fit (and release) an intercept.

    Raises:
        ValueError: There is no such attribute, the targets do not fit the model, or no minimum was
            found.
    """
    for name in private:
        _check_column(name, list(table.attributes))
    asked = {text: _question_about(table, text, model) for text in questions}

    X, y = (
        pandas.DataFrame(table.inputs, columns=table.columns, copy=False),
        _targets_for(model, table.targets),
    )
    fitted: GeneralizedLinearModel = MODELS[model](l2=l2, fit_intercept=intercept).fit(X, y)
    asked_of = {name: table.attributes[name] for name in private}
    eta, bound = (of(X, y, sigma, attributes=asked_of) for of in (fitted.fil, fitted.mse_bound))
    columns = {}
    for name in private:
        columns[f"{name}_fil"], columns[f"{name}_error"] = eta[name], np.sqrt(bound[name])
    guesses = {text: guess(fitted, X, y, question, sigma) for text, question in asked.items()}
    for text, best in guesses.items():
        columns[f"{text}_guess"] = best.accuracy
        columns[f"{text}_divergence"] = best.divergence.max(axis=1)
        columns[f"{text}_tpr"] = best.true_positive_rate(FALSE_POSITIVE_RATE)
    scores = float(fitted.score(X, y)), fitted.expected_score(X, y, sigma)
    blind = (
        np.unique(y, return_counts=True)[1].max() / len(y) if hasattr(fitted, "classes_") else 0.0
    )
    return LeakageTable(columns, *scores, float(blind), guesses, fitted, y)


def _question_about(table: EncodedTable, text: str, model: str = "linear") -> Question:
    """The question that a text describes.

    ``vkorc1``: which value does this column (or the target) have? ``age+10``: is the value as it
    is, or 10 more? ``absent``: is the row there at all?

    Raises:
        ValueError: There is no such column, or it has more than 12 different values.
    """
    if text == table.target:
        labels = np.unique(table.targets)
        _check_few(text, len(labels))
        values = range(len(labels)) if model == "logistic" else labels.tolist()
        return Label(names=[str(v) for v in labels], values=values)
    if text in table.levels:
        return NominalAttribute(
            table.attributes[text], np.eye(len(table.levels[text]))[:, 1:], table.levels[text]
        )
    if text in table.attributes:
        numbers = np.unique(table.inputs[:, table.attributes[text][0]])
        _check_few(text, len(numbers))
        return NominalAttribute(table.attributes[text], numbers[:, None])

    # no column: a difference, or absence
    if text == "absent":
        return Absent()
    difference = re.fullmatch(r"(.+?)([+-]\d+\.?\d*(?:e[+-]?\d+)?)", text)
    name, by = (difference[1].strip(), float(difference[2])) if difference else (text, 0.0)
    _check_column(name, [*table.attributes, table.target])
    if name in table.levels:
        raise ValueError(f"{name!r} is one-hot, so {text!r} has no meaning; ask for {name!r}")
    return Shift(by, None if name == table.target else table.attributes[name][0])


def _check_few(name: str, values: int) -> None:
    if not values <= _MOST_ANSWERS:
        raise ValueError(
            f"{name!r} has {values} different values, a question at most {_MOST_ANSWERS} answers; "
            f"ask for a difference, e.g. --question {name}+1"
        )


def _targets_for(model: str, targets: np.ndarray) -> np.ndarray:
    labels = np.unique(targets)
    if model == "logistic":
        shown = ", ".join(map(str, labels[:4])) + (", …" if len(labels) > 4 else "")
        if len(labels) != 2:
            raise ValueError(
                f"a logistic model needs a target with two values, this one has {len(labels)}: "
                f"{shown}"
            )
        return (targets == labels[1]).astype(float)
    if model != "softmax" and targets.dtype.kind != "f":
        raise ValueError(
            f"a {model} model needs a target of numbers, got e.g. {str(labels[0])!r}; use logistic?"
        )
    return targets

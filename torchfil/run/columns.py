"""The content of a run file: a column for whatever has an entry for an example, and facts, which
are JSON values.

A column is read when it is asked for. docs/run-file.md lists columns and facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from torchfil.run import saved_run as saved
from torchfil.run.stored import ColumnFile, StoredArray, StoredColumns
from torchfil.run.unit import Facts
from torchfil.utils.errors import RunFileError

FORMAT, VERSION = "torchfil-run", 4
KEY = b"torchfil"  # of the facts in the file's metadata
ARROW_SCHEMA = b"ARROW:schema"  # the key of Arrow's own copy of the schema, which no run file has
_LARGEST_FACTS = 2**22  # bytes
_MOST_COLUMNS = 64  # attributes that have a column each
_MOST_VALUES = 2**27  # errors of attributes in a row group
_LIST, _STRINGS = pa.list_(pa.float32()), pa.list_(pa.string())
Values = Callable[[slice], Any]  # of a slice of rows, what Arrow takes
_OF_TEXTS = {
    "words": ("words", _STRINGS),
    "fil": ("words_fil", _LIST),
    "plis": ("words_plis", _LIST),
}
_OF_ATTACKS = {
    "predicted": pa.float64(),
    "achieved": pa.float64(),
    "violated": pa.bool_(),
    "blind": pa.float64(),
}


# ------------------------------------------------------------------ writing


def write_run(run: saved.SavedRun, path: str, rows_at_once: int) -> None:
    """Write a run as a Parquet file, ``rows_at_once`` examples in a row group.

    Raises:
        RunFileError: The facts take more than 4 MiB.
    """
    table = _Table(run)
    facts = json.dumps(table.facts, separators=(",", ":")).encode()
    # a text that a reader must not find
    facts = facts.replace(ARROW_SCHEMA, ARROW_SCHEMA.replace(b":", b"\\u003a"))
    if len(facts) > _LARGEST_FACTS:
        raise RunFileError(
            f"names and settings take {len(facts):,} bytes of {_LARGEST_FACTS:,} allowed; shorten "
            "the title and the names of attributes, groups, questions and answers"
        )
    schema = pa.schema(table.fields)
    width = 1 if run.attributes is None else max(1, len(run.attributes.names))
    rows_at_once = min(rows_at_once, max(1, _MOST_VALUES // width))

    # without Arrow's copy of the schema, which would hold a second copy of names, and types that a
    # reader must trust
    repeated = [
        field.name
        for field in schema
        if field.type in (pa.string(), pa.int64()) and field.name != "id"
    ]
    options: dict[str, Any] = {
        "store_schema": False,
        "write_page_checksum": True,
        "use_dictionary": repeated,
    }
    # a file in another could take much more memory than it has bytes
    options["compression"] = "snappy"
    # no texts
    options["write_statistics"] = [
        field.name for field in schema if pa.types.is_floating(field.type)
    ]
    with parquet.ParquetWriter(path, schema, **options) as writer:
        for start in range(0, len(run), rows_at_once):
            rows = slice(start, min(start + rows_at_once, len(run)))
            columns = [
                pa.array(values(rows), field.type)
                for field, values in zip(schema, table.values, strict=True)
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=rows_at_once)
        writer.add_key_value_metadata({KEY: facts})


class _Table:
    """A run as columns and facts.

    Attributes:
        fields: Name and type of every column.
        values: The values of each, as a function of a slice of rows.
        facts: JSON values; where a part of the run is a column, its name.
    """

    def __init__(self, run: saved.SavedRun) -> None:
        self.fields: list[pa.Field] = []
        self.values: list[Values] = []
        columns, groups = (getattr(each, "data", each) for each in (run.columns, run.groups))
        self.facts: Facts = {
            "format": FORMAT,
            "version": VERSION,
            "about": run.about,
            "bounds": run.bounds,
            "ids": self._column("id", run.ids),
            "columns": {name: self._column(name, values) for name, values in columns.items()},
            "groups": {
                name: self._column(f"group_{name}", labels) for name, labels in groups.items()
            },
            "attributes": None if run.attributes is None else self._attributes(run.attributes),
            "questions": [self._question(question) for question in run.questions],
            "attacks": [self._attack(attack) for attack in run.attacks],
            "records": None if run.records is None else _facts(run.records),
            "texts": None if run.texts is None else self._texts(run.texts),
            "baselines": run.baselines
            and _facts(run.baselines, attributes=_facts(run.baselines.attributes)),
            "history": {name: values.tolist() for name, values in run.history.items()},
            "rounds": {name: values.tolist() for name, values in run.rounds.items()},
        }

    def _add(self, name: str, kind: pa.DataType, values: Values, *, nullable: bool = False) -> str:
        """Add a column and return its name, with a prime for each column that was called the same
        before.
        """
        name = name.replace(ARROW_SCHEMA.decode(), "ARROW schema")  # in a footer, readers refuse it
        while any(field.name == name for field in self.fields):
            name += "'"
        self.fields.append(pa.field(name, kind, nullable))
        self.values.append(values)
        return name

    def _column(self, name: str, values: saved.ByExample) -> str:
        """Numbers or texts, [n]."""
        if values.dtype.kind in "UO":
            # Arrow ends arrays' texts at NUL
            return self._add(name, pa.string(), lambda rows: values[rows].tolist())
        return self._add(name, pa.from_numpy_dtype(values.dtype), lambda rows: values[rows])

    def _matrix(self, names: Sequence[str], values: saved.ByExample) -> list[str]:
        """Numbers, [n, k], a column for each of the k names."""

        def column(j: int) -> Values:
            return lambda rows: values[rows, j]

        return [
            self._add(name, pa.from_numpy_dtype(values.dtype), column(j))
            for j, name in enumerate(names)
        ]

    def _some(
        self,
        name: str,
        kind: pa.DataType,
        rows: np.ndarray,
        entries: Sequence[object] | np.ndarray | None,
    ) -> str | None:
        """An entry for each of these rows; the cells of all others are empty."""
        if entries is None:
            return None

        def values(part: slice) -> list[object]:
            cells: list[object] = [None] * (part.stop - part.start)
            for place in np.flatnonzero((rows >= part.start) & (rows < part.stop)).tolist():
                cells[rows[place] - part.start] = entries[place]
            return cells

        return self._add(name, kind, values, nullable=True)

    def _attributes(self, attributes: saved.Attributes) -> Facts:
        def errors(prefix: str, values: saved.ByExample | None) -> str | list[str] | None:
            if values is None:
                return None
            if len(attributes.names) <= _MOST_COLUMNS:
                return self._matrix([f"{prefix}_of_{name}" for name in attributes.names], values)
            kind = pa.list_(pa.from_numpy_dtype(values.dtype), len(attributes.names))

            def lists(rows: slice) -> pa.Array:
                return pa.FixedSizeListArray.from_arrays(
                    pa.array(np.ravel(values[rows])), type=kind
                )

            return self._add(f"{prefix}_of_attributes", kind, lists)

        return _facts(
            attributes,
            **{part: errors(part, getattr(attributes, part)) for part in ("error", "error_low")},
        )

    def _question(self, question: saved.QuestionRecord) -> Facts:
        columns = {}
        for part in ("divergence", "divergence_high"):
            names = [f"{part}_of_{question.name}_{answer}" for answer in question.answers]
            columns[part] = self._matrix(names, getattr(question, part))
        return _facts(question, **columns)

    def _attack(self, attack: saved.AttackRecord) -> Facts:
        if len(np.unique(attack.rows)) < len(attack.rows):
            raise ValueError(
                f"attack {attack.name!r} has several results for one example; save the mean of them"
            )
        columns = {
            part: self._some(f"{part}_by_{attack.name}", kind, attack.rows, getattr(attack, part))
            for part, kind in _OF_ATTACKS.items()
        }
        return _facts(attack, rows=None, **columns)

    def _texts(self, texts: saved.Texts) -> Facts:
        columns = {
            part: self._some(*column, texts.rows, getattr(texts, part))
            for part, column in _OF_TEXTS.items()
        }
        return _facts(texts, **columns)


def _facts(record: object, **changes: object) -> Facts:
    """The fields of a record as JSON values, some of them changed."""
    kept = {name: value for name, value in vars(record).items() if name not in changes}
    return {
        name: getattr(value, "tolist", lambda value=value: value)() for name, value in kept.items()
    } | changes


# ------------------------------------------------------------------ reading


def read_facts(source: pa.NativeFile) -> Facts | None:
    """The facts of a Parquet file; None where its metadata are not those of a run alone."""
    own = parquet.read_metadata(source).metadata or {}
    if own.keys() != {KEY} or len(own[KEY]) > _LARGEST_FACTS:
        return None
    facts = json.loads(own[KEY])
    return facts if isinstance(facts, dict) and facts.get("format") == FORMAT else None


def read_run(source: pa.NativeFile, facts: Facts) -> saved.SavedRun:
    """The run of an open file with these facts.

    In memory, unless the file has several row groups.
    """
    checked = {"page_checksum_verification": True, "pre_buffer": False}
    file = ColumnFile(source, [facts["ids"], *facts["groups"].values()], **checked)
    in_memory = file.num_row_groups <= 1

    def stored(names: str | list[str]) -> Any:
        array = StoredArray(file, names)
        return np.asarray(array) if in_memory else array

    def by_name(names: Mapping[str, str]) -> Mapping[str, np.ndarray]:
        arrays = {name: stored(column) for name, column in names.items()}
        return arrays if in_memory else StoredColumns(arrays)

    def question(asked: Facts) -> saved.QuestionRecord:
        both = {part: stored(asked[part]) for part in ("divergence", "divergence_high")}
        return saved.QuestionRecord(**{**asked, **both})

    def optional(read: Callable[..., Any], name: str, *more: object) -> Any:
        return None if facts[name] is None else read(file, facts[name], *more)

    return saved.SavedRun(
        about=facts["about"],
        ids=stored(facts["ids"]),
        columns=by_name(facts["columns"]),
        attributes=optional(_read_attributes, "attributes", stored),
        groups=by_name(facts["groups"]),
        records=optional(_read_records, "records"),
        texts=optional(_read_texts, "texts"),
        history={name: _numbers(values) for name, values in facts["history"].items()},
        bounds=facts["bounds"],
        attacks=[_read_attack(file, attack) for attack in facts["attacks"]],
        questions=[question(asked) for asked in facts["questions"]],
        rounds={name: _numbers(values) for name, values in facts["rounds"].items()},
        baselines=optional(_read_baselines, "baselines"),
    )


def _read_attributes(
    file: ColumnFile, facts: Facts, stored: Callable[[str | list[str]], saved.ByExample]
) -> saved.Attributes:
    width = len(facts["names"])

    def errors(columns: list[str] | str | None) -> Any:
        return (
            _read_lists(file, columns, width)
            if isinstance(columns, str)
            else columns and stored(columns)
        )

    arrays = {part: errors(facts[part]) for part in ("error", "error_low")}
    return saved.Attributes(**{**facts, **arrays})


def _read_lists(file: ColumnFile, name: str, width: int) -> np.ndarray:
    """A column of lists of one length, [n, width], in memory."""
    file.claim([name])
    parts = []
    for group in range(file.num_row_groups):
        lists = file.read_row_group(group, columns=[name]).column(name).combine_chunks()
        # raises where a list has another length
        fixed = lists.cast(pa.list_(lists.type.value_type, width))
        parts.append(fixed.flatten().to_numpy().reshape(len(lists), width))
    return np.concatenate(parts) if parts else np.empty((0, width), np.float32)


def _read_records(_: ColumnFile, facts: Facts) -> saved.Records:
    return saved.Records(
        np.asarray(facts["rows"], np.int64), np.asarray(facts["values"], np.float64)
    )


def _read_texts(file: ColumnFile, facts: Facts) -> saved.Texts:
    rows = np.asarray(facts["rows"], dtype=np.int64)
    words = StoredArray(file, facts["words"]).cells(rows, _STRINGS)
    fil, plis = (_lists(file, facts[part], rows) for part in ("fil", "plis"))
    return saved.Texts(rows, words, np.zeros((len(rows), 0)) if fil is None else fil, plis)


def _lists(file: ColumnFile, name: str | None, rows: np.ndarray) -> np.ndarray | None:
    """Lists of one length of these rows, float32 [m, T]; None where there is no such column."""
    return (
        None if name is None else np.asarray(StoredArray(file, name).cells(rows, _LIST), np.float32)
    )


def _read_attack(file: ColumnFile, facts: Facts) -> saved.AttackRecord:
    kept = {part: kind for part, kind in _OF_ATTACKS.items() if facts[part] is not None}
    found = {part: StoredArray(file, facts[part]).not_empty(kind) for part, kind in kept.items()}
    rows = found["predicted"][0]
    if any(not np.array_equal(places, rows) for places, _ in found.values()):
        raise ValueError(f"the columns of attack {facts['name']!r} are about different examples")
    return saved.AttackRecord(
        **{**facts, "rows": rows, **{part: values for part, (_, values) in found.items()}}
    )


def _numbers(values: list[object]) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{values[:3]} … must be numbers")
    return array


def _read_baselines(_: ColumnFile, facts: Facts) -> saved.Baselines:
    spread = saved.Spread(
        **{name: np.asarray(values, np.float64) for name, values in facts["attributes"].items()}
    )
    errors, by_class = (
        np.asarray(facts[name], np.float64) for name in ("errors", "attribute_errors")
    )
    by_class = by_class.reshape(len(by_class), len(spread.std))
    return saved.Baselines(spread, facts["levels"], facts["knows"], errors, by_class)

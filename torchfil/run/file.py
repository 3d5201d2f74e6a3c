"""A saved run as one Parquet file; docs/run-file.md describes its columns.

What has an entry for an example is a column, and everything else is one JSON document in the file's metadata. Just
before the footer stand the 64 hexadecimal digits of the SHA-256 of all other bytes: readers of Parquet find the footer
from the file's end and the columns by their places, so that they do not look there. Page checksums guard what is read
later, and let other programs check what they read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchfil.run.saved_run import (
    AttackRecord,
    Attributes,
    Pictures,
    QuestionRecord,
    SavedRun,
    Spread,
    Texts,
    Yardsticks,
)
from torchfil.run.stored import ByExample, StoredArray, StoredColumns
from torchfil.utils.csv_files import visible
from torchfil.utils.errors import RunFileError
from torchfil.utils.files import replaced_when_complete, sha256, update_digest

__all__ = ["FORMAT", "ROWS_AT_ONCE", "VERSION", "load", "save"]

FORMAT, VERSION = "torchfil-run", 1
ROWS_AT_ONCE = 2**18  # examples of a row group; a file of one row group is read into memory
KEY = b"torchfil"  # of the JSON document in the metadata
_MAGIC, _CHECKSUM = b"PAR1", b"torchfil-sha256:"
_CHECKSUM_SIZE = len(_CHECKSUM) + 64
_LARGEST_FACTS = 2**22  # bytes of JSON
_LARGEST_FOOTER = 2**26
_MOST_COLUMNS = 64  # attributes that have a column each
_OF_ATTACKS = ("predicted", "achieved", "violated", "blind")
_MOST_VALUES = 2**27  # errors of attributes in a row group


def save(run: SavedRun, path: str | os.PathLike[str], *, rows_at_once: int = ROWS_AT_ONCE) -> Path:
    """Write a run; the file is replaced only when complete, and only its owner may read it (mode 0600).

    Args:
        run: What to write.
        path: The file; ``run.parquet`` by custom.
        rows_at_once: Examples of a row group.

    Returns:
        The path written.

    Raises:
        RunFileError: Names and settings take more than 4 MiB.
    """
    import pyarrow as pa
    from pyarrow import parquet

    table = _Table(run)
    facts = json.dumps(table.facts, separators=(",", ":")).encode()
    if len(facts) > _LARGEST_FACTS:
        raise RunFileError(
            f"{path}: names and settings take {len(facts):,} bytes of JSON, and {_LARGEST_FACTS:,} are allowed; "
            "shorten the title and the names of attributes, groups, questions and answers"
        )
    schema = pa.schema([pa.field(name, kind, nullable) for name, (kind, _, nullable) in table.columns.items()])
    width = 1 if run.attributes is None else max(1, len(run.attributes.names))
    rows_at_once = min(rows_at_once, max(1, _MOST_VALUES // width))
    options = {"store_schema": False, "write_page_checksum": True, "compression": "zstd"}
    with replaced_when_complete(path) as temporary:
        with parquet.ParquetWriter(temporary, schema, **options) as writer:
            for start in range(0, len(run), rows_at_once):
                rows = slice(start, min(start + rows_at_once, len(run)))
                arrays = [values(rows) for _, values, _ in table.columns.values()]
                writer.write_table(pa.table(arrays, schema=schema), row_group_size=rows_at_once)
            writer.add_key_value_metadata({KEY: facts})
        with open(temporary, "rb+") as file:
            _insert_checksum(file)
    return Path(path)


def load(path: str | os.PathLike[str]) -> SavedRun:
    """Read a run. Safe on files from others: nothing in it is executed.

    Every byte is checked. The columns of a run of many examples stay on the disk until they are asked for.

    Raises:
        FileNotFoundError: There is no such file.
        RunFileError: It is no saved run, is cut short or damaged, or was written by another version.
    """
    import pyarrow as pa

    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"no file {where}; a run is saved by engine.save_run or `torchfil demo`")
    if where.is_dir():
        raise RunFileError(f"{where} is a folder, not a saved run; name the file in it, such as run.parquet")
    try:
        file = pa.OSFile(str(where))  # one handle: the file may be replaced meanwhile
        _check_whole(file, where)
        return _read(file, where)
    except (RunFileError, MemoryError):
        raise
    except Exception as error:  # whatever a file of others makes the readers of JSON and Parquet raise
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        text = visible(" ".join(f"{kind}{error}".split()))
        raise RunFileError(f"{where} is damaged ({text}). Save the run again.") from error


# ------------------------------------------------------------------ integrity


def _insert_checksum(file: IO[bytes]) -> None:
    """Put the SHA-256 of a Parquet file in front of its footer."""
    file.seek(0)
    digest = sha256(file)
    file.seek(-8, os.SEEK_END)
    footer = int.from_bytes(file.read(4), "little") + 8
    file.seek(-footer, os.SEEK_END)
    content = file.read()
    file.seek(-footer, os.SEEK_END)
    file.write(_CHECKSUM + digest.encode() + content)


def _check_whole(file: Any, where: Path) -> None:
    """Raise unless this is a run file of which no byte has changed."""
    size = file.size()
    if size == 0:
        raise RunFileError(f"{where} is empty. Copy it again.")
    if file.read(4) != _MAGIC[:size]:
        raise RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
    file.seek(max(0, size - 8))
    tail = file.read()
    footer = int.from_bytes(tail[:4], "little") + 8
    if tail[4:] != _MAGIC or size < 12:
        raise RunFileError(f"{where} is cut short: it holds {size:,} bytes of a longer file. Copy it again.")
    data = size - footer - _CHECKSUM_SIZE
    if footer > _LARGEST_FOOTER or data < len(_MAGIC):
        raise RunFileError(f"{where} is damaged, or not a saved run of torchfil; a run is saved by engine.save_run")
    file.seek(data)
    found = file.read(_CHECKSUM_SIZE)
    if not found.startswith(_CHECKSUM):
        raise RunFileError(
            f"{where} is not a saved run of torchfil, or another program changed it; a run is saved by engine.save_run"
        )
    digest = hashlib.sha256()
    file.seek(0)
    update_digest(digest, file, data)
    file.seek(data + _CHECKSUM_SIZE)
    update_digest(digest, file)
    if found != _CHECKSUM + digest.hexdigest().encode():
        raise RunFileError(f"{where} is damaged: its checksum does not fit its content. Save the run again.")


# ------------------------------------------------------------------ writing


class _Table:
    """A run as columns and facts.

    Attributes:
        columns: By name its Arrow type, its values as a function of a slice of rows, and whether cells may be empty.
        facts: Everything else, as JSON values; columns are named in it.
    """

    def __init__(self, run: SavedRun) -> None:
        import pyarrow as pa

        self._count = len(run)
        self.columns: dict[str, tuple[Any, Callable[[slice], Any], bool]] = {}
        if run.ids.dtype.kind == "U":
            self._add("id", pa.string(), lambda rows: pa.array(run.ids[rows].tolist(), pa.string()))
        else:
            self._add("id", pa.int64(), lambda rows: pa.array(run.ids[rows], pa.int64()))
        arrays, labels = (getattr(each, "arrays", each) for each in (run.columns, run.groups))
        self.facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "about": run.about,
            "bounds": run.bounds,
            "columns": {name: self._numbers(name, values) for name, values in arrays.items()},
            "groups": {name: self._labels(f"group_{name}", values) for name, values in labels.items()},
            "attributes": None if run.attributes is None else self._attributes(run.attributes),
            "questions": [self._question(question) for question in run.questions],
            "attacks": [self._attack(attack) for attack in run.attacks],
            "pictures": None if run.pictures is None else self._pictures(run.pictures),
            "texts": None if run.texts is None else self._texts(run.texts),
            "yardsticks": None if run.yardsticks is None else _baselines(run.yardsticks),
            "history": {name: values.tolist() for name, values in run.history.items()},
            "rounds": {name: values.tolist() for name, values in run.rounds.items()},
        }

    def _add(self, name: str, kind: Any, values: Callable[[slice], Any], *, nullable: bool = False) -> str:
        """Add a column, and return its name, which gets a prime for each column of that name before it."""
        while name in self.columns:
            name += "'"
        self.columns[name] = kind, values, nullable
        return name

    def _numbers(self, name: str, values: ByExample, column: int | None = None) -> str:
        """A column of numbers, [n], or one of [n, k]."""
        import pyarrow as pa

        kind = pa.from_numpy_dtype(values.dtype)
        return self._add(
            name, kind, lambda rows: pa.array(values[rows] if column is None else values[rows, column], kind)
        )

    def _labels(self, name: str, values: ByExample) -> str:
        import pyarrow as pa

        return self._add(name, pa.string(), lambda rows: pa.array(values[rows].tolist(), pa.string()))

    def _some(self, name: str, kind: Any, rows: np.ndarray, entries: Any) -> str:
        """A column with an entry for some examples, empty for all others."""
        import pyarrow as pa

        def values(part: slice) -> Any:
            cells: list[Any] = [None] * (part.stop - part.start)
            for place in np.flatnonzero((rows >= part.start) & (rows < part.stop)).tolist():
                cells[rows[place] - part.start] = entries[place]
            return pa.array(cells, kind)

        return self._add(name, kind, values, nullable=True)

    def _attributes(self, attributes: Attributes) -> dict[str, Any]:
        import pyarrow as pa

        def columns(prefix: str, values: ByExample) -> list[str] | str:
            if len(attributes.names) <= _MOST_COLUMNS:
                return [self._numbers(f"{prefix}_of_{name}", values, j) for j, name in enumerate(attributes.names)]
            width = len(attributes.names)
            kind = pa.list_(pa.from_numpy_dtype(values.dtype), width)

            def lists(rows: slice) -> Any:
                flat = pa.array(np.ascontiguousarray(values[rows]).reshape(-1))
                return pa.FixedSizeListArray.from_arrays(flat, width).cast(kind)

            return self._add(f"{prefix}_of_attributes", kind, lists)

        return {
            "names": attributes.names,
            "units": attributes.units,
            "pixels": None if attributes.pixels is None else attributes.pixels.tolist(),
            "error": columns("error", attributes.error),
            "error_low": None if attributes.error_low is None else columns("error_low", attributes.error_low),
        }

    def _question(self, question: QuestionRecord) -> dict[str, Any]:
        def columns(prefix: str, values: ByExample) -> list[str]:
            names = (f"{prefix}_of_{question.name}_{answer}" for answer in question.answers)
            return [self._numbers(name, values, place) for place, name in enumerate(names)]

        return {
            **{name: getattr(question, name) for name in ("name", "answers", "complete", "law")},
            "divergence": columns("divergence", question.divergence),
            "divergence_high": columns("divergence_high", question.divergence_high),
        }

    def _attack(self, attack: AttackRecord) -> dict[str, Any]:
        import pyarrow as pa

        if len(np.unique(attack.rows)) < len(attack.rows):
            raise ValueError(f"attack {attack.name!r} has several results for one example; save the mean of them")
        facts = {name: getattr(attack, name) for name in ("name", "threat_model", "testable", "untestable")}
        for part in _OF_ATTACKS:
            values = getattr(attack, part)
            if values is not None:
                kind = pa.bool_() if part == "violated" else pa.float64()
                facts[part] = self._some(f"{part}_by_{attack.name}", kind, attack.rows, values.tolist())
        return facts

    def _pictures(self, pictures: Pictures) -> dict[str, Any]:
        import pyarrow as pa

        images, maps, rows = pictures.images, pictures.maps, pictures.rows
        facts = {"rows": rows.tolist(), "shape": list(images.shape[1:])}
        facts["images"] = self._some("picture", pa.binary(), rows, [image.tobytes() for image in images])
        if maps is not None:
            facts["maps"] = self._some("picture_plis", pa.list_(pa.float32()), rows, maps.reshape(len(rows), -1))
        return facts

    def _texts(self, texts: Texts) -> dict[str, Any]:
        import pyarrow as pa

        facts: dict[str, Any] = {"rows": texts.rows.tolist()}
        facts["words"] = self._some("words", pa.list_(pa.string()), texts.rows, texts.words)
        facts["fil"] = self._some("words_fil", pa.list_(pa.float32()), texts.rows, texts.fil)
        if texts.plis is not None:
            facts["plis"] = self._some("words_plis", pa.list_(pa.float32()), texts.rows, texts.plis)
        return facts


def _baselines(baselines: Yardsticks) -> dict[str, Any]:
    return {
        "examples": baselines.examples,
        "inputs": {name: float(value) for name, value in vars(baselines.inputs).items()},
        "attributes": {name: values.tolist() for name, values in vars(baselines.attributes).items()},
        "levels": baselines.levels,
    }


# ------------------------------------------------------------------ reading


def _read(source: Any, where: Path) -> SavedRun:
    """The run in a file that is whole; in memory, unless it has several row groups."""
    from pyarrow import parquet

    # the metadata by themselves: with a stranger's ARROW:schema, opening the file would build types that it names
    metadata = parquet.read_metadata(source)
    own = metadata.metadata or {}
    if own.keys() != {KEY} or len(own[KEY]) > _LARGEST_FACTS:
        raise RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
    facts = json.loads(own[KEY])
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise RunFileError(f"{where} is not a saved run of torchfil; a run is saved by engine.save_run")
    if facts.get("version") != VERSION:
        raise RunFileError(
            f"{where} is of run format {visible(str(facts.get('version')))}; this torchfil reads format {VERSION}. "
            "Install the torchfil that wrote it, or save the run again with this one."
        )
    file = parquet.ParquetFile(
        source,
        metadata=metadata,
        read_dictionary=list(facts["groups"].values()),
        page_checksum_verification=True,
        pre_buffer=False,
    )
    in_memory = file.num_row_groups <= 1

    def stored(names: Any) -> Any:
        array = StoredArray(file, names)
        return np.asarray(array) if in_memory else array

    def by_name(names: Mapping[str, str]) -> Mapping[str, np.ndarray]:
        arrays = {name: stored(column) for name, column in names.items()}
        return arrays if in_memory else StoredColumns(arrays)

    return SavedRun(
        about=facts["about"],
        ids=stored("id"),
        columns=by_name(facts["columns"]),
        attributes=_read_attributes(file, facts["attributes"], stored),
        groups=by_name(facts["groups"]),
        pictures=_read_pictures(file, facts["pictures"]),
        texts=_read_texts(file, facts["texts"]),
        history={name: np.asarray(values) for name, values in facts["history"].items()},
        bounds=facts["bounds"],
        attacks=[_read_attack(file, attack) for attack in facts["attacks"]],
        questions=[
            QuestionRecord(
                asked["name"],
                asked["answers"],
                asked["complete"],
                stored(asked["divergence"]),
                stored(asked["divergence_high"]),
                asked["law"],
            )
            for asked in facts["questions"]
        ],
        rounds={name: np.asarray(values) for name, values in facts["rounds"].items()},
        yardsticks=_read_baselines(facts["yardsticks"]),
    )


def _read_attributes(file: Any, facts: dict[str, Any] | None, stored: Callable[[Any], Any]) -> Attributes | None:
    if facts is None:
        return None

    def errors(columns: list[str] | str) -> ByExample:
        return _read_lists(file, columns, len(facts["names"])) if isinstance(columns, str) else stored(columns)

    pixels = None if facts["pixels"] is None else np.asarray(facts["pixels"], dtype=np.int64)
    low = None if facts["error_low"] is None else errors(facts["error_low"])
    return Attributes(facts["names"], facts["units"], errors(facts["error"]), low, pixels)


def _read_lists(file: Any, name: str, width: int) -> np.ndarray:
    """A column of lists, [n, k], in memory; it raises where a list has another length."""
    import pyarrow as pa

    parts = []
    for group in range(file.num_row_groups):
        lists = file.read_row_group(group, columns=[name]).column(name).combine_chunks()
        fixed = lists.cast(pa.list_(lists.type.value_type, width))
        parts.append(fixed.flatten().to_numpy().reshape(len(lists), width))
    return np.concatenate(parts) if parts else np.empty((0, width), np.float32)


def _read_pictures(file: Any, facts: dict[str, Any] | None) -> Pictures | None:
    if facts is None:
        return None
    rows, shape = np.asarray(facts["rows"], dtype=np.int64), tuple(facts["shape"])
    images = b"".join(StoredArray(file, facts["images"]).cells(rows))
    maps = StoredArray(file, facts["maps"]).cells(rows) if "maps" in facts else None
    return Pictures(
        rows,
        np.frombuffer(images, np.uint8).reshape(len(rows), *shape),
        None if maps is None else np.asarray(maps, dtype=np.float32).reshape(len(rows), *shape[:2]),
    )


def _read_texts(file: Any, facts: dict[str, Any] | None) -> Texts | None:
    if facts is None:
        return None
    rows = np.asarray(facts["rows"], dtype=np.int64)
    words, fil, plis = (
        StoredArray(file, facts[part]).cells(rows) if part in facts else [] for part in ("words", "fil", "plis")
    )
    return Texts(rows, words, np.asarray(fil, np.float32), np.asarray(plis, np.float32) if "plis" in facts else None)


def _read_attack(file: Any, facts: dict[str, Any]) -> AttackRecord:
    found = {part: StoredArray(file, facts[part]).not_empty() for part in _OF_ATTACKS if part in facts}
    rows = found["predicted"][0]
    if any(not np.array_equal(places, rows) for places, _ in found.values()):
        raise ValueError(f"the columns of attack {facts['name']!r} are about different examples")
    values: dict[str, Any] = {part: entries for part, (_, entries) in found.items()}
    values |= {name: facts[name] for name in ("name", "threat_model", "testable", "untestable")}
    return AttackRecord(rows=rows, **values)


def _read_baselines(facts: dict[str, Any] | None) -> Yardsticks | None:
    if facts is None:
        return None
    inputs, attributes = (
        Spread(**{name: np.asarray(values, dtype=np.float64) for name, values in facts[part].items()})
        for part in ("inputs", "attributes")
    )
    return Yardsticks(facts["examples"], inputs, attributes, facts["levels"])

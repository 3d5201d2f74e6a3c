"""Run files for tests: all values compared, and files that somebody edited."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from torchfil.run.columns import KEY
from torchfil.run.file import _insert_checksum
from torchfil.run.stored import StoredArray
from torchfil.utils.tables import as_texts


def same(a: Any, b: Any) -> bool:
    """Whether two runs, or parts of them, hold the same values; one may be on the disk."""
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, np.ndarray | StoredArray):
        a, b = np.asarray(a), np.asarray(b)
        # texts from files are Python's
        a, b = (as_texts(each) if each.dtype.kind == "U" else each for each in (a, b))
        alike = a.dtype == b.dtype
        return alike and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def facts_of(path: Path) -> dict[str, Any]:
    """The JSON document of a run file."""
    return json.loads(parquet.read_metadata(path).metadata[KEY])


def edited(path: Path, facts: Mapping[str, Any] | bytes | None = None, /, **columns: Any) -> Path:
    """The run file with other facts or columns, and a checksum that fits."""
    table = parquet.read_table(path)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    document = (
        facts
        if isinstance(facts, bytes)
        else json.dumps({**facts_of(path), **(facts or {})}).encode()
    )
    return with_footer(path, table, {KEY: document})


def with_footer(
    path: Path, table: pa.Table, metadata: Mapping[bytes, bytes], **options: Any
) -> Path:
    """A Parquet file with these metadata, and a checksum that fits."""
    with parquet.ParquetWriter(path, table.schema, **{"store_schema": False, **options}) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(dict(metadata))
    with open(path, "rb+") as file:
        _insert_checksum(file)
    return path

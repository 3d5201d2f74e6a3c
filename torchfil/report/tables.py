"""The table of all examples as files: CSV, and Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from torchfil.report.saved_run import SavedRun
from torchfil.report.status import NOT_MEASURED, status_of

__all__ = ["columns_of", "write_csv", "write_parquet"]

STATUS = np.array(["measured", "lower bound", "not measured"])
BLANK_WHERE_UNKNOWN = ("fil", "fil_error", "sampling_error", "mse_bound", "mse_bound_low")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
CHUNK = 50_000


def columns_of(run: SavedRun) -> dict[str, np.ndarray]:
    """Name ↦ [n]: id, status, the run's columns, groups and ± of attributes.

    What was not measured is NaN (an empty cell), not zero.
    """
    status = status_of(run)
    unknown = status == NOT_MEASURED
    table: dict[str, np.ndarray] = {"id": run.ids, "status": STATUS[status]}
    for name, values in run.columns.items():
        blank = name in BLANK_WHERE_UNKNOWN
        table[name] = np.where(unknown, np.nan, values.astype(np.float64)) if blank else values
    table |= {f"group {name}": labels.astype(str) for name, labels in run.groups.items()}
    if run.attributes is not None:
        for j, name in enumerate(run.attributes.names):
            table[f"error of {name}"] = np.where(unknown, np.nan, run.attributes.error[:, j].astype(np.float64))
    return table


def write_csv(run: SavedRun, path: Path) -> None:
    """One line per example, UTF-8, numbers with seven significant digits.

    A text that a spreadsheet would run as a formula gets a leading apostrophe. Parquet keeps everything as it is.
    """
    table = columns_of(run)
    with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_inert(name) for name in table])
        for start in range(0, len(run.ids), CHUNK):
            writer.writerows(zip(*(_cells(values[start : start + CHUNK]) for values in table.values()), strict=True))


def write_parquet(run: SavedRun, path: Path) -> str | None:
    """The same with its types. Returns why it was not written, or None."""
    if find_spec("pyarrow") is None:
        return "leakage.parquet was not written: pyarrow is not installed."
    import pyarrow
    from pyarrow import parquet

    table = columns_of(run)
    arrays = {
        name: pyarrow.array(v.tolist() if v.dtype.kind == "U" else v, from_pandas=True) for name, v in table.items()
    }
    parquet.write_table(pyarrow.table(arrays), path)
    return None


def _cells(values: np.ndarray) -> list[Any]:
    if values.dtype.kind == "U":
        return [_inert(text) for text in values.tolist()]
    if values.dtype.kind != "f":
        return values.tolist()
    texts = ("%.7g " * len(values) % tuple(values.tolist())).split()
    for i in np.flatnonzero(np.isnan(values)).tolist():
        texts[i] = ""
    return texts


def _inert(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) else text

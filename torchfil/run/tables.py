"""The table of all examples as a CSV file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchfil.run.baselines import BLANK_WHERE_UNKNOWN, NOT_MEASURED, status_of
from torchfil.run.saved_run import SavedRun
from torchfil.utils.text import write_csv_parts

__all__ = ["columns_of", "write_leakage_csv"]

STATUS = np.array(["measured", "lower bound", "not measured"])
AT_ONCE = 2**18  # rows that are written together


def columns_of(run: SavedRun) -> dict[str, np.ndarray]:
    """Name ↦ [n]: id, status, the run's columns, groups, and "least error of" every attribute.

    That is the lower end of the error's interval, or the error itself where the end is not known. What was not
    measured is NaN (an empty cell), not zero.
    """
    status = status_of(run)
    unknown = status == NOT_MEASURED
    table: dict[str, np.ndarray] = {"id": np.asarray(run.ids), "status": STATUS[status]}
    for name, values in run.columns.items():
        blank = name in BLANK_WHERE_UNKNOWN
        table[name] = np.where(unknown, np.nan, values.astype(np.float64)) if blank else values
    table |= {f"group {name}": labels.astype(str) for name, labels in run.groups.items()}
    if run.attributes is not None:
        for j, name in enumerate(run.attributes.names):
            errors = np.asarray(run.attributes.shown[:, j], dtype=np.float64)
            table[f"least error of {name}"] = np.where(unknown, np.nan, errors)
    return table


def write_leakage_csv(run: SavedRun, path: Path) -> None:
    """One line per example, numbers with seven significant digits; see :func:`torchfil.utils.text.write_csv`.

    Texts that a spreadsheet would compute get a leading apostrophe. The run file keeps everything as it is.
    """
    write_csv_parts(path, map(columns_of, run.slices(AT_ONCE)), digits=7)

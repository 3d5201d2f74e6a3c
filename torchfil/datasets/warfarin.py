"""Warfarin doses: the consortium's spreadsheet, or the scaled table that Yeom et al. made from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchfil.datasets.folders import DataFormatError, Folder, content, data_folder, not_found
from torchfil.datasets.tasks import TabularTask, levels_of, one_hot

__all__ = ["iwpc", "iwpc_task", "read_consortium_rows"]

Rows = Sequence[Mapping[str, str]]

_SCALED = "iwpc-scaled.csv"
_SHEET = "Subject Data"
_NOMINAL = ("cyp2c9", "race", "vkorc1")
_INDUCERS = ("Carbamazepine (Tegretol)", "Phenytoin (Dilantin)", "Rifampin or Rifampicin")
_RACES = {"white": "white", "asian": "asian", "black or african american": "black"}
_GENOTYPES = {"G/G": "CC", "A/G": "CT", "G/A": "CT", "A/A": "TT"}  # of the other strand, as in Yeom et al.'s table


def iwpc(folder: Folder = None, *, seed: int = 0) -> TabularTask:
    """Warfarin doses (3,855 + 964 patients, 14 columns), as Hannun et al. 2021 prepare the data of Yeom et al. 2018.

    Columns are in alphabetical order. Race, cyp2c9 and vkorc1 are one-hot without their first level. Age (in decades),
    height, weight and the dose (the square root of mg per week) are scaled to mean 0 and deviation 1. Amiodarone and
    decr (a drug that induces enzymes) are 0 or 1.

    The papers use the table of Yeom et al., ``iwpc/iwpc-scaled.csv``, gzipped or not. Without it, the consortium's own
    spreadsheet is read: ``iwpc/PS206767-553247439.xls`` (needs xlrd), or the same saved as ``.xlsx`` (openpyxl) or
    ``.csv``. Its rows are prepared in the same way. Rows with a missing entry are left out, and a drug without a note
    counts as not taken, so the rows are not exactly the papers' 4,819.

    Args:
        folder: The folder with one of these.
        seed: The seed of the random split, with 80 % for training; 0 is the split of the authors' code.
    """
    where = data_folder(folder) / "iwpc"
    if (where / _SCALED).exists() or (where / f"{_SCALED}.gz").exists():
        return iwpc_task(list(csv.DictReader(io.StringIO(content("iwpc", where / _SCALED).decode()))), seed)
    for path in sorted((*where.glob("PS206767-*.xls*"), *where.glob("PS206767-*.csv"))):
        return iwpc_task(read_consortium_rows(path), seed)
    names = ("PS206767-553247439.xls", _SCALED, f"{_SCALED}.gz")
    raise not_found("iwpc", tuple(where / name for name in names))


def iwpc_task(rows: Rows, seed: int) -> TabularTask:
    """The task of :func:`iwpc` from the rows of such a table."""
    names = sorted(set(rows[0]) - {"dose"})
    levels = {name: levels_of(rows, name) for name in _NOMINAL}
    columns, attributes, inputs = one_hot(rows, names, levels, {name: own[0] for name, own in levels.items()})
    targets = np.asarray([row["dose"] for row in rows], dtype=float)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()
    train, test = np.split(order, [int(0.8 * len(rows))])
    return TabularTask(inputs[train], targets[train], inputs[test], targets[test], columns, attributes, levels)


def read_consortium_rows(path: Path) -> list[dict[str, str]]:
    """The complete patients of the consortium's spreadsheet, with the fields and the scale of Yeom et al.'s table.

    Args:
        path: A ``.xls``, ``.xlsx`` or ``.csv`` file; in a workbook, the sheet "Subject Data" is read.

    Raises:
        DataFormatError: A column is missing, or no row is complete.
        ImportError: The package for this kind of workbook is not installed.
    """
    readers = {".xls": _from_xls, ".xlsx": _from_xlsx, ".csv": _from_csv}
    if path.suffix not in readers:
        raise DataFormatError(f"{path} is not a .xls, .xlsx or .csv file")
    header, *lines = readers[path.suffix](path)
    columns = _columns(header)
    missing = sorted({*columns.values(), *_INDUCERS} - set(header))
    if missing:
        raise DataFormatError(f"{path} has no columns {missing}; is it the sheet {_SHEET!r} of the consortium's file?")

    entries = [dict(zip(header, line, strict=False)) for line in lines]
    patients = [patient for entry in entries if (patient := _patient(entry, columns)) is not None]
    if not patients:
        raise DataFormatError(f"{path} has no patient with all of {sorted(columns.values())}")
    return _scaled(patients)


def _columns(header: Sequence[str]) -> dict[str, str]:
    """The spreadsheet's column of each field; the name of the race column differs between copies."""
    return {
        "race": "Race (OMB)" if "Race (OMB)" in header else "Race",
        "age": "Age",
        "height": "Height (cm)",
        "weight": "Weight (kg)",
        "amiodarone": "Amiodarone (Cordarone)",
        "cyp2c9": "CYP2C9 consensus",
        "vkorc1": "VKORC1 -1639 consensus",
        "dose": "Therapeutic Dose of Warfarin",
    }


def _patient(entry: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str] | None:
    """One patient with the fields of Yeom et al.; None if an entry is missing or has an unknown level."""
    raw = {field: entry.get(column, "").strip() for field, column in columns.items()}
    try:
        patient = {
            "race": _RACES[raw["race"].lower()],
            "age": str(float(raw["age"].partition("-")[0].strip().rstrip("+")) // 10),  # "60 - 69", "90+"
            "height": str(float(raw["height"])),
            "weight": str(float(raw["weight"])),
            "amiodarone": _taken(raw["amiodarone"]),
            "decr": max(_taken(entry.get(drug, "").strip()) for drug in _INDUCERS),
            "cyp2c9": raw["cyp2c9"].replace("*", "").replace("/", ""),  # "*1/*3" is 13
            "vkorc1": _GENOTYPES[raw["vkorc1"]],
            "dose": str(float(raw["dose"]) ** 0.5),
        }
    except (KeyError, ValueError):
        return None
    return patient if patient["cyp2c9"] in ("11", "12", "13", "22", "23", "33") else None


def _taken(noted: str) -> str:
    """Whether a drug is noted as taken; a drug without a note counts as not taken."""
    return str(int(noted in ("1", "1.0")))


def _scaled(patients: list[dict[str, str]]) -> list[dict[str, str]]:
    for name in ("age", "height", "weight", "dose"):
        values = np.asarray([float(patient[name]) for patient in patients])
        spread = values.std() or 1.0
        for patient, value in zip(patients, (values - values.mean()) / spread, strict=True):
            patient[name] = repr(float(value))
    return patients


def _texts(rows: Any) -> list[list[str]]:
    return [["" if value is None else str(value) for value in row] for row in rows]


def _from_csv(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline="")))


def _from_xls(path: Path) -> list[list[str]]:
    try:
        import xlrd
    except ImportError as error:
        raise ImportError(f"{path} needs xlrd, which is not installed: pip install 'torchfil[data]'") from error
    sheet = xlrd.open_workbook(path).sheet_by_name(_SHEET)
    return _texts(sheet.row_values(number) for number in range(sheet.nrows))


def _from_xlsx(path: Path) -> list[list[str]]:
    try:
        import openpyxl
    except ImportError as error:
        raise ImportError(f"{path} needs openpyxl, which is not installed: pip install 'torchfil[data]'") from error
    return _texts(openpyxl.load_workbook(path, read_only=True, data_only=True)[_SHEET].values)

"""Warfarin doses and UCI Adult, as tasks with named attributes for linear models."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchfil.datasets.files import DataFormatError, Folder, content, data_folder, not_found
from torchfil.datasets.files import download as download_files

Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TabularTask:
    """A task on named attributes: numerical ones in one column each, nominal ones one-hot with one level dropped.

    Attributes:
        train_inputs: [n, d].
        train_targets: [n].
        test_inputs: [m, d].
        test_targets: [m].
        columns: The d columns' names: ``"age"`` for a numerical attribute, ``"vkorc1=CT"`` for a nominal one's level.
        attributes: Each attribute's columns.
        levels: Each nominal attribute's levels, including the one without a column (all zeros).
    """

    train_inputs: np.ndarray
    train_targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    columns: tuple[str, ...]
    attributes: dict[str, tuple[int, ...]]
    levels: dict[str, tuple[str, ...]]

    def encode(self, attribute: str, level: str) -> np.ndarray:
        """The entries of the attribute's columns, [its columns], for this level; zeros for the dropped level.

        Raises:
            ValueError: There is no such nominal attribute or level.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is not a nominal attribute; those are {list(self.levels)}")
        if level not in self.levels[attribute]:
            raise ValueError(f"{level!r} is not a level of {attribute!r}; those are {list(self.levels[attribute])}")
        names = [self.columns[column] for column in self.attributes[attribute]]
        return np.asarray([name == f"{attribute}={level}" for name in names], dtype=float)

    def level_numbers(self, attribute: str, inputs: np.ndarray) -> np.ndarray:
        """The index in ``levels[attribute]`` of every row's level, [n]: the inverse of :meth:`encode`.

        Raises:
            ValueError: There is no such nominal attribute, or a row's columns do not encode a level.
        """
        if attribute not in self.levels:
            raise ValueError(f"{attribute!r} is not a nominal attribute; those are {list(self.levels)}")
        codes = np.stack([self.encode(attribute, level) for level in self.levels[attribute]])  # [levels, its columns]
        values = inputs[:, list(self.attributes[attribute])]
        equal = (values[:, None, :] == codes).all(axis=2)  # [n, levels]
        if not equal.any(axis=1).all():
            wrong = int(equal.any(axis=1).argmin())
            raise ValueError(
                f"row {wrong} has {values[wrong].tolist()} for {attribute!r}, which does not encode a level"
            )
        return equal.argmax(axis=1)


def levels_of(rows: Sequence[Mapping[str, str]], name: str) -> tuple[str, ...]:
    """The levels of a nominal attribute, sorted."""
    return tuple(sorted({row[name] for row in rows}))


def one_hot(
    rows: Sequence[Mapping[str, str]],
    names: Sequence[str],
    levels: Mapping[str, tuple[str, ...]],
    dropped: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], np.ndarray]:
    """The columns' names, each attribute's columns and the entries, [n, d]; attributes without levels are numbers."""
    columns: list[str] = []
    attributes: dict[str, tuple[int, ...]] = {}
    parts = []
    for name in names:
        values = np.asarray([row[name] for row in rows])
        if name in levels:
            unknown = sorted(set(values.tolist()) - set(levels[name]))
            if unknown:
                raise ValueError(f"the training set has no {name} {unknown}; its levels are {list(levels[name])}")
            kept = [level for level in levels[name] if level != dropped[name]]
            titles, part = [f"{name}={level}" for level in kept], (values[:, None] == np.asarray(kept)).astype(float)
        else:
            titles, part = [name], values.astype(float)[:, None]
        parts.append(part)
        attributes[name] = tuple(range(len(columns), len(columns) + len(titles)))
        columns += titles
    return tuple(columns), attributes, np.concatenate(parts, axis=1)


_SCALED = "iwpc-scaled.csv"
_NOMINAL = ("cyp2c9", "race", "vkorc1")
_COLUMNS = {  # of the consortium's sheet
    "age": "Age",
    "height": "Height (cm)",
    "weight": "Weight (kg)",
    "amiodarone": "Amiodarone (Cordarone)",
    "cyp2c9": "CYP2C9 consensus",
    "vkorc1": "VKORC1 -1639 consensus",
    "dose": "Therapeutic Dose of Warfarin",
}
_INDUCERS = ("Carbamazepine (Tegretol)", "Phenytoin (Dilantin)", "Rifampin or Rifampicin")
_RACES = {"white": "white", "asian": "asian", "black or african american": "black"}
_GENOTYPES = {"G/G": "CC", "A/G": "CT", "G/A": "CT", "A/A": "TT"}  # of the other strand, as in Yeom et al.'s table


def iwpc(folder: Folder = None, *, seed: int = 0) -> TabularTask:
    """Warfarin doses (3,855 + 964 patients, 14 columns), as Hannun et al. 2021 prepare the data of Yeom et al. 2018.

    Columns are in alphabetical order. Race, cyp2c9 and vkorc1 are one-hot without their first level. Age (in decades),
    height, weight and the dose (the square root of mg per week) are scaled to mean 0 and deviation 1. Amiodarone and
    decr (a drug that induces enzymes) are 0 or 1.

    The papers use the table of Yeom et al., ``iwpc/iwpc-scaled.csv``, gzipped or not. Without it, the consortium's own
    spreadsheet is read, with its sheet "Subject Data" saved as ``iwpc/PS206767-553247439.csv``. Its rows are prepared
    in the same way. Rows with a missing entry are left out, and a drug without a note counts as not taken, so the rows
    are not exactly the papers' 4,819.

    Args:
        folder: The folder with one of these.
        seed: The seed of the random split, with 80 % for training; 0 is the split of the authors' code.
    """
    where = data_folder(folder) / "iwpc"
    if (where / _SCALED).exists() or (where / f"{_SCALED}.gz").exists():
        return iwpc_task(list(csv.DictReader(io.StringIO(content("iwpc", where / _SCALED).decode()))), seed)
    for path in sorted(where.glob("PS206767-*.csv")):
        return iwpc_task(read_consortium_rows(path), seed)
    names = ("PS206767-553247439.csv", _SCALED, f"{_SCALED}.gz")
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
    """The complete patients of the consortium's sheet, with the fields and the scale of Yeom et al.'s table.

    Args:
        path: The sheet "Subject Data" as a CSV file.

    Raises:
        DataFormatError: A column is missing, or no row is complete.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restval="")
        entries, header = list(reader), reader.fieldnames or ()
    # the name of the race column differs between copies
    columns = {**_COLUMNS, "race": "Race (OMB)" if "Race (OMB)" in header else "Race"}
    missing = sorted({*columns.values(), *_INDUCERS} - set(header))
    if missing:
        raise DataFormatError(f"{path} has no columns {missing}; is it the sheet 'Subject Data' of the consortium?")
    patients = [patient for entry in entries if (patient := _patient(entry, columns)) is not None]
    if not patients:
        raise DataFormatError(f"{path} has no patient with all of {sorted(columns.values())}")
    for name in ("age", "height", "weight", "dose"):
        values = np.asarray([float(patient[name]) for patient in patients])
        for patient, value in zip(patients, (values - values.mean()) / (values.std() or 1.0), strict=True):
            patient[name] = repr(float(value))
    return patients


def _patient(entry: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str] | None:
    """One patient with the fields of Yeom et al.; None if an entry is missing or has an unknown level."""
    raw = {field: entry[column].strip() for field, column in columns.items()}
    try:
        patient = {
            "race": _RACES[raw["race"].lower()],
            "age": str(float(raw["age"].partition("-")[0].strip().rstrip("+")) // 10),  # "60 - 69", "90+"
            "height": str(float(raw["height"])),
            "weight": str(float(raw["weight"])),
            "amiodarone": _taken(raw["amiodarone"]),
            "decr": max(_taken(entry[drug].strip()) for drug in _INDUCERS),
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


_FIELDS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
_NUMERICAL = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_MARRIED = ("Married-AF-spouse", "Married-civ-spouse", "Married-spouse-absent")


def adult(folder: Folder = None, *, download: bool = False) -> TabularTask:
    """Income above 50,000 dollars (1) or not (0), UCI Adult (30,162 + 15,060 rows), as Hannun et al. 2021 prepare it.

    Rows with a missing value are dropped. Marital status becomes married (a civil or an armed-forces spouse, or an
    absent one) or unmarried (divorced, never married, separated, widowed), and relationship is removed, as in Mehnaz
    et al. 2020. Levels are those of the training set. Columns are in the file's order:

    * 6 numerical columns, minus the training mean, divided by the training deviation (n − 1): age, fnlwgt,
      education-num, capital-gain, capital-loss, hours-per-week;
    * 80 columns of one-hot attributes without their last level: workclass 6, education 15, marital-status 1 (the
      column "unmarried"), occupation 13, race 4, sex 1, native-country 40.

    education-num is a function of education, so the 86 columns span the constant, barely: without l2 > 0 the
    Hessian is ill-conditioned (2e8 for least squares), and with an intercept it is singular.

    Args:
        folder: The folder with ``adult/adult.data`` and ``adult/adult.test``, gzipped or not.
        download: Whether to download missing files (6 MB).
    """
    root = download_files("adult", folder) if download else data_folder(folder)
    return adult_task(_rows(root / "adult" / "adult.data"), _rows(root / "adult" / "adult.test"))


def adult_task(train: Rows, test: Rows) -> TabularTask:
    """The task of :func:`adult` from rows with Adult's fields: levels, mean and deviation of the training rows."""
    names = [name for name in _FIELDS if name not in ("relationship", "income")]
    levels = {name: levels_of(train, name) for name in names if name not in _NUMERICAL}
    levels["marital-status"] = ("unmarried", "married")
    dropped = {name: own[-1] for name, own in levels.items()}
    columns, attributes, inputs = one_hot(train, names, levels, dropped)
    test_inputs = one_hot(test, names, levels, dropped)[2]

    # test rows are scaled with the training rows' mean and deviation
    numerical = [attributes[name][0] for name in _NUMERICAL]
    mean, deviation = inputs[:, numerical].mean(axis=0), inputs[:, numerical].std(axis=0, ddof=1)
    for part in (inputs, test_inputs):
        part[:, numerical] = (part[:, numerical] - mean) / deviation
    targets, test_targets = (np.asarray([float(row["income"] == ">50K") for row in rows]) for rows in (train, test))
    return TabularTask(inputs, targets, test_inputs, test_targets, columns, attributes, levels)


def _rows(path: Path) -> list[dict[str, str]]:
    """The complete rows; the test file's first line is not a row, and its labels end in a full stop."""
    rows = []
    for fields in csv.reader(io.StringIO(content("adult", path).decode()), skipinitialspace=True):
        if len(fields) != len(_FIELDS) or "?" in fields:
            continue
        row = dict(zip(_FIELDS, fields, strict=True))
        row["marital-status"] = "married" if row["marital-status"] in _MARRIED else "unmarried"
        row["income"] = row["income"].rstrip(".")
        rows.append(row)

    if not rows:
        raise DataFormatError(f"{path} has no complete row of {len(_FIELDS)} fields; download it again")
    return rows

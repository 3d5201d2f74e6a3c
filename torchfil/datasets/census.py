"""UCI Adult, from its publisher's two files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from torchfil.datasets.downloads import download as download_files
from torchfil.datasets.folders import DataFormatError, Folder, content, data_folder
from torchfil.datasets.tasks import TabularTask, levels_of, one_hot

__all__ = ["adult", "adult_task"]

Rows = list[dict[str, str]]

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


def _rows(path: Path) -> Rows:
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

"""CSV files: what is read back is what was written, and no cell is a formula."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchfil.utils.text import inert, visible, write_csv

FORMULAS = [
    "=cmd()",
    "+cmd()",
    "-cmd()",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "-1+1",
    "+",
    "-inf",
    "-1_000",
    "＝1",
]


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_a_formula_gets_an_apostrophe_and_other_texts_stay() -> None:
    for text in FORMULAS:
        assert inert(text) == f"'{text}"
        assert inert(inert(text)) == f"''{text}", "two ids never become one"
    for text in (
        "",
        "7",
        "-7",
        "+7.5",
        "-.5",
        "-1e-05",
        "+2E9",
        "a=b",
        "'s-Gravenhage",
        "x@y",
        "''",
    ):
        assert inert(text) == text


def test_names_and_cells_of_every_column_are_inert(tmp_path: Path) -> None:
    write_csv(tmp_path / "table.csv", {"id": FORMULAS, "=name": np.asarray(FORMULAS)})
    assert read(tmp_path / "table.csv") == [
        ["id", "'=name"],
        *([visible(f"'{text}")] * 2 for text in FORMULAS),
    ]

    class Name:
        def __str__(self) -> str:
            return "=cmd()"

    write_csv(tmp_path / "table.csv", {"id": [Name(), -3, ("=x", 1), None, np.int64(-4)]})
    assert [row[0] for row in read(tmp_path / "table.csv")[1:]] == [
        "'=cmd()",
        "-3",
        "('=x', 1)",
        "None",
        "-4",
    ]


@pytest.mark.parametrize("as_column", [list, np.asarray], ids=["list", "array"])
def test_numbers_are_read_back(tmp_path: Path, as_column: Any) -> None:
    values = [0.1 + 0.2, -1e-300, math.inf, math.nan, 3.0]
    write_csv(
        tmp_path / "table.csv",
        {"value": as_column(values), "count": as_column([-1, 0, 1, 2, 2**40])},
    )
    cells, counts = zip(*read(tmp_path / "table.csv")[1:], strict=True)
    assert [float(cell) if cell else math.nan for cell in cells] == pytest.approx(
        values, rel=0, abs=0, nan_ok=True
    )
    assert [int(cell) for cell in counts] == [-1, 0, 1, 2, 2**40]
    write_csv(tmp_path / "table.csv", {"value": as_column(values), "row": range(5)}, digits=3)
    assert [row[0] for row in read(tmp_path / "table.csv")[1:]] == [
        "0.3",
        "-1e-300",
        "inf",
        "",
        "3",
    ]


def test_only_the_owner_reads_it_and_failure_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_csv(path, {"id": [1]})
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="length"):
        write_csv(path, {"id": [1, 2], "value": [1.0]})
    assert read(path) == [["id"], ["1"]]
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]

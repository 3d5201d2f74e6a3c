"""``torchfil glm``: numbers as the library gives them, tables as people write them, one line for
every mistake.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.glm.glm_cases import CODES
from tests.test_cli import call, refused

pytest.importorskip("sklearn")

from torchfil.glm import Absent, LinearRegression, NominalAttribute, Shift, guess
from torchfil.glm.tables import read_table
from torchfil.report import load


def with_noise(args: tuple[Any, ...]) -> list[Any]:
    return ["glm", *args, *([] if "--sigma" in args else ["--sigma", "1"])]


def shown(*args: Any) -> str:
    found = call(*with_noise(args))
    assert found.exit_code == 0, found.output
    return found.stdout


def result(*args: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(shown(*args, "--json"))
    return data


def rows(path: Path, n: int = 60, **columns: Any) -> Path:
    """A table of x, y and these."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=n)
    table = {"x": x, "y": 2 * x + rng.normal(size=n), **columns}
    lines = [
        ",".join(table),
        *(",".join(map(str, row)) for row in zip(*table.values(), strict=True)),
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    gene, names = (
        rng.choice(["CC", "CT", "TT"], 60),
        [f"p{i}" for i in range(58)] + ["=cmd()", "-7"],
    )
    grade, code = rng.integers(3, size=60), rng.integers(11, 14, size=60)
    dose = 20 + (gene == "TT") + grade + rng.normal(size=60)
    columns = {
        "name": names,
        "age": rng.normal(size=60),
        "vkorc1": gene,
        "grade": grade,
        "cyp2c9": code,
    }
    return rows(tmp_path / "patients.csv", **columns, sex=rng.choice(["f", "m"], 60), dose=dose)


COMMON = ("--target", "dose", "--id", "name", "--ignore", "x,y,sex", "--categorical", "cyp2c9")


def test_numbers_are_those_of_the_library(patients: Path, tmp_path: Path) -> None:
    """In the JSON, in the table of all rows, and in the saved run."""
    out, saved = tmp_path / "leakage.csv", tmp_path / "run.parquet"
    asked = (
        "--private",
        "vkorc1,age",
        "--question",
        "vkorc1,age+0.5,dose-1,absent",
        "--group",
        "sex",
    )
    release = ("--no-intercept", "--l2", "0.1", "--sigma", "0.5")
    data = result(
        patients,
        *COMMON,
        *asked,
        *release,
        "--out",
        out,
        "--save",
        saved,
        "--report",
        tmp_path / "page",
    )
    X, y = np.empty((60, 6)), np.empty(60)
    for row, entry in enumerate(csv.DictReader(patients.open())):
        X[row, :2] = float(entry["age"]), float(entry["grade"])
        X[row, 2:4] = CODES[["CC", "CT", "TT"].index(entry["vkorc1"])]
        X[row, 4:] = CODES[["11", "12", "13"].index(entry["cyp2c9"])]
        y[row] = float(entry["dose"])

    model, private = LinearRegression(l2=0.1).fit(X, y), {"vkorc1": [2, 3], "age": [0]}
    questions: dict[str, Any] = {
        "vkorc1": NominalAttribute([2, 3], CODES),
        "age+0.5": Shift(0.5, 0),
    }
    questions |= {"dose-1": Shift(-1.0), "absent": Absent()}
    eta, bound = (
        model.fil(X, y, 0.5, attributes=private),
        model.mse_bound(X, y, 0.5, attributes=private),
    )
    expected = {f"{name}_fil": eta[name] for name in private}
    expected |= {f"{name}_error": np.sqrt(bound[name]) for name in private}
    run = load(saved)
    for record, (name, question) in zip(run.questions, questions.items(), strict=True):
        best = guess(model, X, y, question, 0.5)
        expected |= {f"{name}_guess": best.accuracy, f"{name}_tpr": best.true_positive_rate(0.01)}
        expected[f"{name}_divergence"] = best.divergence.max(axis=1)
        assert data["questions"][name]["accuracy"]["mean"] == pytest.approx(best.accuracy.mean())
        assert np.allclose(record.rate(0.01), best.true_positive_rate(0.01))

    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    for name, values in expected.items():
        assert [float(row[name]) for row in written] == pytest.approx(values.tolist())
    # no formulas in spreadsheets
    assert [row["id"] for row in written[-3:]] == ["p57", "'=cmd()", "-7"]
    assert out.stat().st_mode & 0o777 == 0o600
    assert [float(row["mse_bound"]) for row in written] == pytest.approx(
        run.columns["mse_bound"].tolist()
    )


def test_a_label_by_name_in_a_packed_table(tmp_path: Path) -> None:
    label = np.random.default_rng(0).choice(["no", "yes"], 60)
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(rows(tmp_path / "data.csv", label=label).read_bytes()))
    logistic = ("--model", "logistic", "--question", "label", "--top", 1)
    data = result(path, "--target", "label", *logistic)
    assert data["columns"] == ["x", "y"]
    assert len(data["most_exposed"]) == 1
    told = data["questions"]["label"]
    assert told["answers"] == ["no", "yes"]
    assert told["prior_accuracy"] <= told["accuracy"]["mean"] <= 1


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,y\n1,2\n", "--target does", "no column 'does'"),
        ("a,y\n1,2\n2,3\n4,4\n", "--target y --private y", "is the target"),
        ("a,y\nu,2\nv,3\nu,4\n", "--target y --question a+1", "is one-hot"),
        ('a,note,y\n1,"x\ny",2\n\n2,z,3\n5,z\n', "", "1 in 'y'"),
        ("a,y\n1,2,9\n2,3,9\n", "", "is not a CSV file"),
        ("a,a\n1,2\n", "", "more than once"),
        ("a,y\n1,2\n,3\n2,NA\n", "", "1 in 'a', 1 in 'y'"),
        ("a,b,c,y\n1,1,s,2\n1,2,s,3\n", "", "constant columns: --ignore a,c"),
        ("a,y\n" + "\n".join(f"name{i},{i}" for i in range(60)), "", "an identifier"),
        ("a,note,y\n1,x,2\n2,z,3\n5 kg,z,1\n3,w,4\n", "", "'5 kg' in row 2"),
        ("a;y\n1,234;2\n2,500;3\n4,125;5\n", "--separator ;", "'1,234' in row 0"),
        (
            "größe,y\n1,2\n".encode("cp1252").decode("utf-8", "surrogateescape"),
            "",
            "--encoding cp1252",
        ),
    ],
)
def test_mistakes(tmp_path: Path, content: str, options: str, message: str) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    words = [word.strip("'") for word in options.split()]
    assert message in refused(
        *with_noise((path, *(words if "--target" in words else ["--target", "y", *words])))
    )


@pytest.mark.parametrize(
    ("separator", "decimal", "encoding"),
    [
        (",", ".", "utf-8-sig"),
        (";", ",", "utf-16"),
        ("\t", ",", "cp1252"),
    ],
)
def test_the_same_numbers_however_they_are_written(
    tmp_path: Path, separator: str, decimal: str, encoding: str
) -> None:
    numbers, kinds = np.arange(40) * 1.25 - 7, np.array(["süß", "sauer"] * 20)
    lines = [["größe", "art", "y"]]
    for number, kind in zip(numbers, kinds, strict=True):
        written = str(number).replace(".", decimal)
        lines.append([written, kind, written])
    path = tmp_path / "a.csv"
    path.write_bytes("\r\n".join(map(separator.join, lines)).encode(encoding))
    found = read_table(path, "y", separator=separator, decimal=decimal, encoding=encoding)
    assert found.columns == ("größe", "art=süß")
    np.testing.assert_array_equal(found.inputs, np.column_stack([numbers, kinds == "süß"]))
    np.testing.assert_array_equal(found.targets, numbers)


def test_what_is_said_of_a_table_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    # only used columns count as missing
    path.write_text("name,a,note,y\np,1,,2\n,2,x,3\nr,?,x,3\ns,5,NA,4\nt,3,x,\n")
    assert read_table(path, "y", ignore=["note"], id_column="name", drop_missing=True).ids == [
        "p",
        "",
        "s",
    ]
    path = rows(tmp_path / "b.csv", grade=["1", "2", "3", "4+"] * 15, kind=["a", "b", "7"] * 20)
    levels = read_table(path, "y", categorical=["grade"]).levels
    assert levels == {"grade": ("1", "2", "3", "4+"), "kind": ("7", "a", "b")}

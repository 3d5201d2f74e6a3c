"""``torchfil glm``: tables as people have them, numbers as the library gives them, one line for every mistake."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.test_cli import call, refused
from tests.test_datasets import IWPC
from torchfil import datasets

pytest.importorskip("sklearn")


def with_noise(args: tuple[Any, ...]) -> list[Any]:
    return ["glm", *args, *([] if "--sigma" in args else ["--sigma", "1"])]


def glm(*args: Any) -> Result:
    return call(*with_noise(args))


def refused_glm(*args: Any) -> str:
    return refused(*with_noise(args))


class TestGlm:
    @pytest.fixture
    def patients(self, tmp_path: Path) -> Path:
        path = tmp_path / "patients.csv"
        path.write_text(IWPC)
        return path

    def test_the_whole_table(self, patients: Path, tmp_path: Path) -> None:
        out = tmp_path / "leakage.csv"
        found = glm(patients, "--target", "dose", "--private", "vkorc1,age", "--out", out, "--top", 2)
        assert found.exit_code == 0, found.output
        assert "one-hot: race (3), vkorc1 (3)" in found.stdout
        assert "for codes, use --categorical" in found.stdout
        with out.open() as file:
            rows = list(csv.DictReader(file))
        names = ["id", "fil", "mse_bound", "vkorc1_fil", "vkorc1_error", "age_fil", "age_error"]
        assert list(rows[0]) == names
        assert len(rows) == 5
        assert out.stat().st_mode & 0o777 == 0o600

    def test_texts_are_no_formulas_in_spreadsheets(self, tmp_path: Path) -> None:
        path, out = tmp_path / "data.csv", tmp_path / "leakage.csv"
        path.write_text("name,=age,y\n=cmd(),1,2\n-cmd(),2,1\n-7,4,5\npatient,3,3\n")
        found = glm(path, "--target", "y", "--id", "name", "--private", "=age", "--out", out)
        assert found.exit_code == 0, found.output
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["id"] for row in rows] == ["'=cmd()", "'-cmd()", "-7", "patient"]
        assert list(rows[0])[3:] == ["'=age_fil", "'=age_error"]

    def test_numbers_are_those_of_the_library(self, patients: Path) -> None:
        from torchfil.glm import LinearRegression

        folder = patients.parent / "data"
        (folder / "iwpc").mkdir(parents=True)
        (folder / "iwpc" / "iwpc-scaled.csv").write_text(IWPC)
        options = ["--categorical", "cyp2c9", "--no-intercept", "--l2", "0.1", "--sigma", "0.5", "--json"]
        data = json.loads(glm(patients, "--target", "dose", "--private", "vkorc1,age", *options).stdout)
        found = {row["id"]: row for row in data["most_exposed"]}
        task = datasets.iwpc(folder)
        inputs = np.concatenate([task.train_inputs, task.test_inputs])
        targets = np.concatenate([task.train_targets, task.test_targets])
        model = LinearRegression(l2=0.1).fit(inputs, targets)
        asked: Any = {"vkorc1": task.attributes["vkorc1"], "age": task.attributes["age"]}
        eta = model.fil(inputs, targets, 0.5, attributes=asked)
        bound = model.mse_bound(inputs, targets, 0.5, attributes=asked)
        doses = [float(line.split(",")[-1]) for line in IWPC.strip().splitlines()[1:]]
        for row, dose in enumerate(doses):
            place = int(np.flatnonzero(targets == dose)[0])
            for name in asked:
                assert found[str(row)][f"{name}_fil"] == pytest.approx(eta[name][place])
                assert found[str(row)][f"{name}_error"] == pytest.approx(bound[name][place] ** 0.5)

    def test_questions_are_those_of_the_library(self, patients: Path, tmp_path: Path) -> None:
        from torchfil.glm import Absent, LinearRegression, NominalAttribute, Shift, guess
        from torchfil.glm.csv_columns import read_table
        from torchfil.glm.csv_table import encode

        out = tmp_path / "leakage.csv"
        asked = ["--target", "dose", "--question", "vkorc1,amiodarone,age+0.5,dose-1,absent", "--sigma", "0.1"]
        found = glm(patients, *asked, "--out", out)
        assert found.exit_code == 0, found.output
        assert "no attacker does better" in found.stdout
        assert "question    answers  prior  best: mean  largest  rows ≥ 90 %" in found.stdout
        data = json.loads(glm(patients, *asked, "--json").stdout)["questions"]

        table = encode(read_table(patients), "dose")
        X, y = table.inputs, table.targets
        model = LinearRegression(l2=0.01, fit_intercept=True).fit(X, y)
        age, amiodarone = (table.attributes[name][0] for name in ("age", "amiodarone"))
        codes = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        values = np.unique(X[:, [amiodarone]])[:, None]
        questions: dict[str, Any] = {
            "vkorc1": NominalAttribute(table.attributes["vkorc1"], codes),
            "amiodarone": NominalAttribute([amiodarone], values),
            "age+0.5": Shift(0.5, age),
            "dose-1": Shift(-1.0),
            "absent": Absent(),
        }
        with out.open() as file:
            rows = list(csv.DictReader(file))
        for name, question in questions.items():
            best = guess(model, X, y, question, 0.1)
            for column, expected in (
                ("guess", best.accuracy),
                ("divergence", best.divergence.max(axis=1)),
                ("tpr", best.true_positive_rate(0.01)),
            ):
                assert [float(row[f"{name}_{column}"]) for row in rows] == pytest.approx(expected.tolist())
            assert data[name]["accuracy"] == pytest.approx({"mean": best.accuracy.mean(), "max": best.accuracy.max()})
            assert data[name]["prior_accuracy"] == best.prior_accuracy[0]
            assert data[name]["true_positive_rate"]["max"] == pytest.approx(best.true_positive_rate(0.01).max())
        assert data["vkorc1"]["answers"] == ["CC", "CT", "TT"]

    def test_the_label_of_a_logistic_model(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        lines = [f"{x:.3f},{rng.choice(['yes', 'no'])}" for x in rng.normal(size=30)]
        path = tmp_path / "data.csv"
        path.write_text("x,label\n" + "\n".join(lines))
        options = ["--target", "label", "--model", "logistic", "--question", "label", "--json"]
        data = json.loads(glm(path, *options).stdout)["questions"]["label"]
        assert data["answers"] == ["no", "yes"]
        assert data["prior_accuracy"] <= data["accuracy"]["mean"] <= 1

    @pytest.mark.parametrize("model", ["logistic", "softmax", "poisson"])
    def test_other_models(self, tmp_path: Path, model: str) -> None:
        rng = np.random.default_rng(0)
        names = {"logistic": ["yes", "no"], "softmax": ["a", "b", "c"], "poisson": ["0", "3", "5"]}[model]
        lines = [
            f"{x:.3f},{rng.choice(['u', 'v'])},{rng.choice(names)},p{i}" for i, x in enumerate(rng.normal(size=60))
        ]
        path = tmp_path / "data.csv.gz"
        path.write_bytes(gzip.compress(("x,kind,label,name\n" + "\n".join(lines)).encode()))
        data = json.loads(glm(path, "--target", "label", "--model", model, "--id", "name", "--top", 1, "--json").stdout)
        assert data["columns"] == ["x", "kind=v"]
        assert list(data["most_exposed"][0]) == ["id", "fil", "mse_bound"]
        assert data["most_exposed"][0]["id"].startswith("p")
        assert data["summary"]["fil"]["max"] == data["most_exposed"][0]["fil"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--target", "does"], "no column 'does'; did you mean 'dose'? There are race, age,"),
            (["--target", "dose", "--private", "vkorc"], "no column 'vkorc'; did you mean 'vkorc1'?"),
            (["--target", "dose", "--private", "dose"], "'dose' is the target"),
            (["--target", "dose", "--question", "vkorc"], "no column 'vkorc'; did you mean 'vkorc1'?"),
            (["--target", "dose", "--question", "vkorc1+1"], "'vkorc1' is one-hot, so 'vkorc1+1' has no meaning"),
            (["--target", "dose", "--ignore", "race,dose"], "'dose' is the target; it cannot be left out"),
            (["--target", "dose", "--id", "dose"], "'dose' is the target; it cannot be left out (--ignore) or name"),
            (["--target", "dose", "--categorical", "dose"], "'dose' is the target; only inputs are categorical"),
            (["--target", "dose", "--sigma", "0"], "sigma=0.0 must be positive"),
            (["--target", "dose", "--l2", "-1"], "l2=-1.0 must be"),
            (["--target", "dose", "--l2", "0"], "columns ['age', 'amiodarone', 'cyp2c9', 'vkorc1=CT'"),
            (["--target", "vkorc1"], "a linear model needs a target of numbers, got e.g. 'CC'"),
            (["--target", "dose", "--model", "logistic"], "needs a target with two values, this one has 5"),
            (["--target", "dose", "--model", "poisson"], "Poisson targets are counts"),
        ],
    )
    def test_mistakes(self, patients: Path, options: list[str], message: str) -> None:
        assert message in refused_glm(patients, *options)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "must have a line of column names and at least one row"),
            ("a,b\n", "must have a line of column names and at least one row"),
            ("a,b\n1,2\n3\n", "row 2 has 1 entries for 2 columns"),
            ("a,a\n1,2\n", "has the columns ['a'] more than once"),
            ("a,y\n1,2\n,3\n2,NA\n", "entries are missing: 1 in 'a', 1 in 'y'"),
            ("a,b,y\n1,1,2\n1,2,3\n", "column 'a' has the value '1' in every row"),
            ("a,y\n" + "\n".join(f"name{i},{i}" for i in range(60)), "looks like a name or an identifier"),
            ("a,y\n1\0,2\n", "is no text in UTF-8, UTF-16 (with its mark) or Windows-1252"),
            ("\udc81,y\n1,2\n", "is no text in UTF-8, UTF-16 (with its mark) or Windows-1252"),
            ("y\n1\n2\n", "there is no column to predict 'y' from"),
            ('a,y\n"1"2,3\n', "is not a CSV file: ',' expected after '\"'; see to its quotes"),
            ("a;b,y\n1;2,3\n", "could be separated by"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "data.csv"
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        assert message in refused_glm(path, "--target", "y")
        assert "No such file" in refused_glm(tmp_path / "none.csv", "--target", "y")

    def test_missing_entries_are_left_out_on_request(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text("a,y\n1,2\n?,3\n2,3\n4,1\n")
        found = glm(path, "--target", "y", "--drop-missing")
        assert "1 rows with missing entries were left out" in found.stdout
        data = json.loads(glm(path, "--target", "y", "--drop-missing", "--json").stdout)
        assert sorted(row["id"] for row in data["most_exposed"]) == ["0", "2", "3"]

    def test_only_used_columns_count_as_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text("name,a,note,y\np,1,,2\n,2,x,3\nr,?,x,3\ns,5,NA,4\nt,3,x,\n")
        options = ["--target", "y", "--ignore", "note", "--id", "name", "--drop-missing", "--json"]
        data = json.loads(glm(path, *options).stdout)
        assert sorted(row["id"] for row in data["most_exposed"]) == ["", "p", "s"]

    def test_a_damaged_gzip_file(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv.gz"
        whole = gzip.compress(b"a,y\n" + b"".join(b"%d,%d\n" % (i, i * i % 7) for i in range(500)))
        middle = len(whole) // 2
        for content in (whole[:middle], whole[:-4], whole[:middle] + b"\0" * 9 + whole[middle + 9 :]):
            path.write_bytes(content)
            assert "is a gzip file that is cut short or damaged" in refused_glm(path, "--target", "y")

    def test_a_table_that_cannot_be_written_is_named(self, patients: Path, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        for out, reason in (("folder", "Is a directory"), ("none/x.csv", "No such file or directory")):
            line = refused_glm(patients, "--target", "dose", "--out", tmp_path / out)
            assert line == f"torchfil: {tmp_path / out}: {reason}"
        assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []

    def test_the_data_are_not_written_over(self, patients: Path, tmp_path: Path) -> None:
        before = patients.read_bytes()
        (tmp_path / "link.csv").symlink_to(patients)
        for out in (patients, tmp_path / "link.csv"):
            assert "is the data file itself" in refused_glm(patients, "--target", "dose", "--out", out)
        assert patients.read_bytes() == before

    def test_on_the_warfarin_data(self) -> None:
        try:
            folder = datasets.data_folder()
        except datasets.DataNotFoundError as error:
            pytest.skip(str(error))
        (path,) = (folder / "iwpc").glob("iwpc-scaled.csv*")
        data = json.loads(glm(path, "--target", "dose", "--private", "vkorc1,age", "--json").stdout)
        assert data["rows"] == 4819
        assert data["summary"]["vkorc1_fil"]["max"] == pytest.approx(0.0275, abs=1e-4)


def table_file(
    path: Path, *, separator: str = ",", decimal: str = ".", encoding: str = "utf-8", rows: int = 40
) -> Path:
    """The same numbers however they are written."""
    rng = np.random.default_rng(0)
    lines = [separator.join(["größe", "art", "y"])]
    for _ in range(40):
        size, kind, y = rng.normal(), rng.choice(["süß", "sauer"]), rng.normal()
        lines.append(separator.join([f"{size:.4f}".replace(".", decimal), kind, f"{y:.2f}".replace(".", decimal)]))
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return path


class TestFormats:
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
    @pytest.mark.parametrize(("separator", "decimal"), [(",", "."), (";", "."), (";", ","), ("\t", ","), ("|", ".")])
    def test_the_same_numbers_however_they_are_written(
        self, tmp_path: Path, separator: str, decimal: str, encoding: str
    ) -> None:
        plain = json.loads(glm(table_file(tmp_path / "a.csv"), "--target", "y", "--json").stdout)
        other = table_file(tmp_path / "b.csv", separator=separator, decimal=decimal, encoding=encoding)
        found = json.loads(glm(other, "--target", "y", "--json").stdout)
        assert (found["format"]["separator"], found["format"]["decimal"]) == (separator, decimal)
        assert found["columns"] == ["größe", "art=süß"]
        assert found["summary"] == plain["summary"]

    def test_what_was_told_is_said(self, tmp_path: Path) -> None:
        path = table_file(tmp_path / "a.csv", separator=";", decimal=",", encoding="cp1252")
        shown = glm(path, "--target", "y").stdout
        assert "(Windows-1252, columns separated by semicolons, decimal commas)" in shown
        assert "if letters look wrong, use --encoding" in shown

    def test_what_is_given_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_bytes("a~y\n1,234~2\n1,235~3\n2,5~1\nĦ~4\n".encode("iso8859-3"))
        given = ["--separator", "~", "--decimal", ",", "--encoding", "iso8859-3"]
        line = refused_glm(path, "--target", "y", *given)
        assert "1 of 4 entries cannot be read as such: 'Ħ' in line 5" in line
        assert "--encoding 'klingon' is no encoding" in refused_glm(path, "--target", "y", "--encoding", "klingon")
        assert "--separator '~~' must be one character" in refused_glm(path, "--target", "y", "--separator", "~~")

    def test_a_comma_that_may_be_of_thousands_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("a;y\n1,234;2\n2,500;3\n4,125;5\n")
        assert "'1,234' in" in (line := refused_glm(path, "--target", "y"))
        assert "can be 1234 or 1.234; say that the comma is a decimal sign (--decimal ,)" in line
        data = json.loads(glm(path, "--target", "y", "--decimal", ",", "--private", "a", "--json").stdout)
        assert data["rows"] == 3
        assert "'1,234' in line 2" in refused_glm(path, "--target", "y", "--decimal", ".")

    def test_names_with_commas(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text('"height, cm",note,y\n1.5,a,2\n2.5,b,3\n4.5,a,5\n')
        data = json.loads(glm(path, "--target", "y", "--private", '"height, cm",note', "--json").stdout)
        assert "height, cm_fil" in data["summary"]
        assert "names stand between commas" in refused_glm(path, "--target", "y", "--private", '"height, cm')


class TestDoubtfulColumns:
    def rows(self, path: Path, n: int = 60, **columns: Any) -> Path:
        rng = np.random.default_rng(1)
        x = rng.normal(size=n)
        table = {"x": x, "y": 2 * x + rng.normal(size=n), **columns}
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        path.write_text("\n".join(lines))
        return path

    def test_one_bad_entry_is_reported_with_its_row(self, tmp_path: Path) -> None:
        # it turned a column of 4,819 numbers into 4,819 categories, and moved the largest leakage by a factor of 27
        path = self.rows(tmp_path / "a.csv", z=np.random.default_rng(0).normal(size=60))
        lines = path.read_text().splitlines()
        lines[17] = lines[17] + " kg"
        path.write_text("\n".join(lines))
        line = refused_glm(path, "--target", "y")
        assert "column 'z' holds numbers, but 1 of 60 entries cannot be read as such: '" in line
        assert " kg' in line 18. Correct them (the decimal sign is a point" in line
        assert line.endswith("--categorical z")
        assert "column 'z' holds numbers, but 1 of 60" in refused_glm(path, "--target", "z"), "in the target too"

    def test_codes_among_numbers_are_categories_on_request(self, tmp_path: Path) -> None:
        grades = ["1", "2", "3", "4+"] * 15
        path = self.rows(tmp_path / "a.csv", grade=grades)
        assert "15 of 60 entries cannot be read as such: '4+' in line 5" in refused_glm(path, "--target", "y")
        data = json.loads(glm(path, "--target", "y", "--categorical", "grade", "--json").stdout)
        assert data["levels"] == {"grade": ["1", "2", "3", "4+"]}

    def test_texts_with_few_numbers_among_them_are_categories(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", kind=["a", "b", "7"] * 20)
        assert json.loads(glm(path, "--target", "y", "--json").stdout)["levels"] == {"kind": ["7", "a", "b"]}

    def test_an_index_is_noticed(self, tmp_path: Path) -> None:
        for name, start in (("", 0), ("Unnamed: 0", 0), ("nr", 1)):
            path = self.rows(tmp_path / "a.csv", **{name: np.arange(start, start + 60)})
            shown = name or "unnamed 3"
            line = refused_glm(path, "--target", "y")
            assert f"column '{shown}' counts the rows ({start}, {start + 1}, …): it looks like an index" in line
            for remedy in (["--ignore", shown], ["--id", shown], ["--quantity", shown]):
                assert glm(path, "--target", "y", *remedy).exit_code == 0

    def test_an_index_is_noticed_where_rows_are_left_out(self, tmp_path: Path) -> None:
        numbers: list[Any] = np.linspace(0.5, 7, 60).tolist()
        numbers[20] = ""
        path = self.rows(tmp_path / "a.csv", nr=np.arange(60), z=numbers)
        assert "column 'nr' counts the rows (0, 1, …)" in refused_glm(path, "--target", "y", "--drop-missing")

    def test_other_identifiers_are_told(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", patient=np.random.default_rng(0).permutation(9000)[:60])
        data = json.loads(glm(path, "--target", "y", "--json").stdout)
        assert data["notes"] == [
            "whole numbers that differ in every row: patient; for identifiers, use --ignore or --id"
        ]
        assert json.loads(glm(path, "--target", "y", "--quantity", "patient", "--json").stdout)["notes"] == []

    def test_constant_columns_are_named_together(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", site=["A"] * 60, year=[2020] * 60)
        line = refused_glm(path, "--target", "y")
        assert line.endswith(
            "columns 'site', 'year' have one value each in every row; leave out constant columns: --ignore site,year"
        )
        assert glm(path, "--target", "y", "--ignore", "site,year").exit_code == 0

    def test_one_thing_is_said_of_a_column(self, tmp_path: Path) -> None:
        path = self.rows(tmp_path / "a.csv", grade=[1, 2, 3] * 20)
        both = ["--categorical", "grade", "--quantity", "grade"]
        assert "is a category and a quantity ('grade')" in refused_glm(path, "--target", "y", *both)
        left = ["--categorical", "grade", "--ignore", "grade"]
        assert "is left out ('grade')" in refused_glm(path, "--target", "y", *left)


class TestNoise:
    def test_it_has_to_be_named(self, tmp_path: Path) -> None:
        path = table_file(tmp_path / "a.csv")
        assert refused("glm", path, "--target", "y").startswith("torchfil glm: Missing option '--sigma'.")

    def test_the_released_score_stands_beside_the_clean_one(self, tmp_path: Path) -> None:
        # a model of R² 0.467 was released with σ = 1, at which it is −6.3
        rng = np.random.default_rng(0)
        x = rng.normal(size=(200, 3))
        y = x @ [1.0, -1.0, 0.5] + rng.normal(size=200)
        path = tmp_path / "a.csv"
        path.write_text("a,b,c,y\n" + "\n".join(",".join(map(str, row)) for row in np.column_stack([x, y])))
        data = json.loads(glm(path, "--target", "y", "--no-intercept", "--sigma", "2", "--json").stdout)
        ridge = np.linalg.solve(x.T @ x + 200 * 0.01 * np.eye(3), x.T @ y)
        noisy = [
            1 - np.square(y - x @ (ridge + 2 * rng.normal(size=3))).sum() / np.square(y - y.mean()).sum()
            for _ in range(4000)
        ]
        assert data["score"] > 0.5
        assert data["released_score"] == pytest.approx(np.median(noisy), rel=0.25)
        shown = glm(path, "--target", "y", "--sigma", "2").stdout
        assert f"score without noise {data['score']:.3f}, as released -" in shown
        assert (
            "(median over the noise; R²): no better than a model that knows no column (0); σ = 2 is too much" in shown
        )
        quiet = json.loads(glm(path, "--target", "y", "--sigma", "1e-6", "--json").stdout)
        assert quiet["released_score"] == pytest.approx(quiet["score"], abs=1e-4)

    def test_of_counts_that_overflow(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text("a,y\n" + "\n".join(f"{i * 37 % 101},{i % 4}" for i in range(40)))
        found = glm(path, "--target", "y", "--model", "poisson", "--l2", "1", "--sigma", "1e6", "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["released_score"] is None


def long_table(path: Path, rows: int) -> Path:
    """Thirteen columns, three of them texts."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write(",".join(["site", "sex", "gene", *(f"v{k}" for k in range(9)), "y"]) + "\n")
        for start in range(0, rows, 100_000):
            size = min(100_000, rows - start)
            texts = [
                rng.choice(["A", "B", "C", "D"], size),
                rng.choice(["f", "m"], size),
                rng.choice(["CC", "CT"], size),
            ]
            numbers = [[f"{value:.4f}" for value in rng.normal(size=size)] for _ in range(10)]
            file.writelines(",".join(row) + "\n" for row in zip(*texts, *numbers, strict=True))
    return path


class TestLongTables:
    def test_pieces_fit_together(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In pieces of 7 rows, and with columns of more different entries than are kept as texts."""
        path = long_table(tmp_path / "a.csv", 300)
        whole = json.loads(glm(path, "--target", "y", "--json").stdout)
        monkeypatch.setattr("torchfil.glm.csv_columns._PIECE", 7)
        monkeypatch.setattr("torchfil.glm.csv_columns.MOST_LEVELS", 20)
        assert json.loads(glm(path, "--target", "y", "--json").stdout) == whole
        lines = path.read_text().splitlines()
        cells = lines[251].split(",")
        lines[251] = ",".join([*cells[:5], "1.5 kg", *cells[6:]])
        path.write_text("\n".join(lines))
        assert "1 of 300 entries cannot be read as such: '1.5 kg' in line 252" in refused_glm(path, "--target", "y")
        lines[251] = ",".join([*cells[:5], "", *cells[6:]])
        path.write_text("\n".join(lines))
        assert "1 in 'v2'" in refused_glm(path, "--target", "y")
        assert json.loads(glm(path, "--target", "y", "--drop-missing", "--json").stdout)["rows"] == 299

    @pytest.mark.slow
    def test_memory_of_200_000_rows(self, tmp_path: Path) -> None:
        """A process of its own, whose peak can be read: the table itself is 13 columns of 8 bytes, 21 MB."""
        path = long_table(tmp_path / "a.csv", 200_000)
        code = (
            "import resource, sys; from torchfil.cli import main; import torchfil.glm\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "main(sys.argv[1:], standalone_mode=False)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)"
        )
        args = ["glm", str(path), "--target", "y", "--sigma", "0.1", "--private", "gene,v0", "--json"]
        found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
        assert json.loads(found.stdout)["rows"] == 200_000
        assert int(found.stderr.split()[-1]) < 250_000  # kB: a fifth of what a million rows may take


class TestSavedRuns:
    """``--save`` and ``--report``: page, gate and inspect of a linear model's release."""

    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        rng = np.random.default_rng(0)
        genotype, sex = rng.choice(["CC", "CT", "TT"], 60), rng.choice(["f", "m"], 60)
        rows = [
            f"p{i},{50 + 10 * rng.normal():.2f},{genotype[i]},{sex[i]},{20 + (genotype[i] == 'TT') + rng.normal():.3f}"
            for i in range(60)
        ]
        path = tmp_path / "patients.csv"
        path.write_text("\n".join(["name,age,vkorc1,sex,dose", *rows]))
        return path

    def saved(self, table: Path, *options: Any) -> Any:
        from torchfil.report import load

        path = table.parent / "run.fil"
        found = glm(table, "--target", "dose", "--id", "name", "--save", path, "--sigma", "0.1", *options)
        assert found.exit_code == 0, found.output
        assert f"run: {path}" in found.stdout
        return load(path)

    def test_the_run_holds_the_numbers_of_the_library(self, table: Path) -> None:
        from torchfil.glm import LinearRegression, NominalAttribute, guess
        from torchfil.glm.csv_columns import read_table
        from torchfil.glm.csv_table import encode

        run = self.saved(table, "--private", "vkorc1,age", "--question", "vkorc1", "--group", "sex")
        encoded = encode(read_table(table, id_column="name"), "dose")
        X, y = encoded.inputs, encoded.targets
        model = LinearRegression(l2=1e-2, fit_intercept=True).fit(X, y)
        columns = {name: list(encoded.attributes[name]) for name in ("vkorc1", "age")}
        bound = model.mse_bound(X, y, 0.1, attributes=columns)
        assert run.attributes.names == ["age", "vkorc1"]
        for place, name in enumerate(run.attributes.names):
            assert np.allclose(run.attributes.error[:, place], np.sqrt(bound[name]), rtol=1e-6)
        one_by_one = {str(c): [c] for own in columns.values() for c in own}
        eta = model.fil(X, y, 0.1, attributes=one_by_one, kind="trace")
        square = sum((eta[c] * X[:, int(c)].std()) ** 2 for c in eta) / 3
        assert np.allclose(run.columns["mse_bound"], 1 / square)
        codes = np.eye(3)[:, 1:]
        best = guess(model, X, y, NominalAttribute(columns["vkorc1"], codes), 0.1)
        assert np.allclose(run.questions[0].rate(0.01), best.true_positive_rate(0.01))
        assert run.ids.tolist() == [f"p{i}" for i in range(60)]
        assert set(run.groups["sex"]) == {"f", "m"}

    def test_a_grouping_need_not_be_an_input(self, table: Path) -> None:
        run = self.saved(table, "--ignore", "sex", "--group", "sex")
        assert run.attributes.names == ["age", "vkorc1", "dose"]
        assert set(run.groups) == {"sex"}

    def test_page_gate_and_inspect(self, table: Path, tmp_path: Path) -> None:
        self.saved(table, "--question", "vkorc1,absent")
        run, policy = tmp_path / "run.fil", tmp_path / "policy.toml"
        shown = call("inspect", run).stdout
        assert "the fitted weights, once, with noise σ = 0.1" in shown
        assert "most exposed (closed forms)" in shown
        for limit, code in ((1e-9, 0), (1e9, 1)):
            policy.write_text(f"min_mse_bound = {limit}")
            assert call("gate", run, "--policy", policy).exit_code == code
            page = tmp_path / f"page {code}"
            assert call("report", run, "-o", page, "--policy", policy).exit_code == 0
            text = (page / "index.html").read_text()
            assert ("PASS" if code == 0 else "FAIL") in text
            assert "output perturbation" in text
            assert "no accountant tells an ε" in text
            for untrue in ("repeated trainings", "noisy gradient", "from one run", "partly by luck", "probes"):
                assert untrue not in text.partition("<main>")[2].partition('<section id="examples">')[0], untrue
        policy.write_text("max_epsilon = 8.0")
        found = call("gate", run, "--policy", policy)
        assert found.exit_code == 1
        assert "has no accountant's ε: take the rule out" in found.stdout

    def test_the_page_at_once(self, table: Path, tmp_path: Path) -> None:
        found = glm(table, "--target", "dose", "--id", "name", "--report", tmp_path / "page", "--json")
        page = Path(json.loads(found.stdout)["page"])
        assert page == tmp_path / "page" / "index.html"
        assert "p17" in page.read_text() + (page.parent / "leakage.csv").read_text()

    def test_another_sigma_compared(self, table: Path, tmp_path: Path) -> None:
        for sigma in ("0.1", "0.3"):
            glm(table, "--target", "dose", "--id", "name", "--sigma", sigma, "--save", tmp_path / f"{sigma}.fil")
        found = json.loads(call("compare", tmp_path / "0.1.fil", tmp_path / "0.3.fil", "--json").stdout)
        assert found["expected"] == pytest.approx(9.0)
        assert found["ratio"] == pytest.approx({"mean": 9.0, "0": 9.0, "0.5": 9.0, "1": 9.0})
        assert (found["less"], found["more"]) == (60, 0)

    def test_mistakes(self, table: Path, tmp_path: Path) -> None:
        common = (table, "--target", "dose", "--id", "name")
        assert "is the data file itself" in refused_glm(*common, "--save", table)
        assert "is the data file itself" in refused_glm(*common, "--report", table)
        twice = (*common, "--save", tmp_path / "x", "--out", tmp_path / "x")
        assert "written to already" in refused_glm(*twice)
        assert "names a folder" in refused_glm(*common, "--report", tmp_path / "page.html")
        assert "no column 'seks'; did you mean 'sex'" in refused_glm(*common, "--group", "seks")
        assert not (tmp_path / "run.fil").exists()
        assert table.read_text().startswith("name,age")

"""``torchfil glm``: numbers as the library gives them, one line for every mistake."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paper_data import PaperData

from tests.glm_command import glm, refused_glm, table_file
from tests.paper_files import IWPC, real_data, write
from tests.test_cli import refused

pytest.importorskip("sklearn")


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

        write(patients.parent / "data" / "iwpc" / "iwpc-scaled.csv", IWPC.encode())
        options = ["--categorical", "cyp2c9", "--no-intercept", "--l2", "0.1", "--sigma", "0.5", "--json"]
        data = json.loads(glm(patients, "--target", "dose", "--private", "vkorc1,age", *options).stdout)
        found = {row["id"]: row for row in data["most_exposed"]}
        task = PaperData("iwpc", folder=patients.parent / "data").iwpc()
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
        from torchfil.glm.tables import read_table

        out = tmp_path / "leakage.csv"
        asked = ["--target", "dose", "--question", "vkorc1,amiodarone,age+0.5,dose-1,absent", "--sigma", "0.1"]
        found = glm(patients, *asked, "--out", out)
        assert found.exit_code == 0, found.output
        assert "no attacker does better" in found.stdout
        assert "question    answers  prior  best: mean  largest  rows ≥ 90 %" in found.stdout
        data = json.loads(glm(patients, *asked, "--json").stdout)["questions"]

        table = read_table(patients, "dose")
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
            (["--target", "dose", "--id", "dose"], "'dose' is the target; it cannot be left out"),
            (["--target", "dose", "--categorical", "dose"], "'dose' is the target"),
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
            ("a,b,y\n1,1,2\n1,2,3\n", "one value in every row of 'a'"),
            ("a,y\n" + "\n".join(f"name{i},{i}" for i in range(60)), "looks like a name or an identifier"),
            ("a,y\n1\0,2\n", "is not text in UTF-8, UTF-16 (with its mark) or Windows-1252"),
            ("\udc81,y\n1,2\n", "is not text in UTF-8, UTF-16 (with its mark) or Windows-1252"),
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
            assert "is a gzip file that is truncated or damaged" in refused_glm(path, "--target", "y")

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
            assert "is the data file" in refused_glm(patients, "--target", "dose", "--out", out)
        assert patients.read_bytes() == before

    def test_on_the_warfarin_data(self) -> None:
        (path,) = (real_data("iwpc").folder / "iwpc").glob("iwpc-scaled.csv*")
        data = json.loads(glm(path, "--target", "dose", "--private", "vkorc1,age", "--json").stdout)
        assert data["rows"] == 4819
        assert data["summary"]["vkorc1_fil"]["max"] == pytest.approx(0.0275, abs=1e-4)


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

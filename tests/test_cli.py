"""The command line: results, JSON, exit codes, and one line for every mistake."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from test_datasets import IWPC

from torchfil import datasets
from torchfil.cli import main
from torchfil.report import SavedRun, load, save

pytest.importorskip("sklearn")


def run_file(path: Path, **changes: Any) -> Path:
    n = 30
    fil = np.linspace(0.1, 0.5, n)
    columns = {
        "fil": fil,
        "fil_error": fil / 10,
        "sampling_error": fil / 10,
        "mse_bound": fil**-2,
        "mse_bound_low": 0.9 * fil**-2,
        "participations": np.ones(n, dtype=np.int64),
        "missed": np.zeros(n, dtype=np.int64),
        "squared_norm": fil,
        "epsilon": 2 * fil,
    }
    about = {"title": "a run", "epsilon": 2.5, "delta": 1e-5, "model": {"name": "Net"}, "mechanism": {"steps": 9}}
    parts: dict[str, Any] = {"about": about, "ids": np.arange(n), "columns": columns, "groups": {}}
    return save(SavedRun(**{**parts, **changes}), path)


def call(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def refused(*args: Any) -> str:
    """The one line that a mistake is answered with."""
    found = call(*args)
    assert found.exit_code == 2, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert found.stdout == ""
    (line,) = found.stderr.strip().splitlines()
    return line


class TestHelp:
    def test_every_command_has_examples(self) -> None:
        overview = call("--help")
        assert overview.exit_code == 0
        for name in main.commands:
            assert name in overview.stdout
            shown = call(name, "--help")
            assert shown.exit_code == 0
            assert f"  torchfil {name}" in shown.stdout, "an example"

    def test_as_a_module(self) -> None:
        found = subprocess.run([sys.executable, "-m", "torchfil", "--version"], capture_output=True, text=True)
        assert found.stdout.startswith("torchfil, version")
        assert found.returncode == 0

    def test_mistakes_in_calling(self) -> None:
        assert refused("gates").startswith("torchfil: No such command 'gates'")
        assert (
            refused("report", "x.fil") == "torchfil report: Missing option '-o' / '--out'. (see torchfil report --help)"
        )
        assert "No such option" in refused("inspect", "x.fil", "--everything")
        assert "Invalid value for '--epochs'" in refused("demo", "--epochs", "0")


class TestInspect:
    def test_text_and_json(self, tmp_path: Path) -> None:
        path = run_file(tmp_path / "run.fil")
        text = call("inspect", path, "--top", 2).stdout
        assert "largest 0.5" in text
        assert "2.5 at δ = 1e-05" in text
        assert text.splitlines()[-1].endswith("keep them confidential.")
        data = json.loads(call("inspect", path, "--json", "--top", 2).stdout)
        assert [row["id"] for row in data["most_exposed"]] == [29, 28]
        assert data["examples"] == {"total": 30, "not_measured": 0, "lower_bounds_only": 0, "spared": 0}

    def test_a_run_that_measured_nothing(self, tmp_path: Path) -> None:
        empty = {name: np.zeros(30) for name in ("fil", "participations", "missed")}
        columns = {**empty, "mse_bound": np.full(30, np.inf), "mse_bound_low": np.full(30, np.inf)}
        path = run_file(tmp_path / "run.fil", columns=columns)
        assert "30 examples: not spared" in call("inspect", path).stdout
        assert json.loads(call("inspect", path, "--json").stdout)["fil"]["max"] is None

    def test_bad_files(self, tmp_path: Path) -> None:
        assert "no file" in refused("inspect", tmp_path / "none.fil")
        other = tmp_path / "other.fil"
        other.write_text("no run")
        assert "is not a saved run of torchfil" in refused("inspect", other)
        run_file(other, columns={"squared_norm": np.ones(30)})
        assert "the run has no column 'fil'; it has squared_norm" in refused("inspect", other)
        policy = tmp_path / "policy.toml"
        policy.write_text("min_mse_bound = 1")
        assert "the run has no column 'mse_bound_low'" in refused("gate", other, "--policy", policy)
        whole = run_file(tmp_path / "run.fil").read_bytes()
        other.write_bytes(whole[:-5])
        assert "is cut short" in refused("inspect", other)


class TestGate:
    def test_init_then_pass_then_fail(self, tmp_path: Path) -> None:
        run, policy = run_file(tmp_path / "run.fil"), tmp_path / "policy.toml"
        assert call("gate", "--init", "--policy", policy).exit_code == 0
        passed = call("gate", run, "--policy", policy)
        assert passed.exit_code == 0, passed.output
        assert passed.stdout.splitlines()[-1] == "passed"
        policy.write_text("min_mse_bound = 4.0\nmax_epsilon = 8\n")
        failed = call("gate", run, "--policy", policy)
        assert failed.exit_code == 1
        (line,) = [line for line in failed.stdout.splitlines() if line.startswith("FAIL ")]
        assert line.split()[-3:] == ["4", "3.6", "2"]
        assert failed.stdout.splitlines()[-1] == "FAILED: 1 rule broken"
        quiet = call("gate", run, "--policy", policy, "--quiet")
        assert "pass" not in quiet.stdout
        data = json.loads(call("gate", run, "--policy", policy, "--json").stdout)
        assert data["passed"] is False
        assert {rule["rule"]: rule["passed"] for rule in data["rules"]} == {
            "min_mse_bound": False,
            "max_epsilon": True,
            "max_violated_bounds": True,
            "max_share_not_measured": True,
            "max_examples_missed": True,
        }

    def test_bad_input_is_not_a_failed_gate(self, tmp_path: Path) -> None:
        run, policy = run_file(tmp_path / "run.fil"), tmp_path / "policy.toml"
        assert "no policy" in refused("gate", run, "--policy", policy)
        assert "name a saved run, or use --init" in refused("gate", "--policy", policy)
        policy.write_text("max_epsilom = 1")
        assert "unknown key 'max_epsilom'; did you mean 'max_epsilon'?" in refused("gate", run, "--policy", policy)
        assert "exists already and is not overwritten" in refused("gate", "--init", "--policy", policy)
        assert policy.read_text() == "max_epsilom = 1"
        assert "no file" in refused("gate", tmp_path / "none.fil", "--policy", policy)

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        lost = tmp_path / "none" / "policy.toml"
        assert refused("gate", "--init", "--policy", lost) == f"torchfil: {lost}: No such file or directory"


class TestReport:
    def test_page(self, tmp_path: Path) -> None:
        run = run_file(tmp_path / "run.fil")
        found = call("report", run, "-o", tmp_path / "page", "--quiet")
        assert found.exit_code == 0, found.output
        page = Path(found.stdout.strip())
        assert page == tmp_path / "page" / "index.html"
        assert "a run" in page.read_text(encoding="utf-8")
        assert page.stat().st_mode & 0o777 == 0o600
        redacted = json.loads(call("report", run, "-o", tmp_path / "public", "--redacted", "--json").stdout)
        assert redacted == {"page": str(tmp_path / "public" / "index.html"), "redacted": True}

    def test_bad_input(self, tmp_path: Path) -> None:
        run = run_file(tmp_path / "run.fil")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("keep")
        assert "is not replaced" in refused("report", run, "-o", tmp_path / "mine")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep"
        assert "no file" in refused("report", tmp_path / "none.fil", "-o", tmp_path / "page")


class TestGlm:
    @pytest.fixture
    def patients(self, tmp_path: Path) -> Path:
        path = tmp_path / "patients.csv"
        path.write_text(IWPC)
        return path

    def test_the_whole_table(self, patients: Path, tmp_path: Path) -> None:
        out = tmp_path / "leakage.csv"
        found = call("glm", patients, "--target", "dose", "--private", "vkorc1,age", "--out", out, "--top", 2)
        assert found.exit_code == 0, found.output
        assert "one-hot: race (3), vkorc1 (3)" in found.stdout
        assert "if they are codes, use --categorical" in found.stdout
        with out.open() as file:
            rows = list(csv.DictReader(file))
        names = ["id", "fil", "mse_bound", "vkorc1_fil", "vkorc1_error", "age_fil", "age_error"]
        assert list(rows[0]) == names
        assert len(rows) == 5
        assert out.stat().st_mode & 0o777 == 0o600

    def test_texts_are_no_formulas_in_spreadsheets(self, tmp_path: Path) -> None:
        path, out = tmp_path / "data.csv", tmp_path / "leakage.csv"
        path.write_text("name,=age,y\n=cmd(),1,2\n-cmd(),2,1\n-7,4,5\npatient,3,3\n")
        found = call("glm", path, "--target", "y", "--id", "name", "--private", "=age", "--out", out)
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
        data = json.loads(call("glm", patients, "--target", "dose", "--private", "vkorc1,age", *options).stdout)
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
        from torchfil.glm.csv_table import encode, read_rows

        out = tmp_path / "leakage.csv"
        asked = ["--target", "dose", "--question", "vkorc1,amiodarone,age+0.5,dose-1,absent", "--sigma", "0.1"]
        found = call("glm", patients, *asked, "--out", out)
        assert found.exit_code == 0, found.output
        assert "no attacker does better" in found.stdout
        assert "question    answers  prior  best: mean  largest  rows ≥ 90 %" in found.stdout
        data = json.loads(call("glm", patients, *asked, "--json").stdout)["questions"]

        table = encode(read_rows(patients), "dose")
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
        data = json.loads(call("glm", path, *options).stdout)["questions"]["label"]
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
        data = json.loads(
            call("glm", path, "--target", "label", "--model", model, "--id", "name", "--top", 1, "--json").stdout
        )
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
            (["--target", "dose", "--question", "vkorc1+1"], "'vkorc1' is one-hot, so that 'vkorc1+1' has no meaning"),
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
        assert message in refused("glm", patients, *options)

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
            ("\udcff\udcfe", "is not a CSV file in UTF-8"),
            ("y\n1\n2\n", "there is no column to predict 'y' from"),
            (
                "a;y\n1,5;2\n2,5;3\n",
                "is one column with semicolons in it, 'a;y'; the columns must be separated by commas",
            ),
            ('"a";"y"\r\n1;2\r\n', "is one column with semicolons in it"),
            ("a\ty\n1\t2\n", "is one column with tabs in it"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "data.csv"
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
        assert message in refused("glm", path, "--target", "y")
        assert "No such file" in refused("glm", tmp_path / "none.csv", "--target", "y")

    def test_missing_entries_are_left_out_on_request(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text("a,y\n1,2\n?,3\n2,3\n4,1\n")
        found = call("glm", path, "--target", "y", "--drop-missing")
        assert "1 rows with missing entries were left out" in found.stdout
        data = json.loads(call("glm", path, "--target", "y", "--drop-missing", "--json").stdout)
        assert sorted(row["id"] for row in data["most_exposed"]) == ["0", "2", "3"]

    def test_only_used_columns_count_as_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv"
        path.write_text("name,a,note,y\np,1,,2\n,2,x,3\nr,?,x,3\ns,5,NA,4\nt,3,x,\n")
        options = ["--target", "y", "--ignore", "note", "--id", "name", "--drop-missing", "--json"]
        data = json.loads(call("glm", path, *options).stdout)
        assert sorted(row["id"] for row in data["most_exposed"]) == ["", "p", "s"]

    def test_a_damaged_gzip_file(self, tmp_path: Path) -> None:
        path = tmp_path / "data.csv.gz"
        whole = gzip.compress(b"a,y\n" + b"".join(b"%d,%d\n" % (i, i * i % 7) for i in range(500)))
        middle = len(whole) // 2
        for content in (whole[:middle], whole[:-4], whole[:middle] + b"\0" * 9 + whole[middle + 9 :]):
            path.write_bytes(content)
            assert "is a gzip file that is cut short or damaged" in refused("glm", path, "--target", "y")

    def test_a_table_that_cannot_be_written_is_named(self, patients: Path, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        for out, reason in (("folder", "Is a directory"), ("none/x.csv", "No such file or directory")):
            line = refused("glm", patients, "--target", "dose", "--out", tmp_path / out)
            assert line == f"torchfil: {tmp_path / out}: {reason}"
        assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []

    def test_the_data_are_not_written_over(self, patients: Path, tmp_path: Path) -> None:
        before = patients.read_bytes()
        (tmp_path / "link.csv").symlink_to(patients)
        for out in (patients, tmp_path / "link.csv"):
            assert "is the data file itself" in refused("glm", patients, "--target", "dose", "--out", out)
        assert patients.read_bytes() == before

    def test_on_the_warfarin_data(self) -> None:
        try:
            folder = datasets.data_folder()
        except datasets.DataNotFoundError as error:
            pytest.skip(str(error))
        (path,) = (folder / "iwpc").glob("iwpc-scaled.csv*")
        data = json.loads(call("glm", path, "--target", "dose", "--private", "vkorc1,age", "--json").stdout)
        assert data["rows"] == 4819
        assert data["summary"]["vkorc1_fil"]["max"] == pytest.approx(0.0275, abs=1e-4)


class TestDemo:
    def test_ends_with_a_report(self, tmp_path: Path) -> None:
        found = call("demo", "--epochs", 1, "-o", tmp_path / "demo")
        assert found.exit_code == 0, found.output
        last = found.stdout.strip().splitlines()[-1]
        assert last == f"report: {tmp_path / 'demo' / 'report' / 'index.html'}"
        assert (tmp_path / "demo" / "report" / "index.html").exists()
        run = load(tmp_path / "demo" / "digits.fil")
        assert len(run) == 1797
        assert run.pictures is not None
        assert set(run.groups["digit"]) == set("0123456789")

    def test_bad_device(self, tmp_path: Path) -> None:
        assert "device 'abacus' cannot be used" in refused("demo", "--device", "abacus", "-o", tmp_path / "demo")
        assert not (tmp_path / "demo").exists()


class TestBench:
    def test_the_small_network(self) -> None:
        data = json.loads(call("bench", "--batch", 2, "--repeats", 1, "--json").stdout)
        assert data["steps"][0]["name"] == "stock Opacus (hooks)"
        assert data["steps"][0]["relative"] == 1
        assert all(step["milliseconds"] > 0 for step in data["steps"])
        assert len(data["steps"]) == 5

    @pytest.fixture
    def jobs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A module with jobs in the present folder."""
        (tmp_path / "jobs_of_mine.py").write_text(
            textwrap.dedent("""
            import torch
            from torch import nn

            class WithLoss(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.head = nn.Linear(3, 2)
                def forward(self, x, labels=None):
                    logits = self.head(x)
                    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

            BATCH = (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
            def good():
                return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), BATCH, nn.CrossEntropyLoss()
            def own_loss():
                return WithLoss(), {"x": BATCH[0], "labels": BATCH[1]}
            def mixing():
                return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), BATCH, nn.CrossEntropyLoss()
            def wrong():
                return nn.Linear(3, 2)
            """)
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.delitem(sys.modules, "jobs_of_mine", raising=False)
        return "jobs_of_mine"

    def test_a_model_of_ones_own(self, jobs: str) -> None:
        found = call("bench", "--model", f"{jobs}:good", "--repeats", 1)
        assert found.exit_code == 0, found.output
        for part in ("runs, in one recorded pass", "1 (ReLU)", "× stock Opacus (hooks)", "engine.train_step, 3 probes"):
            assert part in found.stdout
        data = json.loads(call("bench", "--model", f"{jobs}:good", "--repeats", 1, "--json").stdout)
        assert data["batch"] == 4
        assert data["check"]["verdict"] == "recorded"
        assert [step["failed"] for step in data["steps"]] == [None] * 5

    def test_where_opacus_cannot_plain_training_is_the_unit(self, jobs: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(job: Any) -> None:
            raise NotImplementedError("no rule for this layer")

        monkeypatch.setattr("torchfil.cli.timing._opacus_step", fails)
        data = json.loads(call("bench", "--model", f"{jobs}:own_loss", "--repeats", 1, "--json").stdout)
        assert data["check"]["loss"] == "the model's own loss on each example alone"
        assert "let the model run without labels" in data["check"]["advice"][0]
        assert (data["steps"][0]["name"], data["steps"][0]["relative"]) == ("plain training", 1)
        assert data["steps"][-1]["failed"] == "no rule for this layer"
        assert len(data["steps"]) == 5

    def test_a_refused_model_ends_with_exit_code_1(self, jobs: str) -> None:
        found = call("bench", "--model", f"{jobs}:mixing", "--repeats", 1)
        assert found.exit_code == 1
        assert "is refused" in found.stdout
        assert "GroupNorm" in found.stdout

    def test_mistakes_are_one_line(self, jobs: str) -> None:
        assert "must be package.module:function" in refused("bench", "--model", "nothing")
        assert "has no function 'none'" in refused("bench", "--model", f"{jobs}:none")
        assert "must return (model, batch)" in refused("bench", "--model", f"{jobs}:wrong")
        assert "No module named" in refused("bench", "--model", "no_such_module:job")

"""The command line: results, JSON, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from torchfil.cli import main
from torchfil.cli.demo import small_digits
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
            refused("report", "x.parquet")
            == "torchfil report: Missing option '-o' / '--out'. (see torchfil report --help)"
        )
        assert "No such option" in refused("inspect", "x.parquet", "--everything")
        assert "Invalid value for '--epochs'" in refused("demo", "--epochs", "0")


class TestInspect:
    def test_text_and_json(self, tmp_path: Path) -> None:
        path = run_file(tmp_path / "run.parquet")
        text = call("inspect", path, "--top", 2).stdout
        assert "largest 0.5" in text
        assert "2.5 at δ = 1e-05" in text
        assert text.splitlines()[-1].endswith("keep them confidential.")
        data = json.loads(call("inspect", path, "--json", "--top", 2).stdout)
        assert [row["id"] for row in data["most_exposed"]] == [29, 28]
        counts = {"total": 30, "not_measured": 0, "lower_bounds_only": 0, "spared": 0}
        assert data["examples"] == counts | {"exposed": None}  # nothing says what a blind guess errs by

    def test_a_run_that_measured_nothing(self, tmp_path: Path) -> None:
        empty = {name: np.zeros(30) for name in ("fil", "participations", "missed")}
        columns = {**empty, "mse_bound": np.full(30, np.inf), "mse_bound_low": np.full(30, np.inf)}
        path = run_file(tmp_path / "run.parquet", columns=columns)
        assert "30 examples: not spared" in call("inspect", path).stdout
        assert json.loads(call("inspect", path, "--json").stdout)["fil"]["max"] is None

    def test_bad_files(self, tmp_path: Path) -> None:
        assert "no file" in refused("inspect", tmp_path / "none.parquet")
        other = tmp_path / "other.parquet"
        other.write_text("no run")
        assert "is not a saved run of torchfil" in refused("inspect", other)
        run_file(other, columns={"squared_norm": np.ones(30)})
        assert "the run has no column 'fil'; it has squared_norm" in refused("inspect", other)
        whole = run_file(tmp_path / "run.parquet").read_bytes()
        other.write_bytes(whole[:-5])
        assert "is cut short" in refused("inspect", other)


class TestReport:
    def test_page(self, tmp_path: Path) -> None:
        run = run_file(tmp_path / "run.parquet")
        found = call("report", run, "-o", tmp_path / "page", "--quiet")
        assert found.exit_code == 0, found.output
        page = Path(found.stdout.strip())
        assert page == tmp_path / "page" / "index.html"
        assert "a run" in page.read_text(encoding="utf-8")
        assert page.stat().st_mode & 0o777 == 0o600
        redacted = json.loads(call("report", run, "-o", tmp_path / "public", "--redacted", "--json").stdout)
        assert redacted == {"page": str(tmp_path / "public" / "index.html"), "redacted": True}

    def test_bad_input(self, tmp_path: Path) -> None:
        run = run_file(tmp_path / "run.parquet")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("keep")
        assert "is not replaced" in refused("report", run, "-o", tmp_path / "mine")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep"
        assert "no file" in refused("report", tmp_path / "none.parquet", "-o", tmp_path / "page")

    def test_a_smallest_group_means_something_on_public_pages_alone(self, tmp_path: Path) -> None:
        run = run_file(tmp_path / "run.parquet")
        told = refused("report", run, "-o", tmp_path / "page", "--min-group", 20)
        assert "--min-group 20 has no effect without --redacted; add --redacted, or leave it out" in told
        assert not (tmp_path / "page").exists()
        assert "--min-group 20 has no effect" in refused("compare", run, run, "--min-group", 20)
        assert call("report", run, "-o", tmp_path / "page", "--redacted", "--min-group", 20).exit_code == 0


class TestDemo:
    def test_another_folder_called_report_is_refused_before_training(self, tmp_path: Path) -> None:
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "thesis.txt").write_text("years of work")
        assert "thesis.txt" in refused("demo", "-o", tmp_path)
        assert not (tmp_path / "run.parquet").exists()

    def test_ends_with_a_report(self, tmp_path: Path) -> None:
        found = call("demo", "--epochs", 1, "-o", tmp_path / "demo")
        assert found.exit_code == 0, found.output
        last = found.stdout.strip().splitlines()[-1]
        assert last == f"report: {tmp_path / 'demo' / 'report' / 'index.html'}"
        assert (tmp_path / "demo" / "report" / "index.html").exists()
        run = load(tmp_path / "demo" / "run.parquet")
        assert len(run) == 1797
        assert run.pictures is not None
        assert set(run.groups["digit"]) == set("0123456789")
        assert run.yardsticks is not None
        assert run.attributes is not None
        assert run.attributes.pixels.tolist() == [[row, column] for row in range(8) for column in range(8)]  # type: ignore[union-attr]
        assert "data-step=" in (tmp_path / "demo" / "report" / "index.html").read_text()  # a map, not rows of pixels

    def test_bad_device(self, tmp_path: Path) -> None:
        assert "device 'abacus' cannot be used" in refused("demo", "--device", "abacus", "-o", tmp_path / "demo")
        assert not (tmp_path / "demo").exists()

    def test_digits_are_drawn_without_scikit_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        images, labels, origin = small_digits()
        assert "drawn by rule" in origin
        assert images.shape == (1797, 1, 8, 8)
        assert 0 <= images.min() < images.max() <= 1
        means = torch.stack([images[labels == label].mean(0) for label in range(10)]).flatten(1)
        assert (torch.cdist(images.flatten(1), means).argmin(1) == labels).double().mean() > 0.4

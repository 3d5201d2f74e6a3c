"""The command line: results, JSON, exit codes, and one line for every mistake."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.report.pages import text_of
from torchfil.cli import main
from torchfil.cli.demo import small_digits
from torchfil.report import SavedRun, load, save

pytest.importorskip("sklearn")


def run_file(path: Path, **changes: Any) -> Path:
    n = 30
    fil = np.linspace(0.1, 0.5, n)
    columns = {"fil": fil, "fil_error": fil / 10, "sampling_error": fil / 10, "mse_bound": fil**-2}
    columns |= {"mse_bound_low": 0.9 * fil**-2, "participations": np.ones(n, dtype=np.int64)}
    columns |= {"missed": np.zeros(n, dtype=np.int64), "squared_norm": fil, "epsilon": 2 * fil}
    about = {
        "title": "a run",
        "epsilon": 2.5,
        "delta": 1e-5,
        "model": {"name": "Net"},
        "mechanism": {"steps": 9},
    }
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


def test_inspect(tmp_path: Path) -> None:
    path = run_file(tmp_path / "run.parquet")
    text = call("inspect", path, "--top", 2).stdout
    assert "confidential" in text
    data = json.loads(call("inspect", path, "--json", "--top", 2).stdout)
    assert [row["id"] for row in data["most_exposed"]] == [29, 28]

    empty = {name: np.zeros(30) for name in ("fil", "participations", "missed")}
    columns = {**empty, "mse_bound": np.full(30, np.inf), "mse_bound_low": np.full(30, np.inf)}
    path = run_file(tmp_path / "run.parquet", columns=columns)
    nothing = call("inspect", path, "--json").stdout  # what is infinite or not a number is null
    assert json.loads(nothing, parse_constant=lambda name: pytest.fail(name))["fil"]["max"] is None


def test_report(tmp_path: Path) -> None:
    run, policy = run_file(tmp_path / "run.parquet"), tmp_path / "policy.toml"
    policy.write_text("min_mse_bound = 100.0\n")
    weights = tmp_path / "model.pt"
    weights.write_bytes(b"weights")
    found = call(
        "report", run, "-o", tmp_path / "page", "--quiet", "--policy", policy, "--weights", weights
    )
    assert found.exit_code == 0, found.output
    page = Path(found.stdout.strip())
    assert page == tmp_path / "page" / "index.html"
    assert page.stat().st_mode & 0o777 == 0o600
    assert "a run" in text_of(page, "first")
    for file in (run, policy, weights):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in text_of(page, "decision")
    assert (
        call("report", run, "-o", tmp_path / "page", "--policy", tmp_path / "none.toml").exit_code
        == 2
    )
    assert "Do not release" in text_of(page, "verdict")  # what was there stays
    public = ("report", run, "-o", tmp_path / "public", "--redacted", "--min-group", 20, "--json")
    assert json.loads(call(*public).stdout) == {
        "page": str(tmp_path / "public" / "index.html"),
        "redacted": True,
    }


def test_mistakes_take_one_line(tmp_path: Path) -> None:
    run, other, bare = (run_file(tmp_path / f"{name}.parquet") for name in ("run", "other", "bare"))
    other.write_bytes(run.read_bytes()[:-5])
    run_file(bare, columns={"squared_norm": np.ones(30)})
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.txt").write_text("years of work")
    for args, why in (
        (("report", run), "Missing option '-o'"),
        (("inspect", tmp_path / "none.parquet"), "no file"),
        (("inspect", other), "is cut short"),
        (("inspect", bare), "the run has no column 'fil'"),
        (("report", run, "-o", tmp_path / "report"), "is not replaced"),
        (
            ("report", run, "-o", tmp_path / "page", "--min-group", 20),
            "no effect without --redacted",
        ),
        (("demo", "-o", tmp_path), "thesis.txt"),
        (("demo", "--device", "abacus", "-o", tmp_path / "demo"), "device 'abacus'"),
    ):
        assert why in refused(*args)
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.parquet",
        "other.parquet",
        "bare.parquet",
        "report",
    }
    assert (tmp_path / "report" / "thesis.txt").read_text() == "years of work"


def test_the_demo_ends_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels, _ = small_digits()
    few = images[:597], labels[:597], "597 digits"
    monkeypatch.setattr(sys.modules[small_digits.__module__], "small_digits", lambda: few)
    found = call("demo", "--epochs", 1, "-o", tmp_path / "demo")
    assert found.exit_code == 0, found.output
    page = tmp_path / "demo" / "report" / "index.html"
    assert found.stdout.strip().splitlines()[-1] == f"report: {page}"
    run = load(tmp_path / "demo" / "run.parquet")
    assert len(run) == 300
    assert set(run.groups["digit"]) == set("0123456789")

"""``torchfil gate``: exit codes, and what it leaves for people and pipelines."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up, worrying
from tests.test_cli import call, refused, run_file
from torchfil.gate.gate import notes
from torchfil.report import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_file(tmp_path / "run.parquet", ids=np.asarray([f"=patient {i}" for i in range(30)]))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """One that the run breaks by one rule, for two patients."""
    path = tmp_path / "policy.toml"
    path.write_text("min_mse_bound = 4.0\nmax_epsilon = 8\n")
    return path


def test_init_then_pass_then_fail(run: Path, policy: Path, tmp_path: Path) -> None:
    start = tmp_path / "start.toml"
    assert call("gate", "--init", "--policy", start).exit_code == 0
    assert call("gate", run, "--policy", start).exit_code == 3  # it keeps no questions
    passed = call("gate", save(worrying(safe=True), tmp_path / "safe.parquet"), "--policy", start)
    told = "passed: may be released (all 7 rules kept)"
    assert (passed.exit_code, passed.stdout.splitlines()[-1]) == (0, told), passed.output
    failed = call("gate", run, "--policy", policy)
    assert failed.exit_code == 1
    (line,) = [line for line in failed.stdout.splitlines() if line.startswith("broken ")]
    assert line.split()[-4:] == ["3.6", "at", "least", "4"]
    assert "kept" not in call("gate", run, "--policy", policy, "--quiet").stdout

    # choices that no rule judges are noted
    path = save(made_up(), tmp_path / "spared.parquet")
    assert (
        "note: 3 examples were trained with a smaller weight"
        in call("gate", path, "--policy", policy).stdout
    )
    assert json.loads(call("gate", path, "--policy", policy, "--json").stdout)["notes"] == notes(
        made_up()
    )


def test_files_that_are_missing_or_in_the_way(run: Path, policy: Path, tmp_path: Path) -> None:
    """A mistake is not a failed gate."""
    bare, before = (
        run_file(tmp_path / "bare.parquet", columns={"fil": np.ones(30)}),
        run.read_bytes(),
    )
    lost, used = tmp_path / "none" / "policy.toml", ("--policy", policy)
    for args, message in (
        ((run, "--policy", tmp_path), "TOML"),
        ((run, "--policy", lost), "no policy"),
        (used, "name a saved run"),
        (("--init", *used), "is not overwritten"),
        ((run, *used, "--list", run), "would overwrite"),
        ((run, *used, "--sarif", policy), "would overwrite"),
        ((run, *used, "--json-file", tmp_path / "a", "--sarif", tmp_path / "a"), "would overwrite"),
        ((bare, *used), "no column 'mse_bound_low'"),
    ):
        assert message in refused("gate", *args)
    assert run.read_bytes() == before
    assert call("gate", "--init", "--policy", lost).exit_code == 0, "the folder is made"
    assert not (tmp_path / "a").exists()


def test_the_list_names_whom_the_broken_rules_concern(
    run: Path, policy: Path, tmp_path: Path
) -> None:
    who = tmp_path / "who.csv"
    found = call("gate", run, "--policy", policy, "--list", who)
    assert "patient" not in found.stdout
    assert who.stat().st_mode & 0o777 == 0o600
    with who.open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"rule": "min_mse_bound", "id": f"'=patient {i}"} for i in (28, 29)
        ]
    policy.write_text("max_epsilon = 8")
    assert "no rule is broken: " in call("gate", run, "--policy", policy, "--list", who).stdout
    assert who.read_text().splitlines() == ['"rule","id"']


def test_files_for_pipelines(
    run: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON and GitHub's summary: none names an example."""
    as_json, summary = tmp_path / "gate.json", tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    found = call("gate", run, "--policy", policy, "--json-file", as_json, "--json")
    assert found.exit_code == 1
    assert as_json.stat().st_mode & 0o777 == 0o600
    assert not any("patient" in path.read_text() for path in (as_json, summary))

    data = json.loads(found.stdout)
    assert json.loads(as_json.read_text(encoding="utf-8")) == data
    assert [rule["rule"] for rule in data["rules"] if not rule["passed"]] == ["min_mse_bound"]

    assert summary.read_text(encoding="utf-8").startswith(
        "before\n### torchfil gate, a run: FAILED"
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    assert "No such file or directory" in refused("gate", run, "--policy", policy)

"""``torchfil gate``: exit codes, and what it leaves for people and pipelines."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.report.run_cases import worrying
from tests.test_cli import call, refused, run_file
from torchfil.report import load, save


class TestGate:
    def test_init_then_pass_then_fail(self, tmp_path: Path) -> None:
        run, policy = run_file(tmp_path / "run.parquet"), tmp_path / "policy.toml"
        assert call("gate", "--init", "--policy", policy).exit_code == 0
        bare = call("gate", run, "--policy", policy)
        assert bare.exit_code == 1
        assert "the run kept no question: make_private(…, questions={…}) keeps them" in bare.stdout
        passed = call("gate", save(worrying(safe=True), tmp_path / "safe.parquet"), "--policy", policy)
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
        run, policy = run_file(tmp_path / "run.parquet"), tmp_path / "policy.toml"
        assert "no policy" in refused("gate", run, "--policy", policy)
        assert "name a saved run, or use --init" in refused("gate", "--policy", policy)
        policy.write_text("max_epsilom = 1")
        assert "unknown key 'max_epsilom'; did you mean 'max_epsilon'?" in refused("gate", run, "--policy", policy)
        (tmp_path / "utf-16.toml").write_text("max_epsilon = 8", encoding="utf-16")
        assert "save it as UTF-8" in refused("gate", run, "--policy", tmp_path / "utf-16.toml")
        assert "is a folder, not a policy" in refused("gate", run, "--policy", tmp_path)
        assert "exists already and is not overwritten" in refused("gate", "--init", "--policy", policy)
        assert policy.read_text() == "max_epsilom = 1"
        assert "no file" in refused("gate", tmp_path / "none.parquet", "--policy", policy)

    def test_a_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        lost = tmp_path / "none" / "policy.toml"
        assert refused("gate", "--init", "--policy", lost) == f"torchfil: {lost}: No such file or directory"

    def test_a_run_without_its_columns(self, tmp_path: Path) -> None:
        run, policy = run_file(tmp_path / "run.parquet", columns={"fil": np.ones(30)}), tmp_path / "policy.toml"
        policy.write_text("min_mse_bound = 1")
        assert "the run has no column 'mse_bound_low'" in refused("gate", run, "--policy", policy)

    def test_an_empty_policy_is_refused(self, tmp_path: Path) -> None:
        run, policy = run_file(tmp_path / "run.parquet"), tmp_path / "policy.toml"
        policy.write_text("")
        assert "the policy limits nothing, so that every run would pass" in refused("gate", run, "--policy", policy)

    def test_ties_can_be_told_apart(self, tmp_path: Path) -> None:
        low = np.full(30, 1.05 - 1e-6)
        run, policy = run_file(tmp_path / "run.parquet"), tmp_path / "policy.toml"
        run_file(run, columns={**load(run).columns, "mse_bound_low": low})
        policy.write_text("min_mse_bound = 1.05")
        (line,) = [line for line in call("gate", run, "--policy", policy).stdout.splitlines() if "FAIL " in line]
        assert line.split()[-3:] == ["1.05", "1.049999", "30"]


class TestFiles:
    @pytest.fixture
    def failed(self, tmp_path: Path) -> tuple[Path, Path]:
        run = run_file(tmp_path / "run.parquet", ids=np.asarray([f"=patient {i}" for i in range(30)]))
        policy = tmp_path / "policy.toml"
        policy.write_text("min_mse_bound = 4.0\nmax_epsilon = 8\n")
        return run, policy

    def test_the_list_names_whom_the_broken_rules_concern(self, failed: tuple[Path, Path], tmp_path: Path) -> None:
        who = tmp_path / "who.csv"
        found = call("gate", failed[0], "--policy", failed[1], "--list", who)
        assert found.exit_code == 1
        assert "patient" not in found.stdout
        assert who.stat().st_mode & 0o777 == 0o600
        with who.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows == [{"rule": "min_mse_bound", "id": f"'=patient {i}"} for i in (28, 29)]
        failed[1].write_text("max_epsilon = 8")
        passed = call("gate", failed[0], "--policy", failed[1], "--list", who)
        assert passed.exit_code == 0
        assert "no rule is broken: " in passed.stdout
        assert who.read_text().splitlines() == ["rule,id"]

    def test_junit(self, failed: tuple[Path, Path], tmp_path: Path) -> None:
        path = tmp_path / "gate.xml"
        assert call("gate", failed[0], "--policy", failed[1], "--junit", path).exit_code == 1
        suite = ElementTree.parse(path).getroot()
        assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "5", "1")
        broken = {case.get("name"): failure for case in suite for failure in case}
        assert list(broken) == ["min_mse_bound"]
        assert broken["min_mse_bound"].get("message") == "limit 4, found 3.6, 2 examples"
        assert path.stat().st_mode & 0o777 == 0o600
        assert "patient" not in path.read_text(), "ids stand in --list alone"

    def test_json(self, failed: tuple[Path, Path], tmp_path: Path) -> None:
        path = tmp_path / "gate.json"
        found = call("gate", failed[0], "--policy", failed[1], "--json-file", path, "--json")
        assert json.loads(path.read_text(encoding="utf-8")) == json.loads(found.stdout)
        assert set(json.loads(found.stdout)["rules"][0]) == {
            *("rule", "passed", "limit", "found", "offending", "detail"),
        }
        assert path.stat().st_mode & 0o777 == 0o600
        assert "patient" not in path.read_text()

    def test_the_step_summary_is_added_to(
        self, failed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "summary.md"
        path.write_text("before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
        assert call("gate", failed[0], "--policy", failed[1], "-q").exit_code == 1
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[:2] == ["before", "### torchfil gate, a run: FAILED: 1 rule broken"]
        assert lines[3:5] == ["| verdict | rule | what | limit | found | examples |", f"|{' --- |' * 6}"]
        assert any(line.startswith("| FAIL | min\\_mse\\_bound |") for line in lines)
        assert "patient" not in path.read_text()
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
        assert "No such file or directory" in refused("gate", failed[0], "--policy", failed[1])

    def test_nothing_that_is_read_is_written_over(self, failed: tuple[Path, Path], tmp_path: Path) -> None:
        run, policy = failed
        before = run.read_bytes()
        for options in (
            ["--list", run],
            ["--junit", policy],
            ["--json-file", tmp_path / "a", "--junit", tmp_path / "a"],
        ):
            assert "is written to, but it is" in refused("gate", run, "--policy", policy, *options)
        assert run.read_bytes() == before
        assert not (tmp_path / "a").exists()

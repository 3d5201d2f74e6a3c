"""How a gate ends: levels, presets, several runs, and what pipelines and other people's logs
get.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import summary_of, text_of
from tests.report.run_cases import REFUTED, audited, made_up, worrying
from tests.test_cli import call, refused, run_file
from torchfil.gate.gate import OUTCOMES, outcome, worst_of
from torchfil.gate.policy import Policy, PolicyError
from torchfil.gate.rules import STATES, Verdict
from torchfil.report import load, save, write_report

BROKEN = "min_mse_bound = 4.0\n"  # by two of the thirty patients of the run below
UNKNOWN = "min_attribute_error = { age = 5.0 }\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_file(tmp_path / "run.parquet", ids=np.asarray([f"patient {i}" for i in range(30)]))


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    """Writes one."""

    def write(text: str) -> Path:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return path

    return write


# ---------------------------------------------------------------------- levels and outcomes


@pytest.mark.parametrize(
    ("rules", "levels", "code", "states"),
    [
        ("max_epsilon = 8", "", 0, "kept"),
        (BROKEN, "", 1, "broken kept"),
        (BROKEN, "min_mse_bound = 'warn'", 0, "warning kept"),
        (UNKNOWN, "", 3, "unknown kept"),
        (UNKNOWN, "min_attribute_error = 'warn'", 0, "warning kept"),
        (BROKEN + UNKNOWN, "", 1, "broken unknown kept"),
        (BROKEN + UNKNOWN, "min_mse_bound = 'warn'", 3, "warning unknown kept"),
    ],
)
def test_the_level_of_a_rule_decides_how_it_ends(
    run: Path, policy: Any, rules: str, levels: str, code: int, states: str
) -> None:
    file = policy(f"{rules}\nmax_share_too_few_draws = 1\n[levels]\n{levels}")
    found = call("gate", run, "--policy", file, "--json")
    data = json.loads(found.stdout)
    words = {each.code: each.word for each in OUTCOMES}
    assert (found.exit_code, data["outcome"], data["passed"]) == (code, words[code], code == 0)
    assert {rule["state"] for rule in data["rules"]} == {STATES[each] for each in states.split()}


def test_off_is_not_measured_and_no_typing_error_switches_a_rule_off(
    run: Path, policy: Any
) -> None:
    file = policy(
        "min_mse_bound = 4.0\nmax_epsilon = 8\n[levels]\nmin_mse_bound = 'off'\n"
        "max_violated_bounds = 'off'"
    )
    rules = {
        rule["rule"]
        for rule in json.loads(call("gate", run, "--policy", file, "--json").stdout)["rules"]
    }
    assert rules == {"max_epsilon", "max_share_too_few_draws", "max_examples_missed"}
    with pytest.raises(PolicyError, match='"warn"'):
        Policy(max_epsilon=8, levels={"max_epsilon": "error\n"})
    nothing = f"{BROKEN}max_share_too_few_draws = 1\n[levels]\nmin_mse_bound = 'off'"
    assert "limits nothing" in refused("gate", run, "--policy", policy(nothing))
    with pytest.raises(PolicyError, match="finite"):  # which would limit nothing
        Policy(max_epsilon=math.inf)
    for text, message in (
        ("min_mse_bond = 'off'", "min_mse_bound"),
        ("min_group_size = 'off'", "no rule"),
    ):
        assert message in refused(
            "gate", run, "--policy", policy(f"max_epsilon = 8\n[levels]\n{text}")
        )


def test_the_page_does_not_stop_a_release_for_a_warning(tmp_path: Path) -> None:
    for levels, stamp in (
        ({"max_gain_over_guessing": "warn"}, "May be released"),
        ({}, "Do not release"),
    ):
        policy = Policy(max_gain_over_guessing=0.1, levels=levels)
        page = write_report(worrying(), tmp_path / "page", policy=policy)
        assert stamp in text_of(page, "verdict")
        assert stamp in text_of(page, "decision")
        assert ('<tr class="warning">' in page.read_text()) is bool(levels)
        assert summary_of(page)["decision"] == stamp


# ---------------------------------------------------------------------- several runs


def verdict(
    key: str, limit: float, found: float | None, passed: bool, subject: str = ""
) -> Verdict:
    return Verdict(key, passed, limit, found, np.arange(0 if passed else 2), "compared", subject)


def test_the_worst_run_decides_each_rule() -> None:
    broken, kept, better = (
        verdict("max_epsilon", 8.0, found, found <= 8) for found in (9.0, 3.0, 2.0)
    )
    untold = verdict("max_epsilon", 8.0, None, False)
    for several, source in (
        ({"a": [kept], "b": [broken], "c": [untold]}, "b"),
        ({"a": [kept], "b": [untold], "c": [better]}, "b"),
        ({"a": [better], "b": [kept]}, "b"),
    ):
        (found,) = worst_of(several)
        assert found.source == source
    lower, higher = (verdict("min_mse_bound", 1.0, found, True) for found in (2.0, 3.0))
    assert worst_of({"a": [higher], "b": [lower]})[0].source == "b"

    # another attribute may be the worst in each run; questions are judged one by one
    share = [
        verdict("min_attribute_error_share", 0.5, value, True, name)
        for value, name in ((0.9, "age"), (0.7, "dose"))
    ]
    assert [each.subject for each in worst_of({"a": share[:1], "b": share[1:]})] == ["dose"]
    asked = [verdict("max_gain_over_guessing", 0.1, 0.05, True, name) for name in ("sex", "member")]
    assert len(worst_of({"a": asked, "b": asked})) == 2
    assert outcome(worst_of({"a": [kept], "b": [untold]})).word == "cannot tell"


def test_several_runs_of_one_recipe(run: Path, policy: Any, tmp_path: Path) -> None:
    fil = np.linspace(0.2, 0.6, 30)
    columns = {
        "fil": fil,
        "mse_bound": fil**-2,
        "mse_bound_low": 0.9 * fil**-2,
        "missed": np.zeros(30, dtype=np.int64),
    }
    other = run_file(tmp_path / "b.parquet", columns=columns | {"participations": np.full(30, 9)})
    alone = policy("min_mse_bound = 3.0")
    assert "pessimistic" in refused("gate", run, other, "--policy", alone)
    assert call("gate", run, "--policy", alone).exit_code == 0
    both = policy('min_mse_bound = 3.0\naggregate = "pessimistic"')
    found, who = (
        call("gate", run, other, "--policy", both, "--list", tmp_path / "who.csv"),
        tmp_path / "who.csv",
    )
    assert found.exit_code == 1
    assert who.read_text().splitlines()[1:] == [f'"min_mse_bound","{i}"' for i in (26, 27, 28, 29)]
    assert "named twice" in refused("gate", run, run, "--policy", both)
    assert "b.parquet" not in call("gate", run, other, "--policy", both, "--redacted").stdout, (
        "it leaks more"
    )


@pytest.mark.parametrize(
    ("fact", "about"),
    [
        ("mechanism.steps", {"mechanism": {"steps": 10}}),
        ("run.delta", {"delta": 1e-6}),
        ("run.size", {}),
    ],
)
def test_runs_of_different_recipes_are_refused(
    run: Path, policy: Any, tmp_path: Path, fact: str, about: Any
) -> None:
    changes: dict[str, Any] = {"about": {**load(run).about, **about}}
    if not about:
        changes |= {"ids": np.arange(3), "columns": {"fil": np.ones(3), "mse_bound": np.ones(3)}}
    other = run_file(tmp_path / "b.parquet", **changes)
    said = refused(
        "gate", run, other, "--policy", policy('max_epsilon = 8\naggregate = "pessimistic"')
    )
    assert fact in said
    assert "one recipe" in said


def test_released_models_are_judged_together(run: Path, policy: Any, tmp_path: Path) -> None:
    other = run_file(tmp_path / "old.parquet", ids=np.asarray([f"patient {i}" for i in range(30)]))
    file = policy("min_mse_bound = 3.0\nmax_epsilon = 4")
    assert call("gate", run, "--policy", file).exit_code == 0
    together = call("gate", run, "--policy", file, "--released", other)
    assert together.exit_code == 1
    assert "5 (at δ = 2e-5)" in together.stdout
    assert "note: 2 released models together" in together.stdout
    assert "patient" not in together.stdout
    assert "leave out" in refused(
        "gate", run, "--released", other, "--baseline", run.with_name("c"), "--fail-if-worse"
    )


# --------------------------------------------------------------- pipelines, and other people's logs


POLICY = (
    "max_epsilon = 2\nmin_mse_bound = 4.0\nmin_attribute_error = { age = 5.0 }\n[levels]\n"
    "max_epsilon = 'warn'\n"
)


def test_sarif_follows_the_standard(run: Path, policy: Any, tmp_path: Path) -> None:
    models = pytest.importorskip("sarif_pydantic")
    found = call("gate", run, "--policy", policy(POLICY), "--sarif", tmp_path / "gate.sarif")
    assert found.exit_code == 1
    (log,) = models.Sarif.model_validate_json((tmp_path / "gate.sarif").read_text()).runs
    (plain,) = json.loads((tmp_path / "gate.sarif").read_text())["runs"]
    lines = {
        each["ruleId"]: (
            each["level"],
            each["kind"],
            each["locations"][0]["physicalLocation"]["region"]["startLine"],
        )
        for each in plain["results"]
    }
    assert lines == {
        "max_epsilon": ("warning", "fail", 1),
        "min_mse_bound": ("error", "fail", 2),
        # 3.27.10: a kind other than "fail" has the level "none"
        "min_attribute_error": ("none", "open", 3),
    }
    for result in log.results:
        assert log.tool.driver.rules[result.rule_index].id == result.rule_id
    assert (tmp_path / "gate.sarif").stat().st_mode & 0o777 == 0o600


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+|\d{2,}", text))


def test_logs_that_others_read_hold_nothing_that_was_measured(
    run: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SARIF and annotations always.

    With --redacted everything but the list: numbers are those of the policy.
    """
    file, summary = policy(POLICY), tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    files = {name: tmp_path / f"gate.{name}" for name in ("sarif", "json-file")}
    options = [each for name, path in files.items() for each in (f"--{name}", path)]
    found = call("gate", run, "--policy", file, "--redacted", *options)
    allowed = (
        numbers(POLICY)
        | {"1.0", "0.0"}
        | {"2.1.0", "2.1", "01", "0"}
        | numbers(str(tmp_path))
        | numbers(files["sarif"].read_text().partition("runs")[0])
    )
    version = numbers(re.search(r'"version": "[^"]+",\s+"rules"', files["sarif"].read_text())[0])  # type: ignore[index]
    fixed = {"95", "95 %"}  # of the words of a rule
    for text in (
        found.stdout,
        found.stderr,
        summary.read_text(),
        *(path.read_text() for path in files.values()),
    ):
        assert not numbers(text) - allowed - version - fixed, text
        assert "patient" not in text
    # which is what the page and the engineers see
    assert "3.6" in call("gate", run, "--policy", file).stdout
    assert "3.6" not in call("gate", run, "--policy", file).stderr
    told = [line.split("::")[1].split(" ")[0] for line in found.stderr.splitlines()]
    assert sorted(told) == ["error", "error", "warning"]
    assert found.exit_code == 1

    # neither what an audit showed nor how many could be compared with an earlier run
    above = save(audited(REFUTED), tmp_path / "audited.parquet")
    shown = f"{audited(REFUTED).about['audit']['epsilon']:.3g}"
    assert shown in call("gate", above, "--preset", "research").stdout
    assert shown not in call("gate", above, "--preset", "research", "--redacted").stdout
    part = save(load(run).take(np.arange(3)), tmp_path / "part.parquet")
    found = call(
        "gate", part, "--baseline", run, "--fail-if-worse", "--sarif", files["sarif"], "--redacted"
    )
    assert found.exit_code == 3
    assert "fewer than half" in found.stderr
    assert str(len(load(run))) not in found.stdout + found.stderr.replace(str(tmp_path), "")


FORGED = (
    "::error::",
    " \u3000::add-mask::",
    "a\n::error::",
    "\r::error::",
    "\u2028::error::",
    "##[error]",
)


@pytest.mark.parametrize("redacted", [[], ["--redacted"]])
def test_no_text_of_a_run_begins_a_line_as_a_command(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redacted: list[str]
) -> None:
    """Blanks may stand before it.

    The gate's own annotations are commands, whose data are escaped.
    """
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    run = made_up()
    hostile = [f"{FORGED[i % len(FORGED)]}{i}" for i in range(len(run))]
    changes: dict[str, Any] = {
        "about": {**run.about, "title": FORGED[0]},
        "ids": np.asarray(hostile),
    }
    changes["groups"] = {name: np.asarray(hostile) for name in FORGED[:2]}
    changes["attributes"] = dataclasses.replace(
        run.attributes, names=[f"{each} x" for each in FORGED[:3]]
    )
    changes["questions"] = [dataclasses.replace(run.questions[0], name=FORGED[2])]
    path = save(dataclasses.replace(run, **changes), tmp_path / "run.parquet")
    file = policy("max_gain_over_guessing = 0.01\nmin_mse_bound = 1e9").rename(
        tmp_path / "::error::.toml"
    )
    gated = ("gate", path, "--policy", file, *redacted, "--list", tmp_path / "::who.csv")
    for command in (
        gated,
        ("inspect", path, "--top", 40),
        ("compare", path, path, *redacted),
        ("card", path),
        ("report", path, "-o", "::error::page", *redacted),
    ):
        monkeypatch.chdir(tmp_path)
        found = call(*command)
        assert found.exit_code in (0, 1), found.output
        own = [
            line
            for line in found.stderr.splitlines()
            if line.startswith("::error title=torchfil gate%3A ")
        ]
        assert len(own) == 2 * (command is gated), found.stderr
        lines = [line for line in re.split("[\\n\\r\\u2028]", found.output) if line not in own]
        assert [line for line in lines if line.lstrip().startswith("::") or "##[" in line] == []
    assert "\n: :error::0 " in call("inspect", path, "--top", 40).stdout, "shown, not dropped"


# ---------------------------------------------------------------------- the hook and the action

ROOT = Path(__file__).parents[2]


def acted(
    folder: Path, step: int = 1, **given: Any
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A step of the action as GitHub runs it, and its outputs."""
    action = pytest.importorskip("yaml").safe_load((ROOT / "action.yml").read_text())
    defaults = {
        name.upper(): str(each.get("default", "")) for name, each in action["inputs"].items()
    }
    out = folder / "output"
    out.write_text("")
    environment = {**os.environ, **defaults, "PYTHON": sys.executable, "GITHUB_OUTPUT": str(out)}
    environment |= {"PYTHONPATH": str(ROOT), "GITHUB_ACTION_PATH": str(folder), **given}
    command = [
        "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        "-c",
        action["runs"]["steps"][step]["run"],
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    return done, out.read_text().splitlines()


def test_the_action_runs_the_gate(tmp_path: Path, run: Path, policy: Any) -> None:
    """An input with signs of the shell stays one argument."""
    odd = policy(POLICY).rename(tmp_path / "a $(touch b) policy.toml")
    done, told = acted(tmp_path, RUNS=str(run), POLICY=str(odd), SARIF=str(tmp_path / "g.sarif"))
    assert done.returncode == 1, done.stderr
    assert told == ["outcome=failed", f"sarif={tmp_path / 'g.sarif'}"]
    assert "not shown" in done.stdout
    assert not (tmp_path / "b").exists()


def test_no_input_of_the_action_is_an_option_or_an_output(
    tmp_path: Path, run: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python only notes the arguments, which torchfil is then given here."""
    noted, python = tmp_path / "arguments", tmp_path / "python"
    python.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {noted}\nexit "$CODE"\n')
    python.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    fine = {"PYTHON": str(python), "RUNS": str(run), "POLICY": str(policy(POLICY)), "CODE": "2"}
    before = run.read_bytes()
    for name in ("RUNS", "POLICY", "PRESET", "BASELINE", "TOLERANCE", "RELEASED"):
        given = fine | ({"POLICY": ""} if name == "PRESET" else {})
        given[name] = (f"{run}\n" if name == "RUNS" else "") + "--json-file=lost"
        _, told = acted(tmp_path, **given)
        module, program, *arguments = noted.read_text()[:-1].split("\0")
        assert (module, program, told) == ("-m", "torchfil", ["outcome=bad input"]), name
        refused(*arguments)
        assert not (tmp_path / "lost").exists()
    acted(tmp_path, **fine, SARIF=str(run))
    refused(*noted.read_text()[:-1].split("\0")[2:])
    assert run.read_bytes() == before
    for sarif in ("a\noutcome=passed", "a\routcome=passed"):
        done, told = acted(tmp_path, **fine | {"CODE": "0"}, SARIF=sarif)
        assert (done.returncode, told) == (2, ["outcome=bad input"]), sarif
    for code, word in (0, "passed"), (3, "cannot tell"), (7, "stopped"):
        assert acted(tmp_path, **fine | {"CODE": str(code)})[1][0] == f"outcome={word}"


@pytest.mark.parametrize(
    "python", ["eval", "-c", "", f"{sys.executable} -c", f"{sys.executable}\n", "./none"]
)
def test_the_python_of_the_action_is_a_file(tmp_path: Path, python: str) -> None:
    for step in (0, 1):
        done, told = acted(tmp_path, step, PYTHON=python, RUNS="run.parquet")
        assert (done.returncode, told) == (1 + (step == 0), [])
        assert ("is not a program that can be found" in done.stderr) == (step == 0)

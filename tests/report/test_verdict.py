"""The verdict on the first screen: PASS, FAIL or NO POLICY, with the reason in words."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.report.run_cases import made_up
from torchfil.cli import main
from torchfil.gate.policy import Policy
from torchfil.report import save, write_report


def told(page: Path, slug: str) -> str:
    """A section as a reader sees it."""
    section = re.search(rf'<section id="{slug}">(.*?)</section>', page.read_text(), flags=re.DOTALL)
    assert section is not None
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", section[1])))


def cover(page: Path) -> str:
    """The word above everything else; "" where there is none."""
    word = re.search(r'<p class="stamp"><a href="#verdict">(.*?)</a></p>', page.read_text())
    return "" if word is None else word[1]


def test_a_broken_rule_is_told_first_and_where_it_is_signed(tmp_path: Path) -> None:
    run = made_up()
    smallest = float(run.columns["mse_bound_low"].min())
    page = write_report(run, tmp_path / "report", policy=Policy(min_mse_bound=100.0, max_share_spared=1.0))
    text = told(page, "verdict")
    assert cover(page) == "FAIL"
    assert re.search(r"The run breaks 1 of the \d rules of the policy: by the policy the model must not be", text)
    assert f"lower end of its interval: {smallest:.3g}, where the policy says 100." in text
    assert re.search(r"\d+ examples? concerned\. min_mse_bound", text)
    assert re.search(r"\d rules kept", text)
    assert page.read_text().index('id="verdict"') < page.read_text().index('id="findings"')
    assert "The run breaks 1 of the" in told(page, "decision")
    rules = json.loads((page.parent / "summary.json").read_text())["verdict"]
    assert [rule["rule"] for rule in rules if not rule["passed"]] == ["min_mse_bound"]


def test_a_run_that_keeps_the_policy(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report", policy=Policy(min_mse_bound=1e-9))
    text = told(page, "verdict")
    assert cover(page) == "PASS"
    assert re.search(r"The run keeps the \d rules of the policy\.", text)


def test_without_a_policy_nothing_is_promised(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    text = told(page, "verdict")
    assert cover(page) == "NO POLICY"
    assert "torchfil gate --init" in text
    assert "No policy was given" in told(page, "decision")
    assert "verdict" not in json.loads((page.parent / "summary.json").read_text())


def test_the_public_version_has_no_verdict(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "public", redacted=True)
    assert 'id="verdict"' not in page.read_text()
    assert cover(page) == ""
    assert "No policy" not in told(page, "decision")
    with pytest.raises(ValueError, match="hang on a single example"):
        write_report(made_up(), tmp_path / "other", redacted=True, policy=Policy(min_mse_bound=1.0))
    assert not (tmp_path / "other").exists()


def test_at_the_command_line(tmp_path: Path) -> None:
    save(made_up(), tmp_path / "run.parquet")
    (tmp_path / "policy.toml").write_text("min_mse_bound = 100.0\n")
    arguments = ["report", str(tmp_path / "run.parquet"), "-o", str(tmp_path / "report")]
    result = CliRunner().invoke(main, [*arguments, "--policy", str(tmp_path / "policy.toml")])
    assert result.exit_code == 0, result.output
    assert cover(tmp_path / "report" / "index.html") == "FAIL"
    refused = CliRunner().invoke(main, [*arguments, "--policy", str(tmp_path / "none.toml")])
    assert refused.exit_code == 2
    assert cover(tmp_path / "report" / "index.html") == "FAIL"  # what was there stays

"""The verdict on the first screen: PASS, FAIL or NO POLICY, with the reason in words."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from tests.report.run_cases import made_up
from tests.test_cli import call
from torchfil.gate.policy import Policy
from torchfil.report import save, write_report


def told(page: Path, slug: str) -> str:
    """A section as a reader sees it."""
    section = re.search(rf'<section id="{slug}">(.*?)</section>', page.read_text(), flags=re.DOTALL)
    return "" if section is None else html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", section[1])))


def cover(page: Path) -> str:
    """The word above everything else; "" where there is none."""
    word = re.search(r'<p class="stamp"><a href="#verdict">(.*?)</a></p>', page.read_text())
    return "" if word is None else word[1]


@pytest.mark.parametrize(
    ("policy", "word", "verdict", "decision"),
    [
        (Policy(min_mse_bound=100.0, max_share_spared=1.0), "FAIL", r"breaks 1 of the \d rules", "The run breaks 1 of"),
        (Policy(min_mse_bound=1e-9), "PASS", r"The run keeps the \d rules of the policy\.", "The run keeps the"),
        (None, "NO POLICY", "torchfil gate --init", "No policy was given"),
    ],
)
def test_the_verdict_is_told_first_and_where_it_is_signed(
    tmp_path: Path, policy: Policy | None, word: str, verdict: str, decision: str
) -> None:
    page = write_report(made_up(), tmp_path / "report", policy=policy)
    assert cover(page) == word
    assert re.search(verdict, told(page, "verdict"))
    assert decision in told(page, "decision")
    assert page.read_text().index('id="verdict"') < page.read_text().index('id="findings"')
    rules = json.loads((page.parent / "summary.json").read_text()).get("verdict")
    assert (rules is None) == (policy is None)
    assert [rule["rule"] for rule in rules or () if not rule["passed"]] == ["min_mse_bound"] * (word == "FAIL")


def test_a_broken_rule_is_told_with_its_numbers(tmp_path: Path) -> None:
    run = made_up()
    text = told(write_report(run, tmp_path / "report", policy=Policy(min_mse_bound=100.0)), "verdict")
    smallest = float(run.columns["mse_bound_low"].min())
    assert f"lower end of its interval: {smallest:.3g}, where the policy says 100." in text
    assert re.search(r"\d+ examples? concerned\. min_mse_bound.*\d rules kept", text)


def test_the_public_version_has_no_verdict(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "public", redacted=True)
    assert (told(page, "verdict"), cover(page)) == ("", "")
    assert "No policy" not in told(page, "decision")
    with pytest.raises(ValueError, match="hang on a single example"):
        write_report(made_up(), tmp_path / "other", redacted=True, policy=Policy(min_mse_bound=1.0))
    assert not (tmp_path / "other").exists()


def test_at_the_command_line(tmp_path: Path) -> None:
    run, policy = save(made_up(), tmp_path / "run.parquet"), tmp_path / "policy.toml"
    policy.write_text("min_mse_bound = 100.0\n")
    for path, code in ((policy, 0), (tmp_path / "none.toml", 2)):  # what was there stays
        assert call("report", run, "-o", tmp_path / "report", "--policy", path).exit_code == code
        assert cover(tmp_path / "report" / "index.html") == "FAIL"

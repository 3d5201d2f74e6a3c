"""Ten prepared runs: their answers are true, and the first 900 pixels give them; what the lookup takes for visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

from tests.report.prepared_runs import TOO_FEW, Answers, ten_runs
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.gate.rules import Verdict
from torchfil.report.options import options_of
from torchfil.run.saved_run import SavedRun

one_minute = pytest.importorskip("tests.report.one_minute", reason="selenium is not installed")
RUNS = ten_runs()
CASES = [pytest.param(*case, id=name) for name, case in RUNS.items()]


def shown(verdict: Verdict) -> tuple[str, str]:
    """Found and limit as the page has them."""
    above = 0.5 if verdict.key == "max_gain_over_guessing" else 0.0
    if above or verdict.key.startswith("max_share"):
        return tuple(f"{100 * (value + above):.3g} %" for value in (verdict.found, verdict.limit))
    return f"{verdict.found:.3g}", f"{verdict.limit:.3g}"


@pytest.mark.parametrize(("run", "policy", "answers"), list(RUNS.values()), ids=list(RUNS))
def test_classes_and_questions_are_those_of_the_arrays(run: SavedRun, policy: Policy, answers: Answers) -> None:
    """The four classes by one rule, from the columns alone, and the success of every attacker by its formula."""
    blind = 1.0 if run.about.get("kind") == "linear" else 0.5
    low, bound = run.columns["mse_bound_low"], run.columns["mse_bound"]
    unknown = (run.columns.get("participations", np.ones(len(run))) == 0) | (~(low > 0) & (bound > 0))
    ratio = np.where(unknown, np.inf, np.sqrt(low) / blind)
    half, below = int((ratio < 0.5).sum()), int(((ratio >= 0.5) & (ratio < 1)).sum())
    assert (half, below, len(run) - half - below - unknown.sum(), unknown.sum()) == answers.who
    assert str(run.ids[ratio.argmin()]) == answers.most

    for question, (name, without, most) in zip(run.questions, answers.leaks, strict=True):
        worst = float(question.divergence_high.max())
        success = 0.5 + 0.5 * min(np.sqrt(worst / 2), np.sqrt(-np.expm1(-worst)))
        success = ndtr(np.sqrt(worst / 2)) if question.law == "normal" else success
        assert (question.name, "50 %", f"{100 * success:.3g} %") == (name, without, most)
    for name, error, guess, _ in answers.attributes:
        place = run.attributes.names.index(name)
        least = f"{run.attributes.error_low[:, place].min():.3g}"
        assert (least, f"{run.baselines.attributes.std[place]:.3g}") == (error, guess)


@pytest.mark.parametrize(("run", "policy", "answers"), CASES)
def test_broken_rules_and_noise_are_those_of_the_gate(run: SavedRun, policy: Policy, answers: Answers) -> None:
    verdicts = check(run, policy)
    broken = [verdict for verdict in verdicts if not verdict.passed]
    assert [verdict.key for verdict in broken] == [key for key, *_ in answers.why]
    for verdict, (_, subject, found, limit) in zip(broken, answers.why, strict=True):
        assert subject in verdict.subject + verdict.note
        assert shown(verdict) == (found, limit)
    if answers.change[0] == "noise":
        least, sigma = float(answers.change[1]), options_of(run, policy, verdicts).sigma
        assert least <= sigma <= 1.01 * least


def test_the_first_screen_answers_five_questions(browser: Any, tmp_path: Path) -> None:
    found = one_minute.unanswered(browser, tmp_path)
    assert all(not lacking for lacking, _ in found.values()), one_minute.table(found)


HIDDEN = """<!doctype html><html lang="en"><title>t</title><body style="margin:0; font: 16px sans-serif">
<p>seen&nbsp;1</p> <table><tr><td>seen 2</td><td>of 3</td></tr></table>
<svg width="200" height="60"><text y="20">seen 4</text><text x="90" y="22">71 %</text><text y="50">x</text></svg>
<details><summary>seen 5</summary><p>hidden 1</p></details>
<p style="visibility: hidden">hidden 2</p><p style="opacity: 0">hidden 3</p><p style="display: none">hidden 4</p>
<p style="position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden">hidden 5</p>
<div style="height: 20px; overflow: hidden"><p style="margin: 30px 0">hidden 6</p></div>
<p style="color: transparent">hidden 7</p><p style="font-size: 4px">hidden 8</p>
<p style="position: absolute; left: -400px">hidden 9</p>
<div style="position: relative"><p>hidden 10</p><div style="position: absolute; inset: 0; background: red"></div></div>
<p style="position: absolute; top: 895px; margin: 0">hidden 11</p><p style="position: absolute; top: 860px">seen 6</p>
"""


def test_only_what_is_seen_counts(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(HIDDEN)
    with one_minute.screen(browser, 1280, 900):
        one_minute.opened(browser, page)
        lines = one_minute.lines_of(one_minute.visible(browser))
    assert lines == ["seen 1", "seen 2 of 3", "seen 5", "seen 6", "seen 4 71 %", "x"]


def test_numbers_are_looked_up_strictly() -> None:
    line = "Closest estimate (1,203 examples) 0.29 of a blind guess's error, at least 0.50; 13.2 % of 7×"
    assert one_minute.numbers(line) == {(1203, ""), (0.29, ""), (0.5, ""), (13.2, "%"), (7, "")}
    holds = one_minute.holds
    assert holds(line, "closest", "0.29", "0.5", 1203)
    assert not any(holds(line, "", value) for value in ("0.2", "0.9", "29", "13.2", "3.2 %", "203", "13 %"))
    assert holds("Zoë 17, then", text="Zoë 17")
    assert not holds("Zoë 170", text="Zoë 17")
    answers = Answers("Do not release", ((TOO_FEW, "", "50 %", ""),), (1, 2, 3, 4), "7", change=("noise", "2"))
    told = ["Do not release", "50 % too few draws", "σ = 2.5", "Cannot tell yet"]
    assert {question for question, _ in one_minute.missing(answers, told)} == set(one_minute.QUESTIONS) - {"why?"}

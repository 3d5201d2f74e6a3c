"""The first screens answer: may it be released, why not, who is exposed, what leaks, what to
change.
"""

from __future__ import annotations

import dataclasses
import html
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import source, summary_of, text_of
from tests.report.prepared_runs import KINDS, POLICY, WHOLE, N, bare, of_kind, question, some
from tests.report.run_cases import made_up, with_baselines, worrying
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import write_report
from torchfil.report.charts import answers_of
from torchfil.report.examples import Measures
from torchfil.report.summary import Report, summarise
from torchfil.run import baselines
from torchfil.run.saved_run import Attributes, QuestionRecord, Records, SavedRun


def written(run: SavedRun, folder: Path, policy: Policy | None = None, **options: Any) -> Path:
    return write_report(run, folder / "report", policy=policy, **options)


def visible_text(page: Path) -> str:
    """Everything that a reader may see, without styles and scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def counts_of(page: Path, slug: str = "closeness") -> list[str]:
    return [
        re.sub("<[^>]+>", "", cell)
        for cell in re.findall(r"<b>(.*?)</b> ?<span>", source(page, slug))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_three_words_and_a_row_for_every_rule(kind: str, tmp_path: Path) -> None:
    policy = POLICY if kind != "table" else WHOLE
    page = written(of_kind(kind, safe=True), tmp_path, policy)
    assert "May be released" in text_of(page, "verdict")
    assert all(rule["passed"] for rule in summary_of(page)["verdict"])
    assert "Nothing needs to change" in text_of(page, "verdict")
    page, run = written(of_kind(kind, safe=False), tmp_path, policy), of_kind(kind, safe=False)
    assert "Do not release" in text_of(page, "verdict")
    states = re.findall(r'<tr class="(\w+)">', source(page, "verdict"))
    assert states == sorted(states, key=("broken", "unknown", "kept").index)
    assert len(states) == len(check(run, policy))
    assert summary_of(page)["decision"] == "Do not release"

    # who, by id, and how many, as everywhere
    worst = Measures(run, policy).most()[0]
    assert f"Most exposed {worst.id}" in text_of(page, "verdict")
    assert text_of(page, "most-exposed").split("All 200")[0].count("Zoë") >= 3
    classes = np.bincount(baselines.exposure_of(run), minlength=4).tolist()
    assert counts_of(page) == [str(count) for count in classes]


def test_counts_are_the_gates_and_no_card_contradicts_another(tmp_path: Path) -> None:
    """Ages of 12 are known to 0.3 of a blind guess's error, and nobody as a whole: 103 and 16, it
    once said.
    """
    errors = np.full((N, 2), 40.0)
    errors[:12, 0] = 3.6
    low = np.where(np.arange(N) < 20, 0.0, 1.8)  # twenty were drawn too rarely
    run = bare(
        "Ages", 2.0, attributes=Attributes(["age", "height"], ["years", "cm"], errors, errors)
    )
    run.columns["mse_bound_low"] = low
    run = with_baselines(run, [12.0, 9.0])
    policy = Policy(
        min_error_share=0.5, max_share_exposed=0.0, min_attribute_error_share=1.0, blind_error=0.5
    )
    page = written(run, tmp_path, policy)
    exposed, by_attribute = (
        next(verdict for verdict in check(run, policy) if verdict.key == key)
        for key in ("max_share_exposed", "min_attribute_error_share")
    )
    assert counts_of(page) == ["0", str(exposed.offending), "180", "20"] == ["0", "0", "180", "20"]
    assert by_attribute.offending == 0  # all twelve were drawn too rarely
    assert "0.3" not in text_of(page, "attributes")
    run.columns["mse_bound_low"][:] = 1.8
    page = written(run, tmp_path, policy)
    by_attribute = next(
        verdict for verdict in check(run, policy) if verdict.key == "min_attribute_error_share"
    )
    assert re.search(r"age 0\.3× .* 12 height", text_of(page, "attributes"))
    assert by_attribute.offending == 12
    assert "Least error for one attribute, age (12 examples)" in text_of(page, "verdict")
    assert "age: ± 3.6 years (blind guess: ± 12 years)" in text_of(page, "verdict").replace(
        "\xa0", " "
    )


def test_untold_examples_are_a_class_of_their_own_and_never_the_most_exposed(
    tmp_path: Path,
) -> None:
    run = bare("Few draws", 2.0)
    run.columns["mse_bound_low"][:90] = 0.0
    page = written(run, tmp_path, POLICY)
    assert counts_of(page) == ["0", "0", "110", "90"]
    shown = text_of(page, "most-exposed").split("All 200")[0]
    assert {int(row) for row in re.findall(r"Zoë (\d+)", shown)} <= set(range(90, N))
    assert "Too few draws to tell (90 examples)" in text_of(page, "verdict")


def test_what_epsilon_allows_is_attained_by_the_worst_pair() -> None:
    """Every (ε, δ)-private pair is dominated by one of four outcomes, for which the best guess is
    known exactly.
    """
    for epsilon, delta in ((0.3, 1e-5), (2.5, 1e-3), (9.0, 0.1)):
        run = bare("ε", 2.0)
        run.about.update(epsilon=epsilon, delta=delta)
        (row,) = answers_of(Report(summarise(run), run), Measures(run, None))
        share = (1 - delta) / (1 + math.exp(epsilon))
        one = np.array([delta, share * math.exp(epsilon), share, 0.0])
        best = np.maximum(one, one[::-1]).sum() / 2
        assert (row.low, row.value) == (0.5, pytest.approx(best))


def test_questions_stand_beside_the_limit_and_the_commonest_answer() -> None:
    truth = np.repeat([0, 1, 2], [80, 70, 50])
    high = np.where(np.arange(3) == truth[:, None], 0.0, 1e-4)
    high[-10:, :2] = 0.5
    asked = [
        QuestionRecord("genotype", ["CC", "CT", "TT"], True, high, high),
        question("member", some(1e-4, 2.0, [3])),
    ]
    run = bare("Doses", 2.0, questions=asked)
    run.columns["mse_bound_low"][3] = 0.0  # too few draws: its answer does not count
    policy = Policy(max_gain_over_guessing=0.1)
    rows = answers_of(Report(summarise(run), run), Measures(run, policy))
    told = [(row.name, row.low, round(row.value, 3), row.limit) for row in rows]
    assert told[:2] == [
        ("genotype", 0.5, 0.75, 0.6),
        ("genotype, all answers", 79 / 199, 0.771, None),
    ]
    assert told[2][:2] == ("member", 0.5)
    assert told[2][2] < 0.51


def test_measures_flag_as_their_rules_do_and_say_why() -> None:
    run = worrying()
    policy = Policy(max_gain_over_guessing=0.1, max_individual_epsilon=2.0)
    run.columns["participations"][7] = 31
    run = with_baselines(run, 0.5)
    run = dataclasses.replace(run, groups={"site": np.where(np.arange(100) == 7, "C", "A")})
    spread = run.baselines.attributes
    values = np.stack([spread.high, spread.mean + 3 * spread.std])[:, :2]
    run = dataclasses.replace(run, records=Records(np.array([7, 8]), values))
    exposure = Measures(run, policy)
    assert list(exposure.flags) == ["all inputs", "single attributes", "“smokes”", "individual ε"]
    brute = {
        "all inputs": np.sqrt(run.columns["mse_bound_low"]) < 0.5,
        "single attributes": (run.attributes.error < 0.5).any(axis=1),
        "“smokes”": run.questions[0].success() > 0.6,
        "individual ε": run.columns["epsilon"] > 2.0,
    }
    for name, expected in brute.items():
        np.testing.assert_array_equal(exposure.flags[name], expected)
    first = exposure.most()[0]
    assert (first.row, first.flagged) == (7, sum(int(flags[7]) for flags in brute.values()))
    assert first.why == "highest age; highest height; drawn 31 times; site C is rare (1.0 %)"


def test_a_public_page_has_counts_and_no_verdict(tmp_path: Path) -> None:
    errors = np.full((N, 2), 40.0)
    errors[:12, 0] = 3.0
    table = Attributes(["age", "height"], ["years", "cm"], errors, errors)
    run = with_baselines(
        bare("baselines", some(2.0, 0.05, list(range(12))), attributes=table), [0.7, 0.7]
    )
    page = written(run, tmp_path, redacted=True)
    assert counts_of(page) == ["about 10", "0", "about 190", "0"]
    shown = visible_text(page)
    assert not re.search(r"Zoë|Do not release|May be released|Cannot tell yet|98765|0\.49\b", shown)
    assert 'href="#show' not in page.read_text()
    assert "×" not in text_of(page, "closeness")  # no ratio: it would tell the data's deviation
    assert "Public version" in shown
    few = written(of_kind("table", safe=False), tmp_path, redacted=True)
    assert counts_of(few)[0] == "fewer than 10"
    with pytest.raises(ValueError, match=r"single example|no verdict"):  # a verdict may hang on one
        written(made_up(), tmp_path, POLICY, redacted=True)

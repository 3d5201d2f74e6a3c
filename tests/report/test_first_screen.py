"""The first screen alone answers: may it be released, who is exposed, what leaks, what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import summary_of, text_of
from tests.report.prepared_runs import KINDS, POLICY, WHOLE, bare, of_kind, question, some
from tests.report.run_cases import made_up, worrying
from torchfil.gate.gate import check, factor_for_all
from torchfil.gate.policy import Policy
from torchfil.gate.rules import rounded_up
from torchfil.report import write_report
from torchfil.run.baselines import blind_errors
from torchfil.run.saved_run import Attributes, Baselines, SavedRun, Spread

PARTS = ("first", "card-who", "card-what", "card-todo")


def written(run: SavedRun, folder: Path, policy: Policy | None = None, **options: Any) -> dict[str, str]:
    """What a reader sees of the first screen, and of its cards."""
    page = write_report(run, folder / "report", policy=policy, **options)
    return {part: text_of(page, part) for part in PARTS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cards_answer_with_a_policy_and_without(kind: str, tmp_path: Path) -> None:
    cards, page = written(of_kind(kind, safe=True), tmp_path, POLICY), tmp_path / "report" / "index.html"
    assert re.findall(r"\b(PASS|FAIL|NO POLICY)\b", cards["first"]) == ["PASS"]
    assert "Nothing" in cards["card-todo"]
    assert all(rule["passed"] for rule in summary_of(page)["verdict"])
    run = of_kind(kind, safe=False)
    assert re.findall(r"\b(PASS|FAIL|NO POLICY)\b", written(run, tmp_path, POLICY)["first"]) == ["FAIL"]
    assert {rule["rule"] for rule in summary_of(page)["verdict"] if not rule["passed"]} == {"min_error_share"}

    cards = written(run, tmp_path)
    assert "NO POLICY" in cards["first"]
    assert "verdict" not in summary_of(page)
    assert "3 of 200" in cards["card-who"]
    sigma, limit = 1.0, 0.25 / 0.009  # the factor on σ² that lifts the lowest lower end to a blind guess's square
    if kind == "linear":
        closest = np.asarray(run.attributes.error).min(axis=0) / blind_errors(run)
        sigma, limit = 0.05, max(1 / run.columns["mse_bound"].min(), *closest**-2.0)  # in deviations
    assert f"σ = {rounded_up(sigma * math.sqrt(limit)):g}" in cards["card-todo"]


@pytest.mark.parametrize("policy", [Policy(max_group_disparity=2.0), Policy(min_attacks=1), Policy(max_epsilon=1.0)])
def test_noise_is_not_offered_where_it_does_not_help(policy: Policy, tmp_path: Path) -> None:
    """Women leak three times as much as men; nobody is exposed."""
    women = np.arange(200) % 2 == 0
    run = bare("Groups", np.where(women, 1.0, 9.0), groups={"sex": np.where(women, "f", "m")})
    broken = [verdict for verdict in check(run, policy) if not verdict.passed]
    assert factor_for_all(broken) == (None, broken)
    assert "σ =" not in written(run, tmp_path, policy)["card-todo"]


def test_what_is_not_known_is_called_so(tmp_path: Path) -> None:
    assert "Not known" in written(made_up(), tmp_path)["card-who"]
    run = bare("probes", 2.0)
    run.columns["mse_bound_low"][5] = 0.0  # drawn too rarely
    cards = written(run, tmp_path, POLICY)
    assert "FAIL" in cards["first"]
    run.columns["participations"][:7] = 0
    cards = written(run, tmp_path, POLICY)
    assert "3.5 % of the examples (7) were not measured" in cards["first"]
    assert "7 not measured" in cards["card-who"]


def scaled(run: SavedRun, factor: float) -> SavedRun:
    """The run at √factor times the noise, if the gradients stayed the same."""
    powers = {"fil": -0.5, "mse_bound": 1.0, "mse_bound_low": 1.0}
    columns = {name: values * factor ** powers.get(name, 0.0) for name, values in run.columns.items()}
    table = run.attributes
    if table is not None:
        low = np.asarray(table.error_low) * math.sqrt(factor)
        table = dataclasses.replace(table, error=table.error * math.sqrt(factor), error_low=low)
    asked = [
        dataclasses.replace(q, divergence=q.divergence / factor, divergence_high=q.divergence_high / factor)
        for q in run.questions
    ]
    return dataclasses.replace(run, columns=columns, attributes=table, questions=asked)


def normal() -> SavedRun:
    """Between normal laws D tells the whole curve, and the noise that keeps a rule is the least that does."""
    asked = dataclasses.replace(question("genotype", some(0.001, 0.8, [3])), law="normal")
    return dataclasses.replace(of_kind("linear", safe=True), questions=[asked])


@pytest.mark.parametrize(
    ("run", "policy"),
    [
        (worrying(), Policy(min_error_share=0.5)),
        (worrying(), Policy(max_share_exposed=0.005)),
        (worrying(), Policy(min_mse_bound=0.7)),
        (worrying(), Policy(mse_bound_of_concern=0.4, max_share_of_concern=0.0)),
        (worrying(), Policy(min_attribute_error_share=0.5)),
        (worrying(), Policy(min_attribute_error={"age": 0.9})),
        (worrying(), Policy(max_gain_over_guessing=0.1)),
        (worrying(), Policy(max_true_positive_rate={"smokes": 0.05})),
        (normal(), Policy(max_gain_over_guessing=0.1)),
        (normal(), Policy(max_true_positive_rate={"genotype": 0.05})),
    ],
)
def test_the_suggested_noise_keeps_the_rule_and_little_less_does_not(run: SavedRun, policy: Policy) -> None:
    (broken,) = [verdict for verdict in check(run, policy) if not verdict.passed]
    factor = broken.noise
    assert factor > 1
    assert all(verdict.passed for verdict in check(scaled(run, 1.001 * factor), policy))
    assert not all(verdict.passed for verdict in check(scaled(run, 0.98 * factor), policy))


def test_the_card_gives_a_noise_that_keeps_the_whole_policy(tmp_path: Path) -> None:
    run = worrying()
    text = written(run, tmp_path, WHOLE)["card-todo"]
    sigma = re.search(r"σ = ([\d.]+)", text)
    assert all(verdict.passed for verdict in check(scaled(run, float(sigma[1]) ** 2), WHOLE))


def test_baselines_of_the_data_stand_in_private_cards_alone(tmp_path: Path) -> None:
    """Ages of deviation 12 years, known to 3 for twelve patients; the inputs have deviation 0.7."""
    errors = np.full((200, 2), 40.0)
    errors[:12, 0] = 3.0
    table = Attributes(["age", "height"], ["years", "cm"], errors, errors)
    spread = Spread(*(np.asarray(values) for values in ([50.0, 170.0], [12.0, 9.0], [20.0, 150.0], [90.0, 200.0])))
    inputs = Spread(*(np.asarray(value) for value in (0.0, 0.7, -2.0, 2.0)))
    bound = some(2.0, 0.2, list(range(12)))
    run = bare("baselines", bound, attributes=table, baselines=Baselines(200, inputs, spread, {}))
    run.about["dataset"].pop("input_range")
    cards = written(run, tmp_path)
    assert "12 of 200" in cards["card-who"]
    assert "“age” could be estimated to ± 3 years (blind guess: ± 12 years)." in cards["card-what"]
    assert f"σ = {rounded_up(4.0):g}" in cards["card-todo"]  # for the ages; the inputs need less
    public = written(run, tmp_path, redacted=True)
    assert "about 10 of 200" in public["card-who"]
    assert "25 % of a blind guess’s error" in public["card-what"]
    assert not re.search(r"\b12\b|0\.49|years|PASS|FAIL|NO POLICY", public["first"])  # neither count nor deviation

    # where inputs alone are exposed, the noise that it takes would tell their deviation
    nothing = Spread(*(np.zeros(0) for _ in range(4)))
    run = dataclasses.replace(run, attributes=None, baselines=Baselines(200, inputs, nothing, {}))
    public = written(run, tmp_path, redacted=True)
    assert "about 10 of 200" in public["card-who"]
    assert "σ =" not in public["card-todo"]


def test_the_noise_of_a_public_page_follows_from_what_is_published(tmp_path: Path) -> None:
    """Two runs with the same public numbers have the same cards, whoever is the most exposed."""
    first = written(bare("same", some(2.0, 0.01, list(range(20)))), tmp_path, redacted=True)
    assert first == written(bare("same", some(2.0, 0.01, list(range(50, 70)))), tmp_path, redacted=True)
    assert f"With noise σ = {rounded_up((0.25 / 0.009) ** 0.5):g} instead of 1" in first["card-todo"]
    # the mean over ten is above a blind guess, though three of them are not: σ = 1 instead of 1 was suggested
    few = written(of_kind("table", safe=False), tmp_path, redacted=True)
    assert "σ =" not in few["card-todo"]
    assert "fewer than 10 of 200" in few["card-who"]
    assert not re.search("Zoë|#show|3 of 200", few["first"])
    with pytest.raises(ValueError, match="single example"):  # a verdict may hang on one
        written(made_up(), tmp_path, POLICY, redacted=True)

"""The first screen alone answers: may it be released, who is exposed, what leaks, what to do."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.report.prepared_runs import KINDS, POLICY, WHOLE, Case, attributes, bare, of_kind, question, some, ten
from tests.report.run_cases import made_up, worrying
from torchfil.gate.gate import check, factor_for_all, in_words
from torchfil.gate.policy import Policy
from torchfil.gate.rules import RULES, Rule, Verdict, rounded_up
from torchfil.report import write_report
from torchfil.run.baselines import blind_errors
from torchfil.run.saved_run import Attributes, SavedRun, Spread, Yardsticks


class FirstScreen(HTMLParser):
    """The visible text of the element with the id "first", and by card."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"first": []}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = dict(attrs).get("id") or ""
        if name == "first" or self.open:
            self.open.append(name if name.startswith(("first", "card-")) else "")
            self.texts.setdefault(name, []) if name.startswith("card-") else None

    def handle_endtag(self, tag: str) -> None:
        if self.open:
            self.open.pop()
            for name in ["first", *filter(None, self.open[1:])]:
                self.texts[name].append(" ")

    def handle_data(self, data: str) -> None:
        for name in filter(None, self.open):
            self.texts[name].append(data)


def screen(page: Path) -> dict[str, str]:
    parser = FirstScreen()
    parser.feed(page.read_text())
    return {name: re.sub(r"\s+", " ", "".join(parts)).strip() for name, parts in parser.texts.items()}


def written(run: SavedRun, folder: Path, policy: Policy | None = None, **options: Any) -> dict[str, str]:
    return screen(write_report(run, folder / "report", policy=policy, **options))


REASONS = {
    "person": r"An unbiased estimate of 1 example could come as close as",
    "attribute": r"An unbiased estimate of an attribute of 1 example could come as close .* \(the worst is 'age'\)",
    "question": r"Any attacker may guess “genotype” of 3 examples right up to [\d.]+ % of the time instead of 50 %",
    "groups": r"By sex, groups leak unequally",
    "attacks": r"0 attacks tested the bounds \(not testable: gradient matching: one trial\)",
}


def read_by_a_stranger(text: str) -> tuple[str, list[str]]:
    """What somebody says who sees the first screen's text and nothing else."""
    (verdict,) = re.findall(r"\b(PASS|FAIL|NO POLICY)\b", text)
    return verdict, [reason for reason, words in REASONS.items() if re.search(words, text)]


@pytest.mark.parametrize("case", ten(), ids=lambda case: case.name)
def test_a_stranger_reads_verdict_and_reason_off_the_first_screen(case: Case, tmp_path: Path) -> None:
    text = written(case.run, tmp_path, case.policy)["first"]
    assert read_by_a_stranger(text) == (case.verdict, [case.reason] if case.reason else [])
    told = "must not be released" if case.verdict == "FAIL" else "The run keeps the"
    assert told in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_cards_answer_without_a_policy(kind: str, tmp_path: Path) -> None:
    run = of_kind(kind, safe=False)
    cards = written(run, tmp_path)
    assert "NO POLICY" in cards["first"]
    assert "3 of 200" in cards["card-who"]
    assert "Show them in the table" in cards["card-who"]
    sigma, limit = 1.0, 0.25 / 0.009  # the factor on σ² that lifts the lowest lower end to a blind guess's square
    if kind == "linear":
        assert run.attributes is not None
        closest = np.asarray(run.attributes.error).min(axis=0) / blind_errors(run)
        sigma, limit = 0.05, max(1 / run.columns["mse_bound"].min(), *closest**-2.0)  # in deviations
    assert f"σ = {rounded_up(sigma * math.sqrt(limit)):g}" in cards["card-todo"]
    assert ("extrapolation at the gradients" in cards["card-todo"]) == (kind != "linear")
    assert "Unbiased attackers" in cards["card-who"]
    random = (
        "What is random is the noise that" if kind == "linear" else "What is random is the run: its batches and its"
    )
    assert random in cards["card-who"]


def test_what_leaks_is_told_in_people_and_per_cent(tmp_path: Path) -> None:
    run = bare(
        "both",
        2.0,
        attributes=attributes(some(2.0, 0.2, [1, 5])),
        questions=[question("genotype", some(0.0, 0.0968, [1, 2, 7]))],
    )
    text = written(run, tmp_path)["card-what"]
    assert (
        "For 3 of 200 examples, any attacker could guess “genotype” correctly in up to 61 % of cases instead of" in text
    )
    assert "For 2 of 200 examples, “age” could be estimated to ± 0.2 (blind guess: ± 0.5)." in text
    assert "“weight”" not in text
    assert text.index("genotype") < text.index("age")
    nothing = written(of_kind("table", safe=True), tmp_path)["card-what"]
    assert "Nothing that was asked or tracked can be estimated much better than by a blind guess" in nothing
    assert "No question was asked" in written(of_kind("text", safe=True), tmp_path)["card-what"]


def test_what_is_not_known_is_called_so(tmp_path: Path) -> None:
    cards = written(made_up(), tmp_path)
    assert "Not known" in cards["card-who"]
    assert "input_range" in cards["card-who"]
    run = bare("probes", 2.0)
    run.columns["mse_bound_low"][5] = 0.0  # drawn too rarely
    cards = written(run, tmp_path, POLICY)
    assert "FAIL" in cards["first"]
    assert "a lower end of 0: not enough draws to tell how close" in cards["first"]
    assert "Measure more" in cards["card-todo"]
    unmeasured = bare("drawn", 2.0)
    unmeasured.columns["participations"][:7] = 0
    cards = written(unmeasured, tmp_path, POLICY)
    assert "3.5 % of the examples (7) were not measured: the run says nothing about them" in cards["first"]
    assert "7 not measured: not safe, only not known." in cards["card-who"]
    assert "every example is drawn and measured" in cards["card-todo"]


def test_where_nothing_need_be_done_it_says_so(tmp_path: Path) -> None:
    assert "By the policy nothing need be done." in written(of_kind("image", safe=True), tmp_path, POLICY)["card-todo"]
    allowed = replace(POLICY, min_error_share=0.05)
    text = written(of_kind("image", safe=False), tmp_path, allowed)["card-todo"]
    assert re.match(r"What to do\? Nothing By the policy nothing need be done. Better still: With noise σ = ", text)


def scaled(run: SavedRun, factor: float) -> SavedRun:
    """The run at √factor times the noise, if the gradients stayed the same."""
    columns = {
        name: values * factor if name.startswith("mse") else values / math.sqrt(factor) if name == "fil" else values
        for name, values in run.columns.items()
    }
    table = run.attributes
    if table is not None:
        table = dataclasses.replace(
            table, error=table.error * math.sqrt(factor), error_low=np.asarray(table.error_low) * math.sqrt(factor)
        )
    asked = [
        dataclasses.replace(q, divergence=q.divergence / factor, divergence_high=q.divergence_high / factor)
        for q in run.questions
    ]
    return dataclasses.replace(run, columns=columns, attributes=table, questions=asked)


LIMITS = {
    "min_error_share": Policy(min_error_share=0.5),
    "max_share_exposed": Policy(max_share_exposed=0.005),
    "min_mse_bound": Policy(min_mse_bound=0.7),
    "max_share_of_concern": Policy(mse_bound_of_concern=0.4, max_share_of_concern=0.0),
    "min_attribute_error_share": Policy(min_attribute_error_share=0.5),
    "min_attribute_error": Policy(min_attribute_error={"age": 0.9}),
    "max_gain_over_guessing": Policy(max_gain_over_guessing=0.1),
    "max_true_positive_rate": Policy(max_true_positive_rate={"smokes": 0.05}),
}


@pytest.mark.parametrize("rule", LIMITS)
def test_the_suggested_noise_keeps_the_rule_and_little_less_does_not(rule: str) -> None:
    run, policy = worrying(), LIMITS[rule]
    (broken,) = [verdict for verdict in check(run, policy) if not verdict.passed]
    assert broken.key == rule
    factor = broken.noise
    assert factor is not None
    assert factor > 1
    assert all(verdict.passed for verdict in check(scaled(run, 1.001 * factor), policy))
    assert not all(verdict.passed for verdict in check(scaled(run, 0.98 * factor), policy))


def test_the_card_gives_a_noise_that_keeps_the_whole_policy(tmp_path: Path) -> None:
    run = worrying()
    assert not all(verdict.passed for verdict in check(run, WHOLE))
    text = written(run, tmp_path, WHOLE)["card-todo"]
    sigma = re.search(
        r"With noise σ = ([\d.]+) instead of 1, or about \d of the 50 steps, the policy would be kept", text
    )
    assert sigma is not None
    assert all(verdict.passed for verdict in check(scaled(run, float(sigma[1]) ** 2), WHOLE))
    assert re.search(r"smallest MSE bound 0.02 → 0.5; exposed 1 → 0; “smokes” guessed 96.5 % → 60 %", text)
    assert "only one example needs it. torchfil.equalise(target=0.5)" in text
    assert 'torchfil.equalise(question="smokes", target=…)' in text


def test_noise_is_not_offered_where_it_does_not_help(tmp_path: Path) -> None:
    for case in ten():
        if case.reason in ("groups", "attacks"):
            broken = [verdict for verdict in check(case.run, case.policy) if not verdict.passed]
            assert factor_for_all(broken) == (None, broken)
            text = written(case.run, tmp_path, case.policy)["card-todo"]
            assert "σ =" not in text
            assert ("equalise(groups=…)" if case.reason == "groups" else "Run an attack") in text
    text = written(bare("ε", 2.0), tmp_path, Policy(max_epsilon=1.0))["card-todo"]
    assert "make_private_with_epsilon(target_epsilon=1, …)" in text


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.find is not None], ids=lambda rule: rule.key)
def test_every_rule_has_words(rule: Rule) -> None:
    text = in_words(Verdict(rule.key, False, 0.25, 0.75, np.arange(2), "the detail", "age", "more"))
    assert text.endswith(".")
    assert any(part in text for part in ("0.75", "75 %", "125 %", "2 examples", "seeded"))
    unknown = in_words(Verdict(rule.key, False, 0.25, None, np.arange(2), "the detail"))
    assert unknown == f"Failed: this run cannot answer the rule {rule.key}."


def test_many_broken_rules_do_not_push_the_cards_away(tmp_path: Path) -> None:
    asked = [question(f"question {i}", np.full(200, 1.0)) for i in range(12)]
    page = write_report(bare("many", 2.0, questions=asked), tmp_path / "report", policy=WHOLE)
    text = screen(page)["first"]
    assert text.count("Any attacker may guess") == 4  # after one on attributes, which were not tracked
    assert "8 more broken rules" in text
    assert "9 more below" in text


def test_the_signed_page_repeats_title_verdict_and_findings(tmp_path: Path) -> None:
    page = write_report(worrying(), tmp_path / "report", policy=WHOLE)
    section = re.search(r'<section id="decision">(.*?)</section>', page.read_text(), flags=re.DOTALL)
    assert section is not None
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section[1]))
    assert "a made-up run" in text
    assert "FAIL : The run breaks 3 of the" in text
    assert "Any attacker may guess “smokes” of 1 example" in text
    assert "100 examples were trained on" in text
    assert "An unbiased guess of the most exposed example has a mean squared error" in text


def with_yardsticks() -> SavedRun:
    """Ages of deviation 12 years, known to 3 for twelve patients; the inputs have deviation 0.7."""
    errors = np.full((200, 2), 40.0)
    errors[:12, 0] = 3.0
    table = Attributes(["age", "height"], ["years", "cm"], errors, errors)
    spread = Spread(*(np.asarray(values) for values in ([50.0, 170.0], [12.0, 9.0], [20.0, 150.0], [90.0, 200.0])))
    inputs = Spread(*(np.asarray(value) for value in (0.0, 0.7, -2.0, 2.0)))
    bound = some(2.0, 0.2, list(range(12)))
    return bare("yardsticks", bound, attributes=table, yardsticks=Yardsticks(200, inputs, spread, {}))


def test_yardsticks_of_the_data_stand_in_private_cards_alone(tmp_path: Path) -> None:
    run = with_yardsticks()
    assert run.yardsticks is not None
    run.about["dataset"].pop("input_range")
    cards = written(run, tmp_path)
    assert "12 of 200" in cards["card-who"]
    assert "that of a blind guess is 0.49" in cards["card-who"]
    told = "For 12 of 200 examples, “age” could be estimated to ± 3 years (blind guess: ± 12 years)."
    assert told in cards["card-what"]
    assert f"σ = {rounded_up(4.0):g}" in cards["card-todo"]  # for the ages; the inputs need less

    public = written(run, tmp_path, redacted=True)
    assert "about 10 of 200" in public["card-who"]
    assert "For about 10 examples, “age” could be estimated with" in public["card-what"]
    assert "25 % of a blind guess’s error" in public["card-what"]
    assert not re.search(r"\b12\b|0\.49|years", public["first"])  # neither count nor deviation
    assert "the questions and attributes named here could not be" in public["card-todo"]

    # where inputs alone are exposed, the noise that it takes would tell their deviation
    nothing = Spread(*(np.zeros(0) for _ in range(4)))
    run = dataclasses.replace(run, attributes=None, yardsticks=Yardsticks(200, run.yardsticks.inputs, nothing, {}))
    public = written(run, tmp_path, redacted=True)
    assert "about 10 of 200" in public["card-who"]
    assert "More noise or fewer steps" in public["card-todo"]
    assert "σ =" not in public["card-todo"]


def test_groups_that_leak_unequally_are_named(tmp_path: Path) -> None:
    (case,) = [case for case in ten() if case.reason == "groups"]
    assert "By sex, f leaks 3 times as much as m (typical FIL)." in written(case.run, tmp_path)["card-who"]
    assert "By sex" not in written(of_kind("table", safe=True), tmp_path)["card-who"]


def test_noise_for_questions_of_a_linear_model_is_exact() -> None:
    """Between normal laws D tells the whole curve, and the noise that keeps a rule is the least that does."""
    asked = dataclasses.replace(question("genotype", some(0.001, 0.8, [3])), law="normal")
    run = dataclasses.replace(of_kind("linear", safe=True), questions=[asked])
    for policy in (Policy(max_gain_over_guessing=0.1), Policy(max_true_positive_rate={"genotype": 0.05})):
        (broken,) = [verdict for verdict in check(run, policy) if not verdict.passed]
        factor = broken.noise
        assert factor is not None
        assert all(verdict.passed for verdict in check(scaled(run, 1.001 * factor), policy))
        assert not all(verdict.passed for verdict in check(scaled(run, 0.99 * factor), policy))


class TestPublic:
    def test_cards_are_made_from_aggregates(self, tmp_path: Path) -> None:
        run = of_kind("table", safe=False)
        cards = written(run, tmp_path, redacted=True)
        assert not re.search(r"PASS|FAIL|NO POLICY", cards["first"])
        assert "fewer than 10 of 200" in cards["card-who"]
        assert "Show" not in cards["card-who"]
        assert "3 of 200" not in cards["first"]
        assert "For fewer than 10 of 200 examples, any attacker could tell “genotype”" in cards["card-what"]
        assert "Zoë" not in cards["first"]

    def test_the_suggested_noise_follows_from_what_is_published(self, tmp_path: Path) -> None:
        """Two runs with the same public numbers have the same cards, whoever is the most exposed."""
        first = written(bare("same", some(2.0, 0.01, list(range(20)))), tmp_path, redacted=True)
        assert first == written(bare("same", some(2.0, 0.01, list(range(50, 70)))), tmp_path, redacted=True)
        assert f"With noise σ = {rounded_up((0.25 / 0.009) ** 0.5):g} instead of 1" in first["card-todo"]

    def test_too_few_exposed_give_no_noise(self, tmp_path: Path) -> None:
        """The mean over ten is above a blind guess, though three of them are not: σ = 1 instead of 1 was suggested."""
        text = written(of_kind("image", safe=False), tmp_path, redacted=True)["card-todo"]
        assert "σ =" not in text
        assert "rests on numbers that are not published" in text


def test_one_remedy_for_two_rules_is_told_once(tmp_path: Path) -> None:
    """Of examples without an interval both the error's rule and the attribute's ask for more measurements."""
    run = bare("Too few draws", 9.0, attributes=attributes(some(3.0, 0.0, [3])))
    run = dataclasses.replace(run, columns={**run.columns, "mse_bound_low": some(9.0, 0.0, [3])})
    policy = Policy(min_error_share=0.5, min_attribute_error_share=0.5)
    assert sum(not verdict.passed for verdict in check(run, policy)) == 2
    assert written(run, tmp_path, policy)["first"].count("Measure more") == 1

"""Attacks beside their bounds on the page: violated, not testable, not tested."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import torchfil
from tests.report.pages import sentences
from tests.report.run_cases import made_up
from torchfil.attacks import AttackResult
from torchfil.report import load, save, write_report
from torchfil.report.summary import summarise


def test_a_violated_bound_is_the_first_thing_said(tmp_path: Path) -> None:
    run = made_up()
    attack = run.attacks[0]
    broken = type(attack)(
        attack.name, attack.threat_model, attack.rows, attack.predicted, attack.achieved / 9, np.ones(3, bool)
    )
    text = write_report(made_up(attacks=[broken]), tmp_path / "report").read_text()
    findings = re.search(r"<section id=\"findings\">(.*?)</section>", text, flags=re.DOTALL)
    assert findings is not None
    assert "A bound was violated" in findings[1]


def test_an_example_without_a_bound_breaks_none(tmp_path: Path) -> None:
    attack = made_up().attacks[0]
    predicted = np.asarray([1.0, np.inf, 1.0])
    half = type(attack)(attack.name, attack.threat_model, attack.rows, predicted, attack.achieved, attack.violated)
    (found,) = summarise(made_up(attacks=[half])).attacks
    assert found.ratio["0"] == pytest.approx(2.0)
    none = type(attack)(
        attack.name, attack.threat_model, attack.rows, predicted * np.inf, attack.achieved, half.violated
    )
    (found,) = summarise(made_up(attacks=[none])).attacks
    assert (found.targets, found.ratio) == (3, {})
    assert "not shown" in write_report(made_up(attacks=[none]), tmp_path / "report").read_text()


def test_one_trial_is_not_testable_and_never_held(tmp_path: Path) -> None:
    one = AttackResult("a guess", "knows all else", [0, 1], np.array([1e-9, 5.0]), "mse", trials=1)
    compared = torchfil.compare_with_bounds([1.0, 1.0], one)
    assert compared.verdicts == ["not testable"] * 2
    assert np.isnan(compared.violations)
    record = compared.record(range(40))
    assert not record.testable
    run = made_up(attacks=[record])
    assert not load(save(run, tmp_path / "run.parquet")).attacks[0].testable
    page = write_report(run, tmp_path / "report").read_text()
    assert "not testable" in page
    assert "the bound held" not in page
    many = AttackResult(
        "a guess", "all", [0, 1], np.array([1e-9, 5.0]), "mse", trials=9, standard_error=np.full(2, 1e-12)
    )
    assert torchfil.compare_with_bounds([1.0, 1.0], many).verdicts == ["violated", "held"]


def test_attacks_that_tested_nothing_are_called_so(tmp_path: Path) -> None:
    """They were counted among those that did not beat the bound, and a blind guess below it as a violation."""
    errors = np.full(3, 0.5)
    blind = AttackResult("the mean", "no model", [0, 1, 2], errors, "mse", 9, np.zeros(3), saw_model=False)
    record = torchfil.compare_with_bounds([1.0, 1.0, 0.2], blind).record(range(40))
    page = write_report(made_up(attacks=[record]), tmp_path / "report")
    found = sentences(page, "findings")
    assert "No attack tested the bounds: the mean (never saw the model). They stand on theory alone." in found
    assert "did better than" not in found
    assert "A bound was violated" not in found
    assert "never saw the model" in sentences(page, "attacks")

    real = AttackResult(
        "inversion", "all", [0, 1, 2], errors, "mse", 9, np.full(3, 9.0), blind=np.asarray([0.1, 5.0, 0.1])
    )
    both = [record, torchfil.compare_with_bounds([1.0, 1.0, 0.2], real).record(range(40))]
    page = write_report(made_up(attacks=both), tmp_path / "both")
    assert "No attack that tested the bounds (inversion) did better than they allow." in sentences(page, "findings")
    rows = [summary for summary in summarise(made_up(attacks=both)).attacks if summary.testable]
    assert [(row.below, row.blind_below) for row in rows] == [(2, 2)]
    assert "67 %" in sentences(page, "attacks")

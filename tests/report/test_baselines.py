"""Blind guesses, shares of their error and who is exposed: against brute force, and the same
everywhere.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from tests.refused import all_refused
from tests.report.pages import files_of, summary_of, text_of
from tests.report.run_cases import made_up, with_baselines, worrying
from torchfil.cli.runs import summary as inspected
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import write_report
from torchfil.report.formats import number
from torchfil.report.summary import summarise
from torchfil.run import baselines
from torchfil.run.blind_guess import ColumnMoments
from torchfil.run.saved_run import QuestionRecord, SavedRun


@pytest.mark.parametrize("pieces", [1, 7, 50])
def test_pieces_give_what_all_rows_give(pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    # far from 0: sums of squares would keep no digit
    values = rng.normal(1e6, [1e-2, 1.0, 50.0], size=(100, 3))
    values[rng.random(values.shape) < 0.2] = np.nan
    found = reduce(operator.add, map(ColumnMoments.of, np.array_split(values, pieces)))
    np.testing.assert_array_equal(found.count, (~np.isnan(values)).sum(axis=0))
    for name, brute in (
        ("mean", np.nanmean),
        ("std", np.nanstd),
        ("low", np.nanmin),
        ("high", np.nanmax),
    ):
        np.testing.assert_allclose(getattr(found.spread, name), brute(values, axis=0), rtol=1e-7)
    never = (
        ColumnMoments.of(np.array([[1.0, np.nan]])) + ColumnMoments.of(np.array([[3.0, np.nan]]))
    ).spread
    assert never.std.tolist()[0] == 1.0
    assert all(math.isnan(values[1]) for values in vars(never).values())


def test_levels_are_told_by_moments_alone() -> None:
    rng = np.random.default_rng(0)
    two = np.where(rng.random(500) < 0.3, 1.7, -0.4)
    nearly = np.r_[0.6, two[1:]]  # one value between the two
    three = rng.choice([0.0, 0.5, 1.0], size=500)
    shares = baselines.level_shares(
        ColumnMoments.of(np.stack([two, three, nearly, np.ones(500)], axis=1)).spread
    )
    assert shares[0] == pytest.approx((two == 1.7).mean())
    assert np.isnan(shares[1:]).all()


def test_a_blind_guess_is_what_is_stated_then_the_data_then_the_range() -> None:
    run = made_up()
    assert baselines.blind_error_of_inputs(run) is None
    assert np.isnan(baselines.blind_errors(run)).all()
    ranged = dataclasses.replace(run, about=run.about | {"dataset": {"input_range": [-1.0, 3.0]}})
    known = with_baselines(ranged, [3.0, 0.0, math.nan])
    assert (baselines.typical_blind_error(ranged), baselines.blind_errors(ranged).tolist()) == (
        2.0,
        [[2.0] * 3],
    )
    assert baselines.typical_blind_error(with_baselines(ranged, 0.7)) == pytest.approx(0.7)
    assert baselines.typical_blind_error(known, 5.0) == 5.0
    assert baselines.blind_errors(known).tolist() == [[3.0, 0.0, 2.0]]
    assert baselines.blind_errors(known, {"age": 7.0}, 1.0).tolist() == [[7.0, 0.0, 1.0]]

    # nothing is left to guess of a constant
    assert baselines.ratio_to_blind_guess([0.0, 0.3, math.inf], 0.0).tolist() == [math.inf] * 3
    assert not (baselines.attribute_ratios(run, 0, np.zeros((1, 3))) < 1).any()


def test_examples_are_held_against_the_blind_guess_of_their_public_class() -> None:
    """An error of 0.3 is closer than a blind guess of one label, and not of the other."""
    run = with_baselines(made_up(6), 1.0)
    columns = {
        **run.columns,
        "public_class": np.array([0, 0, 1, 1, 1, 0]),
        "mse_bound_low": np.full(6, 0.09),
    }
    two = dataclasses.replace(run.baselines, errors=np.array([1.0, 0.2]))
    run = dataclasses.replace(run, columns=columns, baselines=two)
    assert baselines.blind_error_of_inputs(run).tolist() == [1.0, 1.0, 0.2, 0.2, 0.2, 1.0]
    assert baselines.typical_blind_error(run) == pytest.approx(math.sqrt((3 + 3 * 0.04) / 6))
    half, beyond = baselines.HALF, baselines.BEYOND
    assert baselines.exposure_of(run).tolist() == [half, half, beyond, beyond, beyond, half]
    table = np.array([[10.0, 1.0, 1.0], [0.1, 1.0, 1.0]])
    ratios = run.attributes.error[:, 0] / np.array([10.0, 10.0, 0.1, 0.1, 0.1, 10.0])
    np.testing.assert_allclose(baselines.attribute_ratios(run, 0, table), ratios)
    run.columns["public_class"][0] = 2
    with pytest.raises(ValueError, match="public_class"):
        dataclasses.replace(run, ids=run.ids)


class TestOneRule:
    """Who is exposed: the same people, whoever asks."""

    @staticmethod
    def told(run: SavedRun) -> set[int | str | None]:
        """By the rule, by the gate, on the page and by ``inspect``."""
        exposed = baselines.exposure_of(run) <= baselines.BELOW
        (verdict,) = (
            v for v in check(run, Policy(max_share_exposed=0.0)) if v.key == "max_share_exposed"
        )
        data = inspected(run, 0)[1]
        counts = list(data["examples"]["exposure"].values())
        (rare,) = (
            v.offending for v in check(run, Policy(max_share_too_few_draws=0.0)) if "draws" in v.key
        )
        classes = summarise(run).classes
        assert [rare, counts[3]] == [classes[baselines.UNTOLD]] * 2
        assert sum(counts) == sum(classes.values()) == len(run)
        return {
            int(exposed.sum()),
            verdict.offending,
            summarise(run).exposed,
            counts[0] + counts[1],
        }

    def test_page_and_gate_count_the_same(self) -> None:
        run = with_baselines(made_up(), 0.8)
        run.columns["mse_bound_low"][[3, 4]] = np.nan, 0.0  # too few draws to tell
        run.columns["participations"][7] = 0  # never drawn
        told = np.delete(run.columns["mse_bound_low"], [3, 4, 7])
        brute = sum(low < 0.8**2 for low in told)
        assert self.told(run) == {brute}
        assert brute > 1
        run = worrying(safe=True)  # errors of 2 in a range of 1; the data goes before the range
        run.columns["mse_bound_low"][:] = 0.4**2
        assert self.told(run) == {100}
        assert self.told(with_baselines(run, 0.3)) == {0}

    def test_more_noise_and_fewer_draws_expose_nobody(self) -> None:
        """Below five measured steps no lower end is known: that is not exposure, however small the
        noise was.
        """
        run = with_baselines(worrying(safe=True), 0.3)
        run.columns["mse_bound_low"] = run.columns["mse_bound"].copy()
        run.columns["participations"][:40], run.columns["mse_bound_low"][:40] = 3, 0.0
        assert self.told(run) == {0}
        assert summarise(run).classes == {
            baselines.HALF: 0,
            baselines.BELOW: 0,
            baselines.BEYOND: 60,
            3: 40,
        }
        run.columns["mse_bound"][0] = 0.0  # without noise everything is told
        assert summarise(run).classes[baselines.HALF] == 1

    def test_attributes_on_page_and_gate(self) -> None:
        run = with_baselines(worrying(), [0.15, 5.0])
        age, height = summarise(run).attributes
        assert (age.exposed, height.exposed) == (1, 100)
        assert (age.ratio["0"], age.ratio["0.5"]) == (
            pytest.approx(0.1 / 0.15),
            pytest.approx(2 / 0.15),
        )
        (verdict,) = (
            v for v in check(run, Policy(min_attribute_error_share=1.0)) if "attribute" in v.rule
        )
        exposed = [baselines.attribute_ratios(run, j, np.array([[0.15, 5.0]])) < 1 for j in (0, 1)]
        exposed = exposed[0] | exposed[1]
        assert verdict.rows.tolist() == np.flatnonzero(exposed).tolist()
        assert verdict.found == pytest.approx(min(0.1 / 0.15, 2 / 5))

    def test_an_error_stands_beside_its_own_ratio_and_blind_guess(self, tmp_path: Path) -> None:
        """The smallest error need not be the closest one: its label may be easy to guess.

        The page shows one.
        """
        run = with_baselines(worrying(), [0.2, 5.0])
        classes = np.arange(100) % 2
        of_class = np.array([[0.2, 5.0], [0.8, 5.0]])
        errors = np.full((100, 2), 9.0)
        # 0.55 of an easy label's blind guess, 0.2 of the other's
        errors[0, 0], errors[1, 0] = 0.11, 0.16
        attributes = dataclasses.replace(run.attributes, error=errors, error_low=errors)
        spread = dataclasses.replace(
            run.baselines, attribute_errors=of_class, errors=np.array([0.2, 0.8])
        )
        columns = {**run.columns, "public_class": classes}
        run = dataclasses.replace(
            run, attributes=attributes, baselines=spread, columns=columns, records=None
        )

        age = summarise(run).attributes[0]
        assert (age.error["0"], age.blind, age.ratio["0"]) == (0.16, 0.8, pytest.approx(0.2))
        policy = Policy(min_attribute_error_share=0.5)
        (verdict,) = (v for v in check(run, policy) if "attribute" in v.rule)
        assert verdict.found == pytest.approx(0.2)
        page = write_report(run, tmp_path / "page", policy=policy)
        top, below = (
            text_of(page, slug).replace("\xa0", " ") for slug in ("verdict", "attributes")
        )
        assert "Closest attribute age: ± 0.16 (blind guess: ± 0.8)" in top
        assert "± 0.16" in below
        assert "± 0.8" in below
        assert "± 0.11" not in top + below

    def test_gains_and_answers_of_questions(self) -> None:
        run = made_up()
        (question,) = run.questions
        (verdict,) = (
            v for v in check(run, Policy(max_gain_over_guessing=0.1)) if v.subject == question.name
        )
        assert verdict.rows.tolist() == np.flatnonzero(question.success() > 0.6).tolist()
        truth = np.random.default_rng(0).integers(3, size=90)
        divergence = np.where(np.arange(3) == truth[:, None], 0.0, 0.2)
        divergence[5] = 0.0  # never drawn: it does not tell its answer
        asked, rows = (
            QuestionRecord("q", list("abc"), True, divergence, divergence),
            np.arange(90) < 90,
        )
        counts = np.bincount(np.delete(truth, 5), minlength=3) / 89
        assert baselines.answer_shares(asked, rows) == pytest.approx(counts)
        assert baselines.answer_shares(dataclasses.replace(asked, complete=False), rows) is None


class TestPage:
    def test_nothing_of_the_data_is_public(self, tmp_path: Path) -> None:
        """Mean, deviation, range and shares of levels.

        And no error beside its share, whose quotient is a deviation.
        """
        run = with_baselines(
            made_up(240), [1.234567, 2.345678, 0.456789], age={"PLANTED-level": 0.2718281828}
        )
        private = b"".join(files_of(write_report(run, tmp_path / "private")).values())
        page = write_report(run, tmp_path / "public", redacted=True)
        content, summary = b"".join(files_of(page).values()), summary_of(page)
        spreads = [*vars(run.baselines.attributes).values(), run.baselines.errors]
        values = [float(value) for each in spreads for value in each.flat]
        planted = {number(value) for value in values if abs(value) > 100} | {
            f"{value:.5g}" for value in values
        }
        planted |= {"PLANTED-level", "27 %", "0.2718"}
        assert sum(text.encode() in private for text in planted) > 5  # the search can find them
        assert [text for text in planted if text.encode() in content] == []
        assert (summary["blind"], summary["knows"], summary["ratio_histogram"]) == (
            None,
            None,
            None,
        )
        assert all(row["ratio"] is None for row in summary["exposure"])
        for attribute in summary["attributes"]:
            assert (attribute["error"], attribute["blind"], attribute["levels"]) == ({}, None, {})
            assert attribute["ratio"]

    def test_public_shares_rest_on_many(self) -> None:
        run = with_baselines(made_up(240), 1.7)
        for j, attribute in enumerate(summarise(run, redacted=True, min_group=12).attributes):
            least = np.sort(run.attributes.error[:, j])[:12]
            share = math.exp(np.log(np.minimum(least / 1.7, 1)).mean())
            assert attribute.ratio["0"] == float(f"{share:.2g}")
            assert isinstance(attribute.exposed, str) or (attribute.exposed or 0) % 12 == 0


def test_what_does_not_fit_is_refused() -> None:
    run = with_baselines(made_up())
    all_refused(
        {
            "baselines has shape": lambda: dataclasses.replace(run, attributes=None),
            "levels of": lambda: with_baselines(made_up(), 1.0, nobody={"a": 1.0}),
        }
    )

"""Blind guesses, shares of their error and who is exposed: against brute force, and the same everywhere."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up, pixelated, with_yardsticks, worrying
from torchfil.cli.runs import summary as inspected
from torchfil.gate.gate import check
from torchfil.gate.policy import Policy
from torchfil.report import load, save, write_report
from torchfil.report.formats import number
from torchfil.report.summary import summarise
from torchfil.run.baselines import (
    NOT_MEASURED,
    answer_shares,
    attribute_exposure,
    blind_error_of_inputs,
    blind_errors,
    counted_spread,
    exposed_examples,
    gain_over_guessing,
    level_shares,
    share_in_words,
    share_of_blind_guess,
    spread_of,
    status_of,
)
from torchfil.run.saved_run import Attributes, QuestionRecord, SavedRun


def words(page: Path, section: str) -> str:
    """The text of a section, without what is folded away."""
    (content,) = re.findall(rf'<section id="{section}">(.*?)</section>', page.read_text(), re.DOTALL)
    content = re.sub(r"<details>.*?</details>", "", content, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", content).replace("\u00a0", " ")


class TestSpread:
    @pytest.mark.parametrize("pieces", [1, 2, 7, 50])
    def test_pieces_give_what_all_rows_give(self, pieces: int) -> None:
        rng = np.random.default_rng(pieces)
        values = rng.normal(1e6, [1e-2, 1.0, 50.0], size=(100, 3))  # far from 0: sums of squares would keep no digit
        values[rng.random(values.shape) < 0.2] = np.nan
        spread, counts = counted_spread(np.array_split(values, pieces))
        np.testing.assert_array_equal(counts, (~np.isnan(values)).sum(axis=0))
        for name, brute in (("mean", np.nanmean), ("std", np.nanstd), ("low", np.nanmin), ("high", np.nanmax)):
            np.testing.assert_allclose(getattr(spread, name), brute(values, axis=0), rtol=1e-7)

    def test_nothing_is_known_of_what_is_never_there(self) -> None:
        spread = spread_of([np.array([[1.0, np.nan]]), np.array([[3.0, np.nan]])])
        assert spread.std.tolist()[0] == 1.0
        assert all(math.isnan(values[1]) for values in vars(spread).values())

    def test_levels_are_told_by_moments_alone(self) -> None:
        rng = np.random.default_rng(0)
        two = np.where(rng.random(500) < 0.3, 1.7, -0.4)
        nearly = np.r_[0.6, two[1:]]  # one value between the two
        three = rng.choice([0.0, 0.5, 1.0], size=500)
        shares = level_shares(spread_of([np.stack([two, three, nearly, np.ones(500)], axis=1)]))
        assert shares[0] == pytest.approx((two == 1.7).mean())
        assert np.isnan(shares[1:]).all()


class TestBlindGuess:
    def test_what_is_stated_goes_first_then_the_data_then_the_range(self) -> None:
        run = made_up()
        assert blind_error_of_inputs(run) is None
        assert np.isnan(blind_errors(run)).all()
        ranged = dataclasses.replace(run, about=run.about | {"dataset": {"input_range": [-1.0, 3.0]}})
        known = with_yardsticks(ranged, [3.0, 0.0, math.nan])
        assert (blind_error_of_inputs(ranged), blind_errors(ranged).tolist()) == (2.0, [2.0] * 3)
        assert blind_error_of_inputs(with_yardsticks(ranged, 0.7)) == pytest.approx(0.7)
        assert blind_error_of_inputs(known, 5.0) == 5.0
        assert blind_errors(known).tolist() == [3.0, 0.0, 2.0]
        assert blind_errors(known, {"age": 7.0}, 1.0).tolist() == [7.0, 0.0, 1.0]

    def test_nothing_is_left_to_guess_of_a_constant(self) -> None:
        assert share_of_blind_guess([0.0, 0.3, math.inf], 0.0).tolist() == [1.0] * 3
        assert not attribute_exposure(with_yardsticks(made_up(), 0.0), 0, 0.0).any()

    @pytest.mark.parametrize(("share", "text"), [(0.9999, "99 %"), (0.38, "38 %"), (0.0099, "below 1 %")])
    def test_shares_are_rounded_down(self, share: float, text: str) -> None:
        assert share_in_words(share) == f"{text} of a blind guess’s error"


class TestOneRule:
    """Who is exposed: the same people, whoever asks."""

    @staticmethod
    def told(run: SavedRun) -> set[int | str | None]:
        """By the rule, by the gate, on the page and by ``inspect``."""
        exposed = exposed_examples(run)
        assert exposed is not None
        (verdict,) = (v for v in check(run, Policy(max_share_exposed=0.0)) if v.key == "max_share_exposed")
        data = inspected(run, 0)[1]
        return {int(exposed.sum()), verdict.offending, summarise(run).exposed, data["examples"]["exposed"]}

    @pytest.mark.parametrize("seed", range(3))
    def test_page_and_gate_count_the_same(self, seed: int) -> None:
        run = with_yardsticks(made_up(seed=seed), 0.8)
        run.columns["mse_bound_low"][3] = np.nan  # not known: nothing says that it is safe
        run.columns["participations"][7] = 0  # not measured
        measured = status_of(run) != NOT_MEASURED
        brute = sum(not low >= 0.8**2 for low in run.columns["mse_bound_low"][measured])
        assert self.told(run) == {brute}
        assert brute > 1

    def test_the_data_goes_before_the_range(self) -> None:
        run = worrying(safe=True)  # errors of 2 in a range of 1
        run.columns["mse_bound_low"][:] = 0.4**2
        assert self.told(run) == {100}
        assert self.told(with_yardsticks(run, 0.3)) == {0}

    def test_attributes_on_page_and_gate(self) -> None:
        run = with_yardsticks(worrying(), [0.15, 5.0])
        age, height = summarise(run).attributes
        assert (age.exposed, height.exposed) == (1, 100)
        assert (age.share["0"], age.share["0.5"]) == (pytest.approx(0.1 / 0.15), 1.0)
        (verdict,) = (v for v in check(run, Policy(min_attribute_error_share=1.0)) if "attribute" in v.rule)
        exposed = attribute_exposure(run, 0, 0.15) | attribute_exposure(run, 1, 5.0)
        assert verdict.rows.tolist() == np.flatnonzero(exposed).tolist()
        assert verdict.found == pytest.approx(min(0.1 / 0.15, 2 / 5))

    def test_gains_and_answers_of_questions(self) -> None:
        run = made_up()
        (question,) = run.questions
        (verdict,) = (v for v in check(run, Policy(max_gain_over_guessing=0.1)) if v.subject == question.name)
        assert verdict.rows.tolist() == np.flatnonzero(gain_over_guessing(question) > 0.1).tolist()
        truth = np.random.default_rng(0).integers(3, size=90)
        divergence = np.where(np.arange(3) == truth[:, None], 0.0, 0.2)
        divergence[5] = 0.0  # never drawn: it does not tell its answer
        told = answer_shares(QuestionRecord("q", list("abc"), True, divergence, divergence))
        counts = np.bincount(np.delete(truth, 5), minlength=3) / 89
        assert told == pytest.approx(dict(zip("abc", counts, strict=True)))
        assert answer_shares(dataclasses.replace(question, complete=False)) is None


class TestPage:
    def test_shares_first_and_raw_numbers_folded_away(self, tmp_path: Path) -> None:
        error = np.broadcast_to([0.4, 9.0, 0.4], (40, 3))
        run = made_up(attributes=Attributes(["age", "height", "weight"], ["years", "cm", ""], error, error))
        page = write_report(
            with_yardsticks(run, [1.0, 2.0, 0.5], height={"tall": 0.25, "small": 0.75}), tmp_path / "report"
        )
        text, whole = words(page, "attributes"), page.read_text().replace("\u00a0", " ")
        assert all(told in text for told in ("40 %", "80 %", "no better than guessing"))
        assert "±" not in text
        assert all(told in whole for told in ("± 0.4 years", "small 75 %, tall 25 %"))

    def test_inputs_are_told_beside_a_blind_guess(self, tmp_path: Path) -> None:
        run = with_yardsticks(made_up(240), 0.5)
        page = write_report(run, tmp_path / "report")
        share = math.floor(100 * math.sqrt(np.min(run.columns["mse_bound_low"])) / 0.5)
        text = words(page, "distribution")
        assert f"{share} % of a blind guess’s error" in text
        assert "off by its standard deviation, 0.5" in text
        assert "the squared error of a blind guess, 0.25, which needs no model" in words(page, "findings")

    def test_where_no_blind_guess_is_known_it_is_said(self, tmp_path: Path) -> None:
        text = words(write_report(made_up(), tmp_path / "report"), "attributes")
        assert "no share of a blind guess can be told" in text
        assert "±" in text

    def test_nothing_of_the_data_is_public(self, tmp_path: Path) -> None:
        """Mean, deviation, range and shares of levels; and no error beside its share, whose quotient is a deviation."""
        run = with_yardsticks(made_up(240), [1.234567, 2.345678, 0.456789], age={"PLANTED-level": 0.2718281828})
        private = b"".join(p.read_bytes() for p in write_report(run, tmp_path / "private").parent.iterdir())
        public = write_report(run, tmp_path / "public", redacted=True).parent
        content = b"".join(p.read_bytes() for p in public.iterdir())
        assert run.yardsticks is not None
        spreads = [*vars(run.yardsticks.inputs).values(), *vars(run.yardsticks.attributes).values()]
        values = [float(value) for each in spreads for value in each.flat]
        planted = {number(value) for value in values if abs(value) > 100} | {f"{value:.5g}" for value in values}
        planted |= {"PLANTED-level", "27 %", "0.2718"}
        assert sum(text.encode() in private for text in planted) > 5  # the search can find them
        assert [text for text in planted if text.encode() in content] == []
        summary = json.loads((public / "summary.json").read_text())
        assert summary["guess"] is None
        assert all(row["share"] is None for row in summary["exposure"])
        for attribute in summary["attributes"]:
            assert (attribute["error"], attribute["blind"], attribute["levels"]) == ({}, None, {})
            assert attribute["share"]

    def test_public_shares_rest_on_many(self) -> None:
        run = with_yardsticks(made_up(240), 1.7)
        assert run.attributes is not None
        for j, attribute in enumerate(summarise(run, redacted=True, min_group=12).attributes):
            least = np.sort(run.attributes.error[:, j])[:12]
            share = math.exp(np.log(np.minimum(least / 1.7, 1)).mean())
            assert attribute.share["0"] == float(f"{share:.2g}")
            assert isinstance(attribute.exposed, str) or (attribute.exposed or 0) % 12 == 0


class TestMaps:
    def test_pixels_are_a_picture_not_rows(self, tmp_path: Path) -> None:
        page = write_report(pixelated(), tmp_path / "report")
        text = words(page, "attributes")
        assert len(re.findall(r"pixel \d", text)) == 1  # the most exposed, in the caption
        assert "16 of 64 can be guessed more closely than blindly" in text
        (content,) = re.findall(r'<section id="attributes">(.*?)</section>', page.read_text(), re.DOTALL)
        steps = re.findall(r'<path d="([^"]+)"[^>]*data-step="(\d)"', content)
        assert {(way.count("M"), step) for way, step in steps} == {(4, "2")}  # four rows; 0.1 of 0.25 is 40 %
        assert len(steps) == 2 * 3  # three levels of exposure, for wide and for narrow screens

    @pytest.mark.parametrize(("examples", "shown"), [(60, True), (9, False)])
    def test_the_public_map_is_made_of_many(self, tmp_path: Path, examples: int, shown: bool) -> None:
        text = write_report(pixelated(examples), tmp_path / "report", redacted=True).read_text()
        assert "<img" not in text
        assert ("data-step" in text) == shown


class TestFile:
    @pytest.mark.parametrize("rows", [slice(None), slice(3, 20)])
    def test_round_trip(self, tmp_path: Path, rows: slice) -> None:
        run = with_yardsticks(pixelated(40), 0.3, **{"pixel 0,0": {"0": 0.1, "1": 0.9}})
        loaded = load(save(run.take(rows), tmp_path / "run.parquet"))
        assert loaded.yardsticks is not None
        assert run.yardsticks is not None
        assert (loaded.yardsticks.examples, loaded.yardsticks.levels) == (40, run.yardsticks.levels)
        for what in ("inputs", "attributes"):
            for name, values in vars(getattr(run.yardsticks, what)).items():
                np.testing.assert_array_equal(getattr(getattr(loaded.yardsticks, what), name), values)
        assert loaded.attributes is not None
        assert run.attributes is not None
        np.testing.assert_array_equal(loaded.attributes.pixels, run.attributes.pixels)

    def test_a_run_without_them(self, tmp_path: Path) -> None:
        assert load(save(made_up(), tmp_path / "run.parquet")).yardsticks is None

    def test_what_does_not_fit_is_refused(self) -> None:
        run = with_yardsticks(made_up())
        with pytest.raises(ValueError, match="yardsticks has shape"):
            dataclasses.replace(run, attributes=None)
        with pytest.raises(ValueError, match="levels of"):
            with_yardsticks(made_up(), 1.0, nobody={"a": 1.0})
        assert run.attributes is not None
        with pytest.raises(ValueError, match="pixels has shape"):
            made_up(attributes=dataclasses.replace(run.attributes, pixels=np.zeros((3, 3), dtype=np.int64)))

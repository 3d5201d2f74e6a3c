"""Groups beside each other: page and gate say the same, with the size of the effect, and nothing below it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up, with_yardsticks
from torchfil.gate.gate import check
from torchfil.gate.policy import parse_policy
from torchfil.gate.verdict import Verdict
from torchfil.report import SavedRun, write_report
from torchfil.report.summary import summarise
from torchfil.run.disparity import SMALLEST_EFFECT, disparity_of, group_levels


def grouped(levels: dict[str, np.ndarray]) -> SavedRun:
    """A run whose groups have these η̄."""
    fil = np.concatenate(list(levels.values()))
    labels = np.concatenate([np.full(len(own), name) for name, own in levels.items()])
    run = made_up(len(fil), groups={"site": labels}, attacks=[])
    run.columns["fil"][:] = fil
    with np.errstate(divide="ignore"):
        run.columns["mse_bound"][:], run.columns["mse_bound_low"][:] = fil**-2.0, 0.9 * fil**-2.0
    return run


def judged(run: SavedRun, limit: float = 2.0) -> Verdict:
    verdicts = check(run, parse_policy({"max_group_disparity": limit}))
    return next(verdict for verdict in verdicts if verdict.rule == "max_group_disparity (site)")


def text_of(page: Path, section: str = "groups") -> str:
    (content,) = re.findall(rf'<section id="{section}">(.*?)</section>', page.read_text(), re.DOTALL)
    return re.sub(r"<[^>]+>", "", content).replace("\u00a0", " ")


class TestOneStatistic:
    def test_page_and_gate_say_the_same(self, tmp_path: Path) -> None:
        """Before, the gate compared medians (here 1) and the page geometric means: it passed what the page showed."""
        half = np.r_[np.ones(11), np.full(9, 90.0)]
        run = grouped({"A": half, "B": np.ones(20)})
        assert np.median(half) == 1
        (grouping,) = summarise(run).groupings
        verdict = judged(run)
        assert grouping.disparity is not None
        assert verdict.found == grouping.disparity.ratio == pytest.approx(90 ** (9 / 20))
        assert not verdict.passed
        assert verdict.rows.tolist() == list(range(20))
        assert "most over the least exposed group: 7.58;" in text_of(write_report(run, tmp_path / "report"))

    @pytest.mark.parametrize("seed", range(6))
    def test_for_any_groups(self, seed: int) -> None:
        """Also where some are too small to speak for themselves, which the page's ratio took in before."""
        rng = np.random.default_rng(seed)
        sizes = {"a": 30, "b": 12, "c": 3, "d": 1, "e": 10}
        run = grouped({name: rng.lognormal(rng.normal(), 1.0, size) for name, size in sizes.items()})
        (grouping,) = summarise(run).groupings
        means = {
            name: math.exp(np.log(run.columns["fil"][run.groups["site"] == name]).mean())
            for name, size in sizes.items()
            if size >= 10
        }
        assert grouping.disparity is not None
        assert grouping.disparity.ratio == pytest.approx(max(means.values()) / min(means.values()))
        assert judged(run).found == grouping.disparity.ratio

    def test_nothing_infinite_and_alike(self) -> None:
        fil, codes = np.r_[np.zeros(10), np.ones(10)], np.r_[np.zeros(10, int), np.ones(10, int)]
        levels = group_levels(fil, codes, ["a", "b"])
        assert levels == {"a": 0.0, "b": 1.0}
        found = disparity_of(levels)
        assert found is not None
        assert found.ratio == math.inf
        assert disparity_of({"a": math.inf, "b": math.inf}) == disparity_of({"a": 0.0, "b": 0.0})
        assert disparity_of({"a": 1.0}) is None
        same = grouped({"A": np.full(10, 0.3), "B": np.full(20, 0.3)})
        assert judged(same, 1.0).passed
        assert judged(same, 1.0).found == 1.0

    def test_a_group_in_which_nothing_leaked(self, tmp_path: Path) -> None:
        run = grouped({"A": np.full(20, 0.5), "B": np.zeros(20)})
        assert judged(run, 1e9).found == math.inf
        assert not judged(run, 1e9).passed
        assert "A leaks beyond all measure beside B" in text_of(write_report(run, tmp_path / "report"))


class TestHeadlines:
    def test_they_carry_the_size_and_its_unit(self, tmp_path: Path) -> None:
        run = grouped({"A": np.full(20, 0.5), "B": np.full(20, 0.2)})
        text = text_of(write_report(run, tmp_path / "report"))
        assert (
            "A has 2.5 times the FIL of B: an unbiased guess of an input typically has a mean squared error of 4"
            in text
        )
        assert "or more there, and of 25 in B." in text
        text = text_of(write_report(with_yardsticks(run, 4.0), tmp_path / "report"))
        assert "(50 % of a blind guess’s error, and no better than guessing)." in text

    @pytest.mark.parametrize(("factor", "called"), [(1.08, False), (1.4, True)])
    def test_they_are_silent_below_a_stated_size(self, tmp_path: Path, factor: float, called: bool) -> None:
        """Before, 500 examples a group made any difference stand out, however small."""
        noise = np.random.default_rng(0).lognormal(0, 0.05, 500)
        run = grouped({"A": factor * noise, "B": noise})
        page = write_report(run, tmp_path / "report")
        text = text_of(page)
        assert ("times the FIL of" in text) is called
        assert ("Clearly above all examples: A." in text) is called
        assert ("times the FIL of B" in text_of(page, "findings")) is called
        assert "differs by 10 % or more; smaller differences are not called" in text
        assert SMALLEST_EFFECT == 1.1

    def test_chance_is_not_called_an_effect(self, tmp_path: Path) -> None:
        wide = np.random.default_rng(0).lognormal(0, 2.0, (2, 12))
        run = grouped({"A": 1.3 * wide[0], "B": wide[1]})
        (grouping,) = summarise(run).groupings
        assert grouping.disparity is not None
        assert grouping.disparity.ratio > SMALLEST_EFFECT
        assert "times the FIL of" not in text_of(write_report(run, tmp_path / "report"))

    def test_small_groups_have_no_disparity(self, tmp_path: Path) -> None:
        run = grouped({"A": np.full(9, 0.5), "B": np.full(20, 0.2)})
        assert summarise(run).groupings[0].disparity is None
        assert judged(run).found is None
        text = text_of(write_report(run, tmp_path / "report"))
        assert "Fewer than two groups have 10 measured examples" in text
        assert "times the FIL of" not in text

"""Texts on the page, token by token: shares that add up, told without colour as well, and never in public."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up
from torchfil.report import load, save, write_report
from torchfil.report.examples import shares_of
from torchfil.run.saved_run import SavedRun, Texts

FIL = np.asarray([[0.1, 0.2, 0.5, 0.0], [0.3, 0.3, np.nan, np.nan]], "f4")
PLIS = np.asarray([[1.0, 7.0, 1.0, 0.0], [np.nan, 2.0, np.nan, np.nan]], "f4")


def with_tokens(plis: np.ndarray | None = PLIS) -> SavedRun:
    words = [[" she", " has", " <gout>", " "], ["co", "##ld"]]
    return dataclasses.replace(made_up(), texts=Texts(np.asarray([5, 2]), words, FIL, plis))


def section(run: SavedRun, folder: Path) -> str:
    text = write_report(run, folder).read_text()
    found = re.search(r"<section id=\"words\">(.*?)</section>", text, flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_shares_add_up_to_one_and_nothing_is_no_share() -> None:
    rng = np.random.default_rng(0)
    for sizes in (rng.random(9), np.asarray([0.0, 2.0]), np.asarray([np.nan, 1.0])):
        assert shares_of(sizes).sum() == pytest.approx(1.0)
    assert shares_of(np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert shares_of(np.zeros(0)).tolist() == []


def test_tokens_are_shown_with_their_shares(tmp_path: Path) -> None:
    shown = section(with_tokens(), tmp_path / "page")
    assert " ".join(re.findall(r"--share: (\d+)%", shown)) == "4 16 100 0 2 100 2 0 100 100 0 100"
    assert 'title="83 % of the text, η = 0.5"' in shown
    assert 'title="96.1 % of the text, ‖PLIS‖ = 7"' in shown
    assert "␣" in shown  # a token that is a blank
    assert "##ld" in shown
    assert "no bound on anybody" in shown
    assert "‖PLIS‖" not in section(with_tokens(None), tmp_path / "without")


def test_colour_is_not_the_only_sign(tmp_path: Path) -> None:
    shown = section(with_tokens(None), tmp_path / "page")
    spans = re.findall(r"<span class=\"word\"(.*?)</span>", shown)
    assert len(spans) == 6
    gout = next(span for span in spans if "gout" in span)
    assert "border-bottom: 3px solid" in gout  # by the line under it
    assert "<sup>1</sup>" in gout  # by a number
    assert 'tabindex="0"' in gout  # which keyboards reach
    assert 'aria-label="&lt;gout&gt;: 83 % of the text' in gout  # and readers say
    she = next(span for span in spans if ">she" in span)
    assert "border-bottom" not in she
    blank = next(span for span in spans if "␣" in span)
    assert "tabindex" not in blank  # nothing leaks: nothing to tell
    assert "<td>13 %</td>" in shown  # in the table of numbers


def test_tokens_are_private(tmp_path: Path) -> None:
    public = write_report(with_tokens(), tmp_path / "public", redacted=True)
    assert not any("gout" in path.read_text(errors="ignore") for path in public.parent.rglob("*") if path.is_file())


def test_the_file_keeps_both_maps(tmp_path: Path) -> None:
    for plis in (PLIS, None):
        texts = load(save(with_tokens(plis), tmp_path / "run.parquet")).texts
        assert texts is not None
        assert texts.words == [[" she", " has", " <gout>", " "], ["co", "##ld"]]
        assert np.array_equal(texts.fil, FIL, equal_nan=True)
        assert (texts.plis is None) == (plis is None)
        if plis is not None and texts.plis is not None:
            assert np.array_equal(texts.plis, plis, equal_nan=True)
    with pytest.raises(ValueError, match="texts"):
        with_tokens(PLIS[:1])

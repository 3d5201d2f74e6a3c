"""The report's page: it stands alone, strings from data stay strings, and nothing sounds safer than it is."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from tests.report.pages import elements, sentences, table_data, with_unmeasured
from tests.report.run_cases import made_up
from torchfil.report import SavedRun, register_section, write_report
from torchfil.report import page as chapters
from torchfil.report.formats import number
from torchfil.report.page import block, context_of
from torchfil.report.summary import Report, summarise
from torchfil.run.baselines import LOWER_BOUND, MEASURED, NOT_MEASURED, status_of

EVIL = '<script>alert("x")</script>'


def test_the_page_stands_alone_and_says_on_every_section_that_it_is_private(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    text = page.read_text()
    assert not re.search(r"(src|href|action)\s*=\s*[\"'](?!data:|#)", text)
    assert not re.search(r"url\((?!data:)|@import|fetch\(|XMLHttpRequest|WebSocket", text)
    script = re.search(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    sections = re.findall(r"<section id=\"(\w+)\">(.*?)</section>", text, flags=re.DOTALL)
    others = ("linear", "merged")  # of other kinds of runs
    assert [name for name, _ in sections] == [s.slug for s in chapters._SECTIONS if s.slug not in others]
    assert all("Confidential" in content for _, content in sections)
    assert 'content: "Confidential: made from private data"' in text  # in the margin of printed pages
    digest = hashlib.sha256((page.parent / "leakage.csv").read_bytes()).hexdigest()
    assert digest in dict(sections)["decision"]


def test_strings_from_data_stay_strings(tmp_path: Path) -> None:
    run = made_up(text_ids=True)
    ids = run.ids.astype("<U80")
    ids[int(np.argmax(run.columns["fil"]))] = EVIL
    ids[0], ids[1] = '"><img src=x onerror=alert(1)>', "{{script}} </script> \u2028"
    assert run.attributes is not None
    attributes = type(run.attributes)([EVIL, "b&b", "c"], ["<i>", "", ""], run.attributes.error)
    labels = np.where(np.arange(len(ids)) % 2 == 0, EVIL, "b")
    evil = made_up(
        text_ids=True,
        ids=ids,
        attributes=attributes,
        groups={EVIL: labels},
        about=run.about | {"title": EVIL, "accountant": EVIL, "model": {"name": EVIL}},
        attacks=[
            type(run.attacks[0])(
                EVIL, EVIL, *[getattr(run.attacks[0], f) for f in ("rows", "predicted", "achieved", "violated")]
            )
        ],
    )
    plain = elements(write_report(made_up(text_ids=True), tmp_path / "plain"))
    found = elements(write_report(evil, tmp_path / "evil"))
    scripts = [attributes.get("id") for name, attributes in found if name == "script"]
    assert len(scripts) == len(set(scripts))
    assert {name for name, _ in found} == {name for name, _ in plain}
    assert all(str(attributes["src"]).startswith("data:") for name, attributes in found if name == "img")
    assert not [key for _, attributes in found for key in attributes if key.startswith("on")]
    assert EVIL not in (tmp_path / "evil" / "index.html").read_text()


def test_what_was_not_measured_is_not_called_safe(tmp_path: Path) -> None:
    run = with_unmeasured()
    status = status_of(run)
    assert status[[7, 8, 9]].tolist() == [NOT_MEASURED, NOT_MEASURED, LOWER_BOUND]
    assert set(np.delete(status, [7, 8, 9])) == {MEASURED}
    page = write_report(run, tmp_path / "report")
    rows = {row["id"]: row for row in csv.DictReader((page.parent / "leakage.csv").open())}
    for name in ("7", "8"):
        assert rows[name]["status"] == "not measured"
        assert rows[name]["fil"] == rows[name]["mse_bound"] == ""
    assert rows["9"]["status"] == "lower bound"
    assert float(rows["9"]["fil"]) == pytest.approx(run.columns["fil"][9], rel=1e-6)
    assert "2 examples were not measured" in page.read_text()
    summary = summarise(run)
    assert summary.not_measured == 2
    assert all(0 < row.mse_bound < np.inf for row in summary.exposure)


def test_skipped_steps_are_not_safety() -> None:
    run = made_up()
    run.columns["fil"][3] = 0
    assert status_of(run)[3] == MEASURED
    run.about["mechanism"]["fil_rate"] = 0.25
    assert status_of(run)[3] == NOT_MEASURED


def test_a_bare_run_gives_a_page_without_empty_chapters(tmp_path: Path) -> None:
    run = made_up()
    bare = SavedRun(about={}, ids=run.ids, columns={name: run.columns[name] for name in ("fil", "mse_bound")})
    text = write_report(bare, tmp_path / "report").read_text()
    slugs = re.findall(r"<section id=\"(\w+)\">", text)
    assert slugs == [
        "verdict",
        "findings",
        "training",
        "assumptions",
        "distribution",
        "exposed",
        "attacks",
        "examples",
        "decision",
    ]
    assert "No attack was run." in text
    assert "does not say between which values its inputs lie" in text
    nobody = SavedRun(about={}, ids=run.ids[:0], columns={"fil": np.zeros(0), "mse_bound": np.zeros(0)})
    assert "Too few examples were measured" in write_report(nobody, tmp_path / "report").read_text()
    with pytest.raises(ValueError, match="no column 'mse_bound'"):
        write_report(SavedRun(about={}, ids=run.ids, columns={"fil": run.columns["fil"]}), tmp_path / "report")


def with_one_uncertain(**about: bool) -> SavedRun:
    """The lowest lower end is not that of the most exposed example."""
    run = made_up(about=made_up().about | about)
    order = np.argsort(-run.columns["fil"])
    run.columns["mse_bound_low"][order[1]] = 0.1 * run.columns["mse_bound"][order[0]]
    return run


def test_an_estimated_bound_is_called_an_estimate(tmp_path: Path) -> None:
    run = with_one_uncertain()
    least, low = run.columns["mse_bound"].min(), run.columns["mse_bound_low"].min()
    assert summarise(run).lowest_end == pytest.approx(low)
    text = sentences(write_report(run, tmp_path / "report"), "findings")
    estimate = (
        f"An unbiased guess of the most exposed example has a mean squared error of an estimated {number(least)} "
    )
    low_end = (
        "an estimate from one run; no measured example’s lower end (95 %, each example by itself) is below "
        f"{number(low)}."
    )
    assert estimate in text
    assert low_end in text
    assert "These bounds bind unbiased attackers: those whose guesses are right on average" in text
    run.columns["mse_bound_low"][3] = 0  # drawn once, for example
    text = sentences(write_report(run, tmp_path / "report"), "findings")
    assert "for some examples, drawn too rarely, one run does not tell how far below its estimate" in text
    run.columns["mse_bound_low"][3] = np.nan
    unknown = "an estimate from one run; how far below it the truth may lie is not known."
    assert unknown in sentences(write_report(run, tmp_path / "report"), "findings")
    without = made_up(columns={name: v for name, v in run.columns.items() if name != "mse_bound_low"})
    assert summarise(without).lowest_end is None
    assert unknown in sentences(write_report(without, tmp_path / "report"), "findings")

    # no probes, but still the batches and the noise of one run
    text = sentences(write_report(with_one_uncertain(exact=True), tmp_path / "report"), "findings")
    assert estimate in text
    assert low_end in text


def test_few_measured_participations_are_warned_of(tmp_path: Path) -> None:
    def findings(**mechanism: float) -> str:
        run = made_up(about=made_up().about | {"mechanism": mechanism})
        return sentences(write_report(run, tmp_path / "report"), "findings")

    warning = "About 5 measured participations stand behind each example: 25 % of the steps were measured"
    assert warning in findings(fil_rate=0.25, sample_rate=0.1, steps=200)
    assert "the safest-looking are so by luck" in findings(fil_rate=0.5, steps=10)
    assert "stand behind" not in findings(fil_rate=0.25, sample_rate=0.1, steps=2000)
    assert "stand behind" not in findings(fil_rate=1.0, sample_rate=0.1, steps=20)


@pytest.mark.parametrize("pictures", [True, False])
def test_the_least_exposed_are_not_called_safe(tmp_path: Path, pictures: bool) -> None:
    run = made_up() if pictures else made_up(pictures=None)
    text = sentences(write_report(run, tmp_path / "report"), "exposed")
    assert "They look safe partly by luck." in text
    assert "lower end" in text


def test_every_place_shows_the_lower_end_of_an_attribute(tmp_path: Path) -> None:
    run = made_up(pictures=None)
    assert run.attributes is not None
    names, units = run.attributes.names, run.attributes.units
    low = np.full((len(run), 3), 4.0)
    page = write_report(
        made_up(pictures=None, attributes=type(run.attributes)(names, units, np.full((len(run), 3), 6.0), low)),
        tmp_path / "report",
    )
    exposed = sentences(page, "exposed").replace("\u00a0", " ")
    assert "unbiased guesses are off by at least, on average" in exposed
    assert "age ± 4 years" in exposed
    assert "± 6" not in exposed
    (first, *_) = csv.DictReader((page.parent / "leakage.csv").open())
    assert float(first["least error of age"]) == 4
    assert set(table_data(page)["attributes"][0]["values"]) == {4.0}


def test_the_blind_guess_is_explained_and_counted(tmp_path: Path) -> None:
    run = made_up()
    run.about["dataset"]["input_range"] = [-1.0, 1.0]
    summary = summarise(run)
    assert summary.guess == 1.0
    assert summary.below_guess == int((run.columns["mse_bound"] < 1).sum())
    assert summary.mse_histogram is not None
    left = sum(
        count
        for count, edge in zip(summary.mse_histogram.counts, summary.mse_histogram.edges[1:], strict=True)
        if edge <= 1 + 1e-9
    )
    assert left == summary.below_guess  # the line is an edge of the bars
    text = write_report(run, tmp_path / "report").read_text()
    assert "always answering 0 is off by at most 1, a squared error of at most 1." in text


def test_a_section_is_one_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chapters, "_SECTIONS", list(chapters._SECTIONS))
    register_section(
        "weather", "The weather", lambda report: Markup("<p>{}</p>").format("fair & <mild>"), before="groups"
    )
    text = write_report(made_up(), tmp_path / "report").read_text()
    assert text.index('id="weather"') < text.index('id="groups"')
    assert "fair &amp; &lt;mild&gt;" in text
    with pytest.raises(ValueError, match="'weather' is taken"):
        register_section("weather", "again", lambda report: None)
    with pytest.raises(ValueError, match="before='nothing' is no section"):
        register_section("new", "new", lambda report: None, before="nothing")


def test_what_does_not_fit_is_left_out_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_report(made_up(), tmp_path / "whole")
    assert [attribute["name"] for attribute in table_data(whole)["attributes"]] == ["age", "height", "vkorc1=CT"]
    assert "leaves out" not in whole.read_text()
    monkeypatch.setattr("torchfil.report.examples.MOST_CELLS", 100)
    cut = write_report(made_up(), tmp_path / "cut")
    assert [attribute["name"] for attribute in table_data(cut)["attributes"]] == ["age", "height"]
    assert "leaves out vkorc1=CT; the files beside it hold everything" in cut.read_text()


def test_the_table_has_the_most_exposed_and_whom_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with more examples than the page holds; the file beside it has everybody."""
    monkeypatch.setattr("torchfil.report.examples.MOST_ROWS", 12)
    run = with_unmeasured()
    page = write_report(run, tmp_path / "report")
    measured = np.flatnonzero(status_of(run) != NOT_MEASURED)
    ranked = measured[np.argsort(-run.columns["fil"][measured])].tolist()
    named = set(map(int, re.findall(r'data-row="(\d+)"', page.read_text())))
    assert named - set(ranked[:12]), "the least exposed are named, too"
    data = table_data(page)
    assert set(data["places"]) == set(ranked[:12]) | named
    assert [data["rank"][data["places"].index(row)] for row in ranked[:12]] == list(range(1, 13))
    told = (
        f"The table has {len(data['ids'])} of 40 examples: the most exposed of the {len(measured)} that were measured"
    )
    assert told in page.read_text()
    assert len((page.parent / "leakage.csv").read_text().splitlines()) == 41


@pytest.mark.parametrize("slug", ["verdict", "exposed", "words", "examples"])
def test_a_confidential_block_cannot_be_rendered_from_the_public_context(slug: str) -> None:
    report = Report(summarise(made_up(), redacted=True), None, {}, [], {})
    with pytest.raises(UndefinedError):
        block(slug, vars(context_of(report)))

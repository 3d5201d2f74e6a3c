"""The report's page: it stands alone, strings from data stay strings, and nothing sounds safer than
it is.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import UndefinedError

import torchfil
from tests.report.pages import elements, files_of, table_data, text_of
from tests.report.run_cases import ABOVE, AUDIT, REFUTED, SPARED, audited, made_up, with_baselines
from torchfil.attacks import AttackResult
from torchfil.report import SavedRun, load, save, write_report
from torchfil.report import page as chapters
from torchfil.report.formats import number
from torchfil.report.page import block, context_of
from torchfil.report.summary import Report, summarise
from torchfil.run.baselines import LOWER_BOUND, NOT_MEASURED, status_of
from torchfil.run.saved_run import MEASURED, Texts

EVIL = '<script>alert("x")</script>'


def test_the_page_stands_alone_and_says_that_it_is_private(tmp_path: Path) -> None:
    page = write_report(made_up(), tmp_path / "report")
    text = page.read_text()
    beside = "|".join(path.name for path in page.parent.iterdir())
    assert not re.search(rf"(src|href|action)\s*=\s*[\"'](?!data:|#|(?:{beside})[\"'])", text)
    assert not re.search(r"url\((?!data:)|@import|fetch\(|XMLHttpRequest|WebSocket", text)
    found = elements(page)
    places = {attributes["id"] for _, attributes in found if "id" in attributes}
    links = {str(attributes["href"]) for name, attributes in found if name == "a"}
    assert {
        link[1:] for link in links if link.startswith("#") and not link.startswith("#show-")
    } <= places
    script = re.search(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        f"'sha256-{digest}'" in text
    )
    slugs = [
        section.slug
        for section in chapters._SECTIONS
        if section.slug not in ("alerts", "linear", "merged")
    ]
    assert re.findall(r'<section class="card \w+" id="([\w-]+)">', text) == slugs
    assert "Confidential" in text_of(page, "first")
    # in the margin of printed pages
    assert 'content: "Confidential: made from private data"' in text
    assert hashlib.sha256((page.parent / "leakage.csv").read_bytes()).hexdigest() in text_of(
        page, "decision"
    )


def test_strings_from_data_stay_strings(tmp_path: Path) -> None:
    run = made_up(text_ids=True)
    ids = run.ids.astype("<U80")
    ids[int(np.argmax(run.columns["fil"]))] = EVIL
    ids[0], ids[1] = '"><img src=x onerror=alert(1)>', "{{script}} </script> \u2028"
    evil = dataclasses.replace(
        run,
        ids=ids,
        attributes=dataclasses.replace(
            run.attributes, names=[EVIL, "b&b", "c"], units=["<i>", "", ""]
        ),
        groups={EVIL: np.where(np.arange(len(ids)) % 2 == 0, EVIL, "b")},
        about=run.about | {"title": EVIL, "accountant": EVIL, "model": {"name": EVIL}},
        attacks=[dataclasses.replace(run.attacks[0], name=EVIL, threat_model=EVIL)],
    )
    plain = elements(write_report(run, tmp_path / "plain"))
    page = write_report(evil, tmp_path / "evil")
    found = elements(page)
    scripts = [attributes.get("id") for name, attributes in found if name == "script"]
    assert len(scripts) == len(set(scripts))
    assert {name for name, _ in found} == {name for name, _ in plain}
    assert all(
        str(attributes["src"]).startswith("data:") for name, attributes in found if name == "img"
    )
    assert not [key for _, attributes in found for key in attributes if key.startswith("on")]
    assert EVIL not in page.read_text()


def with_unmeasured() -> SavedRun:
    """Example 6 measured too rarely to tell, 7 never drawn, 8 where nothing was measured, 9 in a
    paused step, others in skipped ones.
    """
    run = made_up(40)
    columns = dict(run.columns)
    columns["participations"][6:10] = [2, 0, 2, 5]
    columns["missed"] = np.where(columns["participations"] > 4, 1, 0)
    columns["missed"][8], columns["paused"] = 2, np.where(run.ids == 9, 1, 0)
    columns["fil"][6:9] = columns["mse_bound"][6:9] = np.nan
    return dataclasses.replace(run, columns=columns)


def test_what_was_not_measured_is_not_called_safe(tmp_path: Path) -> None:
    run = with_unmeasured()
    status = status_of(run)
    assert status[6:10].tolist() == [NOT_MEASURED] * 3 + [LOWER_BOUND]
    assert set(np.delete(status, range(6, 10))) == {MEASURED}
    page = write_report(run, tmp_path / "report")
    rows = list(csv.DictReader((page.parent / "leakage.csv").open()))
    assert [row["status"] for row in rows[6:10]] == ["not measured"] * 3 + ["lower bound"]
    assert {row[name] for row in rows[6:9] for name in ("fil", "mse_bound")} == {""}
    assert float(rows[9]["fil"]) == pytest.approx(run.columns["fil"][9], rel=1e-6)
    assert "1 examples took part in paused steps" in text_of(page, "alerts")
    summary = summarise(run)
    assert summary.not_measured == 3
    assert all(0 < row.mse_bound < np.inf for row in summary.exposure)

    run.about["mechanism"] |= {"fil_rate": 0.25}
    assert "measured participations stand behind each example" in text_of(
        write_report(run, page.parent), "alerts"
    )


def test_an_estimated_bound_is_called_an_estimate(tmp_path: Path) -> None:
    """Without probes, too: the batches and the noise of one run are left.

    Its lower end may be another example's.
    """
    run = made_up(about=made_up().about | {"exact": True})
    least = run.columns["mse_bound"].min()
    run.columns["mse_bound_low"][np.argsort(-run.columns["fil"])[1]] = 0.1 * least
    text = text_of(write_report(run, tmp_path / "report"), "distribution")
    assert number(0.1 * least) in text
    for end in (0.1 * least, 0.0, np.nan):
        run.columns["mse_bound_low"][3] = end
        assert summarise(run).lowest_end == pytest.approx(end, nan_ok=True)
    del run.columns["mse_bound_low"]
    assert summarise(run).lowest_end is None


def test_every_place_shows_the_lower_end_of_an_attribute(tmp_path: Path) -> None:
    table = made_up().attributes
    table = dataclasses.replace(table, error=np.full((40, 3), 6.0), error_low=np.full((40, 3), 4.0))
    page = write_report(with_baselines(made_up(attributes=table), 5.0), tmp_path / "report")
    shown = text_of(page, "verdict").replace("\xa0", " ")
    assert "age: ± 4 years" in shown
    assert "± 6" not in shown
    assert (
        float(next(csv.DictReader((page.parent / "leakage.csv").open()))["least error of age"]) == 4
    )
    assert set(table_data(page)["attributes"][0]["values"]) == {4.0}


@pytest.mark.parametrize("redacted", [False, True])
@pytest.mark.parametrize(
    ("audit", "least"), [(AUDIT | {"epsilon": 1.199}, "1.1"), (ABOVE, "2.7"), (REFUTED, "3.4")]
)
def test_an_audit_stands_beside_the_claim_rounded_down(
    audit: Any, least: str, redacted: bool, tmp_path: Path
) -> None:
    page = write_report(audited(audit, 40), tmp_path / "report", redacted=redacted)
    assert f"claimed ε 2.5, audited ε ≥ {least} (1,000 canaries) at δ" in text_of(page, "first")
    assert f"ε ≥ {least} at 95 %" in text_of(page, "audit")
    assert f"≥ {least}, a lower bound" in text_of(page, "training")
    assert "1.2" not in text_of(page, "audit")
    # a rate may rest on few
    assert ("3.1 % 8.2 % 5 % 11.7 %" in text_of(page, "audit")) is not redacted
    assert ("no other number of this report" in " ".join(page.read_text().split())) is (
        audit is REFUTED
    )
    # the sheet to sign
    assert ("leaks more than it claims" in text_of(page, "decision")) is (audit is REFUTED)
    if redacted:
        assert json.loads((page.parent / "summary.json").read_text())["about"]["audit"][
            "epsilon"
        ] == float(least)


def test_what_does_not_fit_is_left_out_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the most exposed and whom the page names, the file beside it everybody."""
    run = load(save(with_unmeasured(), tmp_path / "run.parquet", rows_at_once=7))
    monkeypatch.setattr("torchfil.report.examples.MOST_ROWS", 12)
    page = write_report(run, tmp_path / "report")
    measured = np.flatnonzero(status_of(run) != NOT_MEASURED)
    ranked = measured[np.argsort(run.columns["mse_bound_low"][measured])].tolist()
    data = table_data(page)
    assert set(data["places"]) == set(ranked[:12]) | set(SPARED)  # the down-weighted are named, too
    assert data["measured"] == len(measured)
    assert f"The table has {len(data['ids'])} of 40 examples" in text_of(page, "most-exposed")
    assert len((page.parent / "leakage.csv").read_text().splitlines()) == 41


@pytest.mark.parametrize("slug", ["verdict", "most-exposed", "options", "words"])
def test_a_confidential_block_cannot_be_rendered_from_the_public_context(slug: str) -> None:
    report = Report(summarise(made_up(), redacted=True))
    with pytest.raises(UndefinedError):
        block(slug, context_of(report))


def attacked(bounds: list[float], **parts: object) -> SavedRun:
    """Three examples that a guess is off by 0.5 of, with these bounds."""
    settings = {"trials": 9, "standard_error": np.full(3, 1e-9), **parts}
    attack = AttackResult(
        "a guess", "knows all else", [0, 1, 2], np.full(3, 0.5), "mse", **settings
    )
    return made_up(attacks=[torchfil.compare_with_bounds(bounds, attack).record(range(40))])


def test_attacks_in_numbers() -> None:
    """An example without a bound breaks none; a blind guess may be below a bound, too."""
    (found,) = summarise(attacked([0.25, np.inf, 0.25])).attacks
    assert found.ratio["0"] == pytest.approx(2.0)
    (found,) = summarise(attacked([np.inf] * 3)).attacks
    assert (found.targets, found.ratio) == (3, {})
    beside = attacked(
        [1.0, 1.0, 0.2], standard_error=np.full(3, 9.0), blind=np.asarray([0.1, 5.0, 0.1])
    )
    (found,) = summarise(beside).attacks
    assert (found.below, found.blind_below, found.violated) == (2, 2, 0)


def test_tokens_are_shown_with_their_shares_and_never_in_public(tmp_path: Path) -> None:
    fil = np.asarray([[0.1, 0.2, 0.5, 0.0], [0.3, 0.3, np.nan, np.nan]], "f4")
    plis = np.asarray([[1.0, 7.0, 1.0, 0.0], [np.nan, 2.0, np.nan, np.nan]], "f4")
    words = [[" she", " has", " <gout>", " "], ["co", "##ld"]]
    run = made_up(texts=Texts(np.asarray([5, 2]), words, fil, plis))
    shown = text_of(write_report(run, tmp_path / "report"), "words")
    assert "3. <gout> 83 % 0.5 2.0 % 1" in shown
    assert "2. has 13 % 0.2 96.1 % 7" in shown
    public = write_report(run, tmp_path / "public", redacted=True)
    assert not any(b"gout" in content for content in files_of(public).values())

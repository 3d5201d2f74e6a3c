"""Whoever reads of a run learns whom its numbers bind: a person with all of its rows, a row, or an
example.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.engine.loops import data, train
from tests.report.pages import table_data, text_of
from tests.report.prepared_runs import of_kind
from tests.report.run_cases import owned, with_baselines, with_records
from torchfil.cli import main
from torchfil.gate.gate import check, in_words
from torchfil.gate.policy import Policy
from torchfil.report import load, save, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.page import render_comparison
from torchfil.run.saved_run import SavedRun


def read_aloud(page: str) -> str:
    """What a reader sees of a page, labels and titles included, code and its data apart."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    labels = re.findall(r'(?:title|alt|aria-label|data-label)="([^"]*)"', page)
    return " ".join(html.unescape(" ".join([re.sub(r"<[^>]+>", " ", page), *labels])).split())


def of_patients(kind: str, unit: str) -> SavedRun:
    """A run of one of the kinds of data, or one with every part, by patient or by visit."""
    if kind == "everything":
        return with_baselines(with_records(owned(200, unit)))
    run = of_kind(kind, safe=False)
    run.about["mechanism"] = owned(200, unit).about["mechanism"]
    columns = dict(run.columns) | ({"num_rows": np.full(200, 12)} if unit == "owner" else {})
    return dataclasses.replace(run, columns=columns)


@pytest.mark.parametrize("kind", ["image", "table", "text", "everything"])
@pytest.mark.parametrize(("unit", "word"), [("owner", "patients"), ("row", "visits")])
def test_no_sentence_speaks_of_examples(tmp_path: Path, kind: str, unit: str, word: str) -> None:
    run = of_patients(kind, unit)
    pages = [
        write_report(run, tmp_path / f"{redacted}", redacted=redacted) for redacted in (False, True)
    ]
    compared = [
        render_comparison(compare_runs(run, run, redacted=redacted)) for redacted in (False, True)
    ]
    meanings = " ".join(column["meaning"] for column in table_data(pages[0])["columns"])
    for text in map(
        read_aloud, [*(page.read_text() for page in pages), *compared, f"{word} {meanings}"]
    ):
        assert word in text
        assert re.findall(r".{0,20}\b[Ee]xamples?\b.{0,20}", text) == []


def test_a_person_stands_with_its_rows(tmp_path: Path) -> None:
    run = owned(40)
    path = save(run, tmp_path / "run.parquet")
    page = write_report(load(path), tmp_path / "report")
    assert "40 patients ·" in text_of(page, "first")
    worst = int(re.findall(r"Most exposed patient Zoë (\d+)", text_of(page, "verdict"))[0])
    for part in ("verdict", "most-exposed"):
        assert f"Zoë {worst} , {worst + 1} visit" in text_of(page, part)
    (column,) = [each for each in table_data(page)["columns"] if each["key"] == "num_rows"]
    assert column["values"] == run.columns["num_rows"].tolist()
    assert "num_rows" in (page.parent / "leakage.csv").read_text().partition("\n")[0]
    shown = CliRunner().invoke(main, ["inspect", str(path)]).output
    assert "40 patients, SHA-256" in shown
    assert "id  num_rows" in re.sub(" +", "  ", shown)


def test_the_gate_counts_persons() -> None:
    run = owned(40)
    low = np.sort(run.columns["mse_bound_low"])
    told = [
        in_words(each)
        for each in check(run, Policy(min_mse_bound=float(low[3]), max_share_spared=0.0))
    ]
    assert "(3 patients)" in " ".join(told)
    assert "Patients with a smaller weight" in " ".join(told)
    (broken,) = [
        each for each in check(owned(40, "row"), Policy(unit="person")) if each.rule == "unit"
    ]
    assert in_words(broken) == "Who is bound: single visits; the policy asks for whole patients."


@pytest.mark.parametrize(("owners", "title"), [("babcbdcab", "4 patients"), ("", "9 examples")])
def test_the_file_takes_persons_from_the_run(tmp_path: Path, owners: str, title: str) -> None:
    named = {"owner_of": [*owners], "unit_names": ("patient", "visit")} if owners else {}
    trained = train(data(9), batch_size=4, steps=6, **named)
    run = load(trained.engine.save_run(tmp_path / "run.parquet", delta=1e-3))
    assert run.about["title"] == f"Sequential on {title}"
    assert ("num_rows" in run.columns) == bool(owners)
    assert (
        not owners
        or [owners.count(key) for key in run.ids.tolist()] == run.columns["num_rows"].tolist()
    )

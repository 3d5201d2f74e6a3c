"""Whoever reads of a run learns whom its numbers bind: a person with all of its rows, a row, or an example."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.report.pages import table_data, text_of
from tests.report.prepared_runs import of_kind
from tests.report.run_cases import owned, with_baselines, with_estimates
from torchfil import FILPrivacyEngine
from torchfil.cli import main
from torchfil.engine.options import Accounting
from torchfil.gate.gate import check, in_words
from torchfil.gate.policy import Policy
from torchfil.report import load, save, write_report
from torchfil.report.comparison import compare_runs
from torchfil.report.page import render_comparison
from torchfil.run.saved_run import SavedRun

SUMMED = {"row_reduction": "sum", "rows_per_owner": 4}


def read_aloud(page: str) -> str:
    """What a reader sees of a page, labels and titles included, code and its data apart."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    labels = re.findall(r'(?:title|alt|aria-label|data-label)="([^"]*)"', page)
    return " ".join(html.unescape(" ".join([re.sub(r"<[^>]+>", " ", page), *labels])).split())


def of_patients(kind: str, unit: str) -> SavedRun:
    """A run of one of the kinds of data, or one with every part, by patient or by visit."""
    if kind == "everything":
        return with_baselines(with_estimates(owned(200, unit)))
    run, facts = of_kind(kind, safe=False), owned(200, unit)
    run.about["mechanism"] = facts.about["mechanism"]
    columns = dict(run.columns) | ({"num_rows": np.full(200, 12)} if unit == "owner" else {})
    return dataclasses.replace(run, columns=columns)


@pytest.mark.parametrize("kind", ["image", "table", "text", "everything"])
@pytest.mark.parametrize(("unit", "word"), [("owner", "patients"), ("row", "visits")])
def test_no_sentence_speaks_of_examples(tmp_path: Path, kind: str, unit: str, word: str) -> None:
    run = of_patients(kind, unit)
    pages = [
        write_report(run, tmp_path / name, redacted=name == "public").read_text() for name in ("private", "public")
    ]
    pages += [render_comparison(compare_runs(run, run, redacted=redacted)) for redacted in (False, True)]
    meanings = [column["meaning"] for column in table_data(tmp_path / "private" / "index.html")["columns"]]
    for text in [*map(read_aloud, pages), " ".join([word, *meanings])]:
        assert word in text
        assert re.findall(r".{0,20}\b[Ee]xamples?\b.{0,20}", text) == []


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            owned(40),
            ["The whole patient", "taken as public", "Poisson sampling draws whole patients", "all their visits"],
        ),
        (
            owned(40, more=SUMMED),
            ["up to 4 visits, chosen anew each time", "is the sum over these visits, and is clipped once"],
        ),
        (owned(40, "row"), ["Single visits", "do not bind patients with several visits as a whole"]),
        (of_kind("linear", safe=True), ["One example, which is a row", "Somebody with several rows is not bound"]),
    ],
    ids=["owner", "sum", "row", "example"],
)
def test_the_assumptions_say_who_is_bound(tmp_path: Path, run: SavedRun, expected: list[str]) -> None:
    for redacted in (False, True):
        page = write_report(run, tmp_path / "report", redacted=redacted)
        assert [text for text in expected if text not in text_of(page, "assumptions")] == []
        single = "ε and all tables are about single visits, not about whole patients" in text_of(page, "alerts")
        assert single == (run.unit.kind == "row")


def test_a_person_stands_with_its_rows(tmp_path: Path) -> None:
    run = owned(40)
    path = save(run, tmp_path / "run.parquet")
    page = write_report(load(path), tmp_path / "report")
    assert "40 patients ·" in text_of(page, "first")
    worst = re.search(r"Most exposed patient (Zoë (\d+)) , (\d+) visits?", text_of(page, "verdict"))
    assert worst is not None
    assert int(worst[3]) == int(worst[2]) + 1  # by id from 1 on
    assert f"{worst[1]} , {worst[3]} visit" in text_of(page, "most-exposed")
    (column,) = [each for each in table_data(page)["columns"] if each["key"] == "num_rows"]
    assert column["values"] == run.columns["num_rows"].tolist()
    assert "num_rows" in (page.parent / "leakage.csv").read_text().partition("\n")[0]
    shown = CliRunner().invoke(main, ["inspect", str(path)]).output
    assert "40 patients, SHA-256" in shown
    assert "id  num_rows" in re.sub(" +", "  ", shown)


def test_the_gate_counts_persons() -> None:
    run = owned(40)
    low = np.sort(run.columns["mse_bound_low"])
    told = [in_words(each) for each in check(run, Policy(min_mse_bound=float(low[3]), max_share_spared=0.0))]
    assert "(3 patients)" in " ".join(told)
    assert "Patients with a smaller weight" in " ".join(told)
    (broken,) = [each for each in check(owned(40, "row"), Policy(unit="person")) if each.rule == "unit"]
    assert in_words(broken) == "Who is bound: single visits; the policy asks for whole patients."


@pytest.mark.parametrize(("unit", "expected"), [("owner", r"patient Zoë \d+, 12 visits"), ("row", r"visit Zoë \d+")])
def test_the_head_of_a_dossier(browser: Any, tmp_path: Path, unit: str, expected: str) -> None:
    from tests.report.in_browser import opened, screen
    from tests.report.page_checks import layout

    page = write_report(of_patients("table", unit), tmp_path / "report")
    for width in (1280, 400):
        with screen(browser, width=width):
            opened(browser, page)
            assert layout(browser) == []
            browser.execute_script("document.querySelector('.verdict button[data-row]').click()")
            head = browser.execute_script("return document.querySelector('dialog h3').innerText")
            assert re.fullmatch(expected, head)


@pytest.mark.parametrize(("unit", "title"), [("owner", "4 patients"), (None, "9 examples")])
def test_the_file_takes_persons_from_the_run(tmp_path: Path, unit: str | None, title: str) -> None:
    torch.manual_seed(0)
    data, owners = TensorDataset(torch.randn(9, 3), torch.randint(2, (9,))), [*"babcbdcab"]
    model, engine = nn.Linear(3, 2), FILPrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if unit is None else {"owner_of": owners, "unit": unit, "unit_names": ("patient", "visit")}
    model, optimizer, loader = engine.make_private(model, optimizer, DataLoader(data, batch_size=4), **options)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    run = load(engine.save_run(tmp_path / "run.parquet", delta=1e-3))
    assert (run.unit.kind, run.about["title"]) == (unit or "example", f"Linear on {title}")
    rows = dict(zip(run.ids.tolist(), run.columns["num_rows"].tolist(), strict=True)) if unit == "owner" else {}
    assert rows == ({"b": 4, "a": 2, "c": 2, "d": 1} if unit == "owner" else {})
    assert ("num_rows" in run.columns) == (unit == "owner")


def test_names_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match="two words"):
        Accounting(unit_names=("patient", "<visit>"))

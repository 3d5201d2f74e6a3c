"""The reproduction page: the registry is complete, rows run, and the page is what the records
give.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from reproduction import records
from reproduction.page import joined, page
from reproduction.registry import ROWS
from reproduction.rows import Run
from tests.paper_files import few_made_up

ROOT = Path(__file__).parents[1]
BY_ID = {row.id: row for row in ROWS}
RUN = [row for row in ROWS if row.measure is not None]
# a second or less each on made-up data; the others take a few seconds
QUICK = {f"guo-{name}" for name in ("appendix-c", "figure1", "table1", "table2")} | {"plis-figure1"}
QUICK |= {
    f"hannun-{name}"
    for name in ("attacks-iwpc", "figure1", "figure7a", "figure7b", "table1-mnist-linear")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(row.id, marks=[] if row.id in QUICK else [pytest.mark.slow]) for row in RUN],
)
def test_every_row_runs_on_made_up_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up data are few and the steps too: no result is looked at, but that there is one and
    it is told so.
    """
    pytest.importorskip("torchmetrics" if name.startswith("plis") else "sklearn")
    few_made_up(monkeypatch, digits=200, chests=60, stripes=80)
    row = BY_ID[name]
    record = records.measured(row, Run(tmp_path, tiny=True))
    assert "failed" not in record, record.get("failed")
    assert record["here"]
    assert record["checks"]
    assert record["verdict"].startswith("stand-in: ") == bool(row.needs or row.stand_in)
    for picture in record["pictures"]:
        assert (tmp_path / picture).stat().st_size > 0
    json.dumps(record)


def test_the_page_is_what_the_records_give() -> None:
    """docs/reproduction.md is never edited by hand."""
    found = joined(ROOT / "docs" / "reproduction.json", {})
    assert set(found) <= set(BY_ID), "records of rows that are gone"
    assert page(ROWS, found) == (ROOT / "docs" / "reproduction.md").read_text()

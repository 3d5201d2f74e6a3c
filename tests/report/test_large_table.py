"""The table of a run with more examples than a page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.report.run_cases import made_up
from torchfil.report import load, save, write_report
from torchfil.run.baselines import NOT_MEASURED, status_of


class TestTableOfAPart:
    """Of a run with more examples than the page holds, it has the most exposed, and says so."""

    @pytest.fixture
    def page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr("torchfil.report.examples.MOST_ROWS", 12)
        path = save(made_up(text_ids=True), tmp_path / "run.parquet", rows_at_once=7)
        return write_report(load(path), tmp_path / "report").read_text()

    def test_it_has_the_most_exposed_and_whom_the_page_names(self, page: str, tmp_path: Path) -> None:
        spec = json.loads(page.split('id="spec">')[1].split("</script>")[0])
        run = made_up(text_ids=True)
        measured = np.flatnonzero(status_of(run) != NOT_MEASURED)
        expected = set(measured[np.argsort(-run.columns["fil"][measured])][:12].tolist())
        named = set(map(int, re.findall(r'data-row="(\d+)"', page)))
        assert named - expected, "the least exposed are named, too"
        assert set(spec["places"]) == expected | named
        assert len(spec["ids"]) == len(spec["places"])
        assert spec["measured"] == len(measured)
        assert re.search(rf"The table has {len(spec['places'])} of 40 examples", page)

    def test_the_csv_has_everybody(self, page: str, tmp_path: Path) -> None:
        assert len((tmp_path / "report" / "leakage.csv").read_text().splitlines()) == 41
